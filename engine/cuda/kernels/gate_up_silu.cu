// gate_up_silu: y[r] = silu(G[r] . h) * (U[r] . h) for one token, then quantised in groups of 32 rows
// G, U (n_ff, N_IN) in strips of formats FG and FU; h as for gemv; y (n_ff) f32, q (n_ff) int8,
// scales (n_ff / 32); q and scales only where n_ff is a multiple of 32
// done (n_ff / 32) u32, zero before the first call and after each: blocks that have finished a group of 32 rows
// bytes   both matrices once, activations from L1 and L2, 5.25 * n_ff written
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

// Blocks that an SM shall hold while the rows of both matrices are in flight: measured on an H200, IQ4_XS and Q5_K + Q6_K
// pairs are 12 % faster with 4 than unbounded.
constexpr int PAIR_BLOCKS_PER_SM = 4;

template <class FG, class FU, int N_IN>
__global__ void __launch_bounds__(WARP* GATE_UP_WARPS, PAIR_BLOCKS_PER_SM)
    gate_up_silu(const u8* gate, const u8* up, int n_ff, const float* x, const i8* q, const GroupScale* scales, float* y,
                 i8* y_q, GroupScale* y_scales, u32* done, u32 op, u32* fault) {
    release_dependents();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i64 row = i64(blockIdx.x) * GATE_UP_WARPS + warp;
    if (row < n_ff) {
        const Pair sums = row_dot_pair<FG, FU, N_IN>(gate, up, n_ff, row, Input{x, q, scales});
        const float product = mul(silu(sums.a), sums.b);
        if (lane == 0) {
            check_finite(product, op, fault);
            y[row] = product;
        }
    }
    const int group = blockIdx.x * GATE_UP_WARPS / SUB_BLOCK;
    if (n_ff % SUB_BLOCK != 0 || !finishes_group(done + group) || warp > 0) return;
    quantize_group(__ldcg(y + group * SUB_BLOCK + lane), group, y_q, y_scales, lane);
}
