// attention: full attention of a pack over the f16 KV cache, in three launches
//   qk_norm_rope_append  q = rope(rms_norm(q)); cache_k[p] = f16(rope(rms_norm(k))); cache_v[p] = f16(v)
//   attention_split      per split of 32 positions: scores, their maximum, sum of weights and sum of weighted values
//   attention_combine    out = sum over splits / sum of weights; y = out * sigmoid(gate), quantised in groups of 32
// Token t of the pack has position p = control[1] + t and sees positions 0..p; the append is a launch of its own, so
// all keys of the pack are there before the first is read. Grids depend on the capacity n_ctx, never on the position:
// blocks with nothing to do return.
// qg (n_tokens, N_HEAD, {q, gate}, HEAD_DIM) f32, k, v (n_tokens, N_HEAD_KV, HEAD_DIM) f32,
//   cache_k, cache_v (n_ctx, N_HEAD_KV, HEAD_DIM) f16, control [token id, position of the pack's first token] i32

constexpr int ROPE_WARPS = 4;
constexpr int SPLIT_WARPS = 8;

// Element `k` of a head after its first N_ROT elements were turned in pairs (i, i + N_ROT / 2).
template <int N_ROT>
__device__ __forceinline__ float rotated(const float* head, int k, const float* cos, const float* sin) {
    constexpr int HALF = N_ROT / 2;
    if (k >= N_ROT) return head[k];
    const int i = k % HALF;
    const float first = head[i], second = head[i + HALF];
    return k < HALF ? sub(mul(first, cos[i]), mul(second, sin[i])) : add(mul(first, sin[i]), mul(second, cos[i]));
}

// A warp's head as quads: quad i of the lane is quad lane + 32 i of the head, +0 behind it.
template <int HEAD_DIM>
struct HeadQuads {
    static constexpr int N = (HEAD_DIM + 4 * WARP - 1) / (4 * WARP);
    float4 v[N];

    __device__ __forceinline__ static bool has(int i, int lane) { return lane + WARP * i < HEAD_DIM / 4; }

    __device__ __forceinline__ static HeadQuads load(const float* head, int lane) {
        HeadQuads quads;
#pragma unroll
        for (int i = 0; i < N; i++) quads.v[i] = has(i, lane) ? load_quad(head, lane + WARP * i) : zero_quad();
        return quads;
    }
};

// rms_norm of one head by a warp, to shared memory, where the rotation finds both elements of a pair.
template <int HEAD_DIM>
__device__ __forceinline__ void norm_head(const float* x, const float* weight, float eps, int lane, float* normed) {
    using Quads = HeadQuads<HEAD_DIM>;
    const Quads head = Quads::load(x, lane), w = Quads::load(weight, lane);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Quads::N; i++) sum = add_products(sum, head.v[i], head.v[i]);
    const float scale = div(1.0f, root(add(div(tree(sum), float(HEAD_DIM)), eps)));
#pragma unroll
    for (int i = 0; i < Quads::N; i++) {
        if (Quads::has(i, lane)) store_quad(normed, lane + WARP * i, mul_quad(mul_quad(head.v[i], scale), w.v[i]));
    }
    __syncwarp();
}

// qk_norm_rope_append: q_norm, k_norm (HEAD_DIM) f32, cos, sin (n_ctx, N_ROT / 2) f32 from the host
//   -> q (n_tokens, N_HEAD, HEAD_DIM) f32 and row p of cache_k, cache_v
// bytes    n_tokens * HEAD_DIM * (8 * N_HEAD + 12 * N_HEAD_KV) + 4 * n_tokens * N_ROT
// launch   grid (ceil((N_HEAD + 2 N_HEAD_KV) / 4), n_tokens), block (128): one warp a head of q, of k, of v
// numerics sum32 over a head
struct AppendArguments {
    const float *qg, *k, *v, *q_norm, *k_norm, *cos, *sin;
    const int* control;
    float eps;
    float* q;
    u16 *cache_k, *cache_v;
};

