// Exponentials, logarithms and angles in single precision, the same bits on every card and under the emulation.
//
// CUDA has a library for these, AMD's compiler wants ROCm's device library, which a user's machine may not have, and the
// fast units of both are wrong in the last bits in different ways. So they are written here once, from what every vendor
// file gives exactly: fma_, round_, floor_, sqrt_, division. Each is a reduction of the argument and a polynomial; the
// coefficients are our own minimax fits (least squares at Chebyshev nodes, reweighted until the error is level), in
// single precision. Largest errors found against float64, in units in the last place:
//
//     exp_   1      all arguments; inf above 88.72, gradual underflow to 0 below -87.3
//     log_   1      denormals too; -inf at 0, NaN below
//     tanh_  2
//     sin_, cos_  2 for |x| up to 2e6: positions times frequencies of a rope. Beyond, the reduction's three parts of pi/2
//            run out of bits
//     pow_   2      while the result lies in e^-16 ... e^16, 10 at the ends of the range; NaN for x < 0
//     rsqrt_ 2
//
// NaN in, NaN out, so that what goes wrong in a layer is seen at its end. A product that must be rounded by itself is
// written fma_(a, b, 0): a compiler that joins products and sums leaves that alone.
#pragma once

constexpr float LN2 = 0.693147182f, LN2_REST = -1.90465421e-9f, LOG2_E = 1.44269502f;

// x 2^n for n in [-252, 254], by two factors, so that results below the normal numbers come out rounded once.
DEVICE float scale_by_power(float x, int n) {
    const int half = n >> 1;
    return x * bits_float((u32)(half + 127) << 23) * bits_float((u32)(n - half + 127) << 23);
}

// e to the x + rest, |rest| far below one.
DEVICE float exp_of_sum(float x, float rest) {
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    const float n = round_(x * LOG2_E);
    const float r = fma_(n, -LN2_REST, fma_(n, -LN2, x)) + rest;   // |r| <= ln 2 / 2
    float p = 1.99179733e-4f;
    p = fma_(p, r, 1.39461900e-3f);
    p = fma_(p, r, 8.33326485e-3f);
    p = fma_(p, r, 4.16662693e-2f);
    p = fma_(p, r, 0.166666672f);
    p = fma_(p, r, 0.5f);
    return scale_by_power(1.0f + fma_(r * r, p, r), n == n ? (int)n : 0);
}

DEVICE float exp_(float x) { return exp_of_sum(x, 0.0f); }

// x = m 2^e with m in [2/3, 4/3), for x > 0 and finite.
DEVICE float split_power(float x, float &e) {
    int shift = 0;
    if (x < 1.17549435e-38f) {
        x *= 8388608.0f;
        shift = -23;
    }
    const int n = (int)(float_bits(x) - float_bits(0.666666687f)) >> 23;
    e = (float)(n + shift);
    return bits_float(float_bits(x) - ((u32)n << 23));
}

DEVICE float log_(float x) {
    if (!(x > 0.0f)) return x == 0.0f ? bits_float(0xff800000u) : bits_float(0x7fc00000u);
    if (float_bits(x) == 0x7f800000u) return x;
    float e;
    const float f = split_power(x, e) - 1.0f;   // exact
    float p = 0.123578385f;
    p = fma_(p, f, -0.128471285f);
    p = fma_(p, f, 0.106614098f);
    p = fma_(p, f, -0.121952814f);
    p = fma_(p, f, 0.143128335f);
    p = fma_(p, f, -0.166796163f);
    p = fma_(p, f, 0.199993059f);
    p = fma_(p, f, -0.249998197f);
    p = fma_(p, f, 0.333333373f);
    p = fma_(p, f, -0.5f);
    return fma_(e, LN2, fma_(e, LN2_REST, fma_(f * f, p, f)));
}

