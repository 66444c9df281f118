// stream_gemv: y[r] = residual[r] + W[r] . h for one token, h quantised
// W (n_out, N_IN) in strips of format F, N_IN a multiple of 1024; q (N_IN) i8 with scales (N_IN / 32);
// residual, y (n_out) f32, which may be the same
// bytes    the matrix once, 1.25 * N_IN per block
// launch   grid (blocks, at best one a multiprocessor), block (544), dynamic shared memory: streams.py counts it
// numerics row_dot.cuh

template <class F, int N_IN, int N_OF_STAGE, int N_GROUPS, int N_STAGES>
__global__ void __launch_bounds__(STREAM_BLOCK, 1)
    stream_gemv(const u8* w, int n_out, const i8* q, const GroupScale* scales, const float* residual, float* y) {
    using Rows = StagedRows<F, N_IN, N_OF_STAGE>;
    using R = Ring<N_STAGES, N_OF_STAGE, N_GROUPS, Rows::N_BYTES>;
    extern __shared__ __align__(128) u8 shared[];
    auto* input = reinterpret_cast<SharedInput<N_IN>*>(shared + R::N_BYTES);
    const u32* grid = nullptr;
    if constexpr (is_iq3s<F>::value) grid = copy_grid(reinterpret_cast<u8*>(input + 1));
    const Share share = Share::of_block(n_out, 0);
    const auto ask = [&](int step, u8* stage, u64* barrier) {
        const int first = share.begin + step * N_OF_STAGE, n_rows = min(N_OF_STAGE, share.end - first);
        if (threadIdx.x % WARP == 0) expect_bytes(barrier, Rows::copied_n_bytes(n_out, first, n_rows));
        Rows::copy(stage, w, n_out, first, n_rows, barrier);
    };
    const R ring{shared, share.n_steps(N_OF_STAGE)};
    if (is_asking_warp()) ring.begin(ask);
    dependency_wait();
    LoadedInput<N_IN> loaded;
    if (!is_asking_warp()) loaded.load(q, scales);
    // Lane k loads the residual of the warp's k-th row: later it would wait behind the copies.
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const auto row_of = [&](int step, int i) { return share.begin + step * N_OF_STAGE + i; };
    const int row_of_lane = row_of(warp / N_OF_STAGE + lane * N_GROUPS, warp % N_OF_STAGE);
    const float residual_of_lane = row_of_lane < share.end ? residual[row_of_lane] : 0.0f;
    if (is_asking_warp())
        ring.fill_up(ask);
    else
        input->put(loaded);
    __syncthreads();
    release_dependents();
    if (is_asking_warp()) return ring.keep_up(ask);
    ring.drain(
        [&](int step, int i, const u8* stage) { return Rows::sum(stage, n_out, row_of(step, 0), i, input, grid); },
        [&](int step, int i, float of_lane) {
            const int row = row_of(step, i), k = step / N_GROUPS;
            if (row >= share.end) return;
            const float before = k < WARP ? __shfl_sync(0xffffffffu, residual_of_lane, k) : residual[row];
            const float sum = tree(of_lane);
            if (lane == 0) y[row] = add(before, sum);
        });
}
