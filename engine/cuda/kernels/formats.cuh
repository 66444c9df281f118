// formats.cuh: the block formats as the matrix kernels read them
// The file's blocks are repacked at load, the same number of bytes. A strip is 32 sub-blocks of 32 weights that follow
// each other in the matrix, whatever row they belong to; a super-block is 8 of them. A strip is one run of aligned
// planes, one after the other, so that lane l of a warp reads sub-block l, the warp reads contiguous bytes, and some
// strips of a row are one copy (stream.cuh). What takes 8 bytes a strip (Q6_K, IQ3_S) would spoil the alignment to 16:
// it lies in the tail, behind all strips. The last strip of a matrix may have fewer sub-blocks, and so shorter planes.
// dot is the exact dot product of a sub-block's 32 integer weights with the activations, four int8 a word, as a float.
// Integer instructions bound the matrix kernels (each takes an SM two cycles a warp, those of floats one), hence the
// forms below: values are left at a multiple of what they are where that saves an instruction, and integers become
// floats by an addition where their range allows it.
#pragma once

// What a sub-block's dot product is multiplied by, and what is taken off a weight (only where HAS_MIN).
struct Scales {
    float scale, minimum;
};

// An int whose bits were added to MAGIC_BITS is 3 * 2^22 more as a float, exactly, up to 2^22 in size.
constexpr int MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.0f;
__device__ __forceinline__ float float_of_sum(int bits) { return sub(__int_as_float(bits), MAGIC); }
// The same for bits 0 to 22 of a small number and 2^23.
constexpr u32 SMALL_BITS = 0x4b000000u;
__device__ __forceinline__ float float_of_small(u32 bits) { return sub(__uint_as_float(bits), 8388608.0f); }

// c + four products of unsigned with signed bytes.
__device__ __forceinline__ int dp4a_unsigned(u32 w, int a, int c) {
    int sum;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(w), "r"(a), "r"(c));
    return sum;
}

constexpr int STRIP_SUBS = 32;

// Where a sub-block lies: its strip and that strip's part of the tail; its number in the strip, which has n_sub.
template <class Byte>
struct Spot {
    Byte *strip, *tail;
    int sub, n_sub;
};

// Sub-block `sub` of strip `strip` in a matrix of n_strips whole strips.
template <class F>
__device__ __forceinline__ Spot<const u8> spot_in_strip(const u8* w, i64 n_strips, i64 strip, int sub) {
    const u8* tail = w + n_strips * F::STRIP_N_BYTES + strip * F::TAIL_N_BYTES;
    return {w + strip * F::STRIP_N_BYTES, tail, sub, STRIP_SUBS};
}

// Sub-block i of a matrix of n_sub, which need not be whole strips.
template <class F, class Byte>
__device__ __forceinline__ Spot<Byte> spot_of(Byte* w, i64 n_sub, i64 i) {
    const i64 strip = i >> 5, behind = n_sub - strip * STRIP_SUBS;
    Byte* tail = w + (n_sub * F::STRIP_N_BYTES >> 5) + strip * F::TAIL_N_BYTES;
    return {w + strip * F::STRIP_N_BYTES, tail, int(i) & 31, behind < STRIP_SUBS ? int(behind) : STRIP_SUBS};
}

// The activations of a group of 32, four int8 a word.
struct Group {
    int q[8];

    __device__ __forceinline__ Group(const int4& a, const int4& b) : q{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w} {}
};

// Which memory a matrix lies in. Weights in global memory are read once: they stay out of L1, which holds activations.
struct InGlobal {
    __device__ __forceinline__ static uint4 load16(const u8* p) {
        uint4 v;
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(p));
        return v;
    }
    __device__ __forceinline__ static uint2 load8(const u8* p) {
        uint2 v;
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
        return v;
    }
    __device__ __forceinline__ static u32 load4(const u8* p) { return __ldg(reinterpret_cast<const u32*>(p)); }
    __device__ __forceinline__ static u32 load2(const u8* p) { return __ldg(reinterpret_cast<const u16*>(p)); }
    __device__ __forceinline__ static u32 load1(const u8* p) { return __ldg(p); }
};
struct InShared {
    __device__ __forceinline__ static uint4 load16(const u8* p) { return *reinterpret_cast<const uint4*>(p); }
    __device__ __forceinline__ static uint2 load8(const u8* p) { return *reinterpret_cast<const uint2*>(p); }
    __device__ __forceinline__ static u32 load4(const u8* p) { return *reinterpret_cast<const u32*>(p); }
    __device__ __forceinline__ static u32 load2(const u8* p) { return *reinterpret_cast<const u16*>(p); }
    __device__ __forceinline__ static u32 load1(const u8* p) { return *p; }
};

