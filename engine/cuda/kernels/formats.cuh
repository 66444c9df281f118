// formats.cuh: the block formats as the matrix kernels read them
// The file's blocks are repacked at load into aligned planes, the same number of bytes: what one sub-block of 32 weights
// needs lies together, so that lane l of a warp reads sub-block l of a row and the warp reads one contiguous run.
// n_sub is the number of sub-blocks in the whole matrix and i the index of one; a super-block is 8 of them.
// A decoded word q[w] holds the integer weights 4w..4w+3, one a byte, in the order of the activations.
#pragma once

struct Weights {
    int q[8];
    float scale;
    float minimum;  // only where HAS_MIN
    int scale_low;  // only where HALF_SCALES: integer scales of weights 0..15 and 16..31
    int scale_high;
};

// Weights are read once: keep them out of L1, which holds the activations.
__device__ __forceinline__ uint4 load16(const u8* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 load8(const u8* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ u32 load4(const u8* p) { return __ldg(reinterpret_cast<const u32*>(p)); }
__device__ __forceinline__ u32 load2(const u8* p) { return __ldg(reinterpret_cast<const u16*>(p)); }
__device__ __forceinline__ u32 load1(const u8* p) { return __ldg(p); }

// Nibbles of four words, low halves first: words 2p and 2p + 1 come from word p.
__device__ __forceinline__ void split_nibbles(const uint4& v, int (&q)[8]) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        q[2 * p] = words[p] & 0x0f0f0f0fu;
        q[2 * p + 1] = (words[p] >> 4) & 0x0f0f0f0fu;
    }
}

// The 6-bit scale and minimum of sub-block j of a super-block, from d, dmin and 12 packed bytes.
__device__ __forceinline__ void scale_min_k4(const uint4& meta, int j, float& scale, float& minimum) {
    const int shift = 8 * (j & 3);
    const u32 a = (meta.y >> shift) & 0xffu, b = (meta.z >> shift) & 0xffu, c = (meta.w >> shift) & 0xffu;
    const u32 s = j < 4 ? a & 63u : (c & 15u) | ((a >> 6) << 4);
    const u32 m = j < 4 ? b & 63u : (c >> 4) | ((b >> 6) << 4);
    scale = mul(half_to_float(u16(meta.x)), float(s));
    minimum = mul(half_to_float(u16(meta.x >> 16)), float(m));
}

// Writes a nibble pair plane: byte b of word p holds value 8p + b low and value 8p + 4 + b high.
template <class Value>
__device__ __forceinline__ void pack_nibbles(u8* out, Value value) {
    for (int p = 0; p < 4; ++p)
        for (int b = 0; b < 4; ++b) out[4 * p + b] = u8(value(8 * p + b) | (value(8 * p + 4 + b) << 4));
}

__device__ __forceinline__ void copy_bytes(u8* out, const u8* in, int n) {
    for (int i = 0; i < n; ++i) out[i] = in[i];
}

// Q4_K: plane 0: 16 bytes of nibbles a sub-block; plane 1: d, dmin, 12 scale bytes a super-block.
struct Q4_K {
    static constexpr int BLOCK_N_BYTES = 144, SUBS = 8;
    static constexpr bool HAS_MIN = true, HALF_SCALES = false;
    struct Raw {
        uint4 qs, meta;
    };
    __device__ static Raw load(const u8* w, i64 n_sub, i64 i) {
        return {load16(w + 16 * i), load16(w + 16 * n_sub + 16 * (i >> 3))};
    }
    __device__ static void decode(const Raw& raw, int s, Weights& out) {
        split_nibbles(raw.qs, out.q);
        scale_min_k4(raw.meta, s & 7, out.scale, out.minimum);
    }
    __device__ static void repack(const u8* block, int s, u8* w, i64 n_sub, i64 i) {
        const u8* qs = block + 16 + 32 * (s / 2);
        pack_nibbles(w + 16 * i, [&](int k) { return (qs[k] >> (4 * (s & 1))) & 15; });
        if (s == 0) copy_bytes(w + 16 * n_sub + 2 * i, block, 16);
    }
};

