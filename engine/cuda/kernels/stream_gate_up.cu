// stream_gate_up: y[r] = silu(G[r] . h) * (U[r] . h) for one token, h = rms_norm(x); y quantised in groups of 32 rows
// G, U (n_ff, N_IN) in strips of formats FG and FU, N_IN a multiple of 1024, n_ff of 32; x, norm_weight (N_IN) f32;
// y (n_ff) f32, y_q (n_ff) i8, y_scales (n_ff / 32); done (n_ff / 32) u32, zero before the first call and after each:
// rows of a group that are there
// bytes    both matrices once, 8 * N_IN per block, 5.25 * n_ff written
// launch   grid (blocks, at best one a multiprocessor), block (512), dynamic shared memory
// numerics row_dot.cuh; norm.cuh; silu, product and quantisation of docs/numerics.md
// order    a group lies in one block's share, which quantises it, or in two: then the block that finishes last does
constexpr u32 WHOLE_GROUP = SUB_BLOCK;

// Whether all rows of the group are there now that `n` more are; what other blocks wrote is then visible to this warp.
__device__ __forceinline__ bool completes_group(u32* done, u32 n) {
    u32 n_there = 0;
    if (threadIdx.x % WARP == 0) {
        __threadfence();
        n_there = atomicAdd(done, n) + n;
        if (n_there == WHOLE_GROUP) *done = 0;
    }
    const bool is_whole = __shfl_sync(0xffffffffu, n_there, 0) == WHOLE_GROUP;
    if (is_whole) __threadfence();
    return is_whole;
}

// The rows of one warp, piece by piece; a stage has a piece of both matrices.
template <class FG, class FU, int N_IN, int N_STRIPS>
struct GateUpRows {
    using G = Pieces<FG, N_IN, N_STRIPS>;
    using U = Pieces<FU, N_IN, N_STRIPS>;
    const SharedInput<N_IN>* input;
    const u32* grid;
    float* y;
    u32 op;
    u32* fault;
    float g = 0.0f, u = 0.0f;

    template <class Piece>
    __device__ __forceinline__ void use(Piece piece, int row, const u8* stage) {
        constexpr int PIECE = Piece::value;
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int j = 0; j < G::n_strips(PIECE); j++) {
            const int s = (PIECE * N_STRIPS + j) * WARP + lane;
            const GroupActivations a = input->group(s);
            g = add(g, G::term(stage, j, s, a, G::late(PIECE, row), grid));
            u = add(u, U::term(stage + G::N_BYTES, j, s, a, U::late(PIECE, row), grid));
        }
        if constexpr (PIECE == G::N - 1) {
            const float product = mul(silu(tree(g)), tree(u));
            g = u = 0.0f;
            if (lane == 0) {
                check_finite(product, op, fault);
                y[row] = product;
            }
        }
    }
};

// Quantise the groups of a block's rows: all threads, when the block's rows are done.
__device__ __forceinline__ void quantize_groups(const Share& share, const float* y, i8* y_q, GroupScale* y_scales,
                                                u32* done) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    __syncthreads();
    for (int group = share.begin / SUB_BLOCK + warp; group * SUB_BLOCK < share.end; group += STREAM_WARPS) {
        const int first = max(share.begin, group * SUB_BLOCK), last = min(share.end, (group + 1) * SUB_BLOCK);
        if (last - first < SUB_BLOCK && !completes_group(done + group, last - first)) continue;
        quantize_group(__ldcg(y + group * SUB_BLOCK + lane), group, y_q, y_scales, lane);
    }
}

template <class FG, class FU, int N_IN, int N_STRIPS, int N_STAGES>
__global__ void __launch_bounds__(STREAM_THREADS, 1)
    stream_gate_up(const u8* gate, const u8* up, int n_ff, const float* x, const float* norm_weight, float eps,
                   float* y, i8* y_q, GroupScale* y_scales, u32* done, u32 op, u32* fault) {
    using G = Pieces<FG, N_IN, N_STRIPS>;
    using U = Pieces<FU, N_IN, N_STRIPS>;
    using R = Ring<G::N, N_STAGES, G::N_BYTES + U::N_BYTES, 2>;
    extern __shared__ __align__(16) u8 shared[];
    auto* input = reinterpret_cast<SharedInput<N_IN>*>(shared + STREAM_WARPS * R::N_BYTES);
    const u32* grid = nullptr;
    if constexpr (is_iq3s<FG>::value || is_iq3s<FU>::value) grid = copy_grid(reinterpret_cast<u8*>(input + 1));
    const int warp = threadIdx.x / WARP;
    const Share share = Share::of_block(n_ff, 0);
    const auto ask = [&](auto piece, int i, u8* stage, u64* barrier) {
        constexpr int PIECE = decltype(piece)::value;
        const int row = share.begin + warp + i * STREAM_WARPS;
        G::template ask<PIECE>(stage, gate, n_ff, row, barrier);
        U::template ask<PIECE>(stage + G::N_BYTES, up, n_ff, row, barrier);
    };
    const R ring{shared + warp * R::N_BYTES, share.n_of_warp(warp, STREAM_WARPS)};
    const auto wait = [&] {
        ring.begin(ask);
        dependency_wait();
    };
    take_normed<N_IN>(input, nullptr, NormInput{x, norm_weight, eps}, wait, [&] { ring.fill_up(ask); });
    release_dependents();
    GateUpRows<FG, FU, N_IN, N_STRIPS> rows{input, grid, y, op, fault};
    ring.drain(ask, [&](auto piece, int i, const u8* stage) {
        rows.use(piece, share.begin + warp + i * STREAM_WARPS, stage);
    });
    quantize_groups(share, y, y_q, y_scales, done);
}