// Scale and minimum of sub-block j of a super-block from d, dmin and 12 packed bytes: six bits each, the upper two of
// sub-blocks 4 to 7 above those of sub-blocks 0 to 3. All that depends on j alone is the same for all rows of a lane.
__device__ __forceinline__ Scales scale_min_k4(const uint4& meta, int j) {
    const int byte = 8 * (j & 3), own = j < 4 ? byte : byte + 2;
    const u32 own_bits = j < 4 ? 0x3fu : 0x30u, low_bits = j < 4 ? 0u : 0x0fu;
    const u32 s = ((meta.y >> own) & own_bits) | SMALL_BITS | ((meta.w >> byte) & low_bits);
    const u32 m = ((meta.z >> own) & own_bits) | SMALL_BITS | ((meta.w >> (byte + 4)) & low_bits);
    return {mul(half_to_float(u16(meta.x)), float_of_small(s)),
            mul(half_to_float(u16(meta.x >> 16)), float_of_small(m))};
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

// Q4_K: planes of 16 bytes of nibbles a sub-block, and d, dmin and 12 scale bytes a super-block.
struct Q4_K {
    static constexpr int BLOCK_N_BYTES = 144, SUBS = 8;
    static constexpr bool HAS_MIN = true, HALF_SCALES = false;
    static constexpr int STRIP_N_BYTES = 576, TAIL_N_BYTES = 0;
    struct Raw {
        uint4 qs, meta;
    };
    template <class M = InGlobal>
    __device__ static Raw load(const Spot<const u8>& at) {
        return {M::load16(at.strip + 16 * at.sub), M::load16(at.strip + 16 * at.n_sub + 16 * (at.sub >> 3))};
    }
    __device__ static Scales scales(const Raw& raw, int s) { return scale_min_k4(raw.meta, s & 7); }
    // Upper nibbles stay where they are, 16 times their value.
    __device__ static float dot(const Raw& raw, const Group& a, const u32*) {
        const u32 words[4] = {raw.qs.x, raw.qs.y, raw.qs.z, raw.qs.w};
        int low = MAGIC_BITS, high = MAGIC_BITS;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            low = __dp4a(int(words[p] & 0x0f0f0f0fu), a.q[2 * p], low);
            high = dp4a_unsigned(words[p] & 0xf0f0f0f0u, a.q[2 * p + 1], high);
        }
        return __fmaf_rn(float_of_sum(high), 0.0625f, float_of_sum(low));  // exact: integers below 2^24
    }
    __device__ static void repack(const u8* block, int s, const Spot<u8>& at) {
        const u8* qs = block + 16 + 32 * (s / 2);
        pack_nibbles(at.strip + 16 * at.sub, [&](int k) { return (qs[k] >> (4 * (s & 1))) & 15; });
        if (s == 0) copy_bytes(at.strip + 16 * at.n_sub + 2 * at.sub, block, 16);
    }
};

// Q5_K: as Q4_K, with a plane of 4 bytes a sub-block for the fifth bits: bit 8b + w is that of value 4w + b.
struct Q5_K {
    static constexpr int BLOCK_N_BYTES = 176, SUBS = 8;
    static constexpr bool HAS_MIN = true, HALF_SCALES = false;
    static constexpr int STRIP_N_BYTES = 704, TAIL_N_BYTES = 0;
    struct Raw {
        uint4 qs, meta;
        u32 qh;
    };
    template <class M = InGlobal>
    __device__ static Raw load(const Spot<const u8>& at) {
        return {M::load16(at.strip + 16 * at.sub), M::load16(at.strip + 16 * at.n_sub + 16 * (at.sub >> 3)),
                M::load4(at.strip + 18 * at.n_sub + 4 * at.sub)};
    }
    __device__ static Scales scales(const Raw& raw, int s) { return scale_min_k4(raw.meta, s & 7); }
    __device__ static float dot(const Raw& raw, const Group& a, const u32*) {
        const u32 words[4] = {raw.qs.x, raw.qs.y, raw.qs.z, raw.qs.w};
        int low = MAGIC_BITS, high = 0;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const u32 even = 2 * p < 4 ? raw.qh << (4 - 2 * p) : raw.qh >> (2 * p - 4);
            const u32 odd = 2 * p + 1 < 4 ? raw.qh << (3 - 2 * p) : raw.qh >> (2 * p - 3);
            const u32 nibbles = (words[p] >> 4) & 0x0f0f0f0fu;
            low = __dp4a(int((words[p] & 0x0f0f0f0fu) | (even & 0x10101010u)), a.q[2 * p], low);
            high = __dp4a(int(nibbles | (odd & 0x10101010u)), a.q[2 * p + 1], high);
        }
        return float_of_sum(low + high);
    }
    __device__ static void repack(const u8* block, int s, const Spot<u8>& at) {
        const u8* qs = block + 48 + 32 * (s / 2);
        pack_nibbles(at.strip + 16 * at.sub, [&](int k) { return (qs[k] >> (4 * (s & 1))) & 15; });
        u32 high = 0;
        for (int k = 0; k < 32; ++k) high |= u32((block[16 + k] >> s) & 1) << (8 * (k % 4) + k / 4);
        *reinterpret_cast<u32*>(at.strip + 18 * at.n_sub + 4 * at.sub) = high;
        if (s == 0) copy_bytes(at.strip + 16 * at.n_sub + 2 * at.sub, block, 16);
    }
};

