// norm.cuh: rms_norm of one row of N f32 by the first 256 threads of a block (sum256: lanes in increasing k, tree in each
// warp, then over the eight warps), for the kernel of that name and for those that normalise their input themselves
#pragma once

constexpr int LANES_EMBD = 256;

// Quad `quad` of a row of N f32, with +0 for what lies behind the row.
template <int N>
__device__ __forceinline__ float4 load_row_quad(const float* row, int quad) {
    if constexpr (N % (4 * LANES_EMBD) == 0) {
        return load_quad(row, quad);
    } else if constexpr (N % 4 == 0) {
        return quad < N / 4 ? load_quad(row, quad) : zero_quad();
    } else {  // rows are not aligned to 16 bytes
        const int k = 4 * quad;
        return make_float4(k < N ? row[k] : 0.0f, k + 1 < N ? row[k + 1] : 0.0f, k + 2 < N ? row[k + 2] : 0.0f,
                           k + 3 < N ? row[k + 3] : 0.0f);
    }
}

template <int N>
__device__ __forceinline__ void store_row_quad(float* row, int quad, float4 v) {
    if constexpr (N % 4 == 0) {
        if (quad < N / 4) store_quad(row, quad, v);
    } else {
        const int k = 4 * quad;
        if (k < N) row[k] = v.x;
        if (k + 1 < N) row[k + 1] = v.y;
        if (k + 2 < N) row[k + 2] = v.z;
        if (k + 3 < N) row[k + 3] = v.w;
    }
}

// The second half of sum256: every thread of the block gets the sum over its first eight warps.
__device__ __forceinline__ float fold_warps(float lane_sum) {
    __shared__ __align__(16) float warp_sums[LANES_EMBD / WARP];
    const float sum = tree(lane_sum);
    if (threadIdx.x % WARP == 0 && threadIdx.x < LANES_EMBD) warp_sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    const float4 half = add_quad(load_quad(warp_sums, 0), load_quad(warp_sums, 1));
    return add(add(half.x, half.z), add(half.y, half.w));
}
