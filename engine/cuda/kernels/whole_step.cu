// whole_step: one decode step in one launch: the kernels of a step one after the other, with a barrier over the grid
//   between them, while the weights of the rows to come are copied across these borders
// ops (n_ops) in the order of the forward pass (whole_step.py), words (2) u32, zero before the first launch and after
//   each; Ops: the classes of ops that the model has, as ops[i].kind counts them
// bytes    those of the ops
// launch   grid (blocks, at most one a multiprocessor), block (512), dynamic shared memory, cooperative
// numerics those of the kernels: the same device functions run here
// order    Every warp has a ring of pieces of rows (stream.cuh), and asks for the next piece of the step whenever it has
//          used one: while a block waits or does something else, the next rows of weights come until the ring is full.
//          No op begins to read before all blocks have ended the op before.
// deadlock Cooperative launches are refused unless all blocks are resident, so a block that waits for the grid waits
//          for running ones. A block arrives at a barrier after finitely many pieces of its own: each was asked for by
//          the warp that waits for it, before it waits, and weights are never written; pieces arrive in the order in
//          which they are used. All blocks run the same ops, and so count the same barriers.
constexpr int MAX_PARTS = 4, ARGUMENTS_N_BYTES = 160;

// Rows of one matrix: strips and their tail, and where they go in a stage.
struct StreamPart {
    const u8 *w, *tail;  // tail: null where there is none
    int n_rows, strip_n_bytes, stage_at, unused;
};

// Matrices whose rows follow each other, or, as a pair, go together.
struct Stream {
    StreamPart part[MAX_PARTS];
    int strips_of_row, n_strips;  // of a row, and of a piece of it
    int is_pair, unused;
};

struct StepOp {
    int kind;
    int n_streamed, n_float;  // rows of both kinds, zero where nothing is streamed
    int unused;
    Stream streamed, floats;
    __align__(8) u8 arguments[ARGUMENTS_N_BYTES];
};

// The rows of an op that fall to a warp: the last warp takes the rows of floats where there are any.
struct OwnRows {
    int row, step, end;
    const Stream* stream;

    __device__ __forceinline__ static OwnRows of(const StepOp& op) {
        const int warp = threadIdx.x / WARP, n_warps = STREAM_WARPS - (op.n_float > 0);
        if (warp == n_warps) return {int(blockIdx.x), int(gridDim.x), op.n_float, &op.floats};
        const Share share = Share::of_block(op.n_streamed, op.n_float);
        return {share.begin + warp, n_warps, share.end, &op.streamed};
    }
};

// What a warp asks for next. It lies in shared memory, since it is of no use to what the warp computes.
struct Asked {
    OwnRows rows;
    int op, piece;
};

__device__ __forceinline__ u8* dynamic_shared() {
    extern __shared__ __align__(16) u8 shared[];
    return shared;
}

// What one warp streams through a step.
template <int N_STAGES, int STAGE_N_BYTES>
struct Flow {
    static constexpr int SLOT_N_BYTES = STAGE_N_BYTES + 16, N_BYTES = N_STAGES * SLOT_N_BYTES + int(sizeof(Asked));
    u8* stages;
    const StepOp* ops;
    int n_ops;
    int at;  // of the stage in use
    u32 parity;

    // The flow of this warp, and back: stages begin at even bytes.
    __device__ __forceinline__ static Flow at_place(const StepOp* ops, int n_ops, u32 place) {
        return {dynamic_shared() + threadIdx.x / WARP * N_BYTES, ops, n_ops, int(place & ~1u), place & 1};
    }
    __device__ __forceinline__ u32 place() const { return u32(at) | parity; }

    __device__ __forceinline__ static u64* barrier_of(u8* stage) {
        return reinterpret_cast<u64*>(stage + STAGE_N_BYTES);
    }
    __device__ __forceinline__ Asked* asked() const {
        return reinterpret_cast<Asked*>(stages + N_STAGES * SLOT_N_BYTES);
    }

