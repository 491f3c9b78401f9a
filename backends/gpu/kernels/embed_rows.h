// embed_rows: out[r] = scale * table[tokens[r] - first], or zeros where the table has no such row.
//
//     out        [rows, cols], lines `out_stride` apart
//     table      planes of [table_rows, cols]: the vocabulary's rows from `first` on
//
// Block: 128 threads, each 32 columns of one row; grid (ceil(groups / 128), rows). 48 registers, no block memory. A row of 5120
// columns of Q4_K is 2.9 KB read and 20 KB written, both once: less than a launch takes, at any number of rows up to hundreds.
#pragma once

#include "dequantize.h"

template <class Q>
DEVICE void embed_rows(Q, float *out, const void *table, const int *tokens, int table_rows, int cols, int first, int out_stride,
                       float scale) {
    const int col = (block_x() * threads() + thread()) * GROUP;
    if (col >= cols) return;
    const int row = tokens[block_y()] - first;
    float v[GROUP] = {};
    if (row >= 0 && row < table_rows) {
        row_values(Q(), table, table_rows, cols, row, col, v);
        UNROLL for (int i = 0; i < GROUP; i++) v[i] *= scale;
    }
    store_values(out + (i64)block_y() * out_stride + col, v, cols - col);
}

#define EMBED_ROWS(type)                                                                                                       \
    KERNEL(embed_rows_##type, 128, 8)                                                                                          \
    (float *out, const u8 *table, const int *tokens, i32 table_rows, i32 cols, i32 first, i32 out_stride, float scale) {       \
        embed_rows(type(), out, table, tokens, table_rows, cols, first, out_stride, scale);                                    \
    }
