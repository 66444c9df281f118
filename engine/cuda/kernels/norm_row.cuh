// norm_row.cuh: one row on its way through rms_norm (norm.cuh), by the first 256 threads of a block
#pragma once

// A row in the registers of its lanes. Every load is issued before the reduction, so the latency of a cold weight is paid
// once, not in each turn.
template <int N>
struct NormRow {
    static constexpr int N_QUADS = (N + 4 * LANES_EMBD - 1) / (4 * LANES_EMBD);  // of one lane
    float4 w[N_QUADS], x[N_QUADS];

    __device__ __forceinline__ static int quad(int i) { return threadIdx.x % LANES_EMBD + i * LANES_EMBD; }

    // Quads first..first + n - 1 of the lane, as far as there are so many, to the first places.
    __device__ __forceinline__ void load_weight(const float* weight, int first = 0, int n = N_QUADS) {
#pragma unroll
        for (int i = 0; i < N_QUADS; i++) {
            if (i < n && first + i < N_QUADS) w[i] = load_row_quad<N>(weight, quad(first + i));
        }
    }

    // Quads from `first` on, likewise.
    __device__ __forceinline__ void load(const float* row, int first = 0) {
#pragma unroll
        for (int i = 0; i < N_QUADS; i++) {
            if (first + i < N_QUADS) x[i] = load_row_quad<N>(row, quad(first + i));
        }
    }

    // The factor of the row; all threads of the block must come, those behind the first 256 with any contents.
    __device__ __forceinline__ float scale(float eps) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < N_QUADS; i++) sum = add_products(sum, x[i], x[i]);
        return div(1.0f, root(add(div(fold_warps(sum), float(N)), eps)));
    }

    // Of what was loaded to place i.
    __device__ __forceinline__ float4 normed(int i, float scale) const { return mul_quad(mul_quad(x[i], scale), w[i]); }
};