// Four 6-bit values less 32. Bit 7 is set first so that no borrow crosses a byte, and flipped afterwards.
__device__ __forceinline__ u32 center_q6(u32 values) {
    return ((values | 0x80808080u) - 0x20202020u) ^ 0x80808080u;
}

// Q6_K: planes of 16 (low nibbles), 8 (upper bit pairs: bits 8b + 2(w % 4) of word w / 4) and 2 (scales) bytes a
// sub-block; in the tail d a super-block.
struct Q6_K {
    static constexpr int BLOCK_N_BYTES = 210, SUBS = 8;
    static constexpr bool HAS_MIN = false, HALF_SCALES = true;
    static constexpr int STRIP_N_BYTES = 832, TAIL_N_BYTES = 8;
    struct Raw {
        uint4 ql;
        uint2 qh;
        u32 scales, d;
    };
    template <class M = InGlobal>
    __device__ static Raw load(const Spot<const u8>& at) {
        return {M::load16(at.strip + 16 * at.sub), M::load8(at.strip + 16 * at.n_sub + 8 * at.sub),
                M::load2(at.strip + 24 * at.n_sub + 2 * at.sub), M::load2(at.tail + 2 * (at.sub >> 3))};
    }
    // A quarter of d, since dot is four times what it should be: both are exact, and so is their product's rounding.
    __device__ static Scales scales(const Raw& raw, int) { return {mul(half_to_float(u16(raw.d)), 0.25f), 0.0f}; }
    // Bytes are 4 (v - 32) = 4 v - 128: v moved up by two bits, and bit 7 flipped.
    __device__ static float dot(const Raw& raw, const Group& a, const u32*) {
        const u32 words[4] = {raw.ql.x, raw.ql.y, raw.ql.z, raw.ql.w};
        int half[2] = {0, 0};
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const u32 qh = p < 2 ? raw.qh.x : raw.qh.y;
            const int k = 4 * (p % 2);  // where the bit pairs of the even word lie in qh; those of the odd one follow
            const u32 even = ((words[p] << 2) & 0x3c3c3c3cu) ^ 0x80808080u ^ ((qh << (6 - k)) & 0xc0c0c0c0u);
            const u32 odd = ((words[p] >> 2) & 0x3c3c3c3cu) ^ 0x80808080u ^ ((qh << (4 - k)) & 0xc0c0c0c0u);
            half[p / 2] = __dp4a(int(even), a.q[2 * p], half[p / 2]);
            half[p / 2] = __dp4a(int(odd), a.q[2 * p + 1], half[p / 2]);
        }
        return float(int(i8(raw.scales)) * half[0] + int(i8(raw.scales >> 8)) * half[1]);
    }
    __device__ static void repack(const u8* block, int s, const Spot<u8>& at) {
        const int half = s / 4, part = s % 4;
        const u8* ql = block + 64 * half + 32 * (part & 1);
        const u8* qh = block + 128 + 32 * half;
        pack_nibbles(at.strip + 16 * at.sub, [&](int k) { return (ql[k] >> (4 * (part >> 1))) & 15; });
        u64 high = 0;
        for (int k = 0; k < 32; ++k) {
            const int word = k / 4;
            high |= u64((qh[k] >> (2 * part)) & 3) << (32 * (word / 4) + 8 * (k % 4) + 2 * (word % 4));
        }
        *reinterpret_cast<u64*>(at.strip + 16 * at.n_sub + 8 * at.sub) = high;
        copy_bytes(at.strip + 24 * at.n_sub + 2 * at.sub, block + 192 + 2 * s, 2);
        if (s == 0) copy_bytes(at.tail + at.sub / 4, block + 208, 2);
    }
};

