// mma_rows.cuh: rows of a matrix times a group of tokens by a block; the core of pack_rows, pack_gate_up
// Quantised formats use the int8 tensor cores: one m16n8k32 is the exact dot products of one sub-block of 16 rows with
// 8 tokens. The floats follow row_dot.cuh to the bit:
//   four warps share a tile of 32 rows. Warp w takes the sub-blocks s = w (mod 4), residue by residue (mod 32): w + 0,
//   16, 8, 24, 4, 20, 12, 28. So the upper three levels of the tree over the 32 lanes are additions of its own sums; the
//   lower two are over the warps
//   dots start at the integer that is MAGIC = 3 * 2^22 as a float, and so read as floats are MAGIC + dot, exactly. One
//   fma then gives scale * dot, rounded once: scale * MAGIC has at most 19 bits and cancels. Signs of zero may differ,
//   but to a sum that is never -0 either zero adds nothing. A scale that is not finite would not cancel: then the block
//   uses the core of row_dot.cuh
// Q6_K has two integer scales: two mma, each with half of the weights, and an exact fma for low * dot + high * dot.
// The warps of a block go on together in steps of four sub-blocks, one for each warp of a tile of rows. Weights and
// activations of the next steps are on their way to stages in shared memory meanwhile. Several blocks share an SM, so
// that others work while one waits at a barrier.
#pragma once

constexpr int TILE_TOKENS = 8;  // of one tile of tokens
constexpr int N_ROUNDS = WARP / STEP_SUBS;
constexpr int TILE_Q_N_BYTES = TILE_TOKENS * SUB_BLOCK, TILE_N_BYTES = TILE_Q_N_BYTES + TILE_TOKENS * 8;

// Most tiles of tokens of a block, its stages, and the blocks that shall share an SM, by the shared memory that it has:
// 100, 164, 228 KiB.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int MAX_TOKEN_TILES = 3, N_STAGES = 2, PACK_BLOCKS_PER_SM = 2;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int MAX_TOKEN_TILES = 5, N_STAGES = 3, PACK_BLOCKS_PER_SM = 2;
#else
constexpr int MAX_TOKEN_TILES = 5, N_STAGES = 3, PACK_BLOCKS_PER_SM = 3;
#endif

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
    // First of the tile of rows of this warp.
    __device__ __forceinline__ int tile_row() const { return row + row_tile() * TILE_ROWS; }
};

__device__ __forceinline__ Block block_at(int block, const Pack& pack) {
    const int group = block % pack.n_groups, n_tiles = pack.n_tiles();
    const int first = group * n_tiles / pack.n_groups, end = (group + 1) * n_tiles / pack.n_groups;
    return Block{block / pack.n_groups * BLOCK_ROWS, first, end - first};
}

__device__ __forceinline__ void mma_i8(int (&c)[4], const u32 (&a)[4], uint2 b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(MAGIC_BITS));
}

// A lane's share of a tile of tokens for one sub-block: eight activations of token l / 4; d and sum of two tokens.
struct TokenPiece {
    uint2 q;
    float d[2], total[2];

    // Take the lane's share of a tile.
    template <bool WITH_TOTAL>
    __device__ __forceinline__ void load(const u8* tile, int lane) {
        const u8* scales = tile + TILE_Q_N_BYTES + 16 * (lane % 4);
        q = staged<uint2>(tile + 8 * lane);
        if (WITH_TOTAL) {
            const float4 v = staged<float4>(scales);
            d[0] = v.x, d[1] = v.y, total[0] = v.z, total[1] = v.w;
        } else {
            const float2 v = staged<float2>(scales);
            d[0] = v.x, d[1] = v.y;
        }
    }
};

// Coefficients of the four rows of a lane, handed out by the lanes that have computed them.
template <class F>
struct Coefficients {
    float scale[4], minimum[4], high[4], factor[4], offset[4];

