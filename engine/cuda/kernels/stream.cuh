// stream.cuh: rows of weight matrices on their way through shared memory, times one token; the core of the stream_* kernels
// One block a multiprocessor, each with an equal share of consecutive rows, dealt to its warps one by one. Every warp has
// a ring of pieces of rows on the way: it asks for the first pieces before the kernel before has ended, so
// that device memory is busy while the input is waited for, normalised or copied; and it asks for the next piece when
// it has used one. Nothing but the order of the additions (row_dot.cuh) decides the bits, and that is the same.
#pragma once

constexpr int STREAM_WARPS = 16;
constexpr int STREAM_THREADS = STREAM_WARPS * WARP;
constexpr int STRIP = WARP * SUB_BLOCK;  // weights in a strip: a sub-block a lane

// Ask for a run of bytes to be brought to L2, one warp together; the addresses are rounded to lines.
__device__ __forceinline__ void prefetch_run(const u8* from, int n_bytes) {
    for (int at = 128 * (threadIdx.x % WARP); at < n_bytes; at += 128 * WARP) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
    }
}

constexpr int FLOAT_ROW_COST = 7;  // a row of F32 is about seven times as long as one of Q4_K

// Rows begin..end of a matrix or of several behind each other: the share of one block.
struct Share {
    int begin, end;

    // Of n_rows streamed rows; each of the first n_float blocks has a float row besides.
    __device__ __forceinline__ static Share of_block(int n_rows, int n_float) {
        const int n_blocks = gridDim.x;
        const i64 cost = n_rows + i64(FLOAT_ROW_COST) * n_float;
        const bool counts = n_float <= n_blocks && cost >= FLOAT_ROW_COST * n_blocks;
        const i64 shared = counts ? cost : n_rows;
        const auto begin = [&](int block) {
            return int(shared * block / n_blocks) - (counts ? FLOAT_ROW_COST * min(block, n_float) : 0);
        };
        return {begin(blockIdx.x), begin(blockIdx.x + 1)};
    }
    // How many of them fall to warp `warp` of n_warps.
    __device__ __forceinline__ int n_of_warp(int warp, int n_warps) const {
        const int behind = end - begin - warp;
        return behind > 0 ? (behind + n_warps - 1) / n_warps : 0;
    }
};

// A number known at compile time, for calls that must be unrolled.
template <int V>
struct Int {
    static constexpr int value = V;
};

// body(Int<0>), ..., body(Int<N - 1>)
template <int N, int FIRST = 0, class Body>
__device__ __forceinline__ void unrolled(Body body) {
    if constexpr (FIRST < N) {
        body(Int<FIRST>{});
        unrolled<N, FIRST + 1>(body);
    }
}

// A group of 32 activations, its scale and its sum.
struct GroupActivations {
    int4 low, high;
    float2 scale;
};

// Pieces of a row, N_STRIPS strips each (the last may have fewer), laid out in shared memory as in the matrix: strips,
// then their part of the tail. Copies begin and end at multiples of 16 bytes: where the number of strips before it is
// odd, a part of the tail, 8 bytes a strip, begins 8 bytes late, and there is room for that.
template <class F, int N_IN, int N_STRIPS>
struct Pieces {
    static constexpr int OF_ROW = N_IN / STRIP, N = (OF_ROW + N_STRIPS - 1) / N_STRIPS;
    static constexpr bool HAS_TAIL = F::TAIL_N_BYTES > 0;
    static constexpr int TAIL_AT = N_STRIPS * F::STRIP_N_BYTES;
    static constexpr int N_BYTES = (TAIL_AT + N_STRIPS * F::TAIL_N_BYTES + 15) / 16 * 16 + (HAS_TAIL ? 16 : 0);
    static_assert(F::STRIP_N_BYTES % 16 == 0 && F::TAIL_N_BYTES % 8 == 0);

