// row_dot.cuh: one row of a weight matrix times a pack of tokens, by one warp; the core of gemv and gate_up_silu
// Quantised: exact int32 per 32 weights, one f32 term each, lane = sub-block mod 32 in order, tree over the lanes.
// Float: element k belongs to lane (k / 4) mod 32, in order, tree over the lanes. The same for every launch shape.
#pragma once

constexpr int STRIPS_IN_FLIGHT = 6;  // strips of 32 sub-blocks whose loads are issued before the first is used

// Blocks of 128 threads that an SM shall hold, which bounds the registers of a kernel for one token: with fewer
// registers the assembler asks for a row piece by piece, with more there are too few warps. Measured on an H200 in
// graphs of rotated matrices (docs/measured-facts.md): rows of 5120 are 2 to 7 % faster with 8 than unbounded, rows of
// 6144 6 to 12 % with 6, rows of 17408 in Q4_K 26 % and in IQ3_S 15 % with 3 (4 spills on some architectures; Q6_K
// is 19 % slower with 3). Packs of tokens keep their sums in registers: 4.
__host__ __device__ constexpr int blocks_per_sm(int n_in, int n_tokens) {
    return n_tokens > 1 ? 4 : n_in <= 5120 ? 8 : n_in <= 6144 ? 6 : 3;
}

struct Input {
    const float* x;
    const i8* q;
    const GroupScale* scales;
};

// The f32 term of one sub-block: 32 weights times the activations a, b of one group with its scale and sum.
template <class F>
__device__ __forceinline__ float sub_block_term(const Weights& w, int4 a, int4 b, GroupScale group) {
    int low = __dp4a(w.q[0], a.x, 0), high = __dp4a(w.q[4], b.x, 0);
    low = __dp4a(w.q[1], a.y, low), high = __dp4a(w.q[5], b.y, high);
    low = __dp4a(w.q[2], a.z, low), high = __dp4a(w.q[6], b.z, high);
    low = __dp4a(w.q[3], a.w, low), high = __dp4a(w.q[7], b.w, high);
    const int dot = F::HALF_SCALES ? w.scale_low * low + w.scale_high * high : low + high;
    float term = mul(w.scale, float(dot));
    if (F::HAS_MIN) term = sub(term, mul(w.minimum, float(group.total)));
    return mul(term, group.d);
}

template <class F, int N_TOKENS>
__device__ __forceinline__ void add_sub_block(const typename F::Raw& raw, int s, int n_in, const Input& h,
                                              int n_tokens, float (&acc)[N_TOKENS]) {
    Weights w;
    F::decode(raw, s, w);
#pragma unroll
    for (int t = 0; t < N_TOKENS; ++t) {
        if (N_TOKENS > 1 && t >= n_tokens) break;
        const int4* q = reinterpret_cast<const int4*>(h.q + i64(t) * n_in + SUB_BLOCK * s);
        const int4 a = q[0], b = q[1];
        const int2 group = *reinterpret_cast<const int2*>(h.scales + t * (n_in / SUB_BLOCK) + s);  // one load
        acc[t] = add(acc[t], sub_block_term<F>(w, a, b, GroupScale{__int_as_float(group.x), group.y}));
    }
}

// The sub-blocks of one row that a lane has asked for: the strips from FIRST on, as many as fit in flight.
template <class F, int N_IN, int FIRST>
struct Strips {
    static constexpr int N_SUB = N_IN / SUB_BLOCK, N_STRIPS = (N_SUB + WARP - 1) / WARP;
    static constexpr int N = N_STRIPS - FIRST < STRIPS_IN_FLIGHT ? N_STRIPS - FIRST : STRIPS_IN_FLIGHT;
    typename F::Raw raw[N];

    __device__ __forceinline__ static int sub_block(int i) { return (FIRST + i) * WARP + threadIdx.x % WARP; }

    __device__ __forceinline__ void load(const u8* w, i64 n_out, i64 row) {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (sub_block(i) < N_SUB) raw[i] = F::load(w, n_out * N_SUB, row * N_SUB + sub_block(i));
    }

    template <int N_TOKENS>
    __device__ __forceinline__ void add_to(const Input& h, int n_tokens, float (&acc)[N_TOKENS]) const {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (sub_block(i) < N_SUB) add_sub_block<F, N_TOKENS>(raw[i], sub_block(i), N_IN, h, n_tokens, acc);
    }
};

// Strips from FIRST to the end of the row; each lane adds to its own partial sums.
template <class F, int N_IN, int N_TOKENS, int FIRST>
__device__ __forceinline__ void add_strips_from(const u8* w, i64 n_out, i64 row, const Input& h, int n_tokens,
                                                float (&acc)[N_TOKENS]) {
    if constexpr (FIRST * WARP * SUB_BLOCK < N_IN) {
        Strips<F, N_IN, FIRST> strips;
        strips.load(w, n_out, row);
        if (FIRST == 0) dependency_wait();  // weights are on their way while the kernel before ends
        strips.add_to(h, n_tokens, acc);
        add_strips_from<F, N_IN, N_TOKENS, FIRST + STRIPS_IN_FLIGHT>(w, n_out, row, h, n_tokens, acc);
    }
}