// Q5_K: as Q4_K, with a plane of 4 bytes a sub-block for the fifth bits: bit 8b + w is that of value 4w + b.
struct Q5_K {
    static constexpr int BLOCK_N_BYTES = 176, SUBS = 8;
    static constexpr bool HAS_MIN = true, HALF_SCALES = false;
    struct Raw {
        uint4 qs, meta;
        u32 qh;
    };
    __device__ static Raw load(const u8* w, i64 n_sub, i64 i) {
        return {load16(w + 16 * i), load16(w + 16 * n_sub + 16 * (i >> 3)), load4(w + 18 * n_sub + 4 * i)};
    }
    __device__ static void decode(const Raw& raw, int s, Weights& out) {
        split_nibbles(raw.qs, out.q);
#pragma unroll
        for (int word = 0; word < 8; ++word) out.q[word] |= ((raw.qh >> word) & 0x01010101u) << 4;
        scale_min_k4(raw.meta, s & 7, out.scale, out.minimum);
    }
    __device__ static void repack(const u8* block, int s, u8* w, i64 n_sub, i64 i) {
        const u8* qs = block + 48 + 32 * (s / 2);
        pack_nibbles(w + 16 * i, [&](int k) { return (qs[k] >> (4 * (s & 1))) & 15; });
        u32 high = 0;
        for (int k = 0; k < 32; ++k) high |= u32((block[16 + k] >> s) & 1) << (8 * (k % 4) + k / 4);
        *reinterpret_cast<u32*>(w + 18 * n_sub + 4 * i) = high;
        if (s == 0) copy_bytes(w + 16 * n_sub + 2 * i, block, 16);
    }
};

// Four 6-bit values less 32. Bit 7 is set first so that no borrow crosses a byte, and flipped afterwards.
__device__ __forceinline__ u32 center_q6(u32 values) {
    return ((values | 0x80808080u) - 0x20202020u) ^ 0x80808080u;
}

// Q6_K: planes of 16 (low nibbles), 8 (upper bit pairs: bits 8b + 2(w % 4) of word w / 4) and 2 (scales) bytes a
// sub-block, and d a super-block.
struct Q6_K {
    static constexpr int BLOCK_N_BYTES = 210, SUBS = 8;
    static constexpr bool HAS_MIN = false, HALF_SCALES = true;
    struct Raw {
        uint4 ql;
        uint2 qh;
        u32 scales, d;
    };
    __device__ static Raw load(const u8* w, i64 n_sub, i64 i) {
        return {load16(w + 16 * i), load8(w + 16 * n_sub + 8 * i), load2(w + 24 * n_sub + 2 * i),
                load2(w + 26 * n_sub + 2 * (i >> 3))};
    }
    __device__ static void decode(const Raw& raw, int, Weights& out) {
        split_nibbles(raw.ql, out.q);
#pragma unroll
        for (int word = 0; word < 8; ++word) {
            const u32 high = ((word < 4 ? raw.qh.x : raw.qh.y) >> (2 * (word & 3))) & 0x03030303u;
            out.q[word] = center_q6(u32(out.q[word]) | (high << 4));
        }
        out.scale = half_to_float(u16(raw.d));
        out.scale_low = i8(raw.scales);
        out.scale_high = i8(raw.scales >> 8);
    }
    __device__ static void repack(const u8* block, int s, u8* w, i64 n_sub, i64 i) {
        const int half = s / 4, part = s % 4;
        const u8* ql = block + 64 * half + 32 * (part & 1);
        const u8* qh = block + 128 + 32 * half;
        pack_nibbles(w + 16 * i, [&](int k) { return (ql[k] >> (4 * (part >> 1))) & 15; });
        u64 high = 0;
        for (int k = 0; k < 32; ++k) {
            const int word = k / 4;
            high |= u64((qh[k] >> (2 * part)) & 3) << (32 * (word / 4) + 8 * (k % 4) + 2 * (word % 4));
        }
        *reinterpret_cast<u64*>(w + 16 * n_sub + 8 * i) = high;
        copy_bytes(w + 24 * n_sub + 2 * i, block + 192 + 2 * s, 2);
        if (s == 0) copy_bytes(w + 26 * n_sub + i / 4, block + 208, 2);
    }
};

