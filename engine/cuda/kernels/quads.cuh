// quads.cuh: rows spread over lanes as the contract's sums want them: a lane holds quads, four consecutive elements,
// and quad i of a row belongs to lane i mod n_lanes. A quad is one 16-byte load of f32; eight lanes hold a group of 32.
#pragma once

__device__ __forceinline__ float4 zero_quad() { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }

__device__ __forceinline__ float4 load_quad(const float* row, int quad) {
    return reinterpret_cast<const float4*>(row)[quad];
}

__device__ __forceinline__ void store_quad(float* row, int quad, float4 v) {
    reinterpret_cast<float4*>(row)[quad] = v;
}

// Four f16 of the KV cache, widened.
__device__ __forceinline__ float4 widen_quad(uint2 h) {
    return make_float4(half_to_float(u16(h.x)), half_to_float(u16(h.x >> 16)), half_to_float(u16(h.y)),
                       half_to_float(u16(h.y >> 16)));
}

__device__ __forceinline__ float4 mul_quad(float4 a, float b) {
    return make_float4(mul(a.x, b), mul(a.y, b), mul(a.z, b), mul(a.w, b));
}

__device__ __forceinline__ float4 mul_quad(float4 a, float4 b) {
    return make_float4(mul(a.x, b.x), mul(a.y, b.y), mul(a.z, b.z), mul(a.w, b.w));
}

__device__ __forceinline__ float4 add_quad(float4 a, float4 b) {
    return make_float4(add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w));
}

__device__ __forceinline__ float4 silu_quad(float4 v) {
    return make_float4(silu(v.x), silu(v.y), silu(v.z), silu(v.w));
}

// A lane's sum continued by the products of two quads, one addition after the other.
__device__ __forceinline__ float add_products(float sum, float4 a, float4 b) {
    sum = add(sum, mul(a.x, b.x));
    sum = add(sum, mul(a.y, b.y));
    sum = add(sum, mul(a.z, b.z));
    return add(sum, mul(a.w, b.w));
}

// The same for a lane's first quad, without the addition to +0. That can only change the sign of a zero sum, which
// positive_zero() settles once the row is summed.
__device__ __forceinline__ float products(float4 a, float4 b) {
    return add(add(add(mul(a.x, b.x), mul(a.y, b.y)), mul(a.z, b.z)), mul(a.w, b.w));
}

__device__ __forceinline__ float positive_zero(float sum) { return add(sum, 0.0f); }

// The larger of two values; NaN if either is (fmaxf would drop it).
__device__ __forceinline__ float max_nan(float a, float b) { return b > a || b != b ? b : a; }

// Which of N rows a lane has the sum of after tree_rows<N>.
template <int N>
__device__ __forceinline__ int row_of_lane(int lane) {
    return lane / (WARP / N);
}

// tree over the 32 lanes for N rows at once, N a power of two up to 32: the additions of tree(), but at each level a
// lane keeps half of the rows it has and hands over the others, so N rows cost about N shuffles instead of 5 N.
// v[i] is this lane's part of row i; returns the sum of row row_of_lane<N>(lane).
template <int N>
__device__ __forceinline__ float tree_rows(float (&v)[N], int lane) {
    int offset = WARP / 2;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
        const bool upper = lane & offset;
#pragma unroll
        for (int i = 0; i < half; i++) {
            const float given = __shfl_xor_sync(0xffffffffu, upper ? v[i] : v[i + half], offset);
            v[i] = add(upper ? v[i + half] : v[i], given);
        }
        offset /= 2;
    }
    float sum = v[0];
#pragma unroll
    for (int rest = WARP / 2 / N; rest > 0; rest /= 2) sum = add(sum, __shfl_xor_sync(0xffffffffu, sum, rest));
    return sum;
}

// A quad of a group of 32, quantised: its four int8, and the group's scale and sum, which all eight lanes have.
struct QuantizedQuad {
    u32 q;
    GroupScale scale;
};

// Quantise a quad; all lanes of the warp take part, eight consecutive ones a group. As quantize_group does it.
__device__ __forceinline__ QuantizedQuad quantized_quad(float4 v) {
    float amax = max_nan(max_nan(fabsf(v.x), fabsf(v.y)), max_nan(fabsf(v.z), fabsf(v.w)));
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) amax = max_nan(amax, __shfl_xor_sync(0xffffffffu, amax, offset));
    const bool zero = amax < 7.888609052210118e-31f;  // 2^-100
    // All lanes of a group would do the same two divisions: odd ones do the one, even ones the other.
    const bool is_odd = threadIdx.x % 2 != 0;
    const float own = div(is_odd ? amax : 127.0f, is_odd ? 127.0f : amax), other = __shfl_xor_sync(0xffffffffu, own, 1);
    const float inverse = zero ? 0.0f : is_odd ? other : own, step = zero ? 0.0f : is_odd ? own : other;
    const int a = __float2int_rn(mul(v.x, inverse)), b = __float2int_rn(mul(v.y, inverse));
    const int c = __float2int_rn(mul(v.z, inverse)), d = __float2int_rn(mul(v.w, inverse));
    int total = a + b + c + d;
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) total += __shfl_xor_sync(0xffffffffu, total, offset);
    const u32 packed = u32(a & 0xff) | u32(b & 0xff) << 8 | u32(c & 0xff) << 16 | u32(d & 0xff) << 24;
    return {packed, GroupScale{step, total}};
}

// Quantise a row held as quads; all lanes of the warp take part. `quad` is the quad's index in the row that q and
// scales belong to; lanes whose quad lies behind the row pass zeros and store = false.
__device__ __forceinline__ void quantize_quad(float4 v, int quad, bool store, i8* q, GroupScale* scales) {
    const QuantizedQuad quantized = quantized_quad(v);
    if (!store) return;
    reinterpret_cast<u32*>(q)[quad] = quantized.q;
    if (quad % 8 == 0) scales[quad / 8] = quantized.scale;
}