// One head, by a warp: unit counts the heads of q, then those of k, then those of v; head: shared memory.
template <int HEAD_DIM, int N_HEAD, int N_HEAD_KV, int N_ROT>
__device__ __forceinline__ void append_head(const AppendArguments& in, int token, int unit, float* head) {
    const int lane = threadIdx.x % WARP;
    const i64 position = in.control[1] + token;
    const float* cos_row = in.cos + position * (N_ROT / 2);
    const float* sin_row = in.sin + position * (N_ROT / 2);
    if (unit < N_HEAD) {
        norm_head<HEAD_DIM>(in.qg + (i64(token) * N_HEAD + unit) * (2 * HEAD_DIM), in.q_norm, in.eps, lane, head);
        float* out = in.q + (i64(token) * N_HEAD + unit) * HEAD_DIM;
        for (int i = lane; i < HEAD_DIM; i += WARP) out[i] = rotated<N_ROT>(head, i, cos_row, sin_row);
    } else if (unit < N_HEAD + N_HEAD_KV) {
        const int kv = unit - N_HEAD;
        norm_head<HEAD_DIM>(in.k + (i64(token) * N_HEAD_KV + kv) * HEAD_DIM, in.k_norm, in.eps, lane, head);
        u16* out = in.cache_k + (position * N_HEAD_KV + kv) * HEAD_DIM;
        for (int i = lane; i < HEAD_DIM; i += WARP) out[i] = float_to_half(rotated<N_ROT>(head, i, cos_row, sin_row));
    } else {
        const int kv = unit - N_HEAD - N_HEAD_KV;
        const float* values = in.v + (i64(token) * N_HEAD_KV + kv) * HEAD_DIM;
        u16* out = in.cache_v + (position * N_HEAD_KV + kv) * HEAD_DIM;
        for (int i = lane; i < HEAD_DIM; i += WARP) out[i] = float_to_half(values[i]);
    }
}

template <int HEAD_DIM, int N_HEAD, int N_HEAD_KV, int N_ROT>
__global__ void __launch_bounds__(ROPE_WARPS* WARP)
    qk_norm_rope_append(const float* qg, const float* k, const float* v, const float* q_norm, const float* k_norm,
                        const float* cos, const float* sin, const int* control, float eps, float* q, u16* cache_k,
                        u16* cache_v) {
    release_dependents();
    dependency_wait();
    __shared__ __align__(16) float normed[ROPE_WARPS][HEAD_DIM];
    const int unit = blockIdx.x * ROPE_WARPS + threadIdx.x / WARP;
    if (unit >= N_HEAD + 2 * N_HEAD_KV) return;
    const AppendArguments in{qg, k, v, q_norm, k_norm, cos, sin, control, eps, q, cache_k, cache_v};
    append_head<HEAD_DIM, N_HEAD, N_HEAD_KV, N_ROT>(in, blockIdx.y, unit, normed[threadIdx.x / WARP]);
}

// Scores of the warp's positions for all query heads of the KV head; every key is read once.
template <int HEAD_DIM, int N_GQA, int N_WARPS>
__device__ __forceinline__ void split_scores(const float* q, const u16* keys, i64 stride, int n_seen, float scale,
                                             float (&scores)[N_GQA][KV_SPLIT], u32 op, u32* fault) {
    using Quads = HeadQuads<HEAD_DIM>;
    constexpr int POSITIONS_A_WARP = KV_SPLIT / N_WARPS;
    const int lane = threadIdx.x % WARP, first = threadIdx.x / WARP * POSITIONS_A_WARP;
    float4 key[POSITIONS_A_WARP][Quads::N];
#pragma unroll
    for (int j = 0; j < POSITIONS_A_WARP; j++) {
#pragma unroll
        for (int i = 0; i < Quads::N; i++) {
            uint2 h = make_uint2(0, 0);
            if (first + j < n_seen && Quads::has(i, lane)) {
                h = reinterpret_cast<const uint2*>(keys + (first + j) * stride)[lane + WARP * i];
            }
            key[j][i] = widen_quad(h);
        }
    }
    const int own = first + row_of_lane<POSITIONS_A_WARP>(lane);
#pragma unroll
    for (int h = 0; h < N_GQA; h++) {
        const Quads query = Quads::load(q + h * HEAD_DIM, lane);
        float part[POSITIONS_A_WARP];
#pragma unroll
        for (int j = 0; j < POSITIONS_A_WARP; j++) {
            part[j] = products(query.v[0], key[j][0]);
#pragma unroll
            for (int i = 1; i < Quads::N; i++) part[j] = add_products(part[j], query.v[i], key[j][i]);
        }
        const float score = mul(positive_zero(tree_rows(part, lane)), scale);
        if (lane % (WARP / POSITIONS_A_WARP) == 0) {
            if (own < n_seen) check_finite(score, op, fault);
            scores[h][own] = score;
        }
    }
}

