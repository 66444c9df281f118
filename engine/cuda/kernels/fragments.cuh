// fragments.cuh: the planes of formats.cuh as the int8 tensor cores want them
// In a tile of 16 rows, lane l of a warp holds weights 8t .. 8t + 7 of rows g and g + 8, with g = l / 4 and t = l % 4;
// the activations (pack_tiles.cu) lie likewise. An exact dot product may take its terms in any order, so these are the
// eight weights that lie together in every plane. A block copies four consecutive sub-blocks of all its rows to a stage
// in shared memory, plane by plane. Piece is what a lane takes from there of one row's sub-block, and words() makes the
// two words of it; Meta and scales() are for one lane a row.
#pragma once

constexpr int STEP_SUBS = 4;                     // sub-blocks of a row in a stage, one for each warp of a tile of rows
constexpr int TILE_ROWS = 32;                    // of such a tile
constexpr int N_ROW_TILES = 1;                   // of a block
constexpr int BLOCK_ROWS = N_ROW_TILES * TILE_ROWS;
constexpr int PACK_WARPS = N_ROW_TILES * STEP_SUBS;
constexpr int TILE_THREADS = WARP * STEP_SUBS, PACK_THREADS = N_ROW_TILES * TILE_THREADS;

// The tile of rows of this thread, the thread's number among those of the tile, and that of its warp.
__device__ __forceinline__ int row_tile(int thread = threadIdx.x) { return N_ROW_TILES == 1 ? 0 : thread / TILE_THREADS; }
__device__ __forceinline__ int tile_thread(int thread = threadIdx.x) {
    return N_ROW_TILES == 1 ? thread : thread % TILE_THREADS;
}
__device__ __forceinline__ int tile_warp(int thread = threadIdx.x) { return tile_thread(thread) / WARP; }

// threadIdx.x, asked for anew: what is computed from it does not take registers before.
__device__ __forceinline__ int thread_anew() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
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
    // Where the 4 bytes lie that its super-block and a neighbour, the one before or the one behind, have in the tail.
    __device__ __forceinline__ const u8* in_tail() const {
        return w + i64(n_sub_all / 8) * (F::STRIP_N_BYTES / 4) + i64(i / 16) * 4;
    }
};

// The rows of a block, for one of its threads; those behind the matrix read its last one.
template <class F>
struct BlockRows {
    const u8* w;
    int n_out, n_sub, row, thread;

    __device__ __forceinline__ u32 sub_block(int r, int s) const {
        return u32(min(row + r, n_out - 1)) * n_sub + s;
    }
    __device__ __forceinline__ SubBlock<F> at(int r, int s) const {
        const u32 n_sub_all = u32(n_out) * n_sub, i = sub_block(r, s), strip = i / STRIP_SUBS;
        return {w, n_sub_all, i, strip, min(STRIP_SUBS, int(n_sub_all - strip * STRIP_SUBS))};
    }
};

// Before the first plane of a stage. The first warp has the activations to ask for, so others begin.
struct NoPlane {
    static constexpr int END = 0, END_CHUNK = WARP;

    template <class F>
    __device__ __forceinline__ static void ask(u8*, const BlockRows<F>&, int) {}
};

// The part of a stage that comes behind Previous: CHUNK bytes at a time of ROW_N_BYTES a row, copied by the threads in
// turn. The chunks of a row lie 32 bytes more than all rows apart, so that neither writes nor reads meet in a bank.
template <int ROW_N_BYTES, class Previous>
struct StagePart {
    static constexpr int CHUNK = ROW_N_BYTES < 16 ? ROW_N_BYTES : 16, ROW_CHUNKS = ROW_N_BYTES / CHUNK;
    static constexpr int STRIDE = BLOCK_ROWS * CHUNK + (ROW_CHUNKS > 1 ? 32 : 0);
    static constexpr int BEGIN = Previous::END, END = BEGIN + ROW_CHUNKS * STRIDE;
    static constexpr int N_CHUNKS = ROW_CHUNKS * BLOCK_ROWS;
    static constexpr int FIRST_CHUNK = Previous::END_CHUNK, END_CHUNK = FIRST_CHUNK + N_CHUNKS;