    __device__ __forceinline__ void start() const {
        if (threadIdx.x % WARP == 0) {
            for (int i = 0; i < N_STAGES; i++) init_barrier(barrier_of(stages + i * SLOT_N_BYTES), 1);
        }
        publish_barriers();
        Asked next{OwnRows::of(ops[0]), 0, 0};
        skip_ended(next);
        put(next);
#pragma unroll 1
        for (int i = 0; i < N_STAGES; i++) ask(stages + i * SLOT_N_BYTES);
    }

    __device__ __forceinline__ void put(const Asked& next) const {
        __syncwarp();
        if (threadIdx.x % WARP == 0) *asked() = next;
        __syncwarp();
    }

    __device__ __forceinline__ void skip_ended(Asked& next) const {
        while (next.rows.row >= next.rows.end && ++next.op < n_ops) next.rows = OwnRows::of(ops[next.op]);
    }

    // Ask for the step's next piece, if there is one.
    __device__ __forceinline__ void ask(u8* to) const {
        Asked next = *asked();
        if (next.op < n_ops) {
            copy_piece(next, *next.rows.stream, to);
            if (++next.piece * next.rows.stream->n_strips >= next.rows.stream->strips_of_row) {
                next.piece = 0;
                next.rows.row += next.rows.step;
                skip_ended(next);
            }
            put(next);
        }
        end_step();
    }

    __device__ __forceinline__ static void copy_piece(const Asked& next, const Stream& from, u8* to) {
        const int n = min(from.n_strips, from.strips_of_row - next.piece * from.n_strips);
        int first = 0, row = next.rows.row;
        if (!from.is_pair)
            while (row >= from.part[first].n_rows) row -= from.part[first++].n_rows;
        const i64 strip = i64(row) * from.strips_of_row + next.piece * from.n_strips;
        const int late = 8 * (int(strip) & 1), tail_n_bytes = (late + 8 * n + 15) / 16 * 16;
        int n_bytes = 0;
#pragma unroll 1
        for (int i = first; i <= first + from.is_pair; i++) {
            n_bytes += n * from.part[i].strip_n_bytes + (from.part[i].tail != nullptr ? tail_n_bytes : 0);
        }
        if (threadIdx.x % WARP == 0) expect_bytes(barrier_of(to), n_bytes);
#pragma unroll 1
        for (int i = first; i <= first + from.is_pair; i++) {
            const StreamPart& part = from.part[i];
            u8* at = to + part.stage_at;
            copy_run(at, part.w + strip * part.strip_n_bytes, n * part.strip_n_bytes, barrier_of(to));
            if (part.tail == nullptr) continue;
            copy_run(at + from.n_strips * part.strip_n_bytes, part.tail + 8 * strip - late, tail_n_bytes, barrier_of(to));
        }
    }

    // use(stage) when the next piece is there.
    template <class Use>
    __device__ __forceinline__ void take(Use use) {
        u8* stage = stages + at;
        wait_stage<N_STAGES>(barrier_of(stage), parity);
        use(stage);
        __syncwarp();
        ask(stage);
        at += SLOT_N_BYTES;
        if (at < N_STAGES * SLOT_N_BYTES) return;
        at = 0;
        parity ^= 1;
    }

    // use(piece, row, stage) for all pieces of the rows, in order.
    template <int N_PIECES, class Use>
    __device__ __forceinline__ void drain(const OwnRows& rows, Use use) {
        for (int row = rows.row; row < rows.end; row += rows.step) {
#pragma unroll 1
            for (int piece = 0; piece < N_PIECES; piece++) take([&](const u8* stage) { use(piece, row, stage); });
        }
    }
};

// A pause in a loop that waits for other blocks.
__device__ __forceinline__ void spin_pause() { asm volatile("nanosleep.u32 20;" ::: "memory"); }

// All threads: what the block wrote is visible to those that wait for its arrival. words[0] counts arrivals.
__device__ __forceinline__ void arrive(u32* words) {
    __syncthreads();
    if (threadIdx.x > 0) return;
    __threadfence();
    atomicAdd(words, 1u);
}

// The block waits no more; words[1] counts such blocks: the last one clears the count of arrivals for the next launch.
__device__ __forceinline__ void end_barriers(u32* words) {
    if (threadIdx.x == 0 && atomicInc(words + 1, gridDim.x - 1) == gridDim.x - 1) *words = 0;
}

