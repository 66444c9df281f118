// norm_row_two_pass.cuh: in the place of norm_row.cuh: the row is read for its factor, then row and weight once more
#pragma once

template <int N>
struct NormRow {
    static constexpr int N_QUADS = (N + 4 * LANES_EMBD - 1) / (4 * LANES_EMBD);  // of one lane
    const float *weights = nullptr, *values = nullptr;
    int begin = 0;

    __device__ __forceinline__ static int quad(int i) { return threadIdx.x % LANES_EMBD + i * LANES_EMBD; }

    __device__ __forceinline__ void load_weight(const float* weight, int = 0, int = N_QUADS) { weights = weight; }
    __device__ __forceinline__ void load(const float* row, int first = 0) { values = row, begin = first; }

    // Threads behind the lanes have no row.
    __device__ __forceinline__ float scale(float eps) const {
        float sum = 0.0f;
        if (values != nullptr) {
#pragma unroll 1
            for (int i = 0; i < N_QUADS; i++) {
                const float4 x = load_row_quad<N>(values, quad(i));
                sum = add_products(sum, x, x);
            }
        }
        return div(1.0f, root(add(div(fold_warps(sum), float(N)), eps)));
    }

    __device__ __forceinline__ float4 normed(int i, float scale) const {
        return mul_quad(mul_quad(load_row_quad<N>(values, quad(begin + i)), scale), load_row_quad<N>(weights, quad(begin + i)));
    }
};