constexpr int QUADS_IN_FLIGHT = 10;

// Float rows: lane l takes quads l, l + 32, ...; several are asked for before the first is used.
template <class F, int N_IN, int N_TOKENS, int IN_FLIGHT = QUADS_IN_FLIGHT>
__device__ __forceinline__ void add_quads(const u8* w, i64 row, const Input& h, int n_tokens, float (&acc)[N_TOKENS]) {
    const u8* weights = w + row * N_IN * F::N_BYTES;
#pragma unroll IN_FLIGHT
    for (int quad = threadIdx.x % WARP; quad < N_IN / 4; quad += WARP) {
        const float4 a = F::load_quad(weights + i64(quad) * 4 * F::N_BYTES);
#pragma unroll
        for (int t = 0; t < N_TOKENS; ++t) {
            if (N_TOKENS > 1 && t >= n_tokens) break;
            acc[t] = add_products(acc[t], a, load_quad(h.x + i64(t) * N_IN, quad));
        }
    }
}

// The same for rows that do not begin at a multiple of 16 bytes.
template <class F, int N_IN, int N_TOKENS>
__device__ __forceinline__ void add_elements(const u8* w, i64 row, const Input& h, int n_tokens,
                                             float (&acc)[N_TOKENS]) {
    for (int k0 = 4 * (threadIdx.x % WARP); k0 < N_IN; k0 += 4 * WARP) {
        for (int k = k0; k < k0 + 4 && k < N_IN; ++k) {
            const float weight = F::load(w + (row * N_IN + k) * F::N_BYTES);
#pragma unroll
            for (int t = 0; t < N_TOKENS; ++t) {
                if (N_TOKENS > 1 && t >= n_tokens) break;
                acc[t] = add(acc[t], mul(weight, h.x[i64(t) * N_IN + k]));
            }
        }
    }
}

template <int N_TOKENS>
__device__ __forceinline__ void fold_lanes(float (&acc)[N_TOKENS]) {
#pragma unroll
    for (int t = 0; t < N_TOKENS; ++t) acc[t] = tree(acc[t]);
}

template <int N_TOKENS>
__device__ __forceinline__ void clear(float (&acc)[N_TOKENS]) {
#pragma unroll
    for (int t = 0; t < N_TOKENS; ++t) acc[t] = 0.0f;
}

// Row `row` of W times every token of the pack; all lanes return the sums. Waits for the kernel before on the way.
template <class F, int N_IN, int N_TOKENS>
__device__ __forceinline__ void row_dot(const u8* w, i64 n_out, i64 row, const Input& h, int n_tokens,
                                        float (&acc)[N_TOKENS]) {
    clear(acc);
    if constexpr (!is_float_format<F>::value)
        add_strips_from<F, N_IN, N_TOKENS, 0>(w, n_out, row, h, n_tokens, acc);
    else {
        dependency_wait();
        if constexpr (N_IN % 4 == 0)
            add_quads<F, N_IN, N_TOKENS>(w, row, h, n_tokens, acc);
        else
            add_elements<F, N_IN, N_TOKENS>(w, row, h, n_tokens, acc);
    }
    fold_lanes(acc);
}

// The same for one row of two matrices; where both fit in flight, both are asked for before either is used.
template <class FA, class FB, int N_IN, int N_TOKENS>
__device__ __forceinline__ void row_dot_pair(const u8* wa, const u8* wb, i64 n_out, i64 row, const Input& h,
                                             int n_tokens, float (&a)[N_TOKENS], float (&b)[N_TOKENS]) {
    constexpr bool QUANTIZED = !is_float_format<FA>::value && !is_float_format<FB>::value;
    if constexpr (QUANTIZED && N_TOKENS == 1 && N_IN <= STRIPS_IN_FLIGHT * WARP * SUB_BLOCK) {
        Strips<FA, N_IN, 0> strips_a;
        Strips<FB, N_IN, 0> strips_b;
        strips_a.load(wa, n_out, row);
        strips_b.load(wb, n_out, row);
        dependency_wait();
        clear(a);
        clear(b);
        strips_a.add_to(h, n_tokens, a);
        strips_b.add_to(h, n_tokens, b);
        fold_lanes(a);
        fold_lanes(b);
    } else {
        row_dot<FA, N_IN, N_TOKENS>(wa, n_out, row, h, n_tokens, a);
        row_dot<FB, N_IN, N_TOKENS>(wb, n_out, row, h, n_tokens, b);
    }
}