    __device__ __forceinline__ void share(const RowScale& own, int lane) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int from = lane / 4 + 8 * r;
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
__device__ __forceinline__ void operands(const u8* stage, int thread, u32 (&a)[2][4], u32 (&a_high)[2][4]) {
    const int t = thread % 4, row = row_tile(thread) * TILE_ROWS + thread % WARP / 4;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const uint2 words = Fragment<F>::words(Fragment<F>::load(stage, row + 8 * r, tile_warp(thread), t), t);
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

// First sub-block of a round's first step: the residues of each warp in the order in which the tree pairs them.
__device__ __forceinline__ int first_of_round(int round) {
    static_assert(STEP_SUBS == 4 && N_ROUNDS == 8, "three bits in reverse, times four");
    return __brev(round) >> 27;
}

// The steps of all rounds one after the other; s is a step's first sub-block, and not one of the row behind the last step.
struct Step {
    int round, s;

    __device__ __forceinline__ void advance(int n_sub) {
        s += WARP;
        while (s >= n_sub && ++round < N_ROUNDS) s = first_of_round(round);
    }
};

// The stages of a block, filled and used in turn. A stage ends in its barrier. The state goes on from one matrix to the
// next.
struct Stages {
    static constexpr int ACTIVATIONS_N_BYTES = STEP_SUBS * MAX_TOKEN_TILES * TILE_N_BYTES;
    static constexpr int BARRIER_AT = ACTIVATIONS_N_BYTES + WEIGHTS_N_BYTES;
    static constexpr int STAGE_N_BYTES = BARRIER_AT + 16, N_BYTES = N_STAGES * STAGE_N_BYTES;
    u8 *first, *now, *used;  // used: the one before now
    u32 parity;              // of now's round

    __device__ __forceinline__ static u64* barrier(u8* stage) { return reinterpret_cast<u64*>(stage + BARRIER_AT); }

    __device__ __forceinline__ void init(u8* shared) {
        first = now = shared, used = last(), parity = 0;
        if (threadIdx.x == 0) {
            for (int i = 0; i < N_STAGES; ++i) init_barrier(barrier(first + i * STAGE_N_BYTES), 1);
        }
        publish_barriers();
        __syncthreads();
    }
    __device__ __forceinline__ u8* last() const { return first + (N_STAGES - 1) * STAGE_N_BYTES; }
    __device__ __forceinline__ u8* after(u8* stage) const { return stage == last() ? first : stage + STAGE_N_BYTES; }
    // Wait until this stage is full, and all threads have used the one before.
    __device__ __forceinline__ void wait() const {
        wait_chunks<N_STAGES - 2>();
        if (HAS_BULK_COPIES) wait_for(barrier(now), parity);
        __syncthreads();
    }
    __device__ __forceinline__ void pass() {
        parity ^= u32(now == last());
        used = now;
        now = after(now);
    }
};

// A matrix and the tokens on their way through the stages, and what a warp makes of them.
template <class F>
struct Steps {
    BlockRows<F> rows;
    const u8* tiles;  // of the block's tokens: of one sub-block after the other
    int n_tiles;
    Step asked;
    u32 largest;  // bits of the largest scale: infinity or NaN if any is not finite

    __device__ __forceinline__ void ask_weights(u8* stage, int s) const {
        Fragment<F>::Stage::ask(stage + Stages::ACTIVATIONS_N_BYTES, rows, s);
    }
    __device__ __forceinline__ void ask_activations(u8* stage, int s) const {
        const int n_bytes = STEP_SUBS * n_tiles * TILE_N_BYTES;
        if (rows.thread == 0) expect_bytes(Stages::barrier(stage), n_bytes);
        copy_run<PACK_THREADS>(stage, tiles + i64(s) * (n_tiles * TILE_N_BYTES), n_bytes, Stages::barrier(stage));
    }

    // Ask for the first steps, all but one stage full.
    __device__ __forceinline__ void start(const Stages& stages) {
        Step step = asked;
        u8* stage = stages.now;
#pragma unroll
        for (int i = 0; i < N_STAGES - 1; ++i, stage = stages.after(stage), step.advance(rows.n_sub))
            if (step.s < rows.n_sub) ask_weights(stage, step.s);
        dependency_wait();  // weights are on their way while the kernel before ends
        stage = stages.now;
#pragma unroll
        for (int i = 0; i < N_STAGES - 1; ++i, stage = stages.after(stage), asked.advance(rows.n_sub)) {
            if (asked.s < rows.n_sub) ask_activations(stage, asked.s);
            commit_chunks();
        }
    }

    // Ask for the step that goes to the stage which was used last.
    __device__ __forceinline__ void ask(const Stages& stages) {
        if (asked.s < rows.n_sub) {
            ask_weights(stages.used, asked.s);
            ask_activations(stages.used, asked.s);
            asked.advance(rows.n_sub);
        }
        commit_chunks();
    }

    __device__ __forceinline__ Coefficients<F> coefficients(const u8* weights, int s) {
        const int r = row_tile(rows.thread) * TILE_ROWS + rows.thread % WARP;
        const ScalesAt at{weights, r, tile_warp(rows.thread), rows.sub_block(r, s)};
        RowScale scale;
        Fragment<F>::scales(Fragment<F>::load_meta(at), s % 8, scale);
        largest = max(largest, __float_as_uint(fabsf(scale.scale)));
        Coefficients<F> c;
        c.share(scale, rows.thread % WARP);
        return c;
    }

    // Add the terms of this warp's sub-block s.
    __device__ __forceinline__ void add(const u8* stage, int s, Accumulators& acc) {
        const int lane = rows.thread % WARP;
        const u8 *tile = stage + tile_warp(rows.thread) * n_tiles * TILE_N_BYTES;
        const u8* weights = stage + Stages::ACTIVATIONS_N_BYTES;
        TokenPiece tokens[2];
        tokens[0] = TokenPiece{}, tokens[1] = TokenPiece{};
        tokens[0].template load<F::HAS_MIN>(tile, lane);
        u32 a[2][4], a_high[2][4];
        operands<F>(weights, rows.thread, a, a_high);
        const Coefficients<F> c = coefficients(weights, s);
        Dots<F> dots[2];
        dots[0].multiply(a, a_high, tokens[0].q);
#pragma unroll
        for (int n = 0; n < MAX_TOKEN_TILES; ++n) {
            if (n >= n_tiles) break;
            if (n + 1 < MAX_TOKEN_TILES) {  // behind the last one there is something in the stage, too
                tokens[(n + 1) % 2].template load<F::HAS_MIN>(tile + (n + 1) * TILE_N_BYTES, lane);
                dots[(n + 1) % 2].multiply(a, a_high, tokens[(n + 1) % 2].q);
            }
            add_terms<F>(c, dots[n % 2], tokens[n % 2], acc[n]);
        }
    }
};

// Shared memory of a tile of rows: TILE_SUMS floats, at first two sets of sums for each warp, at the end results in one
// set. A value lies where the tensor cores leave it, at slot(row, token); thread i of the tile has the results at
// TILE_THREADS * n + i. Behind those of all tiles are the stages.
constexpr int TILE_SLOTS = TILE_ROWS * TILE_TOKENS, N_SLOTS = MAX_TOKEN_TILES * TILE_SLOTS;
constexpr int TILE_SUMS = 2 * STEP_SUBS * N_SLOTS;
constexpr int SUMS_N_BYTES = N_ROW_TILES * TILE_SUMS * 4;
constexpr int N_RESULTS = N_SLOTS / TILE_THREADS;  // of a thread: rows of both tiles of 16 in turn

__device__ __forceinline__ float* tile_sums(u8* shared) {
    return reinterpret_cast<float*>(shared) + row_tile() * TILE_SUMS;
}
__device__ __forceinline__ int slot(int row, int token) {
    const int i = row / 16 * 4 + row % 16 / 8 * 2 + token % 2;
    return token / TILE_TOKENS * TILE_SLOTS + i * WARP + row % 8 * 4 + token % TILE_TOKENS / 2;
}
__device__ __forceinline__ int row_of_result(int n, int thread) {
    return n % 2 * 16 + tile_warp(thread) / 2 * 8 + thread % WARP / 4;
}
__device__ __forceinline__ int token_of_result(int n, int thread) {
    return n / 2 * TILE_TOKENS + thread % 4 * 2 + tile_warp(thread) % 2;
}

// Take a finished residue: kept after an even round; after an odd one added to its pair, and two such sums to one of
// the two halves that a warp's residues make in the tree.
__device__ __forceinline__ void finish_round(int round, const Accumulators& acc, Accumulators& kept, float* warp_sums) {
    float* half = warp_sums + round / 4 * STEP_SUBS * N_SLOTS;
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
        float v[STEP_SUBS];
#pragma unroll
        for (int w = 0; w < STEP_SUBS; ++w) {
            const float* half = sums + w * N_SLOTS + n * TILE_THREADS + tile_thread();
            v[w] = add(half[0], half[STEP_SUBS * N_SLOTS]);
        }
        results[n] = add(add(v[0], v[2]), add(v[1], v[3]));
    }
}

// One warp a row at a time, one token after the other, for blocks with a scale that is not finite, and for rows that are
// not whole steps (only Q8_0 has any).
template <class F>
__device__ __noinline__ void damaged_results(const u8* w, int n_out, Pack pack, Block block, float* sums) {
    const int n_sub = pack.n_sub();
    for (int r = tile_warp(); r < TILE_ROWS && block.tile_row() + r < n_out; r += STEP_SUBS) {
        const i64 row = block.tile_row() + r;
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
    for (int n = 0; n < N_RESULTS; ++n) results[n] = sums[n * TILE_THREADS + tile_thread()];
}

// Sum all steps to the two halves of each warp; returns whether the warp has seen a scale that is not finite.
template <class F>
__device__ __forceinline__ bool sum_steps(const u8* w, int n_out, const Pack& pack, const Block& block, float* sums,
                                          Stages& stages) {
    const int n_sub = pack.n_sub();
    const int thread = thread_anew();
    float* warp_sums = sums + tile_warp(thread) * N_SLOTS + thread % WARP;
    const u8* tiles = pack.tiles + i64(block.tile) * n_sub * TILE_N_BYTES;
    Steps<F> steps{{w, n_out, n_sub, block.row, thread}, tiles, block.n_tiles, {0, 0}, 0};
    steps.start(stages);
    Accumulators kept = {};
#pragma unroll 1
    for (int round = 0; round < N_ROUNDS; ++round) {
        Accumulators acc = {};
#pragma unroll 1
        for (int s = first_of_round(round); s < n_sub; s += WARP) {
            stages.wait();
            steps.ask(stages);
            steps.add(stages.now, s + tile_warp(thread), acc);
            stages.pass();
        }
        finish_round(round, acc, kept, warp_sums);
    }
    return steps.largest >= 0x7f800000u;
}

template <class F>
__device__ __forceinline__ void quantized_results(const u8* w, int n_out, const Pack& pack, const Block& block,
                                                 float* sums, Stages& stages, float (&results)[N_RESULTS]) {
    bool is_damaged = pack.n_sub() % STEP_SUBS > 0;
    if (is_damaged)
        dependency_wait();
    else {
        is_damaged = sum_steps<F>(w, n_out, pack, block, sums, stages);
        fold_warps(sums, results);
    }
    if (__syncthreads_or(is_damaged)) {
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
    dependency_wait();
    for (int r = tile_warp(); r < TILE_ROWS && block.tile_row() + r < n_out; r += STEP_SUBS) {
        for (int n = 0; n < block.n_tiles; ++n) {
            const float value = float_sum<F>(w, block.tile_row() + r, pack, block.tile + n);
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

// results[n] is that of row row_of_result(n, thread) of the tile and token token_of_result(n, thread) of the block.
__device__ __forceinline__ void block_results(const u8* w, int format, int n_out, const Pack& pack, const Block& block,
                                             float* sums, Stages& stages, float (&results)[N_RESULTS]) {
    with_quantized_format(format, [&](auto f) {
        quantized_results<decltype(f)>(w, n_out, pack, block, sums, stages, results);
    });
    with_float_format(format, [&](auto f) { float_results<decltype(f)>(w, n_out, pack, block, sums, results); });
}
