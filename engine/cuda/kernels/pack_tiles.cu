// pack_tiles: the int8 activations of a pack in tiles of eight tokens, as the tensor cores read them (mma_rows.cuh)
// q (n_tokens, n_in) i8, scales (n_tokens, n_in / 32) -> tiles: one group of tiles (block_at) after the other, each
//   (n_in / 32, tiles of the group) of {(8 tokens, 32) i8, (4 pairs of tokens, {d, d, sum, sum}) f32}; tokens that do
//   not exist are zero
// bytes   2.5 * n_tokens * n_in
// launch  grid ceil(n_tiles * n_in / 2 / 256), block 256; one thread per 16 activations
// numerics none but the conversion of the sum, which is exact

// Where sub-block s of a tile lies.
__device__ __forceinline__ i64 tile_at(int tile, int s, int n_sub, int n_tiles, int n_groups) {
    const int group = ((tile + 1) * n_groups - 1) / n_tiles;
    const int first = group * n_tiles / n_groups, end = (group + 1) * n_tiles / n_groups;
    return (i64(first) * n_sub + i64(s) * (end - first) + tile - first) * TILE_N_BYTES;
}

__global__ void pack_tiles(const i8* q, const GroupScale* scales, int n_in, int n_tokens, int n_groups, u8* tiles) {
    release_dependents();
    dependency_wait();
    const int n_sub = n_in / SUB_BLOCK, n_tiles = (n_tokens + TILE_TOKENS - 1) / TILE_TOKENS;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int group = i / 2, t = group % TILE_TOKENS, at = group / TILE_TOKENS;  // at: of the sub-block and tile
    if (at >= n_tiles * n_sub) return;
    const int token = at % n_tiles * TILE_TOKENS + t, s = at / n_tiles;
    const bool exists = token < n_tokens;
    const i64 from = i64(token) * n_sub + s;
    u8* tile = tiles + tile_at(at % n_tiles, s, n_sub, n_tiles, n_groups);
    uint4 piece = make_uint4(0, 0, 0, 0);
    if (exists) piece = reinterpret_cast<const uint4*>(q)[2 * from + i % 2];
    reinterpret_cast<uint4*>(tile)[2 * t + i % 2] = piece;
    if (i % 2 == 1) return;
    float2 scale = make_float2(0.0f, 0.0f);
    if (exists) scale = make_float2(scales[from].d, float(scales[from].total));
    float* pair = reinterpret_cast<float*>(tile + TILE_Q_N_BYTES) + t / 2 * 4;
    pair[t % 2] = scale.x;
    pair[t % 2 + 2] = scale.y;
}
