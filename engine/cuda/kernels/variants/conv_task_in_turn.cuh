// conv_task_in_turn.cuh: in the place of conv_task.cuh: q, k and v of a token by one warp, one after the other
#pragma once

template <int N_WARPS>
__device__ __forceinline__ int conv_task(int warp, int i) {
    return 3 * (warp + i / 3 * N_WARPS) + i % 3;
}
