// mma_rows.cuh: 32 rows of a matrix times up to 40 tokens by a block of four warps; the core of pack_rows, pack_gate_up
// Quantised formats use the int8 tensor cores: one m16n8k32 is the exact dot products of one sub-block of 16 rows with
// 8 tokens. The floats follow row_dot.cuh to the bit:
//   warp w takes the sub-blocks s = w (mod 4), residue by residue (mod 32): w + 0, 16, 8, 24, 4, 20, 12, 28. So the
//   upper three levels of the tree over the 32 lanes are additions of its own sums; the lower two are over the warps
//   dots start at the integer that is MAGIC = 3 * 2^22 as a float, and so read as floats are MAGIC + dot, exactly. One
//   fma then gives scale * dot, rounded once: scale * MAGIC has at most 19 bits and cancels. Signs of zero may differ,
//   but to a sum that is never -0 either zero adds nothing. A scale that is not finite would not cancel: then the block
//   uses the core of row_dot.cuh
// Q6_K has two integer scales: two mma, each with half of the weights, and an exact fma for low * dot + high * dot.
// Bound by instructions, not by memory: of about 32 a lane for the four terms of an mma (Q4_K), 20 are the terms' own.
// Two blocks share an SM, so that one works while the other waits for its first loads or at a barrier.
#pragma once

constexpr int PACK_WARPS = 4;
constexpr int PACK_THREADS = WARP * PACK_WARPS;
constexpr int TILE_ROWS = 32;        // of a block
constexpr int TILE_TOKENS = 8;       // of one tile of tokens
constexpr int MAX_TOKEN_TILES = 5;   // of a block
constexpr int PACK_BLOCKS_PER_SM = 2;
constexpr int N_ROUNDS = WARP / PACK_WARPS;
constexpr int TILE_Q_N_BYTES = TILE_TOKENS * SUB_BLOCK, TILE_SCALES_N_BYTES = TILE_TOKENS * 8;

// Formats by number, as the host passes them.
constexpr int FORMAT_Q4_K = 0, FORMAT_Q5_K = 1, FORMAT_Q6_K = 2, FORMAT_IQ4_XS = 3, FORMAT_IQ3_S = 4, FORMAT_Q8_0 = 5;
constexpr int FORMAT_F32 = 6, FORMAT_F16 = 7, FORMAT_BF16 = 8;

// The tokens of a pack. tiles: pack_tiles.cu; not read by float formats.
struct Pack {
    Input h;
    const u8* tiles;
    int n_in, n_tokens;
    int n_groups;  // that the tiles of tokens are shared out to, evenly, a block for each; at most MAX_TOKEN_TILES in one

    __device__ __forceinline__ int n_sub() const { return n_in / SUB_BLOCK; }
    __device__ __forceinline__ int n_tiles() const { return (n_tokens + TILE_TOKENS - 1) / TILE_TOKENS; }
    __device__ __forceinline__ Input token(int t) const {
        return Input{h.x + i64(t) * n_in, h.q + i64(t) * n_in, h.scales + i64(t) * n_sub()};
    }
};

// The rows and tokens of a block.
struct Block {
    int row, tile, n_tiles;

    __device__ __forceinline__ int token() const { return tile * TILE_TOKENS; }
};

__device__ __forceinline__ Block block_at(int block, const Pack& pack) {
    const int group = block % pack.n_groups, n_tiles = pack.n_tiles();
    const int first = group * n_tiles / pack.n_groups, end = (group + 1) * n_tiles / pack.n_groups;
    return Block{block / pack.n_groups * TILE_ROWS, first, end - first};
}

__device__ __forceinline__ void mma_i8(int (&c)[4], const u32 (&a)[4], uint2 b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(MAGIC_BITS));
}

// What a lane holds of the rows for one sub-block: pieces of rows g, g + 8, g + 16, g + 24 and one row's scales.
template <class F>
struct RowPieces {
    typename Fragment<F>::Piece piece[4];
    typename Fragment<F>::Meta meta;
    u32 first[4], first_own;  // sub-blocks of those rows; rows behind the matrix read the last one
    u32 n_sub_all;

    __device__ __forceinline__ void place(int row, int n_out, int n_sub) {
        const int lane = threadIdx.x % WARP;
        n_sub_all = u32(n_out) * n_sub;
#pragma unroll
        for (int r = 0; r < 4; ++r) first[r] = u32(min(row + lane / 4 + 8 * r, n_out - 1)) * n_sub;
        first_own = u32(min(row + lane, n_out - 1)) * n_sub;
    }