// The values of IQ4_XS indices 0..15, four a word (the table of the gguf package, checked by a test).
constexpr u32 IQ4_VALUES[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};

// Looks up the indices in the low 16 bits of `indices`, whose bits 3 are off: byte permutes on both halves of the table,
// then a choice between them by `choice`.
__device__ __forceinline__ u32 iq4_choose(u32 indices, u32 choice) {
    const u32 low = __byte_perm(IQ4_VALUES[0], IQ4_VALUES[1], indices);
    const u32 high = __byte_perm(IQ4_VALUES[2], IQ4_VALUES[3], indices);
    return __byte_perm(low, high, choice);
}
// Looks up four indices in the low and four in the upper half of `nibbles`.
__device__ __forceinline__ uint2 iq4_lookup(u32 nibbles) {
    const u32 indices = nibbles & 0x77777777u, choice = ((nibbles >> 1) & 0x44444444u) | 0x32103210u;
    return make_uint2(iq4_choose(indices, choice), iq4_choose(indices >> 16, choice >> 16));
}

// The scale of sub-block j of a super-block from d, scales_h and scales_l.
__device__ __forceinline__ float iq4_scale(const uint2& meta, int j) {
    const int low = (meta.y >> (4 * j)) & 15, high = (meta.x >> (16 + 2 * j)) & 3;
    return mul(half_to_float(u16(meta.x)), float((low | (high << 4)) - 32));
}

// IQ4_XS: 16 bytes of indices in order a sub-block; d, scales_h, scales_l a super-block.
struct IQ4_XS {
    static constexpr int BLOCK_N_BYTES = 136, SUBS = 8;
    static constexpr bool HAS_MIN = false, HALF_SCALES = false;
    static constexpr int STRIP_N_BYTES = 544, TAIL_N_BYTES = 0;
    struct Raw {
        uint4 qs;
        uint2 meta;
    };
    template <class M = InGlobal>
    __device__ static Raw load(const Spot<const u8>& at) {
        return {M::load16(at.strip + 16 * at.sub), M::load8(at.strip + 16 * at.n_sub + 8 * (at.sub >> 3))};
    }
    __device__ static Scales scales(const Raw& raw, int s) { return {iq4_scale(raw.meta, s & 7), 0.0f}; }
    __device__ static float dot(const Raw& raw, const Group& a, const u32*) {
        const u32 words[4] = {raw.qs.x, raw.qs.y, raw.qs.z, raw.qs.w};
        int low = MAGIC_BITS, high = 0;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const uint2 w = iq4_lookup(words[p]);
            low = __dp4a(int(w.x), a.q[2 * p], low);
            high = __dp4a(int(w.y), a.q[2 * p + 1], high);
        }
        return float_of_sum(low + high);
    }
    __device__ static void repack(const u8* block, int s, const Spot<u8>& at) {
        const u8* qs = block + 8 + 16 * s;
        for (int b = 0; b < 16; ++b) {
            const int k = 2 * b;
            const int first = k < 16 ? qs[k] & 15 : qs[k - 16] >> 4;
            const int second = k < 16 ? qs[k + 1] & 15 : qs[k - 15] >> 4;
            at.strip[16 * at.sub + b] = u8(first | (second << 4));
        }
        if (s == 0) copy_bytes(at.strip + 16 * at.n_sub + at.sub, block, 8);
    }
};

// IQ3_S: planes of 8 (indices), 4 (signs) and 1 (ninth index bits) bytes a sub-block, 4 (scales) a super-block; in the
// tail d a super-block.
// The 512 groups of four magnitudes are a table in device memory, one word each; `grid` is that or a copy of it.
constexpr int IQ3S_GRID_SIZE = 512;
__device__ u32 iq3s_grid[IQ3S_GRID_SIZE];  // filled by the host after the module is loaded

// Four sign bits become bytes of 0x00 or 0xff.
__device__ __forceinline__ u32 iq3s_mask(u32 signs) { return ((signs * 0x00204081u) & 0x01010101u) * 0xffu; }