// Sum of weight * value over the 32 positions, in order; a thread two elements of every SLICES-th query head.
template <int HEAD_DIM, int N_GQA, int N_WARPS>
__device__ __forceinline__ void split_values(const u16* tile, const float (&weights)[N_GQA][KV_SPLIT], float* values,
                                             i64 head_stride) {
    constexpr int N_PAIRS = HEAD_DIM / 2, SLICES = N_WARPS * WARP / N_PAIRS, N = (N_GQA + SLICES - 1) / SLICES;
    const int pair = threadIdx.x % N_PAIRS, slice = threadIdx.x / N_PAIRS;
    float2 sum[N];
#pragma unroll
    for (int i = 0; i < N; i++) sum[i] = make_float2(0.0f, 0.0f);
#pragma unroll 8
    for (int j = 0; j < KV_SPLIT; j++) {
        const u32 two = reinterpret_cast<const u32*>(tile)[j * N_PAIRS + pair];
        const float x = half_to_float(u16(two)), y = half_to_float(u16(two >> 16));
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int head = slice + i * SLICES;
            if (N_GQA % SLICES != 0 && head >= N_GQA) break;
            sum[i].x = add(sum[i].x, mul(weights[head][j], x));
            sum[i].y = add(sum[i].y, mul(weights[head][j], y));
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int head = slice + i * SLICES;
        if (head < N_GQA) reinterpret_cast<float2*>(values + head * head_stride)[pair] = sum[i];
    }
}

// attention_split: q (n_tokens, N_HEAD, HEAD_DIM) f32 and the cache -> maxima, sums (tokens, N_HEAD, n_split) f32,
//   values (tokens, N_HEAD, n_split, HEAD_DIM) f32, with n_split = ceil(n_ctx / 32);
//   the launch's first token is number `first_token` of the pack; the results begin with that token
// bytes    per token 4 * (p + 1) * N_HEAD_KV * HEAD_DIM read, 4 * n_split(p) * N_HEAD * (HEAD_DIM + 2) written
// launch   grid (N_HEAD_KV, ceil(n_ctx / 32), tokens of the launch), block (256)
// numerics score: sum32 over a head; a split's weights by tree, its values in order of position
// faults   attention, on the scores: a key of -infinity would otherwise become a position of weight 0
struct SplitArguments {
    const float* q;
    const u16 *cache_k, *cache_v;
    const int* control;
    int first_token;
    float scale;
    float *maxima, *sums, *values;
    u32 op;
    u32* fault;
};

template <int HEAD_DIM, int N_GQA>
struct __align__(16) SplitShared {
    u16 tile[KV_SPLIT * HEAD_DIM];
    float weights[N_GQA][KV_SPLIT];
};

// One split of n_split of a KV head, by a block of N_WARPS warps.
template <int HEAD_DIM, int N_HEAD, int N_HEAD_KV, int N_WARPS>
__device__ __forceinline__ void attend_split(const SplitArguments& in, int kv, int split, int n_split, int token,
                                             SplitShared<HEAD_DIM, N_HEAD / N_HEAD_KV>& shared) {
    static_assert(HEAD_DIM == 64 || HEAD_DIM == 128 || HEAD_DIM == 256);
    constexpr int N_GQA = N_HEAD / N_HEAD_KV;
    const int n_behind = in.control[1] + token + 1 - split * KV_SPLIT;  // positions seen from the split's first on
    if (n_behind <= 0) return;
    const int n_seen = n_behind < KV_SPLIT ? n_behind : KV_SPLIT;
    constexpr i64 STRIDE = i64(N_HEAD_KV) * HEAD_DIM;
    const i64 at = split * KV_SPLIT * STRIDE + kv * HEAD_DIM;
    ValueTile<HEAD_DIM, N_WARPS> v;
    v.load(in.cache_v + at, STRIDE, n_seen);
    const float* queries = in.q + (i64(token) * N_HEAD + kv * N_GQA) * HEAD_DIM;
    split_scores<HEAD_DIM, N_GQA, N_WARPS>(queries, in.cache_k + at, STRIDE, n_seen, in.scale, shared.weights, in.op,
                                           in.fault);
    v.store(shared.tile);
    __syncthreads();
    const i64 result = (i64(token - in.first_token) * N_HEAD + kv * N_GQA) * n_split + split;  // of the first head
    softmax_heads<N_GQA, N_WARPS>(shared.weights, n_seen, in.maxima + result, in.sums + result, n_split);
    __syncthreads();
    split_values<HEAD_DIM, N_GQA, N_WARPS>(shared.tile, shared.weights, in.values + result * HEAD_DIM,
                                           i64(n_split) * HEAD_DIM);
}

template <int HEAD_DIM, int N_HEAD, int N_HEAD_KV>
__global__ void __launch_bounds__(SPLIT_WARPS* WARP)
    attention_split(const float* q, const u16* cache_k, const u16* cache_v, const int* control, int first_token,
                    float scale, float* maxima, float* sums, float* values, u32 op, u32* fault) {
    release_dependents();
    dependency_wait();
    __shared__ SplitShared<HEAD_DIM, N_HEAD / N_HEAD_KV> shared;
    const SplitArguments in{q, cache_k, cache_v, control, first_token, scale, maxima, sums, values, op, fault};
    const int token = first_token + blockIdx.z;
    attend_split<HEAD_DIM, N_HEAD, N_HEAD_KV, SPLIT_WARPS>(in, blockIdx.x, blockIdx.y, gridDim.y, token, shared);
}

