// row_dot.cuh: one row of a weight matrix times a pack of tokens, by one warp; the core of gemv and gate_up_silu
// Quantised: exact int32 per 32 weights, one f32 term each, lane = sub-block mod 32 in order, tree over the lanes.
// Float: element k belongs to lane (k / 4) mod 32, in order, tree over the lanes. The same for every launch shape.
#pragma once

constexpr int STRIPS_IN_FLIGHT = 6;  // strips of 32 sub-blocks whose loads are issued before the first is used

struct Input {
    const float* x;
    const i8* q;
    const GroupScale* scales;
};

template <class F, int N_TOKENS>
__device__ __forceinline__ void add_sub_block(const typename F::Raw& raw, int s, int n_in, const Input& h,
                                              int n_tokens, float (&acc)[N_TOKENS]) {
    Weights w;
    F::decode(raw, s, w);
#pragma unroll
    for (int t = 0; t < N_TOKENS; ++t) {
        if (N_TOKENS > 1 && t >= n_tokens) break;
        const int4* q = reinterpret_cast<const int4*>(h.q + i64(t) * n_in + SUB_BLOCK * s);
        const int4 a = __ldg(q), b = __ldg(q + 1);
        const int2 group = __ldg(reinterpret_cast<const int2*>(h.scales + t * (n_in / SUB_BLOCK) + s));
        int low = __dp4a(w.q[0], a.x, 0), high = __dp4a(w.q[4], b.x, 0);
        low = __dp4a(w.q[1], a.y, low), high = __dp4a(w.q[5], b.y, high);
        low = __dp4a(w.q[2], a.z, low), high = __dp4a(w.q[6], b.z, high);
        low = __dp4a(w.q[3], a.w, low), high = __dp4a(w.q[7], b.w, high);
        const int dot = F::HALF_SCALES ? w.scale_low * low + w.scale_high * high : low + high;
        float term = mul(w.scale, float(dot));
        if (F::HAS_MIN) term = sub(term, mul(w.minimum, float(group.y)));
        acc[t] = add(acc[t], mul(term, __int_as_float(group.x)));
    }
}

// Row `row` of a quantised matrix times every token; each lane returns its own partial sums.
template <class F, int N_IN, int N_TOKENS>
__device__ __forceinline__ void lane_sums_quantized(const u8* w, i64 n_out, i64 row, const Input& h, int n_tokens,
                                                    float (&acc)[N_TOKENS]) {
    constexpr int N_SUB = N_IN / SUB_BLOCK, N_STRIPS = (N_SUB + WARP - 1) / WARP;
    const int lane = threadIdx.x % WARP;
    const i64 n_sub = n_out * N_SUB;
#pragma unroll
    for (int first = 0; first < N_STRIPS; first += STRIPS_IN_FLIGHT) {
        typename F::Raw raw[STRIPS_IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < STRIPS_IN_FLIGHT; ++i) {
            const int s = (first + i) * WARP + lane;
            if (first + i < N_STRIPS && s < N_SUB) raw[i] = F::load(w, n_sub, row * N_SUB + s);
        }
#pragma unroll
        for (int i = 0; i < STRIPS_IN_FLIGHT; ++i) {
            const int s = (first + i) * WARP + lane;
            if (first + i < N_STRIPS && s < N_SUB) add_sub_block<F, N_TOKENS>(raw[i], s, N_IN, h, n_tokens, acc);
        }
    }
}

template <class F, int N_IN, int N_TOKENS>
__device__ __forceinline__ void lane_sums_float(const u8* w, i64 row, const Input& h, int n_tokens,
                                                float (&acc)[N_TOKENS]) {
    const int lane = threadIdx.x % WARP;
    for (int k0 = 4 * lane; k0 < N_IN; k0 += 4 * WARP) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int k = k0 + e;
            if (N_IN % 4 && k >= N_IN) break;
            const float weight = F::load(w + (row * N_IN + k) * F::N_BYTES);
#pragma unroll
            for (int t = 0; t < N_TOKENS; ++t) {
                if (N_TOKENS > 1 && t >= n_tokens) break;
                acc[t] = add(acc[t], mul(weight, __ldg(h.x + i64(t) * N_IN + k)));
            }
        }
    }
}

// Row `row` of W times every token of the pack; all lanes return the sums.
template <class F, int N_IN, int N_TOKENS>
__device__ __forceinline__ void row_dot(const u8* w, i64 n_out, i64 row, const Input& h, int n_tokens,
                                        float (&acc)[N_TOKENS]) {
#pragma unroll
    for (int t = 0; t < N_TOKENS; ++t) acc[t] = 0.0f;
    if constexpr (is_float_format<F>::value)
        lane_sums_float<F, N_IN, N_TOKENS>(w, row, h, n_tokens, acc);
    else
        lane_sums_quantized<F, N_IN, N_TOKENS>(w, n_out, row, h, n_tokens, acc);
#pragma unroll
    for (int t = 0; t < N_TOKENS; ++t) acc[t] = tree(acc[t]);
}
