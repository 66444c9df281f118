// gemv: y[t, r] = sum_k W[r, k] * h[t, k], for a pack of tokens that shares one read of W
// W (n_out, N_IN) in planes of format F; h as int8 q (n_tokens, N_IN) with scales (n_tokens, N_IN / 32), or as f32 x
// for the float formats; y (n_tokens, n_out) f32. MODE adds the residual, or checks that the logits are finite.
// bytes   the matrix once, n_tokens * N_IN * 1.25 of activations (L1 and L2 hold them)
// launch  grid ceil(n_out / GEMV_WARPS), block 32 * GEMV_WARPS; one warp a row; needs 1 <= n_tokens <= N_TOKENS
// numerics row_dot.cuh
constexpr int GEMV_WARPS = 4;
constexpr int STORE = 0, ADD_RESIDUAL = 1, LOGITS = 2;

template <class F, int N_IN, int N_TOKENS, int MODE>
__global__ void __launch_bounds__(WARP* GEMV_WARPS, blocks_per_sm(N_IN, N_TOKENS))
    gemv(const u8* w, int n_out, const float* x, const i8* q, const GroupScale* scales, int n_tokens,
         const float* residual, float* y, u32 op, u32* fault) {
    release_dependents();
    const i64 row = i64(blockIdx.x) * GEMV_WARPS + threadIdx.x / WARP;
    if (row >= n_out) return;
    float acc[N_TOKENS];
    row_dot<F, N_IN, N_TOKENS>(w, n_out, row, Input{x, q, scales}, n_tokens, acc);
    if (threadIdx.x % WARP != 0) return;
#pragma unroll
    for (int t = 0; t < N_TOKENS; ++t) {
        if (t >= n_tokens) break;
        const i64 at = i64(t) * n_out + row;
        if (MODE == LOGITS) check_finite(acc[t], op, fault);
        y[at] = MODE == ADD_RESIDUAL ? add(residual[at], acc[t]) : acc[t];
    }
}
