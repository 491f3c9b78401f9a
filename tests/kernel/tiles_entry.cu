// Products of tiles, for test_gpu_tiles.py: out = c + A B over `tiles` tiles of k, one warp; and how often each value of C is
// somebody's.
#include "device.h"

constexpr int STRIDE = tile_stride(16 * 4);

KERNEL(tiles, WARP, 1)(float *out, i32 *owners, const half_t *a, const half_t *b, const float *c, i32 tiles, i32 transposed) {
    SHARED(half_t, a_lines, 16 * STRIDE);
    SHARED(half_t, b_lines, 64 * STRIDE);
    const int depth = 16 * tiles;
    for (int i = thread(); i < 16 * depth; i += threads()) {
        const int line = i / depth, k = i % depth;
        a_lines[line * STRIDE + k] = a[i];
        b_lines[transposed ? k * STRIDE + line : line * STRIDE + k] = b[i];
    }
    block_barrier();
    TileC sum;
    tile_zero(sum);
    for (int k = 0; k < depth; k += 16) {
        TileA left;
        TileB right;
        tile_load_a(left, a_lines + k, STRIDE);
        if (transposed)
            tile_load_bt(right, b_lines + k * STRIDE, STRIDE);
        else
            tile_load_b(right, b_lines + k, STRIDE);
        tile_multiply(sum, left, right);
    }
    tile_each(sum, [&](int row, int col, float &value) { value += c[16 * row + col]; });
    tile_each(sum, [&](int row, int col, float &value) {
        out[16 * row + col] = value;
        atomic_add(&owners[16 * row + col], 1);
    });
}
