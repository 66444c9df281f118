// pack_gate_up: y[t, r] = silu(G[r] . h[t]) * (U[r] . h[t]) for two or more tokens, then quantised in groups of 32 rows
// G, U (n_ff, n_in) in strips of the formats of those numbers; h as for pack_rows; y (n_tokens, n_ff) f32, q (n_tokens,
// n_ff) i8, scales (n_tokens, n_ff / 32); q and scales only where n_ff is a multiple of 32
// bytes   both matrices once for every 40 tokens, activations twice for every 32 rows from L2, 5.25 * n_tokens * n_ff
//         written
// launch  grid n_blocks of one matrix (packs.py), block 128: 32 rows of both matrices by up to 40 tokens
// numerics the two dots as in pack_rows; silu, product and quantisation of docs/numerics.md
__device__ __forceinline__ void quantize_rows(const float* products, const Block& tile, const Pack& pack, int n_ff,
                                              i8* q, GroupScale* scales) {
    const int lane = threadIdx.x % WARP, group = tile.tile_row() / SUB_BLOCK;
    for (int t = tile_warp(); t < tile.n_tiles * TILE_TOKENS; t += STEP_SUBS) {
        const i64 token = tile.token() + t;
        if (token >= pack.n_tokens || tile.tile_row() >= n_ff) break;
        quantize_group(products[slot(lane, t)], group, q + token * n_ff, scales + token * (n_ff / SUB_BLOCK), lane);
    }
}

__global__ void __launch_bounds__(PACK_THREADS, PACK_BLOCKS_PER_SM)
    pack_gate_up(const u8* gate, int gate_format, const u8* up, int up_format, int n_ff, const float* x, const i8* q,
                 const GroupScale* scales, const u8* tiles, int n_in, int n_tokens, int n_groups,
                 float* y, i8* y_q, GroupScale* y_scales, u32 op, u32* fault) {
    static_assert(TILE_ROWS == SUB_BLOCK, "the warps of a tile quantise its rows");
    release_dependents();
    extern __shared__ __align__(16) u8 shared[];
    float* sums = tile_sums(shared);
    Stages stages;
    stages.init(shared + SUMS_N_BYTES);
    const Pack pack{Input{x, q, scales}, tiles, n_in, n_tokens, n_groups};
    const Block tile = block_at(blockIdx.x, pack);
    float gates[N_RESULTS], ups[N_RESULTS] = {};
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {  // one copy of the code for both matrices
#pragma unroll
        for (int n = 0; n < N_RESULTS; ++n) gates[n] = ups[n];
        __syncthreads();  // the gate's sums have been read
        block_results(i == 0 ? gate : up, i == 0 ? gate_format : up_format, n_ff, pack, tile, sums, stages, ups);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N_RESULTS; ++n) {
        const int row = tile.tile_row() + row_of_result(n), token = tile.token() + token_of_result(n);
        const float product = mul(silu(gates[n]), ups[n]);
        sums[n * TILE_THREADS + tile_thread()] = product;
        if (n / 2 >= tile.n_tiles || row >= n_ff || token >= n_tokens) continue;
        check_finite(product, op, fault);
        y[i64(token) * n_ff + row] = product;
    }
    __syncthreads();
    if (n_ff % SUB_BLOCK == 0) quantize_rows(sums, tile, pack, n_ff, y_q, y_scales);
}