    // Byte `byte` of row r, behind FIRST * first; FIRST is a part or a multiple of CHUNK.
    template <int FIRST>
    __device__ __forceinline__ static const u8* of_row(const u8* stage, int r, int first, int byte) {
        const u8* row = stage + BEGIN + r * CHUNK;
        if constexpr (ROW_CHUNKS == 1) return row + FIRST * first + byte;
        if constexpr (FIRST == CHUNK) return row + first * STRIDE + byte;
        const int at = FIRST * first + byte;
        return row + at / CHUNK * STRIDE + at % CHUNK;
    }

    // from(r) is where the bytes of row r lie.
    template <class From>
    __device__ __forceinline__ static void ask(u8* stage, int thread, From from) {
        constexpr int FIRST_THREAD = N_CHUNKS % PACK_THREADS == 0 ? 0 : FIRST_CHUNK % PACK_THREADS;
#pragma unroll
        for (int first = 0; first < N_CHUNKS; first += PACK_THREADS) {
            const int i = first + (thread + PACK_THREADS - FIRST_THREAD) % PACK_THREADS;
            if (N_CHUNKS % PACK_THREADS > 0 && i >= N_CHUNKS) break;
            const int r = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
            copy_chunk<CHUNK>(stage + BEGIN + chunk * STRIDE + r * CHUNK, from(r) + chunk * CHUNK);
        }
    }
};

// A plane of format F (SubBlock::in_plane): of each row the bytes of a step's sub-blocks, or those of its super-block.
template <class F, int BEFORE, int N_BYTES, int SUBS = 1, class Previous = NoPlane>
struct Plane : StagePart<SUBS == 1 ? STEP_SUBS * N_BYTES : N_BYTES, Previous> {
    static_assert(SUBS == 1 || SUBS == 8, "a step lies in one super-block");

    __device__ __forceinline__ static void ask(u8* stage, const BlockRows<F>& rows, int s) {
        Previous::ask(stage, rows, s);
        Plane::StagePart::ask(stage, rows.thread, [&](int r) {
            return rows.at(r, s).template in_plane<BEFORE, N_BYTES, SUBS>(rows.w);
        });
    }
    // Byte `byte` of what warp `sub` of a step has of row r.
    __device__ __forceinline__ static const u8* at(const u8* stage, int r, int sub, int byte = 0) {
        return Plane::template of_row<SUBS == 1 ? N_BYTES : 0>(stage, r, sub, byte);
    }
};

// The tail: 2 bytes a super-block, of which an even one and the next are copied together. Where the matrix ends with an
// even one, 2 bytes behind it are read.
template <class F, class Previous>
struct TailPlane : StagePart<4, Previous> {
    __device__ __forceinline__ static void ask(u8* stage, const BlockRows<F>& rows, int s) {
        Previous::ask(stage, rows, s);
        TailPlane::StagePart::ask(stage, rows.thread, [&](int r) { return rows.at(r, s).in_tail(); });
    }
    __device__ __forceinline__ static const u8* at(const u8* stage, int r, u32 i) {
        return TailPlane::template of_row<2>(stage, r, i / 8 % 2, 0);
    }
};

struct RowScale {
    float scale;
    float minimum;    // only where HAS_MIN
    float low, high;  // only where HALF_SCALES: of weights 0..15 and 16..31
};

template <class V>
__device__ __forceinline__ V staged(const u8* p) {
    return *reinterpret_cast<const V*>(p);
}

// What a lane takes of a row's scales: r is its row in the block, i the sub-block's number in the matrix.
struct ScalesAt {
    const u8* stage;
    int r, sub;
    u32 i;
};

template <class F>
struct Fragment;

