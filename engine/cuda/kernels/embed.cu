// embed: x[t, k] = weight k of row t of the embedding table
// rows (n_tokens, row_n_bytes) u8, as they lie in the file -> x (n_tokens, N_IN) f32
// bytes   n_tokens * (row_n_bytes + 4 * N_IN)
// launch  grid (ceil(N_IN / 256), n_tokens), block 256; one thread a weight, 8 sub-blocks a block
// numerics scale * q, then minus the minimum: the weights that the formats define (docs/numerics.md)
// order   the sub-blocks of a block are repacked to a short strip in shared memory; the exact dot with a single 1 is one
//         of its integers
constexpr int EMBED_THREADS = 256, EMBED_SUBS = EMBED_THREADS / SUB_BLOCK;

// The activations that pick one of 32 weights.
__device__ __forceinline__ Group unit_group(int k) {
    Group group(make_int4(0, 0, 0, 0), make_int4(0, 0, 0, 0));
#pragma unroll
    for (int word = 0; word < 8; ++word) group.q[word] = word == k / 4 ? 1 << (8 * (k % 4)) : 0;
    return group;
}

template <class F>
__device__ __forceinline__ float embedded_weight(const u8* strip, int s, int k) {
    const auto raw = F::template load<InShared>(spot_of<F>(strip, EMBED_SUBS, s));
    const Scales own = F::scales(raw, s);
    const float weight = mul(own.scale, F::dot(raw, unit_group(k), iq3s_grid));
    return F::HAS_MIN ? sub(weight, own.minimum) : weight;
}

template <class F, int N_IN>
__global__ void __launch_bounds__(EMBED_THREADS) embed(const u8* rows, i64 row_n_bytes, float* x) {
    const u8* row = rows + i64(blockIdx.y) * row_n_bytes;
    const int k = blockIdx.x * EMBED_THREADS + threadIdx.x;
    float weight = 0.0f;
    if constexpr (is_float_format<F>::value) {
        if (k < N_IN) weight = F::load(row + i64(k) * F::N_BYTES);
    } else {
        __shared__ __align__(16) u8 strip[EMBED_SUBS / F::SUBS * F::BLOCK_N_BYTES + 16];
        const int s = blockIdx.x * EMBED_SUBS + threadIdx.x;
        if (threadIdx.x < EMBED_SUBS && s < N_IN / SUB_BLOCK)
            F::repack(row + s / F::SUBS * F::BLOCK_N_BYTES, s % F::SUBS,
                      spot_of<F>(strip, EMBED_SUBS, threadIdx.x));
        __syncthreads();
        if (k < N_IN) weight = embedded_weight<F>(strip, threadIdx.x / SUB_BLOCK, k % SUB_BLOCK);
    }
    if (k < N_IN) x[i64(blockIdx.y) * N_IN + k] = weight;
}
