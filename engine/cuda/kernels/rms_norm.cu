// rms_norm: y[t,k] = (x[t,k] / sqrt(mean_k(x[t,k]^2) + eps)) * weight[k], and y quantised in groups of 32
// x (n_tokens, N_EMBD) f32, weight (N_EMBD) f32 -> y (n_tokens, N_EMBD) f32, q (n_tokens, N_EMBD) i8,
//   scales (n_tokens, N_EMBD / 32); q and scales are not touched where N_EMBD is no multiple of 32
// bytes    n_tokens * (9 * N_EMBD + N_EMBD / 4) + 4 * N_EMBD
// launch   grid (n_tokens), block (256): one block a token
// numerics sum256: lanes in increasing k, tree in each warp, then over the eight warps
// tuned    every load is issued before the reduction, so the latency of a cold weight is paid once, not in each turn

constexpr int LANES_EMBD = 256;

// Quad `quad` of a row of N f32, with +0 for what lies behind the row.
template <int N>
__device__ __forceinline__ float4 load_row_quad(const float* row, int quad) {
    if constexpr (N % (4 * LANES_EMBD) == 0) {
        return load_quad(row, quad);
    } else if constexpr (N % 4 == 0) {
        return quad < N / 4 ? load_quad(row, quad) : zero_quad();
    } else {  // rows are not aligned to 16 bytes
        const int k = 4 * quad;
        return make_float4(k < N ? row[k] : 0.0f, k + 1 < N ? row[k + 1] : 0.0f, k + 2 < N ? row[k + 2] : 0.0f,
                           k + 3 < N ? row[k + 3] : 0.0f);
    }
}

template <int N>
__device__ __forceinline__ void store_row_quad(float* row, int quad, float4 v) {
    if constexpr (N % 4 == 0) {
        if (quad < N / 4) store_quad(row, quad, v);
    } else {
        const int k = 4 * quad;
        if (k < N) row[k] = v.x;
        if (k + 1 < N) row[k + 1] = v.y;
        if (k + 2 < N) row[k + 2] = v.z;
        if (k + 3 < N) row[k + 3] = v.w;
    }
}

// The second half of sum256: every thread gets the sum over the block's eight warps.
__device__ __forceinline__ float fold_warps(float lane_sum) {
    __shared__ __align__(16) float warp_sums[LANES_EMBD / WARP];
    const float sum = tree(lane_sum);
    if (threadIdx.x % WARP == 0) warp_sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    const float4 half = add_quad(load_quad(warp_sums, 0), load_quad(warp_sums, 1));
    return add(add(half.x, half.z), add(half.y, half.w));
}

template <int N_EMBD>
__global__ void __launch_bounds__(LANES_EMBD)
    rms_norm(const float* x, const float* weight, float eps, float* y,
             i8* q, GroupScale* scales) {
    constexpr int N_QUADS = (N_EMBD + 4 * LANES_EMBD - 1) / (4 * LANES_EMBD);  // of one lane
    const i64 row = i64(blockIdx.x) * N_EMBD;
    release_dependents();
    float4 w[N_QUADS], v[N_QUADS];
#pragma unroll
    for (int i = 0; i < N_QUADS; i++) w[i] = load_row_quad<N_EMBD>(weight, threadIdx.x + i * LANES_EMBD);
    dependency_wait();
#pragma unroll
    for (int i = 0; i < N_QUADS; i++) v[i] = load_row_quad<N_EMBD>(x + row, threadIdx.x + i * LANES_EMBD);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N_QUADS; i++) sum = add_products(sum, v[i], v[i]);
    const float scale = div(1.0f, root(add(div(fold_warps(sum), float(N_EMBD)), eps)));
#pragma unroll
    for (int i = 0; i < N_QUADS; i++) {
        const int quad = threadIdx.x + i * LANES_EMBD;
        const float4 normed = mul_quad(mul_quad(v[i], scale), w[i]);
        store_row_quad<N_EMBD>(y + row, quad, normed);
        if constexpr (N_EMBD % SUB_BLOCK == 0) {
            quantize_quad(normed, quad, quad < N_EMBD / 4, q + row, scales + row / SUB_BLOCK);
        }
    }
}