DEVICE float tanh_(float x) {
    const float a = abs_(x), z = x * x;
    float p = 2.23106099e-3f;
    p = fma_(p, z, -8.26708786e-3f);
    p = fma_(p, z, 2.17344388e-2f);
    p = fma_(p, z, -5.39524741e-2f);
    p = fma_(p, z, 0.133332476f);
    p = fma_(p, z, -0.333333313f);
    const float near = fma_(x * z, p, x);
    const float far = 1.0f - 2.0f / (exp_(2.0f * a) + 1.0f);
    return a < 0.6f ? near : x < 0.0f ? -far : far;
}

// x - n pi/2 with |r| <= pi/4, and n modulo 4.
DEVICE float reduce_angle(float x, u32 &quarter) {
    const float n = round_(x * 0.636619747f);
    float r = fma_(n, -1.57079637f, x);   // exact: both are multiples of 2^-23, and below 1
    r = fma_(n, 4.37113883e-8f, r);
    r = fma_(n, 1.71512451e-15f, r);
    quarter = abs_(n) < 1.0e9f ? (u32)(int)n & 3u : 0u;
    return r;
}

DEVICE float sin_of_quarter(float r, u32 quarter) {
    const float z = r * r;
    float s = 2.71756449e-6f;
    s = fma_(s, z, -1.98392561e-4f);
    s = fma_(s, z, 8.33332911e-3f);
    s = fma_(s, z, -0.166666672f);
    s = fma_(r * z, s, r);
    float c = -2.72033020e-7f;
    c = fma_(c, z, 2.47994358e-5f);
    c = fma_(c, z, -1.38888834e-3f);
    c = fma_(c, z, 4.16666679e-2f);
    c = fma_(c, z, -0.5f);
    c = fma_(c, z, 1.0f);
    const float v = quarter & 1u ? c : s;
    return quarter & 2u ? -v : v;
}

DEVICE float sin_(float x) {
    u32 quarter;
    const float r = reduce_angle(x, quarter);
    return sin_of_quarter(r, quarter);
}

DEVICE float cos_(float x) {
    u32 quarter;
    const float r = reduce_angle(x, quarter);
    return sin_of_quarter(r, quarter + 1u);
}

DEVICE float rsqrt_(float x) { return 1.0f / sqrt_(x); }

// By the logarithm in two floats: log m = 2 atanh s with s = (m - 1) / (m + 1), its rest carried along.
DEVICE float pow_(float x, float y) {
    if (y == 0.0f || x == 1.0f) return 1.0f;
    if (!(x > 0.0f)) return x == 0.0f ? (y > 0.0f ? 0.0f : y < 0.0f ? bits_float(0x7f800000u) : y) : bits_float(0x7fc00000u);
    if (float_bits(x) == 0x7f800000u) return y > 0.0f ? x : y < 0.0f ? 0.0f : y;
    float e;
    const float m = split_power(x, e), f = m - 1.0f, d = m + 1.0f, d_rest = m - (d - 1.0f);
    const float s = f / d, s_rest = fma_(-s, d_rest, fma_(-s, d, f)) / d;
    const float z = s * s;
    float p = 0.101194143f;
    p = fma_(p, z, 0.110615283f);
    p = fma_(p, z, 0.142868116f);
    p = fma_(p, z, 0.199999884f);
    p = fma_(p, z, 0.333333343f);
    const float whole = fma_(e, LN2, 0.0f), whole_rest = fma_(e, LN2, -whole);
    const float part = 2.0f * s, sum = whole + part;   // |whole| > |part|, or whole is 0
    float rest = part - (sum - whole);
    rest += fma_(e, LN2_REST, whole_rest) + 2.0f * fma_(s * z, p, s_rest);
    const float log = sum + rest, log_rest = rest - (log - sum);
    const float t = fma_(y, log, 0.0f);
    const float t_rest = fma_(y, log_rest, fma_(y, log, -t));
    return exp_of_sum(t, abs_(t) < 104.0f ? t_rest : 0.0f);
}
