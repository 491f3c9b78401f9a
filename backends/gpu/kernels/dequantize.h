// dequantize: rows of a matrix as float32 or halves, for a library's matrix product (and for whoever wants the numbers).
//
//     out         [rows, cols], lines `out_stride` apart
//     w           planes of [matrix_rows, cols]; rows first_row, ...
//
// A thread takes 32 neighbours of a row: 16 to 32 bytes of planes in, 64 or 128 bytes out in stores of 16 bytes. Those of a
// warp lie 64 or 128 bytes apart, but the four (eight) stores of a thread follow each other and L2 joins them to whole lines
// before memory sees them.
//
// Block: 128 threads, grid (ceil(rows * groups / 128)). 48 registers, no block memory, 8 blocks to a multiprocessor. Bytes
// moved per useful byte: 1. Roofline: memory; halves of Q4_K are 18 bytes in and 64 out for a group, so 936 GB/s are 11 G
// groups/s, at some 110 instructions 1.3 T of 17.8 T lane instructions/s (RTX 3090). A product with n rows then reads 2 bytes a
// weight where linear_many reads 0.56: it pays where a library's product is that much faster than ours, at hundreds of rows.
#pragma once

#include "floats.h"
#include "quants.h"

// Weights of a row that begin at column `col`, 32 of them; past the row's end they are zeros. Packed types have whole groups.
template <class Q> DEVICE void row_values(Q, const void *w, int matrix_rows, int cols, i64 row, int col, float (&v)[GROUP]) {
    Group g;
    unpack(fetch(Q(), matrix<Q>(w, matrix_rows, cols), row, col / GROUP), g);
    UNROLL for (int i = 0; i < GROUP; i++) v[i] = weight_of<Q>(g, i);
}

template <class F> DEVICE void float_values(F, const void *w, int cols, i64 row, int col, float (&v)[GROUP]) {
    constexpr int EACH = 16 / F::SIZE;
    const u8 *line = (const u8 *)w + row * float_row_bytes(cols, F::SIZE);
    UNROLL for (int i = 0; i < GROUP; i += EACH) {
        const bool there = col + i < cols;   // a line is filled up to 16 bytes
        const Words4 bits = there ? load_once(line + (i64)(col + i) * F::SIZE) : Words4{0, 0, 0, 0};
        float some[EACH];
        floats_of(F(), bits, some);
        UNROLL for (int j = 0; j < EACH; j++) v[i + j] = some[j];
    }
}
DEVICE void row_values(f32, const void *w, int, int cols, i64 row, int col, float (&v)[GROUP]) {
    float_values(f32(), w, cols, row, col, v);
}
DEVICE void row_values(f16, const void *w, int, int cols, i64 row, int col, float (&v)[GROUP]) {
    float_values(f16(), w, cols, row, col, v);
}
DEVICE void row_values(bf16, const void *w, int, int cols, i64 row, int col, float (&v)[GROUP]) {
    float_values(bf16(), w, cols, row, col, v);
}

// The first `count` of 32, as many at a time as 16 bytes hold.
DEVICE void store_values(float *to, const float (&v)[GROUP], int count) {
    UNROLL for (int i = 0; i < GROUP; i += 4) store4(to + i, {{v[i], v[i + 1], v[i + 2], v[i + 3]}}, count - i);
}
DEVICE void store_values(half_t *to, const float (&v)[GROUP], int count) {
    UNROLL for (int i = 0; i < GROUP; i += 8) {
        half_t h[8];
        UNROLL for (int j = 0; j < 8; j++) h[j] = float_to_half(v[i + j]);
        if (count - i >= 8 && aligned16(to + i))
            store128(to + i, {h[0] | (u32)h[1] << 16, h[2] | (u32)h[3] << 16, h[4] | (u32)h[5] << 16, h[6] | (u32)h[7] << 16});
        else
            UNROLL for (int j = 0; j < 8; j++)
                if (i + j < count) to[i + j] = h[j];
    }
}

template <class Q, class T>
DEVICE void dequantize(Q, T *out, const void *w, int matrix_rows, int cols, int first_row, int rows, int out_stride) {
    const int groups = ceil_div(cols, GROUP);
    const i64 at = (i64)block_x() * threads() + thread();
    const int row = (int)(at / groups), col = (int)(at % groups) * GROUP;
    if (row >= rows) return;
    float v[GROUP];
    row_values(Q(), w, matrix_rows, cols, first_row + row, col, v);
    store_values(out + (i64)row * out_stride + col, v, cols - col);
}

#define DEQUANTIZE_TO(type, name, T)                                                                                           \
    KERNEL(dequantize_##type##_##name, 128, 8)                                                                                 \
    (T * out, const u8 *w, i32 matrix_rows, i32 cols, i32 first_row, i32 rows, i32 out_stride) {                               \
        dequantize(type(), out, w, matrix_rows, cols, first_row, rows, out_stride);                                            \
    }
#define DEQUANTIZE(type) DEQUANTIZE_TO(type, f32, float) DEQUANTIZE_TO(type, f16, half_t)
