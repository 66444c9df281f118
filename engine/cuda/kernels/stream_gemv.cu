// stream_gemv: y[r] = residual[r] + W[r] . h for one token, h quantised
// W (n_out, N_IN) in strips of format F, N_IN a multiple of 1024; q (N_IN) i8 with scales (N_IN / 32);
// residual, y (n_out) f32, which may be the same
// bytes    the matrix once, 1.25 * N_IN per block
// launch   grid (blocks, at best one a multiprocessor), block (512), dynamic shared memory: streams.py counts it
// numerics row_dot.cuh

// The rows of one warp, piece by piece.
template <class F, int N_IN, int N_STRIPS>
struct GemvRows {
    using P = Pieces<F, N_IN, N_STRIPS>;
    const SharedInput<N_IN>* input;
    const u32* grid;
    const float* residual;
    float* y;
    float acc = 0.0f, before = 0.0f;

    template <class Piece>
    __device__ __forceinline__ void use(Piece piece, int row, const u8* stage) {
        constexpr int PIECE = Piece::value;
        const int lane = threadIdx.x % WARP, late = P::late(PIECE, row);
        if (PIECE == 0) before = residual[row];
#pragma unroll
        for (int j = 0; j < P::n_strips(PIECE); j++) {
            const int s = (PIECE * N_STRIPS + j) * WARP + lane;
            acc = add(acc, P::term(stage, j, s, input->group(s), late, grid));
        }
        if constexpr (PIECE == P::N - 1) {
            const float sum = tree(acc);
            acc = 0.0f;
            if (lane == 0) y[row] = add(before, sum);
        }
    }
};

template <class F, int N_IN, int N_STRIPS, int N_STAGES>
__global__ void __launch_bounds__(STREAM_THREADS, 1)
    stream_gemv(const u8* w, int n_out, const i8* q, const GroupScale* scales, const float* residual, float* y) {
    using P = Pieces<F, N_IN, N_STRIPS>;
    using R = Ring<P::N, N_STAGES, P::N_BYTES, 1>;
    extern __shared__ __align__(16) u8 shared[];
    auto* input = reinterpret_cast<SharedInput<N_IN>*>(shared + STREAM_WARPS * R::N_BYTES);
    const u32* grid = nullptr;
    if constexpr (is_iq3s<F>::value) grid = copy_grid(reinterpret_cast<u8*>(input + 1));
    const int warp = threadIdx.x / WARP;
    const Share share = Share::of_block(n_out, 0);
    const auto ask = [&](auto piece, int i, u8* stage, u64* barrier) {
        constexpr int PIECE = decltype(piece)::value;
        P::template ask<PIECE>(stage, w, n_out, share.begin + warp + i * STREAM_WARPS, barrier);
    };
    const R ring{shared + warp * R::N_BYTES, share.n_of_warp(warp, STREAM_WARPS)};
    ring.begin(ask);
    dependency_wait();
    LoadedInput<N_IN> loaded;
    loaded.load(q, scales);
    ring.fill_up(ask);
    input->put(loaded);
    __syncthreads();
    release_dependents();
    GemvRows<F, N_IN, N_STRIPS> rows{input, grid, residual, y};
    ring.drain(ask, [&](auto piece, int i, const u8* stage) {
        rows.use(piece, share.begin + warp + i * STREAM_WARPS, stage);
    });
}