    __device__ __forceinline__ SubBlock<F> at(const u8* w, u32 i) const {
        const u32 strip = i / STRIP_SUBS;
        return {w, n_sub_all, i, strip, min(STRIP_SUBS, int(n_sub_all - strip * STRIP_SUBS))};
    }

    __device__ __forceinline__ void load(const u8* own, const u8* w, int s) {
#pragma unroll
        for (int r = 0; r < 4; ++r) piece[r] = Fragment<F>::load(own, at(w, first[r] + s), threadIdx.x % 4);
        meta = Fragment<F>::load_meta(at(w, first_own + s));
    }
};

// A lane's share of a tile of tokens for one sub-block: eight activations of token l / 4; d and sum of two tokens.
struct TokenPiece {
    uint2 q;
    float d[2], total[2];

    template <bool WITH_TOTAL>
    __device__ __forceinline__ void load(const u8* q_tile, const u8* scales_tile) {
        q = *reinterpret_cast<const uint2*>(q_tile);
        if (WITH_TOTAL) {
            const float4 v = *reinterpret_cast<const float4*>(scales_tile);
            d[0] = v.x, d[1] = v.y, total[0] = v.z, total[1] = v.w;
        } else {
            const float2 v = *reinterpret_cast<const float2*>(scales_tile);
            d[0] = v.x, d[1] = v.y;
        }
    }
};

// Where a lane finds its shares of the block's tiles: those of one sub-block lie one after the other.
struct TokenTiles {
    const u8 *q, *scales;
    int n_tiles;  // of the pack

    __device__ __forceinline__ void place(const Pack& pack, int tile) {
        const int lane = threadIdx.x % WARP;
        n_tiles = pack.n_tiles();
        q = pack.tiles + tile * TILE_Q_N_BYTES + 8 * lane;
        scales = pack.tiles + i64(n_tiles) * pack.n_sub() * TILE_Q_N_BYTES;
        scales += tile * TILE_SCALES_N_BYTES + 16 * (lane % 4);
    }
    __device__ __forceinline__ const u8* q_at(int s) const { return q + i64(u32(s * n_tiles)) * TILE_Q_N_BYTES; }
    __device__ __forceinline__ const u8* scales_at(int s) const {
        return scales + i64(u32(s * n_tiles)) * TILE_SCALES_N_BYTES;
    }
};

// Coefficients of the four rows of a lane, handed out by the lanes that have computed them.
template <class F>
struct Coefficients {
    float scale[4], minimum[4], high[4], factor[4], offset[4];

    __device__ __forceinline__ void share(const RowScale& own) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int from = threadIdx.x % WARP / 4 + 8 * r;
            scale[r] = __shfl_sync(0xffffffffu, own.scale, from);
            if (F::HAS_MIN) minimum[r] = __shfl_sync(0xffffffffu, own.minimum, from);
            if (F::HALF_SCALES) high[r] = __shfl_sync(0xffffffffu, own.high, from);
            factor[r] = F::HALF_SCALES ? __shfl_sync(0xffffffffu, own.low, from) : scale[r];
            offset[r] = mul(factor[r], -MAGIC);
        }
    }

    // The term of row r, before the scale of the activations.
    __device__ __forceinline__ float term(int r, int dot, int dot_high, float total) const {
        const float product = __fmaf_rn(factor[r], __int_as_float(dot), offset[r]);
        if (F::HALF_SCALES)
            return mul(scale[r], __fmaf_rn(high[r], sub(__int_as_float(dot_high), MAGIC), product));
        return F::HAS_MIN ? sub(product, mul(minimum[r], total)) : product;
    }
};

// Dots of 32 rows with a tile of tokens; of the lower and the upper 16 weights where these have scales of their own.
template <class F>
struct Dots {
    int low[2][4], high[2][4];  // high: only where HALF_SCALES

    __device__ __forceinline__ void multiply(const u32 (&a)[2][4], const u32 (&a_high)[2][4], uint2 b) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            mma_i8(low[m], a[m], b);
            if (F::HALF_SCALES) mma_i8(high[m], a_high[m], b);
        }
    }
};

