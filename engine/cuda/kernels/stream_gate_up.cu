// stream_gate_up: y[r] = silu(G[r] . h) * (U[r] . h) for one token, h = rms_norm(x); y quantised in groups of 32 rows
// G, U (n_ff, N_IN) in strips of formats FG and FU, N_IN a multiple of 1024, n_ff of 32; x, norm_weight (N_IN) f32;
// y (n_ff) f32, y_q (n_ff) i8, y_scales (n_ff / 32); done (n_ff / 32) u32, zero before the first call and after each:
// rows of a group that are there
// bytes    both matrices once, 8 * N_IN per block, 5.25 * n_ff written
// launch   grid (blocks, at best one a multiprocessor), block (544), dynamic shared memory
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

struct RowPair {
    float g, u;
};

// The lane's sums over row i of a stage of both matrices, strip by strip: the activations are read once.
template <class G, class U, class Input>
__device__ __forceinline__ RowPair row_pair(const u8* stage, i64 n_out, i64 first, int i, const Input* input, const u32* grid) {
    RowPair sums{0.0f, 0.0f};
#pragma unroll
    for (int strip = 0; strip < G::OF_ROW; strip++) {
        sums.g = add(sums.g, G::term(stage, n_out, first, i, strip, input, grid));
        sums.u = add(sums.u, U::term(stage + G::N_BYTES, n_out, first, i, strip, input, grid));
    }
    return sums;
}

// Quantise the groups of a block's rows: all threads, when the block's rows are done.
__device__ __forceinline__ void quantize_groups(const Share& share, const float* y, i8* y_q, GroupScale* y_scales,
                                                u32* done) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    __syncthreads();
    if (is_asking_warp()) return;
    for (int group = share.begin / SUB_BLOCK + warp; group * SUB_BLOCK < share.end; group += STREAM_WARPS) {
        const int first = max(share.begin, group * SUB_BLOCK), last = min(share.end, (group + 1) * SUB_BLOCK);
        if (last - first < SUB_BLOCK && !completes_group(done + group, last - first)) continue;
        quantize_group(__ldcg(y + group * SUB_BLOCK + lane), group, y_q, y_scales, lane);
    }
}

template <class FG, class FU, int N_IN, int N_OF_STAGE, int N_GROUPS, int N_STAGES>
__global__ void __launch_bounds__(STREAM_BLOCK, 1)
    stream_gate_up(const u8* gate, const u8* up, int n_ff, const float* x, const float* norm_weight, float eps,
                   float* y, i8* y_q, GroupScale* y_scales, u32* done, u32 op, u32* fault) {
    using G = StagedRows<FG, N_IN, N_OF_STAGE>;
    using U = StagedRows<FU, N_IN, N_OF_STAGE>;
    using R = Ring<N_STAGES, N_OF_STAGE, N_GROUPS, G::N_BYTES + U::N_BYTES>;
    extern __shared__ __align__(128) u8 shared[];
    auto* input = reinterpret_cast<SharedInput<N_IN>*>(shared + R::N_BYTES);
    const u32* grid = nullptr;
    if constexpr (is_iq3s<FG>::value || is_iq3s<FU>::value) grid = copy_grid(reinterpret_cast<u8*>(input + 1));
    const Share share = Share::of_block(n_ff, 0);
    const auto ask = [&](int step, u8* stage, u64* barrier) {
        const int first = share.begin + step * N_OF_STAGE, n_rows = min(N_OF_STAGE, share.end - first);
        if (threadIdx.x % WARP == 0) expect_bytes(barrier, G::copied_n_bytes(n_ff, first, n_rows) + U::copied_n_bytes(n_ff, first, n_rows));
        G::copy(stage, gate, n_ff, first, n_rows, barrier);
        U::copy(stage + G::N_BYTES, up, n_ff, first, n_rows, barrier);
    };
    const R ring{shared, share.n_steps(N_OF_STAGE)};
    const auto wait = [&] {
        if (is_asking_warp()) ring.begin(ask);
        dependency_wait();
    };
    const auto go_on = [&] {
        if (is_asking_warp()) ring.fill_up(ask);
    };
    take_normed<N_IN>(input, nullptr, NormInput{x, norm_weight, eps}, wait, go_on);
    release_dependents();
    if (is_asking_warp())
        ring.keep_up(ask);
    else
        ring.drain(
            [&](int step, int i, const u8* stage) {
                return row_pair<G, U>(stage, n_ff, share.begin + step * N_OF_STAGE, i, input, grid);
            },
            [&](int step, int i, const RowPair& sums) {
                const int row = share.begin + step * N_OF_STAGE + i;
                if (row >= share.end) return;
                const float product = mul(silu(tree(sums.g)), tree(sums.u));
                if (threadIdx.x % WARP > 0) return;
                check_finite(product, op, fault);
                y[row] = product;
            });
    quantize_groups(share, y, y_q, y_scales, done);
}
