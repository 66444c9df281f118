// delta_step_row_by_row.cuh: in the place of delta_step.cuh: a row is finished before the next is begun
#pragma once

template <int D, int ROWS, class Chunk>
__device__ __forceinline__ void delta_step(float4 (&s)[ROWS], Chunk& chunk, int t, int row, int lane, float scale) {
    const bool has_columns = lane < D / 4;
    const float4 key = has_columns ? load_quad(chunk.k[t], lane) : zero_quad();
    const float4 query = has_columns ? load_quad(chunk.q[t], lane) : zero_quad();
    const float decay = chunk.decay[t];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        s[r] = mul_quad(s[r], decay);
        const float predicted = positive_zero(tree(products(s[r], key)));
        const float delta = mul(sub(chunk.v[t][row + r], predicted), chunk.b[t]);
        s[r] = add_quad(s[r], mul_quad(key, delta));
        const float out = mul(positive_zero(tree(products(s[r], query))), scale);
        if (lane == 0) chunk.o[t][row + r] = out;
    }
}
