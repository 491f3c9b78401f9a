// Activations as packed matrices read them, written by whoever has them in registers: blocks of 32 columns of a row are int16
// numbers times one scale, the number cut into two signed bytes, v = 256 hi + lo.
//
//     hi, lo    i8 [rows][width]            v = round(x / s)
//     scale     float [rows][width / 32]    s = max |x| / 32512, so that hi stays within a byte
//     sum       float [rows][width / 16]    of s v over 16 columns: what a matrix with mins multiplies them by
#pragma once

#include "floats.h"

struct Quantised {
    i8 *hi, *lo;
    float *scale, *sum;
    int width;
};

// Four columns of a row from `column` on, a multiple of 4, in lanes whose neighbours have the neighbouring columns, so that each
// eight of them have a block. Every lane of the warp calls it; those that are not `there` write nothing, eight at a time.
DEVICE void quantise4(const Quantised &to, int row, int column, const float (&x)[4], bool there) {
    float most = 0.0f;
    UNROLL for (int i = 0; i < 4; i++) most = max_(most, abs_(x[i]));
    most = group_max<8>(most);
    const float scale = most / 32512.0f, inverse = most > 0.0f ? 32512.0f / most : 0.0f;
    u32 hi = 0, lo = 0;
    int sum = 0;
    UNROLL for (int i = 0; i < 4; i++) {
        const int v = (int)round_(x[i] * inverse), upper = (v + 128) >> 8;
        hi |= (u32)(upper & 255) << 8 * i;
        lo |= (u32)((v - 256 * upper) & 255) << 8 * i;
        sum += v;
    }
    const float sums = group_sum<4>((float)sum);
    if (!there) return;
    const i64 at = (i64)row * to.width + column;
    *(u32 *)(to.hi + at) = hi;
    *(u32 *)(to.lo + at) = lo;
    if (column % 16 == 0) to.sum[at / 16] = scale * sums;
    if (column % 32 == 0) to.scale[at / 32] = scale;
}
