// stream.cuh: rows of weight matrices on their way through shared memory, times one token; the core of the stream_* kernels
// One block a multiprocessor, each with an equal share of consecutive rows. One warp does nothing but ask for them, some
// rows at a time, which lie behind each other in memory: it begins before the kernel before has ended, so that device
// memory is busy while the input is waited for, normalised or copied, and asks for the next rows when those that had
// their place have been used. The other warps each take a row of what has come. Nothing but the order of the additions
// (row_dot.cuh) decides the bits, and that is the same.
#pragma once

constexpr int STREAM_WARPS = 16;  // that take rows
constexpr int STREAM_THREADS = STREAM_WARPS * WARP;
constexpr int STREAM_BLOCK = STREAM_THREADS + WARP;  // with the warp that asks
constexpr int STRIP = WARP * SUB_BLOCK;  // weights in a strip: a sub-block a lane
constexpr int EARLY_N_BYTES = 65536;     // that are asked for before the input

__device__ __forceinline__ bool is_asking_warp() { return threadIdx.x >= STREAM_THREADS; }

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

    // Steps of n_of_step rows.
    __device__ __forceinline__ int n_steps(int n_of_step) const { return (end - begin + n_of_step - 1) / n_of_step; }
};

// A group of 32 activations, its scale and its sum.
struct GroupActivations {
    int4 low, high;
    float2 scale;
};

// A thread's part of a quantised token on its way to shared memory.
template <int N_IN>
struct LoadedInput {
    static constexpr int N_QUARTERS = (N_IN / 16 + STREAM_THREADS - 1) / STREAM_THREADS;
    static constexpr int N_SCALES = (N_IN / SUB_BLOCK + STREAM_THREADS - 1) / STREAM_THREADS;
    int4 q[N_QUARTERS];
    GroupScale scales[N_SCALES];

    __device__ __forceinline__ void load(const i8* from_q, const GroupScale* from_scales) {
#pragma unroll
        for (int j = 0; j < N_QUARTERS; j++) {
            const int i = threadIdx.x + j * STREAM_THREADS;
            if (i < N_IN / 16) q[j] = reinterpret_cast<const int4*>(from_q)[i];
        }
#pragma unroll
        for (int j = 0; j < N_SCALES; j++) {
            const int i = threadIdx.x + j * STREAM_THREADS;
            if (i < N_IN / SUB_BLOCK) scales[j] = from_scales[i];
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

    // Copy a quantised token, loaded before; the block's threads must meet before it is read.
    __device__ __forceinline__ void put(const LoadedInput<N_IN>& from) {
#pragma unroll
        for (int j = 0; j < from.N_QUARTERS; j++) {
            const int i = threadIdx.x + j * STREAM_THREADS;
            if (i < N_IN / 16) (i % 2 == 0 ? low : high)[i / 2] = from.q[j];
        }
#pragma unroll
        for (int j = 0; j < from.N_SCALES; j++) {
            const int i = threadIdx.x + j * STREAM_THREADS;
            if (i < N_IN / SUB_BLOCK) put_scale(i, from.scales[j]);
        }
    }

    // Quantise N quads of each lane of a normalised row, from quad `first` on, as far as there are so many, and keep them
    // as f32 in `x` where that is given; the block's threads must meet before it is read.
    template <int N>
    __device__ __forceinline__ void quantize(const NormRow<N_IN>& row, int first, float scale, float* x) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (first + i >= row.N_QUADS) continue;
            const int quad = row.quad(first + i), group = quad / 8, word = quad % 8;
            const float4 normed = row.normed(i, scale);
            const QuantizedQuad quantized = quantized_quad(normed);
            reinterpret_cast<u32*>(word < 4 ? low : high)[group * 4 + word % 4] = quantized.q;
            if (word == 0) put_scale(group, quantized.scale);
            if (x != nullptr) store_quad(x, quad, normed);
        }
    }
};

// A bulk copy is up to a quarter slower where its source and its place in shared memory differ in their position within a
// line (measured on an H200).
constexpr int LINE_N_BYTES = 128;
constexpr int whole_lines(int n_bytes) { return (n_bytes + LINE_N_BYTES - 1) / LINE_N_BYTES * LINE_N_BYTES; }
__device__ __forceinline__ int within_line(i64 at) { return int(at) & (LINE_N_BYTES - 1); }

