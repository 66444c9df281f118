// gate_up_silu: y[t, r] = silu(G[r] . h[t]) * (U[r] . h[t]), then quantised in groups of 32 rows
// G, U (n_ff, N_IN) in planes of formats FG and FU; h as for gemv; y (n_tokens, n_ff) f32, q (n_tokens, n_ff) int8,
// scales (n_tokens, n_ff / 32); q and scales only where n_ff is a multiple of 32
// done (n_ff / 32) u32, zero before the first call and after each: blocks that have finished a group of 32 rows
// bytes   both matrices once, activations from L1 and L2, 5.25 * n_tokens * n_ff written
// launch  grid ceil(n_ff / GATE_UP_WARPS), block 32 * GATE_UP_WARPS; one warp a row of both matrices
// numerics the two dots as in gemv; silu, product and quantisation of docs/numerics.md
// order   the block that finishes a group last quantises it, so no block waits and small blocks fill the last wave
constexpr int GATE_UP_WARPS = 4;

// Whether this block is the last of the group's to get here; what the others wrote before is then visible.
__device__ __forceinline__ bool finishes_group(u32* done) {
    constexpr u32 LAST = SUB_BLOCK / GATE_UP_WARPS - 1;
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicInc(done, LAST) == LAST;
    __syncthreads();
    if (is_last) __threadfence();
    return is_last;
}

// Blocks that an SM shall hold while the rows of both matrices are in flight: measured on an H200, Q4_K pairs are 8 %
// faster with 5 than with 4, IQ4_XS and Q5_K + Q6_K pairs 12 % with 4 than unbounded.
template <class FG, class FU>
struct pair_blocks_per_sm {
    static constexpr int value = 4;
};
template <>
struct pair_blocks_per_sm<Q4_K, Q4_K> {
    static constexpr int value = 5;
};

template <class FG, class FU, int N_IN, int N_TOKENS>
__global__ void __launch_bounds__(WARP* GATE_UP_WARPS, N_TOKENS == 1 ? pair_blocks_per_sm<FG, FU>::value : 1)
    gate_up_silu(const u8* gate, const u8* up, int n_ff, const float* x, const i8* q, const GroupScale* scales,
                 int n_tokens, float* y, i8* y_q, GroupScale* y_scales, u32* done, u32 op, u32* fault) {
    release_dependents();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i64 row = i64(blockIdx.x) * GATE_UP_WARPS + warp;
    if (row < n_ff) {
        float g[N_TOKENS], u[N_TOKENS];
        row_dot_pair<FG, FU, N_IN, N_TOKENS>(gate, up, n_ff, row, Input{x, q, scales}, n_tokens, g, u);
#pragma unroll
        for (int t = 0; t < N_TOKENS; ++t) {
            if (lane > 0 || t >= n_tokens) break;
            const float product = mul(silu(g[t]), u[t]);
            check_finite(product, op, fault);
            y[i64(t) * n_ff + row] = product;
        }
    }
    const int group = blockIdx.x * GATE_UP_WARPS / SUB_BLOCK;
    if (n_ff % SUB_BLOCK != 0 || !finishes_group(done + group)) return;
    for (int t = warp; t < n_tokens; t += GATE_UP_WARPS) {
        const float product = __ldcg(y + i64(t) * n_ff + group * SUB_BLOCK + lane);
        quantize_group(product, group, y_q + i64(t) * n_ff, y_scales + i64(t) * (n_ff / SUB_BLOCK), lane);
    }
}