template <>
struct Fragment<Q4_K> {
    using Piece = u32;
    using Meta = uint4;
    using Nibbles = Plane<Q4_K, 0, 16>;
    using Packed = Plane<Q4_K, 16, 16, 8, Nibbles>;
    using Stage = Packed;
    __device__ static Piece load(const u8* stage, int r, int sub, int t) {
        return staged<u32>(Nibbles::at(stage, r, sub, 4 * t));
    }
    __device__ static Meta load_meta(const ScalesAt& at) { return staged<uint4>(Packed::at(at.stage, at.r, at.sub)); }
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
    using Nibbles = Plane<Q5_K, 0, 16>;
    using Packed = Plane<Q5_K, 16, 16, 8, Nibbles>;
    using High = Plane<Q5_K, 18, 4, 1, Packed>;
    using Stage = High;
    __device__ static Piece load(const u8* stage, int r, int sub, int t) {
        return {staged<u32>(Nibbles::at(stage, r, sub, 4 * t)), staged<u32>(High::at(stage, r, sub))};
    }
    __device__ static Meta load_meta(const ScalesAt& at) { return staged<uint4>(Packed::at(at.stage, at.r, at.sub)); }
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
    using Nibbles = Plane<Q6_K, 0, 16>;
    using High = Plane<Q6_K, 16, 8, 1, Nibbles>;
    using Pairs = Plane<Q6_K, 24, 2, 1, High>;
    using Tail = TailPlane<Q6_K, Pairs>;
    using Stage = Tail;
    __device__ static Piece load(const u8* stage, int r, int sub, int t) {
        return {staged<u32>(Nibbles::at(stage, r, sub, 4 * t)), staged<u32>(High::at(stage, r, sub, 4 * (t / 2)))};
    }
    __device__ static Meta load_meta(const ScalesAt& at) {
        return {staged<u16>(Pairs::at(at.stage, at.r, at.sub)), staged<u16>(Tail::at(at.stage, at.r, at.i))};
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
    using Indices = Plane<IQ4_XS, 0, 16>;
    using Packed = Plane<IQ4_XS, 16, 8, 8, Indices>;
    using Stage = Packed;
    __device__ static Piece load(const u8* stage, int r, int sub, int t) {
        return staged<u32>(Indices::at(stage, r, sub, 4 * t));
    }
    __device__ static Meta load_meta(const ScalesAt& at) { return staged<uint2>(Packed::at(at.stage, at.r, at.sub)); }
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
    using Indices = Plane<IQ3_S, 0, 8>;
    using Signs = Plane<IQ3_S, 8, 4, 1, Indices>;
    using High = Plane<IQ3_S, 12, 1, 1, Signs>;
    using Nibbles = Plane<IQ3_S, 13, 4, 8, High>;  // a scale a sub-block
    using Tail = TailPlane<IQ3_S, Nibbles>;
    using Stage = Tail;
    __device__ static Piece load(const u8* stage, int r, int sub, int t) {
        return {staged<u16>(Indices::at(stage, r, sub, 2 * t)), staged<u8>(Signs::at(stage, r, sub, t)),
                staged<u8>(High::at(stage, r, sub))};
    }
    __device__ static Meta load_meta(const ScalesAt& at) {
        return {staged<u8>(Nibbles::at(at.stage, at.r, at.sub, at.i % 8 / 2)),
                staged<u16>(Tail::at(at.stage, at.r, at.i))};
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
    using Values = Plane<Q8_0, 0, 32>;
    using Halves = Plane<Q8_0, 32, 2, 1, Values>;
    using Stage = Halves;
    __device__ static Piece load(const u8* stage, int r, int sub, int t) {
        return staged<uint2>(Values::at(stage, r, sub, 8 * t));
    }
    __device__ static Meta load_meta(const ScalesAt& at) { return staged<u16>(Halves::at(at.stage, at.r, at.sub)); }
    __device__ static uint2 words(Piece piece, int) { return piece; }
    __device__ static void scales(Meta d, int, RowScale& out) { out.scale = half_to_float(u16(d)); }
};

// Of a stage, for the weights of any format.
constexpr int WEIGHTS_N_BYTES = Fragment<Q8_0>::Stage::END;
static_assert(Fragment<Q4_K>::Stage::END <= WEIGHTS_N_BYTES && Fragment<Q5_K>::Stage::END <= WEIGHTS_N_BYTES &&
              Fragment<Q6_K>::Stage::END <= WEIGHTS_N_BYTES && Fragment<IQ4_XS>::Stage::END <= WEIGHTS_N_BYTES &&
              Fragment<IQ3_S>::Stage::END <= WEIGHTS_N_BYTES);
