// pack_rows: y_i = W_i h, or y_i + W_i h, for two or more tokens and up to four matrices that share an input
// W_i (n_out_i, n_in) in strips of the format of that number; h as f32 x, int8 q, scales and tiles (pack_tiles.cu);
// y_i (n_tokens, n_out_i) f32; n_out_i = 0 for unused places
// bytes   all matrices once for every group of tokens, activations once for every 32 rows from L2
// launch  grid sum over i of n_blocks, block 128, shared memory and groups of tokens by packs.py; blocks in order of the
//         matrices; quantised: 32 rows by a group of up to 40 tokens a block; float: 4 rows by 8 tokens, a row a warp
// numerics mma_rows.cuh, row_dot.cuh
struct PackPart {
    const u8* w;
    int format, n_out;
    float* y;
};

__device__ __forceinline__ int n_blocks(const PackPart& part, const Pack& pack) {
    if (is_float(part.format)) return (part.n_out + PACK_WARPS - 1) / PACK_WARPS * pack.n_tiles();
    return (part.n_out + BLOCK_ROWS - 1) / BLOCK_ROWS * pack.n_groups;
}

// Go on to `next` if the block is behind this part's.
__device__ __forceinline__ void pass(int& block, PackPart& part, const PackPart& next, const Pack& pack) {
    const int n = n_blocks(part, pack);
    if (block < n) return;
    block -= n;
    part = next;
}

__device__ __forceinline__ void put(const PackPart& part, const Pack& pack, int row, int token, bool adds, float v) {
    if (row >= part.n_out || token >= pack.n_tokens) return;
    float* y = part.y + i64(token) * part.n_out + row;
    *y = adds ? add(*y, v) : v;
}

__device__ __forceinline__ void float_block(const PackPart& part, const Pack& pack, int block, bool adds) {
    const int tile = block % pack.n_tiles(), row = block / pack.n_tiles() * PACK_WARPS + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (row >= part.n_out) return;
    dependency_wait();
    float value = 0.0f;
    with_float_format(part.format, [&](auto f) { value = float_sum<decltype(f)>(part.w, row, pack, tile); });
    if (lane % (WARP / TILE_TOKENS) > 0) return;
    put(part, pack, row, tile * TILE_TOKENS + row_of_lane<TILE_TOKENS>(lane), adds, value);
}

__global__ void __launch_bounds__(PACK_THREADS, PACK_BLOCKS_PER_SM)
    pack_rows(const u8* wa, int format_a, int n_a, float* ya, const u8* wb, int format_b, int n_b, float* yb,
              const u8* wc, int format_c, int n_c, float* yc, const u8* wd, int format_d, int n_d, float* yd,
              const float* x, const i8* q, const GroupScale* scales, const u8* tiles, int n_in, int n_tokens,
              int n_groups, int adds) {
    release_dependents();
    extern __shared__ __align__(16) u8 shared[];
    const Pack pack{Input{x, q, scales}, tiles, n_in, n_tokens, n_groups};
    PackPart part{wa, format_a, n_a, ya};
    int block = blockIdx.x;
    pass(block, part, PackPart{wb, format_b, n_b, yb}, pack);
    pass(block, part, PackPart{wc, format_c, n_c, yc}, pack);
    pass(block, part, PackPart{wd, format_d, n_d, yd}, pack);
    if (is_float(part.format)) return float_block(part, pack, block, adds);
    const Block tile = block_at(block, pack);
    Stages stages;
    stages.init(shared + SUMS_N_BYTES);
    float results[N_RESULTS];
    with_quantized_format(part.format, [&](auto f) {
        quantized_results<decltype(f)>(part.w, part.n_out, pack, tile, tile_sums(shared), stages, results);
    });
#pragma unroll
    for (int n = 0; n < N_RESULTS; ++n) {
        if (n / 2 >= tile.n_tiles) break;
        put(part, pack, tile.tile_row() + row_of_result(n, threadIdx.x),
            tile.token() + token_of_result(n, threadIdx.x), adds, results[n]);
    }
}
