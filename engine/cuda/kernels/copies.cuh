// copies.cuh: copies from global to shared memory that go on while the threads do something else
#pragma once

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// One thread: copy 4, 8 or 16 bytes, aligned to their number.
template <int N_BYTES>
__device__ __forceinline__ void copy_chunk(u8* to, const u8* from) {
    if constexpr (N_BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(N_BYTES)
                     : "memory");
}
// What the thread has asked for since the last call is one group.
__device__ __forceinline__ void commit_chunks() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait for the thread's chunks, but for those of the last N groups.
template <int N>
__device__ __forceinline__ void wait_chunks() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Copies on their way to a stage in shared memory. On sm_90 and later one lane asks for whole runs (bulk copies) and the
// stage's barrier tells when all bytes are there. Before that every lane asks for 16 bytes at a time (cp.async), and
// stages arrive in order. Measured on an H200: with cp.async what the warps load besides queues behind the copies.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// One lane: the barrier of a stage into which n_matrices parts are copied each time.
__device__ __forceinline__ void init_barrier(u64* barrier, int n_matrices) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_matrices) : "memory");
}
// After init_barrier: let the copy engine see the barriers too.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
}
// One lane: n_bytes of one part are about to be copied.
__device__ __forceinline__ void expect_bytes(u64* barrier, int n_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_bytes)
                 : "memory");
}
// N_THREADS threads together: copy a run; addresses and n_bytes are multiples of 16.
template <int N_THREADS = WARP>
__device__ __forceinline__ void copy_run(u8* to, const u8* from, int n_bytes, u64* barrier) {
    if (threadIdx.x % N_THREADS > 0) return;
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(n_bytes), "r"(shared_address(barrier))
                 : "memory");
}
__device__ __forceinline__ void end_step() {}
// Wait for the copies of the stage's current round; rounds have parities 0, 1, 0, ...
__device__ __forceinline__ void wait_barrier(const u64* barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{.reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done;}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    } while (done == 0);
}
template <int N_STAGES>
__device__ __forceinline__ void wait_stage(const u64* barrier, u32 parity) {
    wait_barrier(barrier, parity);
}
#else
__device__ __forceinline__ void init_barrier(u64*, int) {}
__device__ __forceinline__ void publish_barriers() {}
__device__ __forceinline__ void expect_bytes(u64*, int) {}
template <int N_THREADS = WARP>
__device__ __forceinline__ void copy_run(u8* to, const u8* from, int n_bytes, u64*) {
    for (int at = 16 * (threadIdx.x % N_THREADS); at < n_bytes; at += 16 * N_THREADS) copy_chunk<16>(to + at, from + at);
}
__device__ __forceinline__ void end_step() { commit_chunks(); }
__device__ __forceinline__ void wait_barrier(const u64*, u32) {}
template <int N_STAGES>
__device__ __forceinline__ void wait_stage(const u64*, u32) {
    wait_chunks<N_STAGES - 1>();
    __syncwarp();
}
#endif