// The barrier before an op.
struct GridBarrier {
    const u32* words;
    u32 n_awaited;
    bool has_waited;

    // All threads: wait until all blocks have arrived; nothing the second time.
    __device__ __forceinline__ void wait() {
        if (has_waited) return;
        has_waited = true;
        if (threadIdx.x == 0) {
            while (*reinterpret_cast<const volatile u32*>(words) < n_awaited) spin_pause();
            __threadfence();
        }
        __syncthreads();
    }
};

// What an op finds in its block.
template <class F>
struct StepBlock {
    F flow;
    GridBarrier barrier;
    u8* scratch;
    const u32* grid;
    const StepOp* op;
};

template <class F, int N_IN, int N_STRIPS>
struct StepGemv {
    struct Arguments {
        const u8* w;
        int n_out;
        const i8* q;
        const GroupScale* scales;
        const float* residual;
        float* y;
    };
    template <class Block>
    __device__ __forceinline__ static void run(const Arguments& in, Block& block) {
        auto* input = reinterpret_cast<SharedInput<N_IN>*>(block.scratch);
        block.barrier.wait();
        input->copy(in.q, in.scales);
        __syncthreads();
        GemvRows<F, N_IN, N_STRIPS> rows{input, block.grid, in.residual, in.y};
        block.flow.template drain<Pieces<F, N_IN, N_STRIPS>::N>(
            OwnRows::of(*block.op), [&](int piece, int row, const u8* stage) { rows.use(piece, row, stage); });
    }
};

template <class FG, class FU, int N_IN, int N_STRIPS>
struct StepGateUp {
    struct Arguments {
        const u8 *gate, *up;
        int n_ff;
        const float *x, *norm_weight;
        float eps;
        float* y;
        i8* y_q;
        GroupScale* y_scales;
        u32* done;
        u32 op;
        u32* fault;
    };
    template <class Block>
    __device__ __forceinline__ static void run(const Arguments& in, Block& block) {
        auto* input = reinterpret_cast<SharedInput<N_IN>*>(block.scratch);
        take_normed<N_IN>(input, nullptr, NormInput{in.x, in.norm_weight, in.eps}, [&] { block.barrier.wait(); });
        GateUpRows<FG, FU, N_IN, N_STRIPS> rows{input, block.grid, in.y, in.op, in.fault};
        block.flow.template drain<Pieces<FG, N_IN, N_STRIPS>::N>(
            OwnRows::of(*block.op), [&](int piece, int row, const u8* stage) { rows.use(piece, row, stage); });
        quantize_groups(Share::of_block(in.n_ff, 0), in.y, in.y_q, in.y_scales, in.done);
    }
};

constexpr int FLOAT_STRIP = 4 * WARP;  // weights of F32 in a strip: a quad a lane

template <int N_IN, class FA, class FB, class FC, class FD, int N_STRIPS, int N_FLOAT_STRIPS>
struct StepProject {
    struct Arguments {
        Part a, b, c, d;
        const float *x, *norm_weight;
        float eps;
    };
    static constexpr bool HAS_FLOAT = is_float_format<FA>::value || is_float_format<FB>::value ||
                                      is_float_format<FC>::value || is_float_format<FD>::value;
    static constexpr int FLOAT_STRIPS_OF_ROW = N_IN / FLOAT_STRIP;

    template <class Use>
    __device__ __forceinline__ static void with_streamed(const Arguments& in, int row, Use use) {
        in_part<FA, is_streamed<FA>::value>(row, in.a, use) || in_part<FB, is_streamed<FB>::value>(row, in.b, use) ||
            in_part<FC, is_streamed<FC>::value>(row, in.c, use) || in_part<FD, is_streamed<FD>::value>(row, in.d, use);
    }
    template <class Use>
    __device__ __forceinline__ static void with_float(const Arguments& in, int row, Use use) {
        in_part<FA, is_float_format<FA>::value>(row, in.a, use) ||
            in_part<FB, is_float_format<FB>::value>(row, in.b, use) ||
            in_part<FC, is_float_format<FC>::value>(row, in.c, use) ||
            in_part<FD, is_float_format<FD>::value>(row, in.d, use);
    }

