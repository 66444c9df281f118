// fragments.cuh: the planes of formats.cuh as the int8 tensor cores want them
// In a tile of 16 rows, lane l of a warp holds weights 8t .. 8t + 7 of rows g and g + 8, with g = l / 4 and t = l % 4;
// the activations (pack_tiles.cu) lie likewise. An exact dot product may take its terms in any order, so these are the
// eight weights that lie together in every plane. Piece is what a lane reads of one row's sub-block, and words() makes
// the two words of it; Meta and scales() are for one lane a row. own is where the lane's LANE_N_BYTES of the first
// sub-block lie.
#pragma once

// A pointer whose origin the compiler does not see: it would add w and t anew to every address.
__device__ __forceinline__ const u8* hide_origin(const u8* p) {
    u64 address = reinterpret_cast<u64>(p), hidden;
    asm("mov.u64 %0, %1;" : "=l"(hidden) : "l"(address));
    return reinterpret_cast<const u8*>(hidden);
}

// Sub-block i of a matrix of n_sub_all at w; its strip, which has n_sub sub-blocks (formats.cuh).
template <class F>
struct SubBlock {
    const u8* w;
    u32 n_sub_all, i, strip;
    int n_sub;

    // Where its part of a plane lies that begins BEFORE bytes a sub-block into the strip and has N_BYTES for each
    // SUBS sub-blocks. Two multiplications: i counts the plane's bytes of all strips before, strip those of the others.
    template <int BEFORE, int N_BYTES, int SUBS = 1>
    __device__ __forceinline__ const u8* in_plane(const u8* origin) const {
        constexpr int OTHERS = F::STRIP_N_BYTES - STRIP_SUBS / SUBS * N_BYTES;
        return origin + i64(i / SUBS) * N_BYTES + i64(strip) * OTHERS + BEFORE * n_sub;
    }
    // Where the 2 bytes of its super-block in the tail lie.
    __device__ __forceinline__ const u8* in_tail() const {
        return w + i64(n_sub_all / 8) * (F::STRIP_N_BYTES / 4) + i64(i / 8) * 2;
    }
};

struct RowScale {
    float scale;
    float minimum;    // only where HAS_MIN
    float low, high;  // only where HALF_SCALES: of weights 0..15 and 16..31
};

__device__ __forceinline__ uint4 cached16(const u8* p) { return __ldg(reinterpret_cast<const uint4*>(p)); }
__device__ __forceinline__ uint2 cached8(const u8* p) { return __ldg(reinterpret_cast<const uint2*>(p)); }

template <class F>
struct Fragment;

template <>
struct Fragment<Q4_K> {
    using Piece = u32;
    using Meta = uint4;
    static constexpr int LANE_N_BYTES = 4;
    __device__ static Piece load(const u8* own, const SubBlock<Q4_K>& at, int) {
        return InGlobal::load4(at.in_plane<0, 16>(own));
    }
    __device__ static Meta load_meta(const SubBlock<Q4_K>& at) { return cached16(at.in_plane<16, 16, 8>(at.w)); }
    __device__ static uint2 words(Piece nibbles, int) {
        return make_uint2(nibbles & 0x0f0f0f0fu, (nibbles >> 4) & 0x0f0f0f0fu);
    }
    __device__ static void scales(const Meta& meta, int s, RowScale& out) {
        const Scales own = scale_min_k4(meta, s & 7);
        out.scale = own.scale, out.minimum = own.minimum;
    }
};

template <>
struct Fragment<Q5_K> {
    struct Piece {
        u32 nibbles, high;
    };
    using Meta = uint4;
    static constexpr int LANE_N_BYTES = 4;
    __device__ static Piece load(const u8* own, const SubBlock<Q5_K>& at, int t) {
        return {InGlobal::load4(at.in_plane<0, 16>(own)), InGlobal::load4(at.in_plane<18, 4>(at.w))};
    }
    __device__ static Meta load_meta(const SubBlock<Q5_K>& at) { return cached16(at.in_plane<16, 16, 8>(at.w)); }
    __device__ static uint2 words(const Piece& piece, int t) {
        const u32 high = piece.high >> (2 * t);
        return make_uint2((piece.nibbles & 0x0f0f0f0fu) | ((high << 4) & 0x10101010u),
                          ((piece.nibbles >> 4) & 0x0f0f0f0fu) | ((high << 3) & 0x10101010u));
    }
    __device__ static void scales(const Meta& meta, int s, RowScale& out) { Fragment<Q4_K>::scales(meta, s, out); }
};

