// row_dot.cuh: one row of a weight matrix times one token, by one warp; the core of gemv, project and gate_up_silu
// Quantised: exact int32 per 32 weights, one f32 term each, lane = sub-block mod 32 in order, tree over the lanes.
// Float: element k belongs to lane (k / 4) mod 32, in order, tree over the lanes. The same for every launch shape.
#pragma once

constexpr int STRIPS_IN_FLIGHT = 6;  // strips of 32 sub-blocks whose loads are issued before the first is used

// Blocks of 128 threads that an SM shall hold, which bounds the registers of a kernel: with fewer registers the
// assembler asks for a row piece by piece, with more there are too few warps. Measured on an H200 in graphs of rotated
// matrices (docs/measured-facts.md): rows of 5120 are 2 to 7 % faster with 8 than unbounded (8 spills in Q6_K on sm_86 and
// sm_89 and a step took as long with it, hence 7), rows of 6144 6 to 12 % with 6, rows of 17408 in Q4_K 26 % and in IQ3_S
// 15 % with 3 (4 spills on some architectures; Q6_K is 19 % slower).
__host__ __device__ constexpr int blocks_per_sm(int n_in) { return n_in <= 5120 ? 7 : n_in <= 6144 ? 6 : 3; }

struct Input {
    const float* x;
    const i8* q;
    const GroupScale* scales;
};

// The f32 term of one sub-block; d and total: scale of the group of activations and their sum.
template <class F>
__device__ __forceinline__ float term_of(const typename F::Raw& raw, int s, const Group& a, float d, float total,
                                         const u32* grid) {
    const Scales own = F::scales(raw, s);
    float term = mul(own.scale, F::dot(raw, a, grid));
    if (F::HAS_MIN) term = sub(term, mul(own.minimum, total));
    return mul(term, d);
}

// The same for sub-block s of a row, with the activations in global memory.
template <class F>
__device__ __forceinline__ float sub_block_term(const typename F::Raw& raw, int s, const Input& h) {
    const int4* q = reinterpret_cast<const int4*>(h.q + SUB_BLOCK * s);
    const int4 a = q[0], b = q[1];
    const int2 group = *reinterpret_cast<const int2*>(h.scales + s);  // both in one load
    return term_of<F>(raw, s, Group(a, b), __int_as_float(group.x), float(group.y), iq3s_grid);
}

// The sub-blocks of one row that a lane has asked for: the strips from FIRST on, as many as fit in flight.
template <class F, int N_IN, int FIRST>
struct Strips {
    static constexpr int N_SUB = N_IN / SUB_BLOCK, N_STRIPS = (N_SUB + WARP - 1) / WARP;
    static constexpr int N = N_STRIPS - FIRST < STRIPS_IN_FLIGHT ? N_STRIPS - FIRST : STRIPS_IN_FLIGHT;
    typename F::Raw raw[N];

    __device__ __forceinline__ static int sub_block(int i) { return (FIRST + i) * WARP + threadIdx.x % WARP; }

    __device__ __forceinline__ static Spot<const u8> spot(const u8* w, i64 n_out, i64 row, int i) {
        if constexpr (N_SUB % STRIP_SUBS == 0)
            return spot_in_strip<F>(w, n_out * N_STRIPS, row * N_STRIPS + FIRST + i, threadIdx.x % WARP);
        else
            return spot_of<F>(w, n_out * N_SUB, row * N_SUB + sub_block(i));
    }

    __device__ __forceinline__ void load(const u8* w, i64 n_out, i64 row) {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (sub_block(i) < N_SUB) raw[i] = F::load(spot(w, n_out, row, i));
    }

    __device__ __forceinline__ float add_to(float acc, const Input& h) const {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (sub_block(i) < N_SUB) acc = add(acc, sub_block_term<F>(raw[i], sub_block(i), h));
        return acc;
    }
};

// The lane's partial sum continued by the strips from FIRST to the end of the row.
template <class F, int N_IN, int FIRST>
__device__ __forceinline__ float add_strips_from(const u8* w, i64 n_out, i64 row, const Input& h, float acc) {
    if constexpr (FIRST * WARP * SUB_BLOCK < N_IN) {
        Strips<F, N_IN, FIRST> strips;
        strips.load(w, n_out, row);
        if (FIRST == 0) dependency_wait();  // weights are on their way while the kernel before ends
        acc = strips.add_to(acc, h);
        return add_strips_from<F, N_IN, FIRST + STRIPS_IN_FLIGHT>(w, n_out, row, h, acc);
    } else {
        return acc;
    }
}

constexpr int QUADS_IN_FLIGHT = 10;

// Float rows: lane l takes quads l, l + 32, ...; several are asked for before the first is used.
template <class F, int N_IN, int IN_FLIGHT = QUADS_IN_FLIGHT>
__device__ __forceinline__ float sum_of_quads(const u8* w, i64 row, const float* x) {
    const u8* weights = w + row * N_IN * F::N_BYTES;
    float acc = 0.0f;
#pragma unroll IN_FLIGHT
    for (int quad = threadIdx.x % WARP; quad < N_IN / 4; quad += WARP) {
        const float4 a = F::load_quad(weights + i64(quad) * 4 * F::N_BYTES);
        acc = add_products(acc, a, load_quad(x, quad));
    }
    return acc;
}

// The same for rows that do not begin at a multiple of 16 bytes.
template <class F, int N_IN>
__device__ __forceinline__ float sum_of_elements(const u8* w, i64 row, const float* x) {
    float acc = 0.0f;
    for (int k0 = 4 * (threadIdx.x % WARP); k0 < N_IN; k0 += 4 * WARP) {
        for (int k = k0; k < k0 + 4 && k < N_IN; ++k) {
            acc = add(acc, mul(F::load(w + (row * N_IN + k) * F::N_BYTES), x[k]));
        }
    }
    return acc;
}

// The lane's sum over a float row.
template <class F, int N_IN>
__device__ __forceinline__ float float_row_sum(const u8* w, i64 row, const float* x) {
    if constexpr (N_IN % 4 == 0)
        return sum_of_quads<F, N_IN>(w, row, x);
    else
        return sum_of_elements<F, N_IN>(w, row, x);
}