// The values of IQ4_XS indices 0..15, four a word (the table of the gguf package, checked by a test).
constexpr u32 IQ4_VALUES[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};

// Looks up four indices in the low 16 bits of `nibbles`: byte permutes on both halves of the table, then a choice by bit 3.
__device__ __forceinline__ u32 iq4_lookup(u32 nibbles) {
    const u32 low = __byte_perm(IQ4_VALUES[0], IQ4_VALUES[1], nibbles & 0x7777u);
    const u32 high = __byte_perm(IQ4_VALUES[2], IQ4_VALUES[3], nibbles & 0x7777u);
    return __byte_perm(low, high, 0x3210u + ((nibbles & 0x8888u) >> 1));
}

// The scale of sub-block j of a super-block, from d, scales_h and scales_l.
__device__ __forceinline__ float iq4_scale(uint2 meta, int j) {
    const int low = (meta.y >> (4 * j)) & 15, high = (meta.x >> (16 + 2 * j)) & 3;
    return mul(half_to_float(u16(meta.x)), float((low | (high << 4)) - 32));
}

// IQ4_XS: 16 bytes of indices in order a sub-block; d, scales_h, scales_l a super-block.
struct IQ4_XS {
    static constexpr int BLOCK_N_BYTES = 136, SUBS = 8;
    static constexpr bool HAS_MIN = false, HALF_SCALES = false;
    struct Raw {
        uint4 qs;
        uint2 meta;
    };
    __device__ static Raw load(const u8* w, i64 n_sub, i64 i) {
        return {load16(w + 16 * i), load8(w + 16 * n_sub + 8 * (i >> 3))};
    }
    __device__ static void decode(const Raw& raw, int s, Weights& out) {
        const u32 words[4] = {raw.qs.x, raw.qs.y, raw.qs.z, raw.qs.w};
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            out.q[2 * p] = iq4_lookup(words[p] & 0xffffu);
            out.q[2 * p + 1] = iq4_lookup(words[p] >> 16);
        }
        out.scale = iq4_scale(raw.meta, s & 7);
    }
    __device__ static void repack(const u8* block, int s, u8* w, i64 n_sub, i64 i) {
        const u8* qs = block + 8 + 16 * s;
        for (int b = 0; b < 16; ++b) {
            const int k = 2 * b;
            const int first = k < 16 ? qs[k] & 15 : qs[k - 16] >> 4;
            const int second = k < 16 ? qs[k + 1] & 15 : qs[k - 15] >> 4;
            w[16 * i + b] = u8(first | (second << 4));
        }
        if (s == 0) copy_bytes(w + 16 * n_sub + i, block, 8);
    }
};

// IQ3_S: planes of 8 (indices), 4 (signs) and 1 (ninth index bits) bytes a sub-block, 4 (scales) and 2 (d) a super-block.
// The 512 groups of four magnitudes are a table in device memory, one word each (small enough for L1).
struct IQ3_S {
    static constexpr int BLOCK_N_BYTES = 110, SUBS = 8;
    static constexpr bool HAS_MIN = false, HALF_SCALES = false;
    struct Raw {
        uint2 qs;
        u32 signs, qh, scales, d;
    };
    __device__ static Raw load(const u8* w, i64 n_sub, i64 i) {
        return {load8(w + 8 * i), load4(w + 8 * n_sub + 4 * i), load1(w + 12 * n_sub + i),
                load1(w + 13 * n_sub + (i >> 1)), load2(w + 13 * n_sub + n_sub / 2 + 2 * (i >> 3))};
    }
    __device__ static void decode(const Raw& raw, int s, Weights& out);
    __device__ static void repack(const u8* block, int s, u8* w, i64 n_sub, i64 i) {
        copy_bytes(w + 8 * i, block + 2 + 8 * s, 8);
        copy_bytes(w + 8 * n_sub + 4 * i, block + 74 + 4 * s, 4);
        w[12 * n_sub + i] = block[66 + s];
        if (s == 0) {
            copy_bytes(w + 13 * n_sub + i / 2, block + 106, 4);
            copy_bytes(w + 13 * n_sub + n_sub / 2 + i / 4, block, 2);
        }
    }
};