// Rows of a matrix as a stage holds them: the strips of up to N rows, then their part of the tail; both as far behind the
// begin of a line as they are in memory, where the matrix begins with a line. Copies begin and end at multiples of 16
// bytes, so what lies before and behind a tail of 8 bytes a strip may come with it: behind the last row up to 8 bytes of
// what the weights' memory has there, since each block of it is padded to 256 bytes.
template <class F, int N_IN, int N>
struct StagedRows {
    static constexpr int OF_ROW = N_IN / STRIP;
    static constexpr bool HAS_TAIL = F::TAIL_N_BYTES > 0;
    static constexpr int ROW_N_BYTES = OF_ROW * F::STRIP_N_BYTES, TAIL_OF_ROW_N_BYTES = OF_ROW * F::TAIL_N_BYTES;
    static constexpr int TAIL_AT = whole_lines(N * ROW_N_BYTES + LINE_N_BYTES - 16);
    static constexpr int N_BYTES = TAIL_AT + (HAS_TAIL ? whole_lines(N * TAIL_OF_ROW_N_BYTES + LINE_N_BYTES) : 0);
    static_assert(F::STRIP_N_BYTES % 16 == 0 && F::TAIL_N_BYTES % 8 == 0);

    // Where in a matrix of n_out rows the strips and the tail of row `row` begin.
    __device__ __forceinline__ static i64 strips_at(i64 row) { return row * ROW_N_BYTES; }
    __device__ __forceinline__ static i64 tail_at(i64 n_out, i64 row) {
        return n_out * ROW_N_BYTES + row * TAIL_OF_ROW_N_BYTES;
    }

    __device__ __forceinline__ static int tail_n_bytes(i64 n_out, i64 row, int n_rows) {
        return HAS_TAIL ? (int(tail_at(n_out, row) & 15) + n_rows * TAIL_OF_ROW_N_BYTES + 15) / 16 * 16 : 0;
    }

    // Bytes that copy() copies.
    __device__ __forceinline__ static int copied_n_bytes(i64 n_out, i64 row, int n_rows) {
        return n_rows * ROW_N_BYTES + tail_n_bytes(n_out, row, n_rows);
    }

    // Ask for n_rows rows from `row` on.
    __device__ __forceinline__ static void copy(u8* to, const u8* w, i64 n_out, i64 row, int n_rows, u64* barrier) {
        const i64 strips = strips_at(row);
        copy_run(to + within_line(strips), w + strips, n_rows * ROW_N_BYTES, barrier);
        if constexpr (HAS_TAIL) {
            const i64 tail = tail_at(n_out, row) / 16 * 16;
            copy_run(to + TAIL_AT + within_line(tail), w + tail, tail_n_bytes(n_out, row, n_rows), barrier);
        }
    }

    // The lane's term of strip `strip` of row i of a stage whose rows begin with `first`.
    __device__ __forceinline__ static float term(const u8* stage, i64 n_out, i64 first, int i, int strip,
                                                 const SharedInput<N_IN>* h, const u32* grid) {
        const int lane = threadIdx.x % WARP, s = strip * WARP + lane;
        const u8* strips = stage + within_line(strips_at(first)) + i * ROW_N_BYTES;
        const u8* tail = stage + TAIL_AT + within_line(tail_at(n_out, first)) + i * TAIL_OF_ROW_N_BYTES;
        const Spot<const u8> spot{strips + strip * F::STRIP_N_BYTES, tail + strip * F::TAIL_N_BYTES, lane, STRIP_SUBS};
        const auto raw = F::template load<InShared>(spot);
        const GroupActivations a = h->group(s);
        return term_of<F>(raw, s, Group(a.low, a.high), a.scale.x, a.scale.y, grid);
    }

    // The lane's sum over row i of a stage.
    __device__ __forceinline__ static float sum(const u8* stage, i64 n_out, i64 first, int i,
                                                const SharedInput<N_IN>* h, const u32* grid) {
        float acc = 0.0f;
#pragma unroll
        for (int strip = 0; strip < OF_ROW; strip++) acc = add(acc, term(stage, n_out, first, i, strip, h, grid));
        return acc;
    }
};

// What a block streams, in steps of up to N_OF_STAGE rows, N_STAGES steps on the way. Group g of N_OF_STAGE warps takes
// the steps g, g + N_GROUPS, ..., a row a warp. It thus sees every round of its stages, which it must: a barrier only
// tells whether a round is odd.
template <int N_STAGES, int N_OF_STAGE, int N_GROUPS, int STAGE_N_BYTES>
struct Ring {
    static constexpr int N_BYTES = N_STAGES * (STAGE_N_BYTES + 16);
    static constexpr int N_FIT = EARLY_N_BYTES / STAGE_N_BYTES;
    static constexpr int N_EARLY = N_FIT < 1 ? 1 : N_FIT < N_STAGES ? N_FIT : N_STAGES;
    static_assert(N_STAGES % N_GROUPS == 0 && N_OF_STAGE * N_GROUPS <= STREAM_WARPS && STAGE_N_BYTES % LINE_N_BYTES == 0);
    u8* stages;
    int n_steps;

