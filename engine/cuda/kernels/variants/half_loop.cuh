// half_loop.cuh: in the place of half.cuh: f16 to f32 from its bits, a denormal shifted until its leading bit is in place
// The same value for every f16; a NaN stays one, but its bits are not those of the hardware's.
#pragma once

__device__ __forceinline__ float half_to_float(u16 h) {
    const u32 sign = u32(h & 0x8000u) << 16;
    u32 fraction = h & 0x3ffu;
    int exponent = h >> 10 & 0x1f;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) {
        if (fraction == 0) return __uint_as_float(sign);
        exponent = 1;
        while ((fraction & 0x400u) == 0) {
            fraction <<= 1;
            exponent--;
        }
    }
    return __uint_as_float(sign | u32(exponent + 112) << 23 | (fraction & 0x3ffu) << 13);
}