__device__ u32 iq3s_grid[512];  // filled by the host after the module is loaded

// Four weights: the magnitudes at `index`, with four sign bits that become bytes of 0x00 or 0xff; (m ^ mask) - mask
// negates those bytes.
__device__ __forceinline__ u32 iq3s_word(u32 index, u32 signs) {
    const u32 mask = ((signs * 0x00204081u) & 0x01010101u) * 0xffu;
    return __vsub4(iq3s_grid[index] ^ mask, mask);
}

// The scale of sub-block s from d and the byte of its pair's scales.
__device__ __forceinline__ float iq3s_scale(u32 d, u32 scales, int s) {
    return mul(half_to_float(u16(d)), float(1 + 2 * ((scales >> (4 * (s & 1))) & 15)));
}

__device__ __forceinline__ void IQ3_S::decode(const Raw& raw, int s, Weights& out) {
#pragma unroll
    for (int word = 0; word < 8; ++word) {
        const u32 low = ((word < 4 ? raw.qs.x : raw.qs.y) >> (8 * (word & 3))) & 0xffu;
        out.q[word] = iq3s_word(low | (((raw.qh >> word) & 1u) << 8), (raw.signs >> (4 * word)) & 15u);
    }
    out.scale = iq3s_scale(raw.d, raw.scales, s);
}

// Q8_0: 32 bytes a sub-block, d a sub-block.
struct Q8_0 {
    static constexpr int BLOCK_N_BYTES = 34, SUBS = 1;
    static constexpr bool HAS_MIN = false, HALF_SCALES = false;
    struct Raw {
        uint4 low, high;
        u32 d;
    };
    __device__ static Raw load(const u8* w, i64 n_sub, i64 i) {
        return {load16(w + 32 * i), load16(w + 32 * i + 16), load2(w + 32 * n_sub + 2 * i)};
    }
    __device__ static void decode(const Raw& raw, int, Weights& out) {
        const u32 words[8] = {raw.low.x,  raw.low.y,  raw.low.z,  raw.low.w,
                              raw.high.x, raw.high.y, raw.high.z, raw.high.w};
#pragma unroll
        for (int word = 0; word < 8; ++word) out.q[word] = words[word];
        out.scale = half_to_float(u16(raw.d));
    }
    __device__ static void repack(const u8* block, int, u8* w, i64 n_sub, i64 i) {
        copy_bytes(w + 32 * i, block + 2, 32);
        copy_bytes(w + 32 * n_sub + 2 * i, block, 2);
    }
};

// Float formats stay as they lie in the file.
struct F32 {
    static constexpr int N_BYTES = 4;
    __device__ static float load(const u8* p) { return __ldg(reinterpret_cast<const float*>(p)); }
    __device__ static float4 load_quad(const u8* p) { return __ldg(reinterpret_cast<const float4*>(p)); }
};
struct F16 {
    static constexpr int N_BYTES = 2;
    __device__ static float load(const u8* p) { return half_to_float(__ldg(reinterpret_cast<const u16*>(p))); }
    __device__ static float4 load_quad(const u8* p) { return widen_quad(__ldg(reinterpret_cast<const uint2*>(p))); }
};
struct BF16 {
    static constexpr int N_BYTES = 2;
    __device__ static float load(const u8* p) {
        return __int_as_float(int(u32(__ldg(reinterpret_cast<const u16*>(p))) << 16));
    }
    __device__ static float4 load_quad(const u8* p) {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(p));
        return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u),
                           __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u));
    }
};

template <class F>
struct is_float_format {
    static constexpr bool value = false;
};
template <>
struct is_float_format<F32> {
    static constexpr bool value = true;
};
template <>
struct is_float_format<F16> {
    static constexpr bool value = true;
};
template <>
struct is_float_format<BF16> {
    static constexpr bool value = true;
};
