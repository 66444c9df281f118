// split_softmax.cuh: the scores of a split turned into weights, a warp a query head and a lane a position
#pragma once

// Turn the scores of one query head into weights, in place; a lane a position.
__device__ __forceinline__ void split_softmax(float* scores, int n_seen, int lane, float& maximum, float& sum) {
    const float score = lane < n_seen ? scores[lane] : __int_as_float(0xff800000);  // -infinity
    maximum = score;
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        maximum = max_nan(maximum, __shfl_xor_sync(0xffffffffu, maximum, offset));
    }
    const float weight = lane < n_seen ? exp_(sub(score, maximum)) : 0.0f;
    sum = tree(weight);
    scores[lane] = weight;
}

// The same for N_HEADS query heads; maxima and sums of consecutive heads lie `stride` apart.
template <int N_HEADS, int N_WARPS>
__device__ __forceinline__ void softmax_heads(float (&scores)[N_HEADS][KV_SPLIT], int n_seen, float* maxima, float* sums,
                                              int stride) {
    const int lane = threadIdx.x % WARP;
    for (int h = threadIdx.x / WARP; h < N_HEADS; h += N_WARPS) {
        float maximum, sum;
        split_softmax(scores[h], n_seen, lane, maximum, sum);
        if (lane == 0) {
            maxima[h * stride] = maximum;
            sums[h * stride] = sum;
        }
    }
}
