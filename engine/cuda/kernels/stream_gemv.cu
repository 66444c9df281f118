// stream_gemv: y[r] = W[r] . h for one token, h quantised, or the row x normalised here (NORMED: the head)
// W (n_out, N_IN) in planes of format F, N_IN a multiple of 1024; q (N_IN) i8 with scales (N_IN / 32), or x,
// norm_weight (N_IN) f32; y (n_out) f32. MODE adds the residual, which may be y, or checks that the logits are finite.
// bytes    the matrix once; 1.25 * N_IN, or 8 * N_IN with the norm, per block
// launch   grid (blocks, at best one a multiprocessor), block (512), dynamic shared memory: engine/cuda/streams.py counts it
// numerics row_dot.cuh; norm.cuh
template <class F, int N_IN, int MODE, bool NORMED, int N_STRIPS, int N_STAGES, int N_BLOCKS>
__global__ void __launch_bounds__(STREAM_THREADS, N_BLOCKS)
    stream_gemv(const u8* w, int n_out, const float* x, const float* norm_weight, float eps, const i8* q,
                const GroupScale* scales, const float* residual, float* y, u32 op, u32* fault) {
    using P = Pieces<F, N_IN, N_STRIPS>;
    using R = Ring<P::N, N_STAGES, P::N_BYTES, 1>;
    extern __shared__ __align__(16) u8 shared[];
    auto* input = reinterpret_cast<SharedInput<N_IN>*>(shared + STREAM_WARPS * R::N_BYTES);
    const u32* grid = nullptr;
    if constexpr (is_iq3s<F>::value) grid = copy_grid(reinterpret_cast<u8*>(input + 1));
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Share share = Share::of_block(n_out);
    const auto ask = [&](auto piece, int i, u8* stage, u64* barrier) {
        constexpr int PIECE = decltype(piece)::value;
        P::template ask<PIECE>(stage, w, n_out, share.begin + warp + i * STREAM_WARPS, barrier);
    };
    const R ring{shared + warp * R::N_BYTES, share.n_of_warp(warp, STREAM_WARPS)};
    if constexpr (NORMED) {
        take_normed<N_IN>(input, nullptr, NormInput{x, norm_weight, eps}, [&] { ring.fill(ask); });
    } else {
        ring.fill(ask);
        dependency_wait();
        input->copy(q, scales);
        __syncthreads();
    }
    release_dependents();
    float acc = 0.0f, before = 0.0f;
    ring.drain(ask, [&](auto piece, int i, const u8* stage) {
        constexpr int PIECE = decltype(piece)::value;
        const int row = share.begin + warp + i * STREAM_WARPS, tail = P::tail(PIECE, row);
        if (MODE == ADD_RESIDUAL && PIECE == 0) before = residual[row];
#pragma unroll
        for (int j = 0; j < P::n_strips(PIECE); j++) {
            const int s = (PIECE * N_STRIPS + j) * WARP + lane;
            acc = add(acc, P::term(stage, j, s, input->group(s), tail, grid));
        }
        if constexpr (PIECE == P::N - 1) {
            const float sum = tree(acc);
            acc = 0.0f;
            if (lane == 0) {
                if (MODE == LOGITS) check_finite(sum, op, fault);
                y[row] = MODE == ADD_RESIDUAL ? add(before, sum) : sum;
            }
        }
    });
}
