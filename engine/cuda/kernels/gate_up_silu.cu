// gate_up_silu: y[t, r] = silu(G[r] . h[t]) * (U[r] . h[t]), then quantised in groups of 32 rows
// G, U (n_ff, N_IN) in planes of formats FG and FU; h as for gemv; y (n_tokens, n_ff) f32, q (n_tokens, n_ff) int8,
// scales (n_tokens, n_ff / 32). A last group of fewer than 32 rows (n_ff no multiple of 32) is stored as f32 only.
// bytes   both matrices once, activations from L1 and L2, 1.25 * n_tokens * n_ff written (5.25 with y)
// launch  grid ceil(n_ff / 32), block 32 * GATE_UP_WARPS; a block owns 32 rows, a warp every eighth of them
// numerics the two dots as in gemv; silu, product and quantisation of docs/numerics.md
constexpr int GATE_UP_WARPS = 8;

template <class FG, class FU, int N_IN, int N_TOKENS>
__global__ void __launch_bounds__(WARP* GATE_UP_WARPS, 1)  // the 1: else the assembler aims at more blocks and spills
    gate_up_silu(const u8* gate, const u8* up, int n_ff, const float* x, const i8* q, const GroupScale* scales,
                 int n_tokens, float* y, i8* y_q, GroupScale* y_scales, u32 op, u32* fault) {
    __shared__ float products[N_TOKENS][SUB_BLOCK];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i64 first = i64(blockIdx.x) * SUB_BLOCK;
    const Input h{x, q, scales};
    for (int r = warp; r < SUB_BLOCK && first + r < n_ff; r += GATE_UP_WARPS) {
        float g[N_TOKENS], u[N_TOKENS];
        row_dot<FG, N_IN, N_TOKENS>(gate, n_ff, first + r, h, n_tokens, g);
        row_dot<FU, N_IN, N_TOKENS>(up, n_ff, first + r, h, n_tokens, u);
#pragma unroll
        for (int t = 0; t < N_TOKENS; ++t)
            if (lane == 0 && t < n_tokens) products[t][r] = mul(silu(g[t]), u[t]);
    }
    __syncthreads();
    for (int t = warp; t < n_tokens; t += GATE_UP_WARPS) {
        if (first + lane < n_ff) {
            check_finite(products[t][lane], op, fault);
            y[i64(t) * n_ff + first + lane] = products[t][lane];
        }
        if (n_ff % SUB_BLOCK == 0)
            quantize_group(products[t][lane], int(blockIdx.x), y_q + i64(t) * n_ff,
                           y_scales + i64(t) * (n_ff / SUB_BLOCK), lane);
    }
}
