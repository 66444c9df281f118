// delta_step.cuh: the delta rule of gated_delta, all rows of a warp at once: their sums go through the lanes together
#pragma once

// One token of the delta rule for a warp's ROWS rows, the first being `row`.
template <int D, int ROWS, class Chunk>
__device__ __forceinline__ void delta_step(float4 (&s)[ROWS], Chunk& chunk, int t, int row, int lane,
                                           float scale) {
    const bool has_columns = lane < D / 4;
    const float4 key = has_columns ? load_quad(chunk.k[t], lane) : zero_quad();
    const float4 query = has_columns ? load_quad(chunk.q[t], lane) : zero_quad();
    const float decay = chunk.decay[t];
    const int own_row = row + row_of_lane<ROWS>(lane);
    float part[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        s[r] = mul_quad(s[r], decay);
        part[r] = products(s[r], key);
    }
    const float predicted = positive_zero(tree_rows(part, lane));
    const float own_delta = mul(sub(chunk.v[t][own_row], predicted), chunk.b[t]);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float delta = __shfl_sync(0xffffffffu, own_delta, r * (WARP / ROWS));
        s[r] = add_quad(s[r], mul_quad(key, delta));
        part[r] = products(s[r], query);
    }
    const float out = mul(positive_zero(tree_rows(part, lane)), scale);
    if (lane % (WARP / ROWS) == 0) chunk.o[t][own_row] = out;
}