// The largest of n values, NaN if any is; all threads of the block get it. Every HEAD_DIM threads look at all values.
template <int HEAD_DIM>
__device__ __forceinline__ float block_max(const float* v, int n) {
    __shared__ float warp_maxima[HEAD_DIM / WARP];
    float maximum = v[0];
    for (int i = threadIdx.x % HEAD_DIM; i < n; i += HEAD_DIM) maximum = max_nan(maximum, v[i]);
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        maximum = max_nan(maximum, __shfl_xor_sync(0xffffffffu, maximum, offset));
    }
    if (threadIdx.x % WARP == 0) warp_maxima[threadIdx.x % HEAD_DIM / WARP] = maximum;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < HEAD_DIM / WARP; i++) maximum = max_nan(maximum, warp_maxima[i]);
    return maximum;
}

// attention_combine: maxima, sums, values of attention_split, gate from qg -> y (n_tokens, N_HEAD * HEAD_DIM) f32,
//   q8 (n_tokens, N_HEAD * HEAD_DIM) i8, scales (n_tokens, N_HEAD * HEAD_DIM / 32); first_token as in attention_split
// bytes    per token 4 * n_split(p) * N_HEAD * (HEAD_DIM + 2) + 9.25 * N_HEAD * HEAD_DIM
// launch   grid (N_HEAD, tokens of the launch), block (HEAD_DIM): a thread an element, over the splits in order
// numerics docs/numerics.md, "Attention": two sums over the splits in order, one division
// faults   attention, on out, and on the gate: an infinite one would become 0 or 1
struct CombineArguments {
    const float *qg, *maxima, *sums, *values;
    const int* control;
    int first_token, n_split;
    float* y;
    i8* q8;
    GroupScale* scales;
    u32 op;
    u32* fault;
};

// One head, by a block whose threads are a multiple of HEAD_DIM: all of these multiples do and write the same.
template <int HEAD_DIM, int N_HEAD>
__device__ __forceinline__ void combine_head(const CombineArguments& in, int head, int token) {
    __shared__ float factors[HEAD_DIM], weighted_sums[HEAD_DIM];
    const int i = threadIdx.x % HEAD_DIM;
    const float gate = in.qg[((i64(token) * N_HEAD + head) * 2 + 1) * HEAD_DIM + i];
    const i64 first = (i64(token - in.first_token) * N_HEAD + head) * in.n_split;
    const int n = (in.control[1] + token) / KV_SPLIT + 1;
    const float maximum = block_max<HEAD_DIM>(in.maxima + first, n);
    float total = 0.0f, out = 0.0f;
    for (int begin = 0; begin < n; begin += HEAD_DIM) {
        __syncthreads();
        if (begin + i < n) {
            factors[i] = exp_(sub(in.maxima[first + begin + i], maximum));
            weighted_sums[i] = mul(factors[i], in.sums[first + begin + i]);
        }
        __syncthreads();
        const int m = n - begin < HEAD_DIM ? n - begin : HEAD_DIM;
#pragma unroll 8
        for (int s = 0; s < m; s++) {
            total = add(total, weighted_sums[s]);
            out = add(out, mul(factors[s], in.values[(first + begin + s) * HEAD_DIM + i]));
        }
    }
    out = div(out, total);
    check_finite(out, in.op, in.fault);
    check_finite(gate, in.op, in.fault);
    const float gated = mul(out, sigmoid(gate));
    const i64 row = i64(token) * N_HEAD * HEAD_DIM;
    in.y[row + head * HEAD_DIM + i] = gated;
    quantize_group(gated, (head * HEAD_DIM + i) / SUB_BLOCK, in.q8 + row, in.scales + row / SUB_BLOCK, i % WARP);
}

template <int HEAD_DIM, int N_HEAD>
__global__ void __launch_bounds__(HEAD_DIM, 1)  // the 1: else the assembler squeezes into 32 registers and may spill
    attention_combine(const float* qg, const float* maxima, const float* sums, const float* values, const int* control,
                      int first_token, int n_split, float* y, i8* q8, GroupScale* scales, u32 op, u32* fault) {
    release_dependents();
    dependency_wait();
    const CombineArguments in{qg, maxima, sums, values, control, first_token, n_split, y, q8, scales, op, fault};
    combine_head<HEAD_DIM, N_HEAD>(in, blockIdx.x, first_token + blockIdx.y);
}