using Accumulators = float[MAX_TOKEN_TILES][2][4];

// The weights of a sub-block as operands; with half scales, lanes 4g, 4g + 1 have the lower half of the weights.
template <class F>
__device__ __forceinline__ void operands(const RowPieces<F>& rows, u32 (&a)[2][4], u32 (&a_high)[2][4]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const uint2 words = Fragment<F>::words(rows.piece[r], t);
        const bool is_low = !F::HALF_SCALES || t < 2;
        a[r / 2][r % 2] = is_low ? words.x : 0, a[r / 2][r % 2 + 2] = is_low ? words.y : 0;
        a_high[r / 2][r % 2] = is_low ? 0 : words.x, a_high[r / 2][r % 2 + 2] = is_low ? 0 : words.y;
    }
}

template <class F>
__device__ __forceinline__ void add_terms(const Coefficients<F>& c, const Dots<F>& dots, const TokenPiece& token,
                                          float (&acc)[2][4]) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int high = F::HALF_SCALES ? dots.high[m][i] : 0;
            const float term = c.term(2 * m + i / 2, dots.low[m][i], high, token.total[i % 2]);
            acc[m][i] = add(acc[m][i], mul(term, token.d[i % 2]));
        }
    }
}

// A warp's way through its sub-blocks, with the next one's loads in flight while one is worked on.
template <class F>
struct WarpRows {
    const u8 *w, *own;
    int n_tiles;
    RowPieces<F> rows;
    TokenTiles tiles;
    TokenPiece tokens[MAX_TOKEN_TILES];
    u32 largest;  // bits of the largest scale: infinity or NaN if any is not finite

    __device__ __forceinline__ void start(int n_out, const Pack& pack, const Block& block, int s) {
        largest = 0;
        own = hide_origin(w + threadIdx.x % 4 * Fragment<F>::LANE_N_BYTES);
        n_tiles = block.n_tiles;
        rows.place(block.row, n_out, pack.n_sub());
        tiles.place(pack, block.tile);
        rows.load(own, w, s);
        dependency_wait();  // weights are on their way while the kernel before ends
        const u8 *q = tiles.q_at(s), *scales = tiles.scales_at(s);
#pragma unroll
        for (int n = 0; n < MAX_TOKEN_TILES; ++n) {
            tokens[n] = TokenPiece{};
            if (n >= n_tiles) continue;
            tokens[n].template load<F::HAS_MIN>(q + n * TILE_Q_N_BYTES, scales + n * TILE_SCALES_N_BYTES);
        }
    }

    // Add the terms of the sub-block that was asked for, number j of its super-block, and ask for sub-block `next`.
    __device__ __forceinline__ void add(int j, int next, Accumulators& acc) {
        u32 a[2][4], a_high[2][4];
        operands<F>(rows, a, a_high);
        RowScale scale;
        Fragment<F>::scales(rows.meta, j, scale);
        largest = max(largest, __float_as_uint(fabsf(scale.scale)));
        Coefficients<F> c;
        c.share(scale);
        rows.load(own, w, next);
        const u8 *q = tiles.q_at(next), *scales = tiles.scales_at(next);
        Dots<F> dots[2];
        dots[0].multiply(a, a_high, tokens[0].q);
#pragma unroll
        for (int n = 0; n < MAX_TOKEN_TILES; ++n) {
            if (n >= n_tiles) break;
            if (n + 1 < MAX_TOKEN_TILES) dots[(n + 1) % 2].multiply(a, a_high, tokens[n + 1].q);
            add_terms<F>(c, dots[n % 2], tokens[n], acc[n]);
            tokens[n].template load<F::HAS_MIN>(q + n * TILE_Q_N_BYTES, scales + n * TILE_SCALES_N_BYTES);
        }
    }
};

// First sub-block of a warp's round: its residues in the order in which the tree pairs them.
__device__ __forceinline__ int first_of_round(int round) {
    return threadIdx.x / WARP + PACK_WARPS * (round / 4 + round / 2 % 2 * 2 + round % 2 * 4);
}

// The sub-block that follows a round: the first of the next round that has any, or one to be read in vain.
__device__ __forceinline__ int sub_block_after(int round, int n_sub) {
    while (++round < N_ROUNDS)
        if (first_of_round(round) < n_sub) return first_of_round(round);
    return 0;
}

