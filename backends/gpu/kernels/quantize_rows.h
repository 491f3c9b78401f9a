// quantize_rows: activations as packed matrices read them (quantised.h), for inputs whose maker did not write them so itself.
//
// Block: 256 threads, each four neighbouring columns of one row; grid (ceil(width / 1024), rows). Eight lanes share a block of
// 32 columns: its largest magnitude by three exchanges, its two sums by two. 24 registers, no block memory.
//
// Roofline: the launch at decode (16384 columns are 64 KB in and 39 KB out), memory with many rows: 4 bytes read and 2.4
// written a number, all useful.
#pragma once

#include "quantised.h"

DEVICE void quantize_rows(const float *src, int src_stride, const Quantised &to) {
    const int row = block_y(), column = 4 * (block_x() * threads() + thread());
    const bool there = column < to.width;
    const Floats4 x = load4(src + (i64)row * src_stride + (there ? column : 0), there ? 4 : 0);
    quantise4(to, row, column, x.v, there);
}
