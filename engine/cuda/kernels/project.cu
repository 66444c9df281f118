// project: y_i = W_i h for one token and up to four matrices that share an input, in one launch
// W_i (n_out_i, N_IN) in strips of format F_i; h as for gemv; y_i (n_out_i) f32; Absent fills unused places
// bytes   all matrices once, activations from L1 and L2
// launch  grid sum of ceil(n_out_i / GEMV_WARPS), block 32 * GEMV_WARPS; one warp a row, blocks in order of the matrices
// numerics row_dot.cuh
struct Absent {};
template <class F>
struct is_absent {
    static constexpr bool value = false;
};
template <>
struct is_absent<Absent> {
    static constexpr bool value = true;
};

struct Part {
    const u8* w;
    int n_out;
    float* y;
};

// Compute the block's rows if they are of this part; else count the part's blocks off and return false.
template <class F, int N_IN>
__device__ __forceinline__ bool takes(int& block, const Part& part, const Input& h) {
    const int n_blocks = (part.n_out + GEMV_WARPS - 1) / GEMV_WARPS;
    if (block >= n_blocks) {
        block -= n_blocks;
        return false;
    }
    const i64 row = i64(block) * GEMV_WARPS + threadIdx.x / WARP;
    if (row >= part.n_out) return true;
    const float sum = row_dot<F, N_IN>(part.w, part.n_out, row, h);
    if (threadIdx.x % WARP == 0) part.y[row] = sum;
    return true;
}

template <int N_IN, class FA, class FB, class FC, class FD>
__global__ void __launch_bounds__(WARP* GEMV_WARPS, blocks_per_sm(N_IN))
    project(const u8* wa, int n_a, float* ya, const u8* wb, int n_b, float* yb, const u8* wc, int n_c, float* yc,
            const u8* wd, int n_d, float* yd, const float* x, const i8* q, const GroupScale* scales) {
    release_dependents();
    const Input h{x, q, scales};
    int block = blockIdx.x;
    if (takes<FA, N_IN>(block, Part{wa, n_a, ya}, h)) return;
    if constexpr (!is_absent<FB>::value)
        if (takes<FB, N_IN>(block, Part{wb, n_b, yb}, h)) return;
    if constexpr (!is_absent<FC>::value)
        if (takes<FC, N_IN>(block, Part{wc, n_c, yc}, h)) return;
    if constexpr (!is_absent<FD>::value) takes<FD, N_IN>(block, Part{wd, n_d, yd}, h);
}