// Shared memory of a block: N_SUMS floats, at first two sets of sums for each warp, at the end results in one set. A
// value lies where the tensor cores leave it, at slot(row, token); thread i has the results at PACK_THREADS * n + i.
constexpr int TILE_SLOTS = TILE_ROWS * TILE_TOKENS, N_SLOTS = MAX_TOKEN_TILES * TILE_SLOTS;
constexpr int N_SUMS = 2 * PACK_WARPS * N_SLOTS;
constexpr int N_RESULTS = N_SLOTS / PACK_THREADS;  // of a thread: rows of both tiles of 16 in turn

__device__ __forceinline__ int slot(int row, int token) {
    const int i = row / 16 * 4 + row % 16 / 8 * 2 + token % 2;
    return token / TILE_TOKENS * TILE_SLOTS + i * WARP + row % 8 * 4 + token % TILE_TOKENS / 2;
}
__device__ __forceinline__ int row_of_result(int n) {
    return n % 2 * 16 + threadIdx.x / (2 * WARP) * 8 + threadIdx.x % WARP / 4;
}
__device__ __forceinline__ int token_of_result(int n) {
    return n / 2 * TILE_TOKENS + threadIdx.x % 4 * 2 + threadIdx.x / WARP % 2;
}

// Take a finished residue: kept after an even round; after an odd one added to its pair, and two such sums to one of
// the two halves that a warp's residues make in the tree.
__device__ __forceinline__ void finish_round(int round, const Accumulators& acc, Accumulators& kept, float* warp_sums) {
    float* half = warp_sums + round / 4 * PACK_WARPS * N_SLOTS;
#pragma unroll
    for (int i = 0; i < MAX_TOKEN_TILES * 8; ++i) {
        const float value = (&acc[0][0][0])[i];
        float &first = (&kept[0][0][0])[i], &sum = half[i * WARP];
        if (round % 2 == 0)
            first = value;
        else
            sum = round % 4 == 1 ? add(first, value) : add(sum, add(first, value));
    }
}

// The lower three levels of the tree: the halves of each warp, then over the warps by 2, 1.
__device__ __forceinline__ void fold_warps(const float* sums, float (&results)[N_RESULTS]) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N_RESULTS; ++n) {
        float v[PACK_WARPS];
#pragma unroll
        for (int w = 0; w < PACK_WARPS; ++w) {
            const float* half = sums + w * N_SLOTS + n * PACK_THREADS + threadIdx.x;
            v[w] = add(half[0], half[PACK_WARPS * N_SLOTS]);
        }
        results[n] = add(add(v[0], v[2]), add(v[1], v[3]));
    }
}

// One warp a row at a time, one token after the other, for blocks with a scale that is not finite.
template <class F>
__device__ __noinline__ void damaged_results(const u8* w, int n_out, Pack pack, Block block, float* sums) {
    const int n_sub = pack.n_sub();
    for (int r = threadIdx.x / WARP; r < TILE_ROWS && block.row + r < n_out; r += PACK_WARPS) {
        const i64 row = block.row + r;
        for (int t = 0; t < block.n_tiles * TILE_TOKENS && block.token() + t < pack.n_tokens; ++t) {
            const Input h = pack.token(block.token() + t);
            float acc = 0.0f;
            for (int s = threadIdx.x % WARP; s < n_sub; s += WARP)
                acc = add(acc, sub_block_term<F>(F::load(spot_of<F>(w, i64(n_out) * n_sub, row * n_sub + s)), s, h));
            const float sum = tree(acc);
            if (threadIdx.x % WARP == 0) sums[slot(r, t)] = sum;
        }
    }
}

__device__ __forceinline__ void read_results(const float* sums, float (&results)[N_RESULTS]) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N_RESULTS; ++n) results[n] = sums[n * PACK_THREADS + threadIdx.x];
}

