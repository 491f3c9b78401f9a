// Sixteen lanes, three ways: the only file that knows which instructions there are.
//
// Every kernel is written once, over `vf` (16 floats) and `vi` (16 int32, or the same 64 bytes). A level supplies these
// types and some forty inline functions: one zmm (avx512, avx512vnni), two ymm (avx2), or a compiler vector that lowers
// to whatever the machine has (baseline: SSE2, NEON, anything). Lane i is row i of a group of 16 rows in linear kernels,
// and slot i of a page in attention.
//
// Integer dot products. A lane holds two int16 weights of a row; the int16 activations of the same two columns are
// broadcast; products and their sum are int32. Nothing saturates: |w| <= 255, |a| <= 32767, and 32 columns stay below
// 2^28. So every integer result is exact, and results of all tile shapes agree bit for bit. (Bytes times bytes would be
// one instruction with VNNI, but int8 activations are too coarse: docs/decisions/0004.)
//
// Floats. `fma` is fused where the level has it and is not where it has not (baseline); within a level it is always the
// same, and the build forbids the compiler to fuse or reorder by itself (-ffp-contract=off, no fast-math).
#pragma once

#include <cstdint>
#include <cstring>

#define HS_INLINE static inline __attribute__((always_inline))
#define HS_MEMBER __attribute__((always_inline)) inline
#if defined(HS_KEEP_LOOPS) // a test build that must compile fast and need not run fast
#define HS_UNROLL
#elif defined(__clang__)
#define HS_UNROLL _Pragma("clang loop unroll(full)")
#else
#define HS_UNROLL _Pragma("GCC unroll 32")
#endif

namespace hs {

HS_INLINE int32_t load_i32(const void *p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return v;
}

}  // namespace hs

#if defined(HS_LEVEL_IS_AVX512) || defined(HS_LEVEL_IS_AVX512VNNI)
#include "simd_avx512.h"
#elif defined(HS_LEVEL_IS_AVX2)
#include "simd_avx2.h"
#else
#include "simd_baseline.h"
#endif

namespace hs {

HS_INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, 3); }

// Sum and maximum of the lanes, in one fixed order at every level: halves, quarters, eighths, pairs.
#ifdef HS_HAVE_YMM
HS_INLINE float lane_sum(vf x) { return ymm_sum(lower(x), upper(x)); }
HS_INLINE float lane_max(vf x) { return ymm_max(lower(x), upper(x)); }
#else
HS_INLINE float lane_sum(vf x) {
    alignas(64) float t[16];
    store(t, x);
    for (int step = 8; step > 0; step /= 2)
        for (int i = 0; i < step; i++) t[i] += t[i + step];
    return t[0];
}

HS_INLINE float lane_max(vf x) {
    alignas(64) float t[16];
    store(t, x);
    for (int step = 8; step > 0; step /= 2)
        for (int i = 0; i < step; i++) t[i] = t[i] > t[i + step] ? t[i] : t[i + step];
    return t[0];
}
#endif

// e^x to 2e-7 relative: x = n ln2 + r, |r| <= ln2 / 2, a polynomial in r, and n added to the exponent.
// Below -87.3 the result is 0, above 88.3 it stays at e^88.3. Coefficients: Cephes expf.
HS_INLINE vf exp_v(vf x) {
    const vf low = set1(-87.3f);
    vf clamped = min_v(max_v(x, low), set1(88.3f));
    vi n = round_to_int(mul(clamped, set1(1.44269504088896341f)));
    vf nf = to_float(n);
    vf r = fma(nf, set1(-0.693359375f), clamped);
    r = fma(nf, set1(2.12194440e-4f), r);
    vf p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(mul(r, r), p, add(r, set1(1.0f)));
    vf power = as_float(shl<23>(add(n, set1i(127))));
    return zero_below(mul(p, power), x, low);
}

// 1 / (1 + e^-x), to 3e-7 relative down to x = -88, and then no less than 4e-39.
HS_INLINE vf sigmoid_v(vf x) { return div(set1(1.0f), add(set1(1.0f), exp_v(sub(set1(0.0f), x)))); }

// tanh to 3e-7 relative: a polynomial in x^2 near 0 (coefficients: Cephes tanhf), else 1 - 2 / (e^2|x| + 1) with the sign
// of x. No number stays no number.
HS_INLINE vf tanh_v(vf x) {
    const vf square = mul(x, x), size = abs_v(x), one = set1(1.0f);
    vf p = set1(-5.70498872745e-3f);
    p = fma(p, square, set1(2.06390887954e-2f));
    p = fma(p, square, set1(-5.37397155531e-2f));
    p = fma(p, square, set1(1.33314422036e-1f));
    p = fma(p, square, set1(-3.33332819422e-1f));
    const vf near = fma(mul(p, square), x, x);
    const vf far = sub(one, div(set1(2.0f), add(exp_v(add(size, size)), one)));
    const vf signed_far = pick(x, set1(0.0f), far, sub(set1(0.0f), far));
    return pick(size, set1(0.625f), signed_far, near);
}

}  // namespace hs
