// stream_project: y_i = W_i h for one token and up to four matrices that share the input h = rms_norm(x)
// W_i (n_out_i, N_IN) in strips of format F_i, N_IN a multiple of 1024; x, norm_weight (N_IN) f32; y_i (n_out_i) f32;
// Absent fills unused places
// bytes    all matrices once, 8 * N_IN per block
// launch   grid (blocks, at best one a multiprocessor), block (512), dynamic shared memory
// numerics row_dot.cuh; norm.cuh
// order    quantised rows behind each other are shared out to blocks; a float row, FLOAT_ROW_COST times as long, goes to
//          a warp of its own in one of the first blocks, which have that many rows less
constexpr int FLOAT_QUADS_IN_FLIGHT = 5;  // they come from L2, where they were asked to before the input was there

template <class F>
struct is_streamed {
    static constexpr bool value = !is_float_format<F>::value && !is_absent<F>::value;
};

template <class F, int N_IN, int N_STRIPS>
struct piece_n_bytes {
    static constexpr int value = Pieces<F, N_IN, N_STRIPS>::N_BYTES;
};
template <int N_IN, int N_STRIPS>
struct piece_n_bytes<Absent, N_IN, N_STRIPS> {
    static constexpr int value = 0;
};
template <int N_IN, int N_STRIPS>
struct piece_n_bytes<F32, N_IN, N_STRIPS> : piece_n_bytes<Absent, N_IN, N_STRIPS> {};
template <int N_IN, int N_STRIPS>
struct piece_n_bytes<F16, N_IN, N_STRIPS> : piece_n_bytes<Absent, N_IN, N_STRIPS> {};
template <int N_IN, int N_STRIPS>
struct piece_n_bytes<BF16, N_IN, N_STRIPS> : piece_n_bytes<Absent, N_IN, N_STRIPS> {};

constexpr int larger(int a, int b) { return a > b ? a : b; }

// Run use(part_format, row) if `row` lies in this part and MATCHES; else count the part's rows off.
template <class F, bool MATCHES, class Use>
__device__ __forceinline__ bool in_part(int& row, const Part& part, Use use) {
    if constexpr (MATCHES) {
        if (row < part.n_out) {
            use(F{}, part, row);
            return true;
        }
        row -= part.n_out;
    }
    return false;
}

// Add the terms of a piece to the lane's sum; after the last piece of a row one lane calls put(sum of the row).
template <class F, int N_IN, int N_STRIPS, class Piece, class Put>
__device__ __forceinline__ void use_piece(Piece piece, int row, const u8* stage, const SharedInput<N_IN>* input,
                                          const u32* grid, float& acc, Put put) {
    using P = Pieces<F, N_IN, N_STRIPS>;
    constexpr int PIECE = Piece::value;
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int j = 0; j < P::n_strips(PIECE); j++) {
        const int s = (PIECE * N_STRIPS + j) * WARP + lane;
        acc = add(acc, P::term(stage, j, s, input->group(s), P::late(PIECE, row), grid));
    }
    if constexpr (PIECE == P::N - 1) {
        const float sum = tree(acc);
        acc = 0.0f;
        if (lane == 0) put(sum);
    }
}