    __device__ __forceinline__ static constexpr int n_strips(int piece) {
        return OF_ROW - piece * N_STRIPS < N_STRIPS ? OF_ROW - piece * N_STRIPS : N_STRIPS;
    }

    // How many bytes late the tail of a piece begins.
    __device__ __forceinline__ static int late(int piece, i64 row) {
        return HAS_TAIL ? 8 * (int(row * OF_ROW + piece * N_STRIPS) & 1) : 0;
    }

    // Ask for piece P of a row.
    template <int P>
    __device__ __forceinline__ static void ask(u8* to, const u8* w, i64 n_out, i64 row, u64* barrier) {
        constexpr int RUN_N_BYTES = n_strips(P) * F::STRIP_N_BYTES;
        const i64 strip = row * OF_ROW + P * N_STRIPS;
        const int late_n_bytes = late(P, row);
        const int tail_n_bytes = HAS_TAIL ? (late_n_bytes + n_strips(P) * F::TAIL_N_BYTES + 15) / 16 * 16 : 0;
        if (threadIdx.x % WARP == 0) expect_bytes(barrier, RUN_N_BYTES + tail_n_bytes);
        copy_run(to, w + strip * F::STRIP_N_BYTES, RUN_N_BYTES, barrier);
        if constexpr (HAS_TAIL) {
            const u8* tail = w + n_out * (OF_ROW * F::STRIP_N_BYTES) + strip * F::TAIL_N_BYTES;
            copy_run(to + TAIL_AT, tail - late_n_bytes, tail_n_bytes, barrier);
        }
    }

    // The term of the lane's sub-block in strip i of a piece whose tail is `late` bytes late; s: its number in a row.
    __device__ __forceinline__ static float term(const u8* piece, int i, int s, const GroupActivations& a, int late,
                                                 const u32* grid) {
        const u8* tail = piece + TAIL_AT + i * F::TAIL_N_BYTES + late;
        const Spot<const u8> spot{piece + i * F::STRIP_N_BYTES, tail, int(threadIdx.x % WARP), STRIP_SUBS};
        const auto raw = F::template load<InShared>(spot);
        return term_of<F>(raw, s, Group(a.low, a.high), a.scale.x, a.scale.y, grid);
    }
};

// What one warp streams: n_rows rows of N_PIECES pieces, N_STAGES pieces on the way at a time. A stage ends in its barrier.
template <int N_PIECES, int N_STAGES, int PIECE_N_BYTES, int N_MATRICES>
struct Ring {
    static constexpr int STAGE_N_BYTES = PIECE_N_BYTES + 16, N_BYTES = N_STAGES * STAGE_N_BYTES;
    u8* stages;
    int n_rows;

    __device__ __forceinline__ static u64* barrier_of(u8* stage) {
        return reinterpret_cast<u64*>(stage + PIECE_N_BYTES);
    }

    // ask(Int<piece>, row, stage, barrier) issues the copies of one piece; row counts the warp's rows.
    template <class Ask>
    __device__ __forceinline__ void fill(Ask ask) const {
        if (threadIdx.x % WARP == 0) {
            for (int i = 0; i < N_STAGES; i++) init_barrier(barrier_of(stages + i * STAGE_N_BYTES), N_MATRICES);
        }
        publish_barriers();
        unrolled<N_STAGES>([&](auto step) {
            constexpr int ROW = step.value / N_PIECES, PIECE = step.value % N_PIECES;
            u8* stage = stages + step.value * STAGE_N_BYTES;
            if (ROW < n_rows) ask(Int<PIECE>{}, ROW, stage, barrier_of(stage));
            end_step();
        });
    }

