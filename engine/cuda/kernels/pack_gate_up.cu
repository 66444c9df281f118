// pack_gate_up: y[t, r] = silu(G[r] . h[t]) * (U[r] . h[t]) for two or more tokens, then quantised in groups of 32 rows
// G, U (n_ff, n_in) in strips of the formats of those numbers; h as for pack_rows; y (n_tokens, n_ff) f32, q (n_tokens,
// n_ff) i8, scales (n_tokens, n_ff / 32); q and scales only where n_ff is a multiple of 32
// bytes   both matrices once for every group of tokens, activations twice for every 32 rows from L2, 9.25 * n_tokens * n_ff
//         written, 4 * n_tokens * n_ff read again
// launch  grid n_blocks of one matrix, block 128, shared memory and groups of tokens by packs.py: 32 rows of both
//         matrices by a group of up to 40 tokens
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
    float results[N_RESULTS];
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {  // one copy of the code for both matrices
        __syncthreads();           // the gate's sums have been read
        block_results(i == 0 ? gate : up, i == 0 ? gate_format : up_format, n_ff, pack, tile, sums, stages, results);
        const int thread = thread_anew();
#pragma unroll
        for (int n = 0; n < N_RESULTS; ++n) {
            const int row = tile.tile_row() + row_of_result(n, thread);
            const int token = tile.token() + token_of_result(n, thread);
            const bool exists = n / 2 < tile.n_tiles && row < n_ff && token < n_tokens;
            float* to = y + i64(token) * n_ff + row;
            if (i == 1) results[n] = exists ? mul(silu(*to), results[n]) : 0.0f;
            if (exists) *to = results[n];  // of the gate for now: registers are scarce
            if (exists && i == 1) check_finite(results[n], op, fault);
        }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N_RESULTS; ++n) sums[n * TILE_THREADS + tile_thread()] = results[n];
    __syncthreads();
    if (n_ff % SUB_BLOCK == 0) quantize_rows(sums, tile, pack, n_ff, y_q, y_scales);
}
