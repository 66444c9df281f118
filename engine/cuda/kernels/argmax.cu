// argmax: the lowest id among the largest logits of one token
// logits (n_vocab) f32, control [token id, position of the pack's first token] -> next_token (1) i32,
//   chosen[position of the pack's last token] i32 and, in pinned host memory, outcome: the id and the fault word as it is
//   once all logits have been looked at; scratch: ArgmaxScratch, zero before the first call and after each
// bytes    4 * n_vocab
// launch   grid (ceil(n_vocab / 2048)), block (256), eight logits a thread
// numerics none: one 64-bit maximum of (logit, -id), the same in any order. +0 and -0 compare equal.
// faults   argmax, on the logits

constexpr int ARGMAX_THREADS = 256;
constexpr int ARGMAX_LOGITS = 8;  // a thread's logits, all loaded before the first is looked at

struct ArgmaxScratch {
    u64 best;
    u32 n_done;
    u32 unused;
};

// Larger for a larger logit, and among equal logits for a lower id; never 0 for a finite logit.
__device__ __forceinline__ u64 argmax_key(float logit, u32 id) {
    const u32 bits = __float_as_uint(positive_zero(logit));
    const u32 ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    return u64(ordered) << 32 | (0xffffffffu - id);
}

__device__ __forceinline__ u64 warp_max_key(u64 key) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const u64 other = __shfl_xor_sync(0xffffffffu, key, offset);
        key = other > key ? other : key;
    }
    return key;
}

struct ArgmaxArguments {
    const float* logits;
    int n_vocab, n_tokens;
    const int* control;
    ArgmaxScratch* scratch;
    int *next_token, *chosen, *outcome;
    u32 op;
    u32* fault;
};

// The best of a thread's logits among those from `begin` on, ARGMAX_LOGITS for each of the block's threads.
template <int N_THREADS>
__device__ __forceinline__ u64 argmax_of_thread(const ArgmaxArguments& in, int begin, u64 best) {
    const int first = begin + threadIdx.x;
    float v[ARGMAX_LOGITS];
#pragma unroll
    for (int i = 0; i < ARGMAX_LOGITS; i++) {
        const int id = first + i * N_THREADS;
        v[i] = id < in.n_vocab ? in.logits[id] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < ARGMAX_LOGITS; i++) {
        const int id = first + i * N_THREADS;
        if (id >= in.n_vocab) continue;
        check_finite(v[i], in.op, in.fault);
        const u64 key = argmax_key(v[i], u32(id));
        best = key > best ? key : best;
    }
    return best;
}

// Fold the threads' keys into the result; the block that comes last writes it.
template <int N_THREADS>
__device__ __forceinline__ void argmax_of_blocks(const ArgmaxArguments& in, u64 of_thread) {
    __shared__ u64 warp_best[N_THREADS / WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u64 of_warp = warp_max_key(of_thread);
    if (lane == 0) warp_best[warp] = of_warp;
    __syncthreads();
    if (warp > 0) return;
    const u64 of_block = warp_max_key(lane < N_THREADS / WARP ? warp_best[lane] : 0);
    if (lane > 0) return;
    atomicMax(&in.scratch->best, of_block);
    __threadfence();
    if (atomicInc(&in.scratch->n_done, gridDim.x - 1) + 1 < gridDim.x) return;
    __threadfence();  // the last block: every other one's maximum and fault are in
    const int id = int(0xffffffffu - u32(atomicExch(&in.scratch->best, 0)));
    in.next_token[0] = id;
    in.chosen[in.control[1] + in.n_tokens - 1] = id;
    in.outcome[0] = id;
    in.outcome[1] = int(atomicOr(in.fault, 0u));  // read where the atomics of the others took effect
}

__global__ void __launch_bounds__(ARGMAX_THREADS)
    argmax(const float* logits, int n_vocab, int n_tokens, const int* control, ArgmaxScratch* scratch, int* next_token,
           int* chosen, int* outcome, u32 op, u32* fault) {
    release_dependents();
    dependency_wait();
    const ArgmaxArguments in{logits, n_vocab, n_tokens, control, scratch, next_token, chosen, outcome, op, fault};
    const int begin = blockIdx.x * (ARGMAX_THREADS * ARGMAX_LOGITS);
    argmax_of_blocks<ARGMAX_THREADS>(in, argmax_of_thread<ARGMAX_THREADS>(in, begin, 0));
}
