#include "device.h"
#include "delta.h"
#include "delta_chunks.h"

KERNEL(delta_conv, 128, 3)(const float *mixed, int mixed_stride, const float *beta, int beta_stride, const float *alpha, int alpha_stride,
                           const float *conv, const float *dt_bias, const float *a, float *convolved, float *kept, int stride,
                           const float *states, i64 slot_floats, const int *runs, const int *lanes, int rows, int each, int key_heads,
                           int value_heads, int key_dim, int value_dim, int kernel, float eps) {
    delta_conv_block({mixed, beta, alpha, conv, dt_bias, a, states, mixed_stride, beta_stride, alpha_stride, kernel, slot_floats, eps},
                     {key_heads, value_heads, key_dim, value_dim, 0}, convolved, kept, stride, runs, lanes, rows, each);
}

// The largest key_dim, and blocks that a multiprocessor has registers for.
#define DELTA_RECURRENT(keys, blocks)                                                                                           \
    KERNEL(delta_recurrent_##keys, 64, blocks)(float *convolved, float *kept, int stride, float *matrices, i64 slot_floats,     \
                                               float *out, int out_stride, const int *runs, int key_heads, int value_heads,     \
                                               int key_dim, int value_dim, int tiled) {                                         \
        delta_recurrent<keys>({key_heads, value_heads, key_dim, value_dim, tiled}, convolved, kept, stride, matrices,           \
                              slot_floats, out, out_stride, runs);                                                              \
    }
DELTA_RECURRENT(64, 8)
DELTA_RECURRENT(128, 7)
DELTA_RECURRENT(256, 7)

KERNEL(delta_finish, 128, 4)(float *out, int out_stride, const float *z, int z_stride, const float *norm, i8 *hi, i8 *lo, float *scale,
                             float *sum, const float *mixed, int mixed_stride, float *kept_mixed, int kept_stride, float *states,
                             i64 slot_floats, const int *runs, const int *lanes, int key_heads, int value_heads, int key_dim,
                             int value_dim, int kernel, float eps) {
    delta_finish_block({out, states, kept_mixed, z, norm, mixed, out_stride, z_stride, mixed_stride, kept_stride, kernel, slot_floats, eps},
                       {key_heads, value_heads, key_dim, value_dim, 0}, {hi, lo, scale, sum, value_heads * value_dim}, runs, lanes);
}

KERNEL(delta_accept, 256, 4)(const float *kept, int stride, const float *kept_mixed, int mixed_stride, float *states, float *matrices,
                             i64 slot_floats, const int *accepts, int key_heads, int value_heads, int key_dim, int value_dim, int tiled,
                             int kernel) {
    delta_accept_part({key_heads, value_heads, key_dim, value_dim, tiled}, kept, stride, kept_mixed, mixed_stride, states, matrices,
                      slot_floats, accepts, kernel);
}

KERNEL(delta_prepare, 256, 1)(const float *convolved, int stride, const int *chunks, float *prepared, int key_heads, int value_heads,
                              int key_dim, int value_dim, int tiled) {
    delta_prepare_chunk({key_heads, value_heads, key_dim, value_dim, tiled}, convolved, stride, chunks, prepared);
}

// The largest key_dim, and columns of a block.
#define DELTA_CHUNKS(keys, cols)                                                                                                \
    KERNEL(delta_chunks_##keys, 8 * cols, 1)(const float *convolved, int stride, float *matrices, i64 slot_floats, float *out,  \
                                             int out_stride, const int *runs, const float *prepared, int key_heads,             \
                                             int value_heads, int key_dim, int value_dim, int tiled) {                          \
        delta_chunks_block<keys, cols>({key_heads, value_heads, key_dim, value_dim, tiled}, convolved, stride, matrices,        \
                                       slot_floats, out, out_stride, runs, prepared);                                           \
    }
DELTA_CHUNKS(64, 32)
DELTA_CHUNKS(128, 32)
DELTA_CHUNKS(256, 16)