template <int N_IN, class FA, class FB, class FC, class FD, int N_STRIPS, int N_STAGES>
__global__ void __launch_bounds__(STREAM_THREADS, 1)
    stream_project(const u8* wa, int n_a, float* ya, const u8* wb, int n_b, float* yb, const u8* wc, int n_c, float* yc,
                   const u8* wd, int n_d, float* yd, const float* x, const float* norm_weight, float eps) {
    constexpr bool HAS_FLOAT = is_float_format<FA>::value || is_float_format<FB>::value ||
                               is_float_format<FC>::value || is_float_format<FD>::value;
    constexpr bool HAS_GRID = is_iq3s<FA>::value || is_iq3s<FB>::value || is_iq3s<FC>::value || is_iq3s<FD>::value;
    constexpr int N_WARPS = STREAM_WARPS - HAS_FLOAT;  // that stream; the last one takes float rows
    constexpr int PIECE_N_BYTES = larger(
        larger(piece_n_bytes<FA, N_IN, N_STRIPS>::value, piece_n_bytes<FB, N_IN, N_STRIPS>::value),
        larger(piece_n_bytes<FC, N_IN, N_STRIPS>::value, piece_n_bytes<FD, N_IN, N_STRIPS>::value));
    constexpr int N_PIECES = (N_IN / STRIP + N_STRIPS - 1) / N_STRIPS;
    using R = Ring<N_PIECES, N_STAGES, PIECE_N_BYTES, 1>;
    extern __shared__ __align__(16) u8 shared[];
    auto* input = reinterpret_cast<SharedInput<N_IN>*>(shared + N_WARPS * R::N_BYTES);
    float* normed = HAS_FLOAT ? reinterpret_cast<float*>(input + 1) : nullptr;
    const u32* grid = nullptr;
    if constexpr (HAS_GRID) grid = copy_grid(reinterpret_cast<u8*>(input + 1) + (HAS_FLOAT ? 4 * N_IN : 0));
    const Part a{wa, n_a, ya}, b{wb, n_b, yb}, c{wc, n_c, yc}, d{wd, n_d, yd};
    const auto streamed = [&](int row, auto use) {
        in_part<FA, is_streamed<FA>::value>(row, a, use) || in_part<FB, is_streamed<FB>::value>(row, b, use) ||
            in_part<FC, is_streamed<FC>::value>(row, c, use) || in_part<FD, is_streamed<FD>::value>(row, d, use);
    };
    const auto floats = [&](int row, auto use) {
        in_part<FA, is_float_format<FA>::value>(row, a, use) || in_part<FB, is_float_format<FB>::value>(row, b, use) ||
            in_part<FC, is_float_format<FC>::value>(row, c, use) || in_part<FD, is_float_format<FD>::value>(row, d, use);
    };
    const int n_float = (is_float_format<FA>::value ? n_a : 0) + (is_float_format<FB>::value ? n_b : 0) +
                        (is_float_format<FC>::value ? n_c : 0) + (is_float_format<FD>::value ? n_d : 0);
    const int n_streamed = n_a + n_b + n_c + n_d - n_float;
    const Share share = Share::of_block(n_streamed, n_float);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const auto ask = [&](auto piece, int i, u8* stage, u64* barrier) {
        constexpr int PIECE = decltype(piece)::value;
        streamed(share.begin + warp + i * N_WARPS, [&](auto format, const Part& part, int row) {
            Pieces<decltype(format), N_IN, N_STRIPS>::template ask<PIECE>(stage, part.w, part.n_out, row, barrier);
        });
    };
    const R ring{shared + warp * R::N_BYTES, warp < N_WARPS ? share.n_of_warp(warp, N_WARPS) : 0};
    const auto wait = [&] {
        if (warp < N_WARPS) {  // the last one has no room for a ring
            ring.begin(ask);
        } else if (int(blockIdx.x) < n_float) {
            floats(blockIdx.x, [&](auto format, const Part& part, int row) {
                constexpr int ROW_N_BYTES = N_IN * decltype(format)::N_BYTES;
                prefetch_run(part.w + i64(row) * ROW_N_BYTES, ROW_N_BYTES);
            });
        }
        dependency_wait();
    };
    take_normed<N_IN>(input, normed, NormInput{x, norm_weight, eps}, wait, [&] {
        if (warp < N_WARPS) ring.fill_up(ask);
    });
    release_dependents();
    if (HAS_FLOAT && warp == N_WARPS) {
        for (int row = blockIdx.x; row < n_float; row += gridDim.x) {
            floats(row, [&](auto format, const Part& part, int at) {
                const float sum = tree(sum_of_quads<decltype(format), N_IN, FLOAT_QUADS_IN_FLIGHT>(part.w, at, normed));
                if (lane == 0) part.y[at] = sum;
            });
        }
    }
    float acc = 0.0f;
    ring.drain(ask, [&](auto piece, int i, const u8* stage) {
        streamed(share.begin + warp + i * N_WARPS, [&](auto format, const Part& part, int row) {
            use_piece<decltype(format), N_IN, N_STRIPS>(piece, row, stage, input, grid, acc,
                                                        [&](float sum) { part.y[row] = sum; });
        });
    });
}
