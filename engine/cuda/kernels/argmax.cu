// argmax: the lowest id among the largest logits of one token
// logits (n_vocab) f32, control [token id, position of the pack's first token] -> next_token (1) i32 and
//   chosen[position of the pack's last token] i32; scratch: ArgmaxScratch, zero before the first call and after each
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

__device__ __forceinline__ u64 argmax_of_thread(const float* logits, int n_vocab, u32 op,
                                                u32* fault) {
    const int first = blockIdx.x * (ARGMAX_THREADS * ARGMAX_LOGITS) + threadIdx.x;
    float v[ARGMAX_LOGITS];
#pragma unroll
    for (int i = 0; i < ARGMAX_LOGITS; i++) {
        const int id = first + i * ARGMAX_THREADS;
        v[i] = id < n_vocab ? logits[id] : 0.0f;
    }
    u64 best = 0;
#pragma unroll
    for (int i = 0; i < ARGMAX_LOGITS; i++) {
        const int id = first + i * ARGMAX_THREADS;
        if (id >= n_vocab) continue;
        check_finite(v[i], op, fault);
        const u64 key = argmax_key(v[i], u32(id));
        best = key > best ? key : best;
    }
    return best;
}

__global__ void __launch_bounds__(ARGMAX_THREADS)
    argmax(const float* logits, int n_vocab, int n_tokens, const int* control,
           ArgmaxScratch* scratch, int* next_token, int* chosen, u32 op, u32* fault) {
    release_dependents();
    dependency_wait();
    __shared__ u64 warp_best[ARGMAX_THREADS / WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u64 of_warp = warp_max_key(argmax_of_thread(logits, n_vocab, op, fault));
    if (lane == 0) warp_best[warp] = of_warp;
    __syncthreads();
    if (warp > 0) return;
    const u64 of_block = warp_max_key(lane < ARGMAX_THREADS / WARP ? warp_best[lane] : 0);
    if (lane > 0) return;
    atomicMax(&scratch->best, of_block);
    __threadfence();
    if (atomicInc(&scratch->n_done, gridDim.x - 1) + 1 < gridDim.x) return;
    __threadfence();  // the last block: every other one's maximum is in
    const int id = int(0xffffffffu - u32(atomicExch(&scratch->best, 0)));
    next_token[0] = id;
    chosen[control[1] + n_tokens - 1] = id;
}
