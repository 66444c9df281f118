// stream_project: y_i = W_i h for one token and up to four matrices that share the input h = rms_norm(x)
// W_i (n_out_i, N_IN) in strips of format F_i, N_IN a multiple of 1024; x, norm_weight (N_IN) f32; y_i (n_out_i) f32;
// Absent fills unused places
// bytes    all matrices once, 8 * N_IN per block
// launch   grid (blocks, at best one a multiprocessor), block (544), dynamic shared memory
// numerics row_dot.cuh; norm.cuh
// order    quantised rows behind each other are shared out to blocks; a float row, FLOAT_ROW_COST times as long, goes to
//          a warp of its own in one of the first blocks, which have that many rows less
constexpr int FLOAT_QUADS_IN_FLIGHT = 5;  // they come from L2, where they were asked to before the input was there

template <class F>
struct is_streamed {
    static constexpr bool value = !is_float_format<F>::value && !is_absent<F>::value;
};

// Bytes of a stage of N rows; none for what is not streamed.
template <class F, int N_IN, int N>
constexpr int stage_n_bytes() {
    if constexpr (is_streamed<F>::value)
        return StagedRows<F, N_IN, N>::N_BYTES;
    else
        return 0;
}

constexpr int larger(int a, int b) { return a > b ? a : b; }

// Run use(format, part, row) if `row` lies in this part, of floats; else count the part's rows off.
template <class F, class Use>
__device__ __forceinline__ bool in_floats(int& row, const Part& part, Use use) {
    if constexpr (is_float_format<F>::value) {
        if (row < part.n_out) {
            use(F{}, part, row);
            return true;
        }
        row -= part.n_out;
    }
    return false;
}

// The steps of a block's share that lie in one part, N rows each; rows_before: those of the parts before.
template <class F, int N>
struct PartSteps {
    int first, end, n_steps;

    __device__ __forceinline__ PartSteps(const Share& share, const Part& part, int& rows_before)
        : first(0), end(0), n_steps(0) {
        if constexpr (is_streamed<F>::value) {
            first = max(share.begin - rows_before, 0), end = min(share.end - rows_before, part.n_out);
            n_steps = end > first ? (end - first + N - 1) / N : 0;
            rows_before += part.n_out;
        }
    }
    // Run use(format, part, first row of the step, end of the rows) if `step` lies here; else count the steps off.
    template <class Use>
    __device__ __forceinline__ bool take(int& step, const Part& part, Use use) const {
        if constexpr (is_streamed<F>::value) {
            if (step < n_steps) {
                use(F{}, part, first + step * N, end);
                return true;
            }
            step -= n_steps;
        }
        return false;
    }
};

