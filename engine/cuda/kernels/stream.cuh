// stream.cuh: rows of weight matrices on their way through shared memory, times one token; the core of the stream_* kernels
// One block a multiprocessor, each with an equal share of consecutive rows, dealt to its warps one by one. Every warp has
// a ring of pieces of rows on the way (cp.async): it asks for the first pieces before the kernel before has ended, so
// that device memory is busy while the input is waited for, normalised or copied; and it asks for the next piece when
// it has used one. Nothing but the order of the additions (row_dot.cuh) decides the bits, and that is the same.
#pragma once

constexpr int STREAM_WARPS = 16;
constexpr int STREAM_THREADS = STREAM_WARPS * WARP;
constexpr int STRIP = WARP * SUB_BLOCK;  // weights in a strip: a sub-block a lane

template <int N_BYTES>
__device__ __forceinline__ void copy_async(u8* to, const u8* from) {
    const u32 address = u32(__cvta_generic_to_shared(to));
    if constexpr (N_BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(N_BYTES) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N_PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N_PENDING) : "memory");
}

// Ask for the lines of a run of bytes to be brought to L2, one warp together.
__device__ __forceinline__ void prefetch_run(const u8* from, int n_bytes) {
    for (int at = 128 * (threadIdx.x % WARP); at < n_bytes; at += 128 * WARP) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
    }
}

// Rows begin..end of a matrix or of several behind each other: the share of one block.
struct Share {
    int begin, end;

    __device__ __forceinline__ static Share of_block(int n_rows) {
        return {int(i64(n_rows) * blockIdx.x / gridDim.x), int(i64(n_rows) * (blockIdx.x + 1) / gridDim.x)};
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

// Pieces of a row, N_STRIPS strips each (the last may have fewer), laid out in shared memory as matrices of their own.
template <class F, int N_IN, int N_STRIPS>
struct Pieces {
    static constexpr int OF_ROW = N_IN / STRIP, N = (OF_ROW + N_STRIPS - 1) / N_STRIPS;
    static constexpr int N_SUB = N_STRIPS * WARP, N_BYTES = (N_SUB / F::SUBS * F::BLOCK_N_BYTES + 15) / 16 * 16;

    __device__ __forceinline__ static constexpr int n_strips(int piece) {
        return OF_ROW - piece * N_STRIPS < N_STRIPS ? OF_ROW - piece * N_STRIPS : N_STRIPS;
    }

    // Ask for piece P of a row.
    template <int P>
    __device__ __forceinline__ static void ask(u8* to, const u8* w, i64 n_out, i64 row) {
#pragma unroll
        for (int plane = 0; plane < F::N_PLANES; plane++) {
            const int strip_n_bytes = F::strip_n_bytes(plane);
            const u8* from = w + (row * OF_ROW + P * N_STRIPS) * strip_n_bytes;
            if (strip_n_bytes % 16 == 0)
                copy_run<16>(to, from, n_strips(P) * strip_n_bytes);
            else
                copy_run<8>(to, from, n_strips(P) * strip_n_bytes);
            to += N_STRIPS * strip_n_bytes;
            w += n_out * (OF_ROW * strip_n_bytes);
        }
    }

    // The term of the lane's sub-block in strip i of a piece; s is its number in the row.
    template <class Activations>
    __device__ __forceinline__ static float term(const u8* piece, int i, int s, const Activations& a, const u32* grid) {
        Weights w;
        F::decode(F::template load<InShared>(piece, N_SUB, i * WARP + int(threadIdx.x % WARP)), s, w, grid);
        return sub_block_term<F>(w, a.low, a.high, a.scale);
    }

  private:
    template <int UNIT>
    __device__ __forceinline__ static void copy_run(u8* to, const u8* from, int n_bytes) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int at = 0; at < n_bytes; at += WARP * UNIT) {
            if (at + UNIT * (lane + 1) <= n_bytes) copy_async<UNIT>(to + UNIT * lane + at, from + UNIT * lane + at);
        }
    }
};

// What one warp streams: n_rows rows of N_PIECES pieces, N_STAGES pieces on the way at a time.
template <int N_PIECES, int N_STAGES, int STAGE_N_BYTES>
struct Ring {
    u8* stages;
    int n_rows;

    // ask(Int<piece>, row, stage) issues the copies of one piece; row counts the warp's rows.
    template <class Ask>
    __device__ __forceinline__ void fill(Ask ask) const {
        unrolled<N_STAGES>([&](auto step) {
            constexpr int ROW = step.value / N_PIECES, PIECE = step.value % N_PIECES;
            if (ROW < n_rows) ask(Int<PIECE>{}, ROW, stages + step.value * STAGE_N_BYTES);
            commit_copies();
        });
    }

    // use(Int<piece>, row, stage) is called for each piece in order, when it is there.
    template <class Ask, class Use>
    __device__ __forceinline__ void drain(Ask ask, Use use) const {
        u8* stage = stages;
        for (int row = 0; row < n_rows; row++) {
            unrolled<N_PIECES>([&](auto piece) {
                constexpr int ROWS_AHEAD = (piece.value + N_STAGES) / N_PIECES;
                constexpr int ASKED = (piece.value + N_STAGES) % N_PIECES;
                wait_copies<N_STAGES - 1>();
                __syncwarp();
                use(piece, row, stage);
                __syncwarp();
                if (row + ROWS_AHEAD < n_rows) ask(Int<ASKED>{}, row + ROWS_AHEAD, stage);
                commit_copies();
                stage = stage == stages + (N_STAGES - 1) * STAGE_N_BYTES ? stages : stage + STAGE_N_BYTES;
            });
        }
    }
};

struct GroupActivations {
    int4 low, high;
    GroupScale scale;
};

// One token's quantised activations in shared memory, the halves of each group apart: 32 lanes read without conflicts.
template <int N_IN>
struct __align__(16) SharedInput {
    int4 low[N_IN / SUB_BLOCK], high[N_IN / SUB_BLOCK];
    GroupScale scales[N_IN / SUB_BLOCK];

    __device__ __forceinline__ GroupActivations group(int s) const { return {low[s], high[s], scales[s]}; }

    // Copy a quantised token; the block's threads must meet before it is read.
    __device__ __forceinline__ void copy(const i8* q, const GroupScale* from) {
#pragma unroll
        for (int i = threadIdx.x; i < N_IN / 16; i += STREAM_THREADS) {
            (i % 2 == 0 ? low : high)[i / 2] = reinterpret_cast<const int4*>(q)[i];
        }
#pragma unroll
        for (int i = threadIdx.x; i < N_IN / SUB_BLOCK; i += STREAM_THREADS) scales[i] = from[i];
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
            if (word == 0) scales[group] = quantized.scale;
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

// Wait for the kernel before, normalise the token and quantise it to shared memory; fill: what may start before.
template <int N_IN, class Fill>
__device__ __forceinline__ void take_normed(SharedInput<N_IN>* to, float* x, const NormInput& from, Fill fill) {
    static_assert(N_IN % (4 * LANES_EMBD) == 0);
    const bool is_lane = threadIdx.x < LANES_EMBD;
    NormRow<N_IN> row;
    if (is_lane) row.load_weight(from.weight);
    fill();
    dependency_wait();
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