template <>
struct Fragment<Q6_K> {
    struct Piece {
        u32 nibbles, high;
    };
    struct Meta {
        u32 scales, d;
    };
    static constexpr int LANE_N_BYTES = 4;
    __device__ static Piece load(const u8* own, const SubBlock<Q6_K>& at, int t) {
        return {InGlobal::load4(at.in_plane<0, 16>(own)), InGlobal::load4(at.in_plane<16, 8>(at.w) + 4 * (t / 2))};
    }
    __device__ static Meta load_meta(const SubBlock<Q6_K>& at) {
        return {InGlobal::load2(at.in_plane<24, 2>(at.w)), InGlobal::load2(at.in_tail())};
    }
    __device__ static uint2 words(const Piece& piece, int t) {
        const u32 high = piece.high >> (4 * (t % 2));
        return make_uint2(center_q6((piece.nibbles & 0x0f0f0f0fu) | ((high << 4) & 0x30303030u)),
                          center_q6(((piece.nibbles >> 4) & 0x0f0f0f0fu) | ((high << 2) & 0x30303030u)));
    }
    __device__ static void scales(const Meta& meta, int, RowScale& out) {
        out.scale = half_to_float(u16(meta.d));
        out.low = float(i8(meta.scales));
        out.high = float(i8(meta.scales >> 8));
    }
};

template <>
struct Fragment<IQ4_XS> {
    using Piece = u32;
    using Meta = uint2;
    static constexpr int LANE_N_BYTES = 4;
    __device__ static Piece load(const u8* own, const SubBlock<IQ4_XS>& at, int) {
        return InGlobal::load4(at.in_plane<0, 16>(own));
    }
    __device__ static Meta load_meta(const SubBlock<IQ4_XS>& at) { return cached8(at.in_plane<16, 8, 8>(at.w)); }
    __device__ static uint2 words(Piece indices, int) {
        return iq4_lookup(indices);
    }
    __device__ static void scales(const Meta& meta, int s, RowScale& out) { out.scale = iq4_scale(meta, s & 7); }
};

template <>
struct Fragment<IQ3_S> {
    struct Piece {
        u32 indices, signs, high;
    };
    struct Meta {
        u32 scales, d;
    };
    static constexpr int LANE_N_BYTES = 2;
    __device__ static Piece load(const u8* own, const SubBlock<IQ3_S>& at, int t) {
        return {InGlobal::load2(at.in_plane<0, 8>(own)), InGlobal::load1(at.in_plane<8, 4>(at.w) + t),
                InGlobal::load1(at.in_plane<12, 1>(at.w))};
    }
    __device__ static Meta load_meta(const SubBlock<IQ3_S>& at) {
        return {InGlobal::load1(at.in_plane<13, 1, 2>(at.w)), InGlobal::load2(at.in_tail())};
    }
    __device__ static uint2 words(const Piece& piece, int t) {
        const u32 high = piece.high >> (2 * t);
        return make_uint2(iq3s_word((piece.indices & 0xffu) | ((high << 8) & 0x100u), piece.signs & 15u),
                          iq3s_word((piece.indices >> 8) | ((high << 7) & 0x100u), piece.signs >> 4));
    }
    __device__ static void scales(const Meta& meta, int s, RowScale& out) {
        out.scale = iq3s_scale(meta.d, meta.scales, s);
    }
};

template <>
struct Fragment<Q8_0> {
    using Piece = uint2;
    using Meta = u32;
    static constexpr int LANE_N_BYTES = 8;
    __device__ static Piece load(const u8* own, const SubBlock<Q8_0>& at, int) {
        return cached8(at.in_plane<0, 32>(own));
    }
    __device__ static Meta load_meta(const SubBlock<Q8_0>& at) { return InGlobal::load2(at.in_plane<32, 2>(at.w)); }
    __device__ static uint2 words(Piece piece, int) { return piece; }
    __device__ static void scales(Meta d, int, RowScale& out) { out.scale = half_to_float(u16(d)); }
};