    __device__ __forceinline__ u8* stage(int step) const { return stages + step % N_STAGES * STAGE_N_BYTES; }
    // Rounds of `there` end when a stage has come, those of `used` when it has been used.
    __device__ __forceinline__ u64* there(int step) const {
        return reinterpret_cast<u64*>(stages + N_STAGES * STAGE_N_BYTES) + step % N_STAGES * 2;
    }
    __device__ __forceinline__ u64* used(int step) const { return there(step) + 1; }
    __device__ __forceinline__ static u32 parity(int step) { return step / N_STAGES & 1; }

    // The asking warp: ask(step, stage, barrier) issues the copies of a step. First for a few steps, since what the other
    // warps load themselves would wait behind the copies.
    template <class Ask>
    __device__ __forceinline__ void begin(Ask ask) const {
        if (threadIdx.x % WARP == 0) {
            for (int i = 0; i < N_STAGES; i++) {
                init_barrier(there(i), HAS_BULK_COPIES ? 1 : WARP);
                init_barrier(used(i), N_OF_STAGE);
            }
        }
        publish_barriers();
        ask_for(0, N_EARLY, ask);
    }
    // Then for as many as there is room for.
    template <class Ask>
    __device__ __forceinline__ void fill_up(Ask ask) const {
        ask_for(N_EARLY, N_STAGES, ask);
    }
    // Then for the others, whenever one has been used.
    template <class Ask>
    __device__ __forceinline__ void keep_up(Ask ask) const {
        ask_for(N_STAGES, n_steps, ask);
    }

    // The other warps: finish(step, i, sum(step, i, stage)) for each row i of a stage of this one, in order, when it is
    // there. The stage is free for the next rows before finish() begins.
    template <class Sum, class Finish>
    __device__ __forceinline__ void drain(Sum sum, Finish finish) const {
        const int warp = threadIdx.x / WARP;
        if (warp >= N_OF_STAGE * N_GROUPS) return;
#pragma unroll 1
        for (int step = warp / N_OF_STAGE; step < n_steps; step += N_GROUPS) {
            wait_for(there(step), parity(step));
            const auto sums = sum(step, warp % N_OF_STAGE, stage(step));
            __syncwarp();
            if (threadIdx.x % WARP == 0) arrive(used(step));
            finish(step, warp % N_OF_STAGE, sums);
        }
    }

private:
    template <class Ask>
    __device__ __forceinline__ void ask_for(int first, int end, Ask ask) const {
#pragma unroll 1
        for (int step = first; step < min(end, n_steps); step++) {
            if (step >= N_STAGES) wait_for(used(step), parity(step) ^ 1);
            ask(step, stage(step), there(step));
            end_copies(there(step));
        }
    }
};

// The token that a kernel normalises itself.
struct NormInput {
    const float* x;
    const float* weight;
    float eps;
};

// Normalise the token and quantise it to shared memory; wait() returns when the token is there, go_on() is called when
// it has been asked for.
template <int N_IN, class Wait, class GoOn>
__device__ __forceinline__ void take_normed(SharedInput<N_IN>* to, float* x, const NormInput& from, Wait wait,
                                            GoOn go_on) {
    static_assert(N_IN % (4 * LANES_EMBD) == 0);
    // The first 256 threads are the lanes that sum. The second 256 quantise half of the lanes' quads in their place.
    static_assert(STREAM_THREADS == 2 * LANES_EMBD);
    constexpr int HALF = (NormRow<N_IN>::N_QUADS + 1) / 2;
    const int first = threadIdx.x < LANES_EMBD ? 0 : HALF;
    NormRow<N_IN> row;
    if (!is_asking_warp()) row.load_weight(from.weight, first, HALF);
    wait();
    if (!is_asking_warp()) row.load(from.x, first);
    go_on();
    const float scale = row.scale(from.eps);
    if (!is_asking_warp()) to->template quantize<HALF>(row, first, scale, x);
    __syncthreads();
}

// The IQ3_S table in shared memory, behind everything else a block has there.
__device__ __forceinline__ const u32* copy_grid(u8* to) {
    u32* grid = reinterpret_cast<u32*>(to);
    if (is_asking_warp()) return grid;
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