    template <class Block>
    __device__ __forceinline__ static void float_rows(const Arguments& in, Block& block, const float* normed) {
        const int lane = threadIdx.x % WARP;
        const OwnRows rows = OwnRows::of(*block.op);
        for (int row = rows.row; row < rows.end; row += rows.step) {
            float acc = 0.0f;
            for (int first = 0; first < FLOAT_STRIPS_OF_ROW; first += N_FLOAT_STRIPS) {
                block.flow.take([&](const u8* stage) {
                    for (int i = 0; i < N_FLOAT_STRIPS && first + i < FLOAT_STRIPS_OF_ROW; i++) {
                        const float4 w = load_quad(reinterpret_cast<const float*>(stage), i * WARP + lane);
                        acc = add_products(acc, w, load_quad(normed, (first + i) * WARP + lane));
                    }
                });
            }
            const float sum = tree(acc);
            if (lane == 0) with_float(in, row, [&](auto, const Part& part, int at) { part.y[at] = sum; });
        }
    }

    template <class Block>
    __device__ __forceinline__ static void run(const Arguments& in, Block& block) {
        auto* input = reinterpret_cast<SharedInput<N_IN>*>(block.scratch);
        float* normed = HAS_FLOAT ? reinterpret_cast<float*>(input + 1) : nullptr;
        take_normed<N_IN>(input, normed, NormInput{in.x, in.norm_weight, in.eps}, [&] { block.barrier.wait(); });
        if (HAS_FLOAT && threadIdx.x / WARP == STREAM_WARPS - 1) return float_rows(in, block, normed);
        float acc = 0.0f;
        constexpr int N_PIECES = (N_IN / STRIP + N_STRIPS - 1) / N_STRIPS;
        block.flow.template drain<N_PIECES>(OwnRows::of(*block.op), [&](int piece, int row, const u8* stage) {
            with_streamed(in, row, [&](auto format, const Part& part, int at) {
                use_piece<decltype(format), N_IN, N_STRIPS>(piece, at, stage, input, block.grid, acc,
                                                            [&](float sum) { part.y[at] = sum; });
            });
        });
    }
};

template <class F, int N_IN, int N_STRIPS>
struct StepHead {
    struct Arguments {
        const float *x, *norm_weight;
        float eps;
        float* logits;
        u32 op;
        u32* fault;
    };
    template <class Block>
    __device__ __forceinline__ static void run(const Arguments& in, Block& block) {
        auto* input = reinterpret_cast<SharedInput<N_IN>*>(block.scratch);
        take_normed<N_IN>(input, nullptr, NormInput{in.x, in.norm_weight, in.eps}, [&] { block.barrier.wait(); });
        float acc = 0.0f;
        block.flow.template drain<Pieces<F, N_IN, N_STRIPS>::N>(
            OwnRows::of(*block.op), [&](int piece, int row, const u8* stage) {
                use_piece<F, N_IN, N_STRIPS>(piece, row, stage, input, block.grid, acc, [&](float sum) {
                    check_finite(sum, in.op, in.fault);
                    in.logits[row] = sum;
                });
            });
    }
};

template <int D, int D_CONV, int N_K_HEADS, int N_V_HEADS>
struct StepGatedDelta {
    using Arguments = GatedDeltaArguments;
    template <class Block>
    __device__ __forceinline__ static void run(const Arguments& in, Block& block) {
        auto& chunk = *reinterpret_cast<GdnChunk<D, 1>*>(block.scratch);
        for (int head = blockIdx.x; head < N_V_HEADS; head += gridDim.x) {
            gated_delta_head<D, D_CONV, N_K_HEADS, N_V_HEADS, 1>(in, head, chunk, [&] { block.barrier.wait(); });
            __syncthreads();
        }
    }
};

template <int HEAD_DIM, int N_HEAD, int N_HEAD_KV, int N_ROT>
struct StepAppend {
    using Arguments = AppendArguments;
    template <class Block>
    __device__ __forceinline__ static void run(const Arguments& in, Block& block) {
        const int warp = threadIdx.x / WARP, n_blocks = gridDim.x;
        float* head = reinterpret_cast<float*>(block.scratch) + warp * HEAD_DIM;
        block.barrier.wait();
        for (int unit = warp * n_blocks + blockIdx.x; unit < N_HEAD + 2 * N_HEAD_KV; unit += STREAM_WARPS * n_blocks) {
            append_head<HEAD_DIM, N_HEAD, N_HEAD_KV, N_ROT>(in, 0, unit, head);
            __syncwarp();
        }
    }
};

