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

// A barrier in shared memory: a round ends after n_arrivals, and when the copies that it expects are there.
__device__ __forceinline__ void init_barrier(u64* barrier, u32 n_arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_arrivals) : "memory");
}
__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(shared_address(barrier)) : "memory");
}

// On sm_90 and later one thread asks for whole runs (bulk copies), whose bytes a barrier expects. Before that each thread
// asks for 16 bytes at a time (cp.async). Measured on an H200: with cp.async what the warps load besides queues behind it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool HAS_BULK_COPIES = true;

// After init_barrier: let the copy engine see the barriers too.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
}
// One thread: arrive; n_bytes are about to be copied.
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
// After the copies of a round, if no other way tells that they are there: all threads that took part.
__device__ __forceinline__ void end_copies(u64*) {}
__device__ __forceinline__ u32 has_passed(const u64* barrier, u32 parity) {
    u32 done;
    asm volatile("{.reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done;}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return done;
}
#else
constexpr bool HAS_BULK_COPIES = false;

__device__ __forceinline__ void publish_barriers() { __syncwarp(); }
__device__ __forceinline__ void expect_bytes(u64*, int) {}
template <int N_THREADS = WARP>
__device__ __forceinline__ void copy_run(u8* to, const u8* from, int n_bytes, u64*) {
    for (int at = 16 * (threadIdx.x % N_THREADS); at < n_bytes; at += 16 * N_THREADS) copy_chunk<16>(to + at, from + at);
}
__device__ __forceinline__ void end_copies(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ u32 has_passed(const u64* barrier, u32 parity) {
    u32 done;
    asm volatile("{.reg .pred done; mbarrier.test_wait.parity.shared.b64 done, [%1], %2; selp.u32 %0, 1, 0, done;}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return done;
}
#endif

// Rounds of a barrier have parities 0, 1, 0, ...; wait until the one of this parity is over.
__device__ __forceinline__ void wait_for(const u64* barrier, u32 parity) {
    while (has_passed(barrier, parity) == 0) {}
}
