// split_softmax_serial.cuh: in the place of split_softmax.cuh: a thread a query head, position after position
#pragma once

// The sum of tree() from one thread: at each level the upper half of the N values left is added to the lower.
template <int N>
__device__ __forceinline__ float tree_of(float (&v)[WARP]) {
    if constexpr (N == 1) {
        return v[0];
    } else {
#pragma unroll
        for (int i = 0; i < N / 2; i++) v[i] = add(v[i], v[i + N / 2]);
        return tree_of<N / 2>(v);
    }
}

template <int N_HEADS, int N_WARPS>
__device__ __forceinline__ void softmax_heads(float (&scores)[N_HEADS][KV_SPLIT], int n_seen, float* maxima, float* sums,
                                              int stride) {
    const int h = threadIdx.x;
    if (h >= N_HEADS) return;
    float maximum = scores[h][0];
    for (int j = 1; j < n_seen; j++) maximum = max_nan(maximum, scores[h][j]);
    float weights[KV_SPLIT];
#pragma unroll
    for (int j = 0; j < KV_SPLIT; j++) {
        weights[j] = j < n_seen ? exp_(sub(scores[h][j], maximum)) : 0.0f;
        scores[h][j] = weights[j];
    }
    maxima[h * stride] = maximum;
    sums[h * stride] = tree_of<WARP>(weights);
}
