// repack: the blocks of a quantised matrix, as they lie in the file, to strips of aligned planes (formats.cuh)
// raw (n_blocks, BLOCK_N_BYTES) u8 -> strips, the same number of bytes; a slice of blocks at a time
// bytes   2 * n_blocks * BLOCK_N_BYTES
// launch  grid ceil(n / 256), block 256; one thread per sub-block of the slice; first = index of its first sub-block
// numerics none: bits are moved, none is changed
template <class F>
__global__ void repack(const u8* raw, u8* strips, i64 n_sub, i64 first, i64 n) {
    const i64 j = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (j < n) F::repack(raw + j / F::SUBS * F::BLOCK_N_BYTES, int(j % F::SUBS), spot_of<F>(strips, n_sub, first + j));
}
