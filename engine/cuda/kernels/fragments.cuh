// fragments.cuh: the planes of formats.cuh as the int8 tensor cores want them
// In a tile of 16 rows, lane l of a warp holds weights 8t .. 8t + 7 of rows g and g + 8, with g = l / 4 and t = l % 4;
// the activations (pack_tiles.cu) lie likewise. An exact dot product may take its terms in any order, so these are the
// eight weights that lie together in every plane. Piece is what a lane reads of one row's sub-block, and words() makes
// the two words of it; Meta and scales() are for one lane a row. i, n_sub and s as in formats.cuh; own is where the
// lane's LANE_N_BYTES of sub-block 0 lie in the first plane.
#pragma once

// A pointer whose origin the compiler does not see: it would add w and t anew to every address.
__device__ __forceinline__ const u8* hide_origin(const u8* p) {
    u64 address = reinterpret_cast<u64>(p), hidden;
    asm("mov.u64 %0, %1;" : "=l"(hidden) : "l"(address));
    return reinterpret_cast<const u8*>(hidden);
}

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
    __device__ static Piece load(const u8* own, const u8*, i64, u32 i, int) { return InGlobal::load4(own + i64(i) * 16); }
    __device__ static Meta load_meta(const u8* w, i64 n_sub, u32 i) {
        return cached16(w + 16 * n_sub + i64(i >> 3) * 16);
    }
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
    __device__ static Piece load(const u8* own, const u8* w, i64 n_sub, u32 i, int t) {
        return {InGlobal::load4(own + i64(i) * 16), InGlobal::load4(w + 18 * n_sub + i64(i) * 4)};
    }
    __device__ static Meta load_meta(const u8* w, i64 n_sub, u32 i) { return Fragment<Q4_K>::load_meta(w, n_sub, i); }
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
    __device__ static Piece load(const u8* own, const u8* w, i64 n_sub, u32 i, int t) {
        return {InGlobal::load4(own + i64(i) * 16), InGlobal::load4(w + 16 * n_sub + i64(i) * 8 + 4 * (t / 2))};
    }
    __device__ static Meta load_meta(const u8* w, i64 n_sub, u32 i) {
        return {InGlobal::load2(w + 24 * n_sub + i64(i) * 2), InGlobal::load2(w + 26 * n_sub + i64(i >> 3) * 2)};
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
    __device__ static Piece load(const u8* own, const u8*, i64, u32 i, int) { return InGlobal::load4(own + i64(i) * 16); }
    __device__ static Meta load_meta(const u8* w, i64 n_sub, u32 i) {
        return cached8(w + 16 * n_sub + i64(i >> 3) * 8);
    }
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
    __device__ static Piece load(const u8* own, const u8* w, i64 n_sub, u32 i, int t) {
        return {InGlobal::load2(own + i64(i) * 8), InGlobal::load1(w + 8 * n_sub + i64(i) * 4 + t), InGlobal::load1(w + 12 * n_sub + i)};
    }
    __device__ static Meta load_meta(const u8* w, i64 n_sub, u32 i) {
        return {InGlobal::load1(w + 13 * n_sub + (i >> 1)), InGlobal::load2(w + 13 * n_sub + n_sub / 2 + i64(i >> 3) * 2)};
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
    __device__ static Piece load(const u8* own, const u8*, i64, u32 i, int) { return cached8(own + i64(i) * 32); }
    __device__ static Meta load_meta(const u8* w, i64 n_sub, u32 i) { return InGlobal::load2(w + 32 * n_sub + i64(i) * 2); }
    __device__ static uint2 words(Piece piece, int) { return piece; }
    __device__ static void scales(Meta d, int, RowScale& out) { out.scale = half_to_float(u16(d)); }
};
