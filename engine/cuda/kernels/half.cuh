// half.cuh: f16 to f32, as every scale of a block format and every key and value need it
#pragma once

// f16 -> f32 by one hardware conversion: exact, denormals, infinities and NaN included.
__device__ __forceinline__ float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
