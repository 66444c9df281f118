// embed: x[t, k] = weight k of row t of the embedding table
// rows (n_tokens, row_n_bytes) u8, as they lie in the file, and staged (n_tokens) pairs of control words, both in pinned
//   host memory -> x (n_tokens, N_IN) f32, control (n_tokens): the pairs, on the device
// bytes   n_tokens * (row_n_bytes + 4 * N_IN)
// launch  grid (ceil(N_IN / 256), n_tokens), block 256; one thread a weight, 8 sub-blocks a block
// numerics scale * q, then minus the minimum: the weights that the formats define (docs/numerics.md)
// order   the sub-blocks of a block are repacked to a short strip in shared memory; the exact dot with a single 1 is one
//         of its integers
constexpr int EMBED_THREADS = 256, EMBED_SUBS = EMBED_THREADS / SUB_BLOCK;

template <class F>
constexpr int EMBED_PART_N_BYTES = EMBED_SUBS / F::SUBS * F::BLOCK_N_BYTES;

// Copy n_bytes of host memory to shared memory, to the same place in a 16-byte word; all threads of the block. A way over
// the bus takes longer than all the rest, so everything is asked for at once; the words hold some bytes around, too.
template <int MOST_N_BYTES>
__device__ __forceinline__ const u8* fetched(const u8* from, int n_bytes) {
    constexpr int MOST_N_WORDS = (MOST_N_BYTES + 15 + 15) / 16;
    static_assert(MOST_N_WORDS <= EMBED_THREADS, "a thread loads one word");
    __shared__ uint4 words[MOST_N_WORDS];
    const int before = int(u64(from) % 16), n_words = (before + n_bytes + 15) / 16;
    if (threadIdx.x < n_words) words[threadIdx.x] = reinterpret_cast<const uint4*>(from - before)[threadIdx.x];
    __syncthreads();
    return reinterpret_cast<const u8*>(words) + before;
}

// The activations that pick one of 32 weights.
__device__ __forceinline__ Group unit_group(int k) {
    Group group(make_int4(0, 0, 0, 0), make_int4(0, 0, 0, 0));
#pragma unroll
    for (int word = 0; word < 8; ++word) group.q[word] = word == k / 4 ? 1 << (8 * (k % 4)) : 0;
    return group;
}

template <class F>
__device__ __forceinline__ float embedded_weight(const u8* strip, int s, int k) {
    const auto raw = F::template load<InShared>(spot_of<F>(strip, EMBED_SUBS, s));
    const Scales own = F::scales(raw, s);
    const float weight = mul(own.scale, F::dot(raw, unit_group(k), iq3s_grid));
    return F::HAS_MIN ? sub(weight, own.minimum) : weight;
}

// The weight of the thread, repacked from the part of a row that starts at `part`; all threads of the block.
template <class F>
__device__ __forceinline__ float repacked_weight(const u8* part, int n_subs) {
    __shared__ __align__(16) u8 strip[EMBED_PART_N_BYTES<F> + 16];
    const u8* blocks = fetched<EMBED_PART_N_BYTES<F>>(part, n_subs / F::SUBS * F::BLOCK_N_BYTES);
    const int s = threadIdx.x;
    if (s < n_subs)
        F::repack(blocks + s / F::SUBS * F::BLOCK_N_BYTES, s % F::SUBS, spot_of<F>(strip, EMBED_SUBS, s));
    __syncthreads();
    if (threadIdx.x >= n_subs * SUB_BLOCK) return 0.0f;
    return embedded_weight<F>(strip, threadIdx.x / SUB_BLOCK, threadIdx.x % SUB_BLOCK);
}

template <class F, int N_IN>
__global__ void __launch_bounds__(EMBED_THREADS)
    embed(const u8* rows, i64 row_n_bytes, const int2* staged, float* x, int2* control) {
    release_dependents();
    dependency_wait();
    const int t = blockIdx.y, k = blockIdx.x * EMBED_THREADS + threadIdx.x;
    const bool has_control = k == EMBED_THREADS - 1;
    const int2 words = has_control ? staged[t] : make_int2(0, 0);  // asked for before the row, used after it
    const u8* row = rows + i64(t) * row_n_bytes;
    float weight = 0.0f;
    if constexpr (is_float_format<F>::value) {
        if (k < N_IN) weight = F::load(row + i64(k) * F::N_BYTES);
    } else {
        const int n_subs = min(EMBED_SUBS, N_IN / SUB_BLOCK - int(blockIdx.x) * EMBED_SUBS);
        weight = repacked_weight<F>(row + blockIdx.x * EMBED_PART_N_BYTES<F>, n_subs);
    }
    if (k < N_IN) x[i64(t) * N_IN + k] = weight;
    if (has_control) control[t] = words;
}
