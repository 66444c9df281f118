// numerics.cuh: the numerics contract (docs/numerics.md) on the device; the same steps as engine/numerics.py
// Every operation is one IEEE binary32 rounding: the __f*_rn intrinsics are never fused into an fma, and the module is
// compiled with --fmad=false --ftz=false --prec-div=true --prec-sqrt=true besides. Accumulators start at +0.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int WARP = 32;
constexpr int SUB_BLOCK = 32;  // weights, and activations, that share one f32 step
constexpr int KV_SPLIT = 32;   // KV positions that are summed on their own

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float div(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float root(float a) { return __fsqrt_rn(a); }

// f32 -> f16, halves to even: the rounding of the KV cache.
__device__ __forceinline__ u16 float_to_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

// tree over the 32 lanes of a warp: xor butterfly by 16, 8, 4, 2, 1; every lane gets the sum.
__device__ __forceinline__ float tree(float v) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) v = add(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
}

__device__ __forceinline__ float power_of_two(int k) { return __int_as_float((k + 127) << 23); }

__device__ __forceinline__ float exp_(float x) {
    x = x > 90.0f ? 90.0f : x;
    x = x < -105.0f ? -105.0f : x;
    const float n = rintf(mul(x, 1.4426950408889634f));
    const float r = sub(sub(x, mul(n, 0.693359375f)), mul(n, float(0.6931471805599453 - 0.693359375)));
    float q = float(1.0 / 5040.0);
    q = add(mul(q, r), float(1.0 / 720.0));
    q = add(mul(q, r), float(1.0 / 120.0));
    q = add(mul(q, r), float(1.0 / 24.0));
    q = add(mul(q, r), float(1.0 / 6.0));
    q = add(mul(q, r), 0.5f);
    const float p = add(1.0f, add(r, mul(mul(r, r), q)));
    const int k = int(n);
    return mul(mul(p, power_of_two(k >> 1)), power_of_two(k - (k >> 1)));
}

__device__ __forceinline__ float log_(float u) {
    const int bits = __float_as_int(u);
    int e = (bits >> 23) - 127;
    float m = __int_as_float((bits & 0x007fffff) | 0x3f800000);
    if (m > 1.4142135623730951f) {
        m = mul(m, 0.5f);
        e += 1;
    }
    const float ef = float(e);
    const float f = sub(m, 1.0f);
    const float s = div(f, add(2.0f, f));
    const float z = mul(s, s);
    float q = float(2.0 / 9.0);
    q = add(mul(q, z), float(2.0 / 7.0));
    q = add(mul(q, z), float(2.0 / 5.0));
    q = add(mul(q, z), float(2.0 / 3.0));
    const float low = add(mul(s, mul(z, q)), mul(ef, float(0.6931471805599453 - 0.693359375)));
    return add(mul(ef, 0.693359375f), add(add(s, s), low));
}

__device__ __forceinline__ float softplus(float x) {
    if (x > 20.0f) return x;
    const float t = exp_(x);
    const float u = add(1.0f, t);
    return add(log_(u), div(sub(t, sub(u, 1.0f)), u));
}

__device__ __forceinline__ float sigmoid(float x) { return div(1.0f, add(1.0f, exp_(-x))); }
__device__ __forceinline__ float silu(float x) { return div(x, add(1.0f, exp_(-x))); }

// One token's activations for the quantised matrices: 32 int8 per group, and the group's scale and sum side by side.
struct __align__(8) GroupScale {
    float d;
    int total;
};

// Quantise one group of 32, one value a lane; the group lies in one warp. A NaN or infinity among the values makes the
// group's scale non-finite, so that it cannot get lost before the next finite check.
__device__ __forceinline__ void quantize_group(float x, int group, i8* q, GroupScale* scales, int lane) {
    const bool has_nan = __any_sync(0xffffffffu, x != x);
    const float amax = has_nan ? __int_as_float(0x7fc00000) : warp_max(fabsf(x));
    const bool zero = amax < 7.888609052210118e-31f;  // 2^-100
    const float inverse = zero ? 0.0f : div(127.0f, amax);
    const int value = __float2int_rn(mul(x, inverse));
    const int total = __reduce_add_sync(0xffffffffu, value);
    q[group * SUB_BLOCK + lane] = i8(value);
    if (lane == 0) scales[group] = GroupScale{zero ? 0.0f : div(amax, 127.0f), total};
}

// Programmatic dependent launch (sm_90 on; nothing elsewhere, and nothing in a plain launch). Every kernel of a step
// begins with release_dependents(), which lets the next kernel's blocks start as soon as all of this one's have, and
// calls dependency_wait() before it reads or writes anything that another kernel of the step writes: it returns when
// the kernel before has completed, and with it all before that. What may come earlier is reading weights, and state
// that only this kernel touches within a step. Whatever comes later must be a plain load: neither __ldg nor __restrict__,
// which let the compiler move it up.
__device__ __forceinline__ void release_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void dependency_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A fault found by a kernel: the first one wins. Layout of the word: layer << 16 | op << 8 | kind.
constexpr u32 KIND_NAN = 1;
constexpr u32 KIND_INFINITY = 2;

__device__ __forceinline__ void check_finite(float x, u32 layer_and_op, u32* fault) {
    if (!(fabsf(x) < __int_as_float(0x7f800000))) {
        const u32 kind = x != x ? KIND_NAN : KIND_INFINITY;
        atomicCAS(fault, 0u, layer_and_op | kind);
    }
}
