// finite_check: sets the fault word if one of n values is NaN or infinite; what a check apart from the ops costs
// x (n) f32
// bytes   4 * n
// launch  grid (ceil(n / 1024)), block (256), four values a thread
constexpr int FINITE_CHECK_THREADS = 256, FINITE_CHECK_VALUES = 4;

__global__ void __launch_bounds__(FINITE_CHECK_THREADS) finite_check(const float* x, int n, u32 op, u32* fault) {
    release_dependents();
    dependency_wait();
    const int first = blockIdx.x * FINITE_CHECK_THREADS * FINITE_CHECK_VALUES + threadIdx.x;
#pragma unroll
    for (int i = 0; i < FINITE_CHECK_VALUES; i++) {
        const int at = first + i * FINITE_CHECK_THREADS;
        if (at < n) check_finite(x[at], op, fault);
    }
}