    // use(Int<piece>, row, stage) is called for each piece in order, when it is there.
    template <class Ask, class Use>
    __device__ __forceinline__ void drain(Ask ask, Use use) const {
        u8* stage = stages;
        u32 parity = 0;
        for (int row = 0; row < n_rows; row++) {
            unrolled<N_PIECES>([&](auto piece) {
                constexpr int ROWS_AHEAD = (piece.value + N_STAGES) / N_PIECES;
                constexpr int ASKED = (piece.value + N_STAGES) % N_PIECES;
                wait_stage<N_STAGES>(barrier_of(stage), parity);
                use(piece, row, stage);
                __syncwarp();
                if (row + ROWS_AHEAD < n_rows) ask(Int<ASKED>{}, row + ROWS_AHEAD, stage, barrier_of(stage));
                end_step();
                const bool wraps = stage == stages + (N_STAGES - 1) * STAGE_N_BYTES;
                stage = wraps ? stages : stage + STAGE_N_BYTES;
                parity ^= u32(wraps);
            });
        }
    }
};

// One token's quantised activations in shared memory, the halves of each group apart: 32 lanes read without conflicts.
template <int N_IN>
struct __align__(16) SharedInput {
    int4 low[N_IN / SUB_BLOCK], high[N_IN / SUB_BLOCK];
    float2 scales[N_IN / SUB_BLOCK];  // the sums as floats, exactly

    __device__ __forceinline__ GroupActivations group(int s) const { return {low[s], high[s], scales[s]}; }

    __device__ __forceinline__ void put_scale(int s, GroupScale scale) {
        scales[s] = make_float2(scale.d, float(scale.total));
    }

    // Copy a quantised token; the block's threads must meet before it is read.
    __device__ __forceinline__ void copy(const i8* q, const GroupScale* from) {
#pragma unroll
        for (int i = threadIdx.x; i < N_IN / 16; i += STREAM_THREADS) {
            (i % 2 == 0 ? low : high)[i / 2] = reinterpret_cast<const int4*>(q)[i];
        }
#pragma unroll
        for (int i = threadIdx.x; i < N_IN / SUB_BLOCK; i += STREAM_THREADS) put_scale(i, from[i]);
    }

    // Quantise a normalised row from the registers of its lanes, and keep it as f32 in `x` where that is given; the
    // block's threads must meet before it is read.
    __device__ __forceinline__ void quantize(const NormRow<N_IN>& row, float scale, float* x) {
#pragma unroll
        for (int i = 0; i < row.N_QUADS; i++) {
            const int quad = row.quad(i), group = quad / 8, word = quad % 8;
            const float4 normed = row.normed(i, scale);
            const QuantizedQuad quantized = quantized_quad(normed);
            reinterpret_cast<u32*>(word < 4 ? low : high)[group * 4 + word % 4] = quantized.q;
            if (word == 0) put_scale(group, quantized.scale);
            if (x != nullptr) store_quad(x, quad, normed);
        }
    }
};

// The token that a kernel normalises itself.
struct NormInput {
    const float* x;
    const float* weight;
    float eps;
};

// Normalise the token and quantise it to shared memory; wait() returns when the token is there.
template <int N_IN, class Wait>
__device__ __forceinline__ void take_normed(SharedInput<N_IN>* to, float* x, const NormInput& from, Wait wait) {
    static_assert(N_IN % (4 * LANES_EMBD) == 0);
    const bool is_lane = threadIdx.x < LANES_EMBD;
    NormRow<N_IN> row;
    if (is_lane) row.load_weight(from.weight);
    wait();
    if (is_lane) row.load(from.x);
    const float scale = row.scale(from.eps);
    if (is_lane) to->quantize(row, scale, x);
    __syncthreads();
}

// The IQ3_S table in shared memory, behind everything else a block has there.
__device__ __forceinline__ const u32* copy_grid(u8* to) {
    u32* grid = reinterpret_cast<u32*>(to);
    for (int i = threadIdx.x; i < IQ3S_GRID_SIZE; i += STREAM_THREADS) grid[i] = iq3s_grid[i];
    return grid;
}

template <class F>
struct is_iq3s {
    static constexpr bool value = false;
};
template <>
struct is_iq3s<IQ3_S> {
    static constexpr bool value = true;
};