template <int HEAD_DIM, int N_HEAD, int N_HEAD_KV>
struct StepSplit {
    struct Arguments {
        SplitArguments in;
        int n_split;
    };
    template <class Block>
    __device__ __forceinline__ static void run(const Arguments& of, Block& block) {
        auto& shared = *reinterpret_cast<SplitShared<HEAD_DIM, N_HEAD / N_HEAD_KV>*>(block.scratch);
        block.barrier.wait();
        const int n_units = N_HEAD_KV * (of.in.control[1] / KV_SPLIT + 1);
        for (int unit = blockIdx.x; unit < n_units; unit += gridDim.x) {
            attend_split<HEAD_DIM, N_HEAD, N_HEAD_KV, STREAM_WARPS>(of.in, unit % N_HEAD_KV, unit / N_HEAD_KV,
                                                                    of.n_split, 0, shared);
            __syncthreads();
        }
    }
};

template <int HEAD_DIM, int N_HEAD>
struct StepCombine {
    using Arguments = CombineArguments;
    template <class Block>
    __device__ __forceinline__ static void run(const Arguments& in, Block& block) {
        block.barrier.wait();
        for (int head = blockIdx.x; head < N_HEAD; head += gridDim.x) {
            combine_head<HEAD_DIM, N_HEAD>(in, head, 0);
            __syncthreads();
        }
    }
};

struct StepArgmax {
    using Arguments = ArgmaxArguments;
    template <class Block>
    __device__ __forceinline__ static void run(const Arguments& in, Block& block) {
        constexpr int N_OF_BLOCK = STREAM_THREADS * ARGMAX_LOGITS;
        block.barrier.wait();
        u64 best = 0;
        for (int begin = blockIdx.x * N_OF_BLOCK; begin < in.n_vocab; begin += gridDim.x * N_OF_BLOCK) {
            best = argmax_of_thread<STREAM_THREADS>(in, begin, best);
        }
        argmax_of_blocks<STREAM_THREADS>(in, best);
    }
};

template <class F>
__device__ __forceinline__ u8* iq3s_table() {
    return dynamic_shared() + STREAM_WARPS * F::N_BYTES;
}

// Run op i, of class Op, from where the warp's flow is, and return where that is then. A function of its own: inlined,
// what is the same in every op of every class would be kept in registers.
template <class Op, class F>
__device__ __noinline__ u32 run_op(const StepOp* ops, int n_ops, int i, const u32* words, u32 place) {
    static_assert(sizeof(typename Op::Arguments) <= ARGUMENTS_N_BYTES);
    u8* table = iq3s_table<F>();
    const GridBarrier barrier{words, i * gridDim.x, i == 0};
    StepBlock<F> block{F::at_place(ops, n_ops, place), barrier, table + 4 * IQ3S_GRID_SIZE,
                       reinterpret_cast<const u32*>(table), ops + i};
    Op::run(*reinterpret_cast<const typename Op::Arguments*>(ops[i].arguments), block);
    block.barrier.wait();
    return block.flow.place();
}

template <int N_STAGES, int STAGE_N_BYTES, class... Ops>
__global__ void __launch_bounds__(STREAM_THREADS, 1) whole_step(const StepOp* ops, int n_ops, u32* words) {
    using F = Flow<N_STAGES, STAGE_N_BYTES>;
    copy_grid(iq3s_table<F>());
    u32 place = 0;
    F::at_place(ops, n_ops, place).start();
#pragma unroll 1
    for (int i = 0; i < n_ops; i++) {
        const int kind = ops[i].kind;
        int k = 0;
        ((kind == k++ ? void(place = run_op<Ops, F>(ops, n_ops, i, words, place)) : void()), ...);
        if (i + 1 < n_ops) arrive(words);
    }
    end_barriers(words);
}
