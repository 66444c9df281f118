// split_softmax_serial.cuh: in the place of split_softmax.cuh: a thread a query head, position after position
#pragma once

// The sum of tree() from one thread: lane 0 adds to each value the one `offset` lanes up.
__device__ __forceinline__ float tree_of(float (&v)[WARP]) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
#pragma unroll
        for (int i = 0; i < offset; i++) v[i] = add(v[i], v[i + offset]);
    }
    return v[0];
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
    sums[h * stride] = tree_of(weights);
}
