// conv_task.cuh: who convolves and normalises what in gated_delta: q, k and v of a token by three warps, side by side
#pragma once

// The i-th task of a warp; task 3 t + {0: q, 1: k, 2: v} belongs to token t.
template <int N_WARPS>
__device__ __forceinline__ int conv_task(int warp, int i) {
    return warp + i * N_WARPS;
}
