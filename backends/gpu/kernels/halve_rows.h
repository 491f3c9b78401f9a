// Rows of activations as halves, for products on matrix cores: out[r] = src[r] * 2^s, scales[r] = 2^-s.
//
// s lifts the row's largest value to 2^14 .. 2^15. So nothing overflows, whatever an activation is (values above 65504 do
// occur in the residual streams of real models), and what is 2^-28 of the largest still has all its bits. A power of two
// costs no rounding: the error of a value is that of a half, 2^-11 of it, or 2^-39 of the row's largest. Rows with infinities
// or NaN keep them, and spoil no other.
//
// Lines are `pitch` halves long, a multiple of MANY_PAD (many_block.h); behind `cols` they are zeros, so products need no
// tail.
//
// Block: 256 threads, one row. The row is read twice, the second time from the caches (16 KiB for 4096 values): 4 bytes read
// and 2 written a value, all useful, at the bandwidth of memory. Beside the product that follows, 2 * outs operations a
// value, that is nothing; it is done once for all matrices of a `Linear`, and each of the product's blocks over the outputs
// then reads 2 bytes a value and not 4.
#pragma once

#include "floats.h"

constexpr int HALVE_TOP = 14;   // exponent that the largest value gets
constexpr u32 HALVE_LEAST = 30; // biased exponent below which the largest counts as this: 2^s stays a normal number

DEVICE void halve_row(half_t *out, float *scales, const float *src, int cols, int src_stride, int pitch) {
    SHARED(float, part, 256 / WARP);
    const int row = block_x();
    src += (i64)row * src_stride;
    out += (i64)row * pitch;
    float most = 0.0f;
    for (int c = 4 * thread(); c < cols; c += 4 * threads()) {
        const Floats4 x = load4(src + c, cols - c);
        UNROLL for (int i = 0; i < 4; i++) most = max_(most, abs_(x.v[i]));
    }
    u32 exponent = float_bits(block_max(most, part)) >> 23;
    if (exponent < HALVE_LEAST) exponent = HALVE_LEAST;
    const float by = bits_float((254 + HALVE_TOP - exponent) << 23);
    for (int c = 8 * thread(); c < pitch; c += 8 * threads()) {
        const Floats4 a = load4(src + c, cols - c), b = load4(src + c + 4, cols - c - 4);
        u32 pair[4];
        UNROLL for (int i = 0; i < 2; i++) {
            pair[i] = (u32)float_to_half(a.v[2 * i] * by) | (u32)float_to_half(a.v[2 * i + 1] * by) << 16;
            pair[2 + i] = (u32)float_to_half(b.v[2 * i] * by) | (u32)float_to_half(b.v[2 * i + 1] * by) << 16;
        }
        store128(out + c, {pair[0], pair[1], pair[2], pair[3]});
    }
    if (thread() == 0) scales[row] = bits_float((exponent - HALVE_TOP) << 23);
}