template <int N_IN, class FA, class FB, class FC, class FD, int N_OF_STAGE, int N_GROUPS, int N_STAGES>
__global__ void __launch_bounds__(STREAM_BLOCK, 1)
    stream_project(const u8* wa, int n_a, float* ya, const u8* wb, int n_b, float* yb, const u8* wc, int n_c, float* yc,
                   const u8* wd, int n_d, float* yd, const float* x, const float* norm_weight, float eps) {
    constexpr bool HAS_FLOAT = is_float_format<FA>::value || is_float_format<FB>::value ||
                               is_float_format<FC>::value || is_float_format<FD>::value;
    constexpr bool HAS_GRID = is_iq3s<FA>::value || is_iq3s<FB>::value || is_iq3s<FC>::value || is_iq3s<FD>::value;
    constexpr int N = N_OF_STAGE;
    constexpr int STAGE_N_BYTES = larger(larger(stage_n_bytes<FA, N_IN, N>(), stage_n_bytes<FB, N_IN, N>()),
                                         larger(stage_n_bytes<FC, N_IN, N>(), stage_n_bytes<FD, N_IN, N>()));
    static_assert(N_OF_STAGE * N_GROUPS <= STREAM_WARPS - HAS_FLOAT, "one warp takes the float rows");
    using R = Ring<N_STAGES, N, N_GROUPS, STAGE_N_BYTES>;
    extern __shared__ __align__(128) u8 shared[];
    auto* input = reinterpret_cast<SharedInput<N_IN>*>(shared + R::N_BYTES);
    float* normed = HAS_FLOAT ? reinterpret_cast<float*>(input + 1) : nullptr;
    const u32* grid = nullptr;
    if constexpr (HAS_GRID) grid = copy_grid(reinterpret_cast<u8*>(input + 1) + (HAS_FLOAT ? 4 * N_IN : 0));
    const Part a{wa, n_a, ya}, b{wb, n_b, yb}, c{wc, n_c, yc}, d{wd, n_d, yd};
    const auto floats = [&](int row, auto use) {
        in_floats<FA>(row, a, use) || in_floats<FB>(row, b, use) || in_floats<FC>(row, c, use) ||
            in_floats<FD>(row, d, use);
    };
    const int n_float = (is_float_format<FA>::value ? n_a : 0) + (is_float_format<FB>::value ? n_b : 0) +
                        (is_float_format<FC>::value ? n_c : 0) + (is_float_format<FD>::value ? n_d : 0);
    const Share share = Share::of_block(n_a + n_b + n_c + n_d - n_float, n_float);
    int rows_before = 0;
    const PartSteps<FA, N> steps_a(share, a, rows_before);
    const PartSteps<FB, N> steps_b(share, b, rows_before);
    const PartSteps<FC, N> steps_c(share, c, rows_before);
    const PartSteps<FD, N> steps_d(share, d, rows_before);
    const auto streamed = [&](int step, auto use) {
        steps_a.take(step, a, use) || steps_b.take(step, b, use) || steps_c.take(step, c, use) ||
            steps_d.take(step, d, use);
    };
    const auto ask = [&](int step, u8* stage, u64* barrier) {
        streamed(step, [&](auto format, const Part& part, int first, int end) {
            using Rows = StagedRows<decltype(format), N_IN, N>;
            const int n_rows = min(N, end - first);
            if (threadIdx.x % WARP == 0) expect_bytes(barrier, Rows::copied_n_bytes(part.n_out, first, n_rows));
            Rows::copy(stage, part.w, part.n_out, first, n_rows, barrier);
        });
    };
    const R ring{shared, steps_a.n_steps + steps_b.n_steps + steps_c.n_steps + steps_d.n_steps};
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool takes_floats = HAS_FLOAT && warp == STREAM_WARPS - 1;
    const auto wait = [&] {
        if (is_asking_warp()) ring.begin(ask);
        if (takes_floats && int(blockIdx.x) < n_float) {
            floats(blockIdx.x, [&](auto format, const Part& part, int row) {
                constexpr int ROW_N_BYTES = N_IN * decltype(format)::N_BYTES;
                prefetch_run(part.w + i64(row) * ROW_N_BYTES, ROW_N_BYTES);
            });
        }
        dependency_wait();
    };
    const auto go_on = [&] {
        if (is_asking_warp()) ring.fill_up(ask);
    };
    take_normed<N_IN>(input, normed, NormInput{x, norm_weight, eps}, wait, go_on);
    release_dependents();
    if (is_asking_warp()) return ring.keep_up(ask);
    if (takes_floats) {
        for (int row = blockIdx.x; row < n_float; row += gridDim.x) {
            floats(row, [&](auto format, const Part& part, int at) {
                const float sum = tree(sum_of_quads<decltype(format), N_IN, FLOAT_QUADS_IN_FLIGHT>(part.w, at, normed));
                if (lane == 0) part.y[at] = sum;
            });
        }
        return;
    }
    ring.drain(
        [&](int step, int i, const u8* stage) {
            float of_lane = 0.0f;
            streamed(step, [&](auto format, const Part& part, int first, int) {
                of_lane = StagedRows<decltype(format), N_IN, N>::sum(stage, part.n_out, first, i, input, grid);
            });
            return of_lane;
        },
        [&](int step, int i, float of_lane) {
            const float sum = tree(of_lane);
            streamed(step, [&](auto, const Part& part, int first, int end) {
                if (lane == 0 && first + i < end) part.y[first + i] = sum;
            });
        });
}
