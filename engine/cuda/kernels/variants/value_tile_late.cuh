// value_tile_late.cuh: in the place of value_tile.cuh: the values are asked for when the scores are there
#pragma once

template <int HEAD_DIM, int N_WARPS>
struct ValueTile {
    static constexpr int PIECES_A_ROW = HEAD_DIM / 8;  // of 16 bytes
    const u16* rows;
    i64 stride;
    int n_seen;

    __device__ __forceinline__ void load(const u16* from, i64 row_stride, int n) {
        rows = from;
        stride = row_stride;
        n_seen = n;
    }

    __device__ __forceinline__ void store(u16* tile) const {
#pragma unroll 1
        for (int at = threadIdx.x; at < KV_SPLIT * PIECES_A_ROW; at += N_WARPS * WARP) {
            const int j = at / PIECES_A_ROW;
            uint4 piece = make_uint4(0, 0, 0, 0);
            if (j < n_seen) piece = reinterpret_cast<const uint4*>(rows + j * stride)[at % PIECES_A_ROW];
            reinterpret_cast<uint4*>(tile)[at] = piece;
        }
    }
};
