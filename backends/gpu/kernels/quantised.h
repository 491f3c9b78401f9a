// Activations as packed matrices read them, written by whoever has them in registers: blocks of 32 columns of a row are int16
// numbers times one scale, the number cut into two signed bytes, v = 256 hi + lo.
//
//     hi, lo    i8 [rows][width]            v = round(x / s)
//     scale     float [rows][width / 32]    s = max |x| / 32512, so that hi stays within a byte
//     sum       float [rows][width / 16]    of s v over 16 columns: what a matrix with mins multiplies them by
#pragma once

#include "floats.h"

// Infinity or NaN in a block makes its scale so, and with it every product.
constexpr float QUANTISED_LEAST = 1e-30f;   // blocks below it are zeros: the reciprocal of the scale would overflow

struct Quantised {
    i8 *hi, *lo;
    float *scale, *sum;
    int width;
};

DEVICE u32 larger_of_both(u32 bits, int mask) {
    const u32 other = shuffle_xor(bits, mask);
    return other > bits ? other : bits;
}

// Four columns of a row from `column` on, a multiple of 4, in lanes whose neighbours have the neighbouring columns, so that each
// eight of them have a block. Every lane of the warp calls it; those that are not `there` write nothing, eight at a time.
DEVICE void quantise4(const Quantised &to, int row, int column, const float (&x)[4], bool there) {
    u32 bits = 0;   // magnitudes compare like their bits, and no number is above infinity: it stays and is seen
    UNROLL for (int i = 0; i < 4; i++) {
        const u32 magnitude = float_bits(x[i]) & 0x7fffffffu;
        bits = magnitude > bits ? magnitude : bits;
    }
    bits = larger_of_both(larger_of_both(larger_of_both(bits, 4), 2), 1);
    const float most = bits_float(bits), scale = most / 32512.0f;
    const bool live = most > QUANTISED_LEAST && bits < 0x7f800000u;
    const float inverse = live ? 32512.0f / most : 0.0f;
    u32 hi = 0, lo = 0;
    int sum = 0;
    UNROLL for (int i = 0; i < 4; i++) {
        const int v = live ? (int)round_(x[i] * inverse) : 0, upper = (v + 128) >> 8;
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
