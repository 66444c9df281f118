// row_sums_shared.cuh: in the place of row_sums.cuh: the warps of a block work on its rows together
// Each thread takes every 128th sub-block of the block's four rows and leaves the terms in shared memory; then every warp
// adds up those of its own row, in the order of row_dot.cuh.
#pragma once

constexpr int ROWS_TOGETHER = 4;  // GEMV_WARPS and GATE_UP_WARPS

template <class F, int N_IN>
__device__ __forceinline__ float sum_together(const u8* w, i64 n_out, i64 row, const Input& h) {
    constexpr int N_SUB = N_IN / SUB_BLOCK;
    __shared__ float terms[ROWS_TOGETHER][N_SUB];
    const int warp = threadIdx.x / WARP;
    const i64 first = row - warp;
    dependency_wait();
    __syncthreads();  // the terms of a matrix before have been added up
    for (int i = threadIdx.x; i < ROWS_TOGETHER * N_SUB; i += ROWS_TOGETHER * WARP) {
        const int s = i % N_SUB;
        terms[i / N_SUB][s] = sub_block_term<F>(F::load(spot_of<F>(w, n_out * N_SUB, first * N_SUB + i)), s, h);
    }
    __syncthreads();
    float acc = 0.0f;
    for (int s = threadIdx.x % WARP; s < N_SUB; s += WARP) acc = add(acc, terms[warp][s]);
    return tree(acc);
}

template <class F, int N_IN>
__device__ __forceinline__ float row_dot(const u8* w, i64 n_out, i64 row, const Input& h) {
    if constexpr (is_float_format<F>::value) {
        dependency_wait();
        return tree(float_row_sum<F, N_IN>(w, row, h.x));
    } else if (n_out % ROWS_TOGETHER == 0) {
        return sum_together<F, N_IN>(w, n_out, row, h);
    } else {  // some warps of the last block have no row
        return tree(add_strips_from<F, N_IN, 0>(w, n_out, row, h, 0.0f));
    }
}

struct Pair {
    float a, b;
};

template <class FA, class FB, int N_IN>
__device__ __forceinline__ Pair row_dot_pair(const u8* wa, const u8* wb, i64 n_out, i64 row, const Input& h) {
    const float a = row_dot<FA, N_IN>(wa, n_out, row, h);
    return {a, row_dot<FB, N_IN>(wb, n_out, row, h)};
}
