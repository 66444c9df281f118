// value_tile.cuh: the values of a split on their way to shared memory, asked for before the scores are worked out
#pragma once

// The f16 values of one KV head at the 32 positions of a split, in shared memory; +0 for positions not seen.
template <int HEAD_DIM, int N_WARPS>
struct ValueTile {
    static constexpr int PIECES_A_ROW = HEAD_DIM / 8;  // of 16 bytes
    static constexpr int N_PIECES = KV_SPLIT * PIECES_A_ROW;
    static constexpr int N = (N_PIECES + N_WARPS * WARP - 1) / (N_WARPS * WARP);  // pieces of a thread
    uint4 piece[N];

    __device__ __forceinline__ void load(const u16* rows, i64 stride, int n_seen) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int at = threadIdx.x + i * N_WARPS * WARP, j = at / PIECES_A_ROW;
            piece[i] = make_uint4(0, 0, 0, 0);
            if (j < n_seen) piece[i] = reinterpret_cast<const uint4*>(rows + j * stride)[at % PIECES_A_ROW];
        }
    }

    __device__ __forceinline__ void store(u16* tile) const {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int at = threadIdx.x + i * N_WARPS * WARP;
            if (at < N_PIECES) reinterpret_cast<uint4*>(tile)[at] = piece[i];
        }
    }
};
