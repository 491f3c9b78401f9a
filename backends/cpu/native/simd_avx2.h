// Level avx2: AVX2, FMA and F16C. Sixteen lanes are two ymm registers.
#pragma once

#include <immintrin.h>

namespace hs {

struct vf {
    __m256 a, b;
};
struct vi {
    __m256i a, b;
};
constexpr int MAX_TILE = 4;        // batch rows of the largest linear tile: 8 accumulators and their operands in 16 registers
constexpr int MAX_QUERIES = 4;     // queries of one attention tile, for the same reason
constexpr uint8_t Q8_FLIP = 0;     // Q8_0 bytes are kept signed
constexpr bool Q8_OFFSET = false;

HS_INLINE vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
HS_INLINE vf load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HS_INLINE void store(float *p, vf x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
HS_INLINE vf add(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
HS_INLINE vf sub(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
HS_INLINE vf mul(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
HS_INLINE vf div(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
HS_INLINE vf max_v(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
HS_INLINE vf min_v(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
HS_INLINE vf fma(vf x, vf y, vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
HS_INLINE vf abs_v(vf x) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}

HS_INLINE vi set1i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
HS_INLINE vi load_bytes(const void *p) {
    const __m256i *q = static_cast<const __m256i *>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
HS_INLINE vi add(vi x, vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
HS_INLINE vi sub(vi x, vi y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
HS_INLINE vi and_v(vi x, vi y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
HS_INLINE vi or_v(vi x, vi y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
template <int K> HS_INLINE vi shl(vi x) { return {_mm256_slli_epi32(x.a, K), _mm256_slli_epi32(x.b, K)}; }
template <int K> HS_INLINE vi shr(vi x) { return {_mm256_srli_epi32(x.a, K), _mm256_srli_epi32(x.b, K)}; }
HS_INLINE vi shl_by(vi x, int k) { return {_mm256_slli_epi32(x.a, k), _mm256_slli_epi32(x.b, k)}; }
HS_INLINE vi shr_by(vi x, int k) { return {_mm256_srli_epi32(x.a, k), _mm256_srli_epi32(x.b, k)}; }
template <int K> HS_INLINE vi sar(vi x) { return {_mm256_srai_epi32(x.a, K), _mm256_srai_epi32(x.b, K)}; }
HS_INLINE vf to_float(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
HS_INLINE vi round_to_int(vf x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
HS_INLINE vf as_float(vi x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

// x where key >= low, else 0.
HS_INLINE vf zero_below(vf x, vf key, vf low) {
    return {_mm256_and_ps(x.a, _mm256_cmp_ps(key.a, low.a, _CMP_GE_OQ)),
            _mm256_and_ps(x.b, _mm256_cmp_ps(key.b, low.b, _CMP_GE_OQ))};
}
// Lane i of x where first <= i < last, else `other`.
HS_INLINE vf keep_lanes(vf x, int first, int last, float other) {
    const __m256i ia = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), ib = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
    const __m256i lo = _mm256_set1_epi32(first - 1), hi = _mm256_set1_epi32(last);
    const __m256i ka = _mm256_and_si256(_mm256_cmpgt_epi32(ia, lo), _mm256_cmpgt_epi32(hi, ia));
    const __m256i kb = _mm256_and_si256(_mm256_cmpgt_epi32(ib, lo), _mm256_cmpgt_epi32(hi, ib));
    const __m256 o = _mm256_set1_ps(other);
    return {_mm256_blendv_ps(o, x.a, _mm256_castsi256_ps(ka)), _mm256_blendv_ps(o, x.b, _mm256_castsi256_ps(kb))};
}

HS_INLINE vf load_f16(const uint16_t *p) {
    const __m128i *q = reinterpret_cast<const __m128i *>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
HS_INLINE void store_f16(uint16_t *p, vf x) {
    __m128i *q = reinterpret_cast<__m128i *>(p);
    _mm_storeu_si128(q, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
HS_INLINE vf load_bf16(const uint16_t *p) {
    const __m128i *q = reinterpret_cast<const __m128i *>(p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1)), 16))};
}
// Low byte of each lane to 16 consecutive bytes.
HS_INLINE void store_low_bytes(int8_t *p, vi x) {
    __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p),
                     _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}

// ---- integer dot products

template <int BITS> constexpr int cadence = BITS == 4 ? 8 : BITS == 5 ? 4 : 2;
using dots = vi;   // 32 int16 partial sums

HS_INLINE dots dots_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
// Keeps a sum where it is written. Left alone, GCC collects the products of a whole sub-block, runs out of registers,
// spills them all, and adds them up at the end.
HS_INLINE vi in_order(vi x) {
    __asm__ volatile("" : "+x"(x.a), "+x"(x.b));
    return x;
}
HS_INLINE dots dots_add(dots s, vi w, const int8_t *a) {
    const __m256i x = _mm256_set1_epi32(load_i32(a));
    return in_order({_mm256_add_epi16(s.a, _mm256_maddubs_epi16(w.a, x)), _mm256_add_epi16(s.b, _mm256_maddubs_epi16(w.b, x))});
}
HS_INLINE vi dots_sum(dots s) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(s.a, one), _mm256_madd_epi16(s.b, one)};
}
// A small integer factor per lane, in the form that dots_scaled wants: the int16 twice.
HS_INLINE vi lane_factor(vi x) {
    const __m256i low = _mm256_set1_epi32(0xffff);
    return {_mm256_or_si256(_mm256_and_si256(x.a, low), _mm256_slli_epi32(x.a, 16)),
            _mm256_or_si256(_mm256_and_si256(x.b, low), _mm256_slli_epi32(x.b, 16))};
}
HS_INLINE vi dots_scaled(dots s, vi factor) { return {_mm256_madd_epi16(s.a, factor.a), _mm256_madd_epi16(s.b, factor.b)}; }
// Two int16 per lane times two int16 broadcast, summed.
HS_INLINE vi pair_dot(vi w, int32_t pair) {
    const __m256i x = _mm256_set1_epi32(pair);
    return {_mm256_madd_epi16(w.a, x), _mm256_madd_epi16(w.b, x)};
}

// Q8_0: four signed bytes per lane. |w| times sign(w) * a keeps the pair sums below 2 * 128 * 127 = 32512.
HS_INLINE vi dots8_add(vi s, vi w, const int8_t *a) {
    const __m256i x = _mm256_set1_epi32(load_i32(a)), one = _mm256_set1_epi16(1);
    const __m256i pa = _mm256_maddubs_epi16(_mm256_abs_epi8(w.a), _mm256_sign_epi8(x, w.a));
    const __m256i pb = _mm256_maddubs_epi16(_mm256_abs_epi8(w.b), _mm256_sign_epi8(x, w.b));
    return in_order({_mm256_add_epi32(s.a, _mm256_madd_epi16(pa, one)), _mm256_add_epi32(s.b, _mm256_madd_epi16(pb, one))});
}

}  // namespace hs
