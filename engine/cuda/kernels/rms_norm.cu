// rms_norm: y[t,k] = (x[t,k] / sqrt(mean_k(x[t,k]^2) + eps)) * weight[k], and y quantised in groups of 32
// x (n_tokens, N_EMBD) f32, weight (N_EMBD) f32 -> y (n_tokens, N_EMBD) f32, q (n_tokens, N_EMBD) i8,
//   scales (n_tokens, N_EMBD / 32); q and scales are not touched where N_EMBD is no multiple of 32
// bytes    n_tokens * (9 * N_EMBD + N_EMBD / 4) + 4 * N_EMBD
// launch   grid (n_tokens), block (256): one block a token
// numerics sum256: lanes in increasing k, tree in each warp, then over the eight warps
// tuned    every load is issued before the reduction, so the latency of a cold weight is paid once, not in each turn

template <int N_EMBD>
__global__ void __launch_bounds__(LANES_EMBD)
    rms_norm(const float* x, const float* weight, float eps, float* y, i8* q, GroupScale* scales) {
    const i64 row = i64(blockIdx.x) * N_EMBD;
    release_dependents();
    NormRow<N_EMBD> norm;
    norm.load_weight(weight);
    dependency_wait();
    norm.load(x + row);
    const float scale = norm.scale(eps);
#pragma unroll
    for (int i = 0; i < norm.N_QUADS; i++) {
        const int quad = norm.quad(i);
        const float4 normed = norm.normed(i, scale);
        store_row_quad<N_EMBD>(y + row, quad, normed);
        if constexpr (N_EMBD % SUB_BLOCK == 0) {
            quantize_quad(normed, quad, quad < N_EMBD / 4, q + row, scales + row / SUB_BLOCK);
        }
    }
}
