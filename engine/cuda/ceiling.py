"""The most that a kernel can read from device memory: the ceiling that speeds of a decode step are held against."""

from __future__ import annotations

from statistics import median

import cupy
import numpy as np

from engine.errors import PlacementError

_READ_SOURCE = r"""
extern "C" __global__ void read_all(const uint4 * data, size_t n, unsigned * sink) {
    const size_t stride = size_t(gridDim.x) * blockDim.x;
    unsigned mixed = 0;
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += 4 * stride) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const size_t j = i + k * stride;
            if (j < n) {
                const uint4 v = __ldcs(data + j);
                mixed ^= v.x ^ v.y ^ v.z ^ v.w;
            }
        }
    }
    if (mixed == 0x5eed5eedu) *sink = mixed;  // keeps the loads; hardly ever true
}
"""
_BLOCK = 256
_BLOCKS_PER_SM = 8
_N_WARM_UP = 3


def read_ceiling(n_bytes: int = 4 << 30, n_repetitions: int = 10) -> float:
    """Return the read bandwidth of device 0 in GB/s (1e9 bytes): the median of streaming reads of n_bytes.

    n_bytes must be a multiple of 16, and far beyond the L2 cache to mean anything. Raises PlacementError where the
    device has no room for it.
    """
    try:
        data = cupy.ones(n_bytes // 4, np.uint32)
    except cupy.cuda.memory.OutOfMemoryError:
        raise PlacementError(f"the device has no {n_bytes:,} bytes free to measure its read ceiling with") from None
    sink = cupy.zeros(1, np.uint32)
    kernel = cupy.RawKernel(_READ_SOURCE, "read_all")
    grid = (cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"] * _BLOCKS_PER_SM,)
    times_ms = []
    for _ in range(_N_WARM_UP + n_repetitions):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        kernel(grid, (_BLOCK,), (data, np.uint64(n_bytes // 16), sink))
        end.record()
        end.synchronize()
        times_ms.append(cupy.cuda.get_elapsed_time(start, end))
    del data
    cupy.get_default_memory_pool().free_all_blocks()
    return n_bytes / (median(times_ms[_N_WARM_UP:]) * 1e-3) * 1e-9
