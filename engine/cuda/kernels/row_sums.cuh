// row_sums.cuh: rows of a matrix times one token, one by each warp (row_dot.cuh); in gemv, project and gate_up_silu
#pragma once

// Row `row` of W times the token; all lanes return the sum. Waits for the kernel before on the way.
template <class F, int N_IN>
__device__ __forceinline__ float row_dot(const u8* w, i64 n_out, i64 row, const Input& h) {
    if constexpr (!is_float_format<F>::value) {
        return tree(add_strips_from<F, N_IN, 0>(w, n_out, row, h, 0.0f));
    } else {
        dependency_wait();
        return tree(float_row_sum<F, N_IN>(w, row, h.x));
    }
}

struct Pair {
    float a, b;
};

// The same for one row of two matrices; where both fit in flight, both are asked for before either is used.
template <class FA, class FB, int N_IN>
__device__ __forceinline__ Pair row_dot_pair(const u8* wa, const u8* wb, i64 n_out, i64 row, const Input& h) {
    constexpr bool QUANTIZED = !is_float_format<FA>::value && !is_float_format<FB>::value;
    if constexpr (QUANTIZED && N_IN <= STRIPS_IN_FLIGHT * WARP * SUB_BLOCK) {
        Strips<FA, N_IN, 0> strips_a;
        Strips<FB, N_IN, 0> strips_b;
        strips_a.load(wa, n_out, row);
        strips_b.load(wb, n_out, row);
        dependency_wait();
        const float a = strips_a.add_to(0.0f, h);
        return {tree(a), tree(strips_b.add_to(0.0f, h))};
    } else {
        const float a = row_dot<FA, N_IN>(wa, n_out, row, h);
        return {a, row_dot<FB, N_IN>(wb, n_out, row, h)};
    }
}