template <class F>
__device__ __forceinline__ void quantized_results(const u8* w, int n_out, const Pack& pack, const Block& block,
                                                 float* sums, float (&results)[N_RESULTS]) {
    const int n_sub = pack.n_sub();
    float* warp_sums = sums + threadIdx.x / WARP * N_SLOTS + threadIdx.x % WARP;
    Accumulators kept = {};
    WarpRows<F> warp{w};
    warp.start(n_out, pack, block, min(first_of_round(0), n_sub - 1));
#pragma unroll 1
    for (int round = 0; round < N_ROUNDS; ++round) {
        Accumulators acc = {};
        const int after = sub_block_after(round, n_sub);
#pragma unroll 1
        for (int s = first_of_round(round); s < n_sub; s += WARP)
            warp.add(first_of_round(round) % 8, s + WARP < n_sub ? s + WARP : after, acc);
        finish_round(round, acc, kept, warp_sums);
    }
    fold_warps(sums, results);
    if (__syncthreads_or(warp.largest >= 0x7f800000u)) {
        damaged_results<F>(w, n_out, pack, block, sums);
        read_results(sums, results);
    }
}

// A row of floats times a tile of tokens, by a warp; returns the sum of token row_of_lane<TILE_TOKENS>(lane).
template <class F>
__device__ __forceinline__ float float_sum(const u8* w, i64 row, const Pack& pack, int tile) {
    const int lane = threadIdx.x % WARP;
    float acc[TILE_TOKENS] = {};
    const float* x[TILE_TOKENS];
#pragma unroll
    for (int t = 0; t < TILE_TOKENS; ++t)
        x[t] = pack.h.x + i64(min(tile * TILE_TOKENS + t, pack.n_tokens - 1)) * pack.n_in;
    const u8* weights = w + row * pack.n_in * F::N_BYTES;
    if (pack.n_in % 4 == 0) {
#pragma unroll 2
        for (int quad = lane; quad < pack.n_in / 4; quad += WARP) {
            const float4 a = F::load_quad(weights + i64(quad) * 4 * F::N_BYTES);
#pragma unroll
            for (int t = 0; t < TILE_TOKENS; ++t) acc[t] = add_products(acc[t], a, load_quad(x[t], quad));
        }
    } else {  // rows are not aligned to 16 bytes
        for (int k = 4 * lane; k < pack.n_in; k += k % 4 < 3 ? 1 : 4 * WARP - 3) {
            const float weight = F::load(weights + i64(k) * F::N_BYTES);
#pragma unroll
            for (int t = 0; t < TILE_TOKENS; ++t) acc[t] = add(acc[t], mul(weight, x[t][k]));
        }
    }
    return tree_rows(acc, lane);
}

template <class F>
__device__ __forceinline__ void float_results(const u8* w, int n_out, const Pack& pack, const Block& block, float* sums,
                                             float (&results)[N_RESULTS]) {
    dependency_wait();
    const int lane = threadIdx.x % WARP;
    for (int r = threadIdx.x / WARP; r < TILE_ROWS && block.row + r < n_out; r += PACK_WARPS) {
        for (int n = 0; n < block.n_tiles; ++n) {
            const float value = float_sum<F>(w, block.row + r, pack, block.tile + n);
            const int token = n * TILE_TOKENS + row_of_lane<TILE_TOKENS>(lane);
            if (lane % (WARP / TILE_TOKENS) == 0) sums[slot(r, token)] = value;
        }
    }
    read_results(sums, results);
}

__device__ __forceinline__ bool is_float(int format) { return format >= FORMAT_F32; }

// Calls run with a value of the format's type.
template <class Run>
__device__ __forceinline__ void with_float_format(int format, Run run) {
    if (format == FORMAT_F32) run(F32{});
    if (format == FORMAT_F16) run(F16{});
    if (format == FORMAT_BF16) run(BF16{});
}
template <class Run>
__device__ __forceinline__ void with_quantized_format(int format, Run run) {
    if (format == FORMAT_Q4_K) run(Q4_K{});
    if (format == FORMAT_Q5_K) run(Q5_K{});
    if (format == FORMAT_Q6_K) run(Q6_K{});
    if (format == FORMAT_IQ4_XS) run(IQ4_XS{});
    if (format == FORMAT_IQ3_S) run(IQ3_S{});
    if (format == FORMAT_Q8_0) run(Q8_0{});
}

// results[n] is that of row row_of_result(n) and token token_of_result(n) of the block.
__device__ __forceinline__ void block_results(const u8* w, int format, int n_out, const Pack& pack, const Block& block,
                                             float* sums, float (&results)[N_RESULTS]) {
    with_quantized_format(format, [&](auto f) {
        quantized_results<decltype(f)>(w, n_out, pack, block, sums, results);
    });
    with_float_format(format, [&](auto f) { float_results<decltype(f)>(w, n_out, pack, block, sums, results); });
}