// Four weights: the magnitudes at `index`, with four sign bits; (m ^ mask) - mask negates the bytes of the mask.
__device__ __forceinline__ u32 iq3s_word(u32 index, u32 signs) {
    const u32 mask = iq3s_mask(signs);
    return __vsub4(iq3s_grid[index] ^ mask, mask);
}

// The scale of sub-block s from d and the byte of its pair's scales.
__device__ __forceinline__ float iq3s_scale(u32 d, u32 scales, int s) {
    return mul(half_to_float(u16(d)), float(1 + 2 * ((scales >> (4 * (s & 1))) & 15)));
}

struct IQ3_S {
    static constexpr int BLOCK_N_BYTES = 110, SUBS = 8;
    static constexpr bool HAS_MIN = false, HALF_SCALES = false;
    static constexpr int STRIP_N_BYTES = 432, TAIL_N_BYTES = 8;
    struct Raw {
        uint2 qs;
        u32 signs, qh, scales, d;
    };
    template <class M = InGlobal>
    __device__ static Raw load(const Spot<const u8>& at) {
        return {M::load8(at.strip + 8 * at.sub), M::load4(at.strip + 8 * at.n_sub + 4 * at.sub),
                M::load1(at.strip + 12 * at.n_sub + at.sub), M::load1(at.strip + 13 * at.n_sub + (at.sub >> 1)),
                M::load2(at.tail + 2 * (at.sub >> 3))};
    }
    __device__ static Scales scales(const Raw& raw, int s) { return {iq3s_scale(raw.d, raw.scales, s), 0.0f}; }
    // With m ^ mask, a negative weight is -m - 1: what its activations make too little is taken off as mask times them.
    __device__ static float dot(const Raw& raw, const Group& a, const u32* grid) {
        int sum = MAGIC_BITS, off = 0;
#pragma unroll
        for (int word = 0; word < 8; ++word) {
            const u32 low = ((word < 4 ? raw.qs.x : raw.qs.y) >> (8 * (word & 3))) & 0xffu;
            const u32 mask = iq3s_mask((raw.signs >> (4 * word)) & 15u);
            sum = __dp4a(int(grid[low | ((raw.qh << (8 - word)) & 0x100u)] ^ mask), a.q[word], sum);
            off = __dp4a(int(mask), a.q[word], off);
        }
        return float_of_sum(sum - off);
    }
    __device__ static void repack(const u8* block, int s, const Spot<u8>& at) {
        copy_bytes(at.strip + 8 * at.sub, block + 2 + 8 * s, 8);
        copy_bytes(at.strip + 8 * at.n_sub + 4 * at.sub, block + 74 + 4 * s, 4);
        at.strip[12 * at.n_sub + at.sub] = block[66 + s];
        if (s == 0) {
            copy_bytes(at.strip + 13 * at.n_sub + at.sub / 2, block + 106, 4);
            copy_bytes(at.tail + at.sub / 4, block, 2);
        }
    }
};

// Q8_0: 32 bytes a sub-block, d a sub-block.
struct Q8_0 {
    static constexpr int BLOCK_N_BYTES = 34, SUBS = 1;
    static constexpr bool HAS_MIN = false, HALF_SCALES = false;
    static constexpr int STRIP_N_BYTES = 1088, TAIL_N_BYTES = 0;
    struct Raw {
        uint4 low, high;
        u32 d;
    };
    template <class M = InGlobal>
    __device__ static Raw load(const Spot<const u8>& at) {
        return {M::load16(at.strip + 32 * at.sub), M::load16(at.strip + 32 * at.sub + 16),
                M::load2(at.strip + 32 * at.n_sub + 2 * at.sub)};
    }
    __device__ static Scales scales(const Raw& raw, int) { return {half_to_float(u16(raw.d)), 0.0f}; }
    __device__ static float dot(const Raw& raw, const Group& a, const u32*) {
        const u32 words[8] = {raw.low.x,  raw.low.y,  raw.low.z,  raw.low.w,
                              raw.high.x, raw.high.y, raw.high.z, raw.high.w};
        int sum = MAGIC_BITS;
#pragma unroll
        for (int word = 0; word < 8; ++word) sum = __dp4a(int(words[word]), a.q[word], sum);
        return float_of_sum(sum);
    }
    __device__ static void repack(const u8* block, int, const Spot<u8>& at) {
        copy_bytes(at.strip + 32 * at.sub, block + 2, 32);
        copy_bytes(at.strip + 32 * at.n_sub + 2 * at.sub, block, 2);
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
