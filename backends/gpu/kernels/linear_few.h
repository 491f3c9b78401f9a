// linear_few: out [rows, outs] = x W^T + bias for a few rows, decode and the rows of a draft. Bound by reading W.
//
//     out           float32, lines `out_stride` apart
//     w             a matrix of planes (planes.py), [outs, cols]
//     bias          [outs] or null
//     hi lo scale sum     x of packed types (quantised.h)        x, x_stride      x of floats, single precision
//     team          lanes for a row of W: 8, 16 or 32
//
// Grid: (ceil(outs / outs of a block), ceil(rows / R)), 128 threads: 128 / team teams of FEW_OUTS outputs each. The variants
// r1, r2, r4 and r8 have R = 1 .. 8 rows of x; more rows take several blocks, which read W again, mostly from L2.
//
// Bytes. A group of 32 weights of Q4_K is 18 bytes of W from memory, and 76 of x from L1: two planes of 32, a scale, two sums.
// x serves two outputs of a lane, and the teams of a warp read the same of it at the same time, which L1 sends to all of them
// at once. So with teams of 8, as large matrices have, 76 / (2 x 4) = 10 bytes of x for each row cross L1 beside 18 of W; W
// goes past L1 (load_once), so that x stays there. From memory: W once, x once: 1.0 bytes for each useful one.
//
// Roofline. Memory, as long as the instructions fit beside it. A group costs 12 instructions to unpack, 10 for its scales and
// for each row 16 dot4, 5 for the sum and 6 / FEW_OUTS loads, 60 altogether at R = 1.
//
//     RTX 3090       936 GB/s are 52 G groups/s, 3.1 T lane instructions/s of 17.8 T: 18 %. At R = 8, dot4 at half
//                    rate, all of it: there linear_many's matrix cores take over
//     7900 XTX       960 GB/s, 3.2 T of 14.7 T (29 T where two issue at a time); R = 8 14 T
//     gfx1103       ~100 GB/s, 0.33 T of 2.0 T; R = 8 1.3 T
//
// In flight. 936 GB/s at 600 ns are 6.8 KB for each of 82 multiprocessors. With one or two rows a lane has the next group of
// two rows of W under way, 36 bytes: the 640 lanes that 96 registers leave hold 23 KB. With more, 512 lanes at 128 registers
// fetch when they need it, and three warps of a scheduler work while the fourth waits: 350 instructions each and
// more. A matrix of 1024 rows, in teams of 32, gives a multiprocessor 200 lanes, 7 KB: just enough. That is why small matrices
// have larger teams; and large ones small teams, because the sum over a team is 2 R log2(team) exchanges for two rows of W.
//
// llama.cpp's mmvq gives a row of W to a block of 4 warps and quantises x to 8 bits; here x has 16 (decision 4), which
// doubles dot4 and bytes of x and not those of W, and a row stays in a warp, which needs no barrier. exllamav3 reads 16 bytes
// a lane likewise, from a layout made for it.
#pragma once

#include "few_products.h"

template <class Q, int R, class X>
DEVICE void linear_few(float *out, const void *w, const float *bias, const X &x, int rows, int outs, int cols, int out_stride,
                       int team) {
    const int out0 = (block_x() * (threads() / team) + thread() / team) * FEW_OUTS;
    FewRows at;
    UNROLL for (int n = 0; n < FEW_OUTS; n++) at.weight[n] = out0 + n < outs ? out0 + n : outs - 1;
    at.first = block_y() * R;
    at.last = rows - 1;
    float sums[R][FEW_OUTS] = {};
    few_products(Q(), sums, w, outs, cols, x, at, team);
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int n = 0; n < FEW_OUTS; n++) {
            const float sum = team_sum(sums[r][n], team);
            if (lane() % team == 0 && at.first + r < rows && out0 + n < outs)
                out[(i64)(at.first + r) * out_stride + out0 + n] = bias ? sum + bias[out0 + n] : sum;
        }
}

// Blocks of 128 threads that a multiprocessor should hold: 96 registers a thread for one or two rows, 128 for more.
constexpr int few_blocks(int rows) { return rows <= 2 ? 5 : 4; }

#define LINEAR_FEW(type, R)                                                                                                    \
    KERNEL(linear_few_##type##_r##R, 128, few_blocks(R))                                                                       \
    (float *out, const u8 *w, const float *bias, const i8 *hi, const i8 *lo, const float *scale, const float *sum, i32 rows,   \
     i32 outs, i32 cols, i32 out_stride, i32 team) {                                                                           \
        linear_few<type, R>(out, w, bias, Acts{hi, lo, scale, sum}, rows, outs, cols, out_stride, team);                       \
    }
#define LINEAR_FEW_FLOAT(type, R)                                                                                              \
    KERNEL(linear_few_##type##_r##R, 128, few_blocks(R))                                                                       \
    (float *out, const u8 *w, const float *bias, const float *x, i32 x_stride, i32 rows, i32 outs, i32 cols, i32 out_stride,   \
     i32 team) {                                                                                                               \
        linear_few<type, R>(out, w, bias, FloatActs{x, x_stride}, rows, outs, cols, out_stride, team);                         \
    }
#define LINEAR_FEW_OF(type) LINEAR_FEW(type, 1) LINEAR_FEW(type, 2) LINEAR_FEW(type, 4) LINEAR_FEW(type, 8)
#define LINEAR_FEW_OF_FLOAT(type)                                                                                              \
    LINEAR_FEW_FLOAT(type, 1) LINEAR_FEW_FLOAT(type, 2) LINEAR_FEW_FLOAT(type, 4) LINEAR_FEW_FLOAT(type, 8)
