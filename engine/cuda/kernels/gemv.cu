// gemv: y[r] = sum_k W[r, k] * h[k] for one token
// W (n_out, N_IN) in strips of format F; h as int8 q (N_IN) with scales (N_IN / 32), or as f32 x for the float formats;
// y (n_out) f32. MODE adds the residual, or checks that the logits are finite.
// bytes   the matrix once, N_IN * 1.25 of activations (L1 and L2 hold them)
// launch  grid ceil(n_out / GEMV_WARPS), block 32 * GEMV_WARPS; one warp a row
// numerics row_dot.cuh
constexpr int GEMV_WARPS = 4;
constexpr int STORE = 0, ADD_RESIDUAL = 1, LOGITS = 2;

template <class F, int N_IN, int MODE>
__global__ void __launch_bounds__(WARP* GEMV_WARPS, blocks_per_sm(N_IN))
    gemv(const u8* w, int n_out, const float* x, const i8* q, const GroupScale* scales, const float* residual, float* y,
         u32 op, u32* fault) {
    release_dependents();
    const i64 row = i64(blockIdx.x) * GEMV_WARPS + threadIdx.x / WARP;
    if (row >= n_out) return;
    const float sum = row_dot<F, N_IN>(w, n_out, row, Input{x, q, scales});
    if (threadIdx.x % WARP > 0) return;
    if (MODE == LOGITS) check_finite(sum, op, fault);
    y[row] = MODE == ADD_RESIDUAL ? add(residual[row], sum) : sum;
}
