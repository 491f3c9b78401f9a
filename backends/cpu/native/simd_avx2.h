// Level avx2: AVX2, FMA and F16C. Sixteen lanes are two ymm registers.
#pragma once

#include <immintrin.h>

#include "simd_ymm.h"

namespace hs {

struct vf {
    __m256 a, b;
};
struct vi {
    __m256i a, b;
};
constexpr int LINEAR_ROWS = 6, LINEAR_GROUPS = 1;   // of the largest linear tile: 12 sums, 2 weights, an activation and a product in 16 registers
constexpr int MAX_QUERIES = 6;   // queries that attention takes at once
constexpr int MAX_SUMS = 6;      // vectors of its sums that stay in registers beside their operands

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
// One register of z = x * y + z; the barrier keeps sums where they are written.
constexpr int VF_PARTS = 2;
HS_INLINE void fma_part(int part, vf x, vf y, vf &z) {
    if (part == 0) {
        z.a = _mm256_fmadd_ps(x.a, y.a, z.a);
        __asm__ volatile("" : "+x"(z.a));
    } else {
        z.b = _mm256_fmadd_ps(x.b, y.b, z.b);
        __asm__ volatile("" : "+x"(z.b));
    }
}
HS_INLINE vf abs_v(vf x) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}

HS_INLINE vi set1i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
HS_INLINE vi load_bytes(const void *p) {
    const __m256i *q = static_cast<const __m256i *>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
HS_INLINE void store_bytes(void *p, vi x) {
    __m256i *q = static_cast<__m256i *>(p);
    _mm256_storeu_si256(q, x.a);
    _mm256_storeu_si256(q + 1, x.b);
}
// Sixteen unsigned bytes or halfwords as int32.
HS_INLINE vi widen_u8(const uint8_t *p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
HS_INLINE vi widen_u16(const uint16_t *p) {
    const __m128i *q = reinterpret_cast<const __m128i *>(p);
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
}
// Each byte of x, 0 to 15, replaced by that entry of a table.
HS_INLINE vi look_up(const int8_t (&table)[16], vi x) {
    const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table)));
    return {_mm256_shuffle_epi8(t, x.a), _mm256_shuffle_epi8(t, x.b)};
}
HS_INLINE vi add(vi x, vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
HS_INLINE vi sub(vi x, vi y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
HS_INLINE vi muli(vi x, vi y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
HS_INLINE vi sub16(vi x, vi y) { return {_mm256_sub_epi16(x.a, y.a), _mm256_sub_epi16(x.b, y.b)}; }
HS_INLINE vi mul16(vi x, vi y) { return {_mm256_mullo_epi16(x.a, y.a), _mm256_mullo_epi16(x.b, y.b)}; }
HS_INLINE vi and_v(vi x, vi y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
HS_INLINE vi or_v(vi x, vi y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
template <int K> HS_INLINE vi shl(vi x) { return {_mm256_slli_epi32(x.a, K), _mm256_slli_epi32(x.b, K)}; }
template <int K> HS_INLINE vi shr(vi x) { return {_mm256_srli_epi32(x.a, K), _mm256_srli_epi32(x.b, K)}; }
HS_INLINE vi shl_by(vi x, int k) { return {_mm256_slli_epi32(x.a, k), _mm256_slli_epi32(x.b, k)}; }
HS_INLINE vi shr_by(vi x, int k) { return {_mm256_srli_epi32(x.a, k), _mm256_srli_epi32(x.b, k)}; }
template <int K> HS_INLINE vi sar(vi x) { return {_mm256_srai_epi32(x.a, K), _mm256_srai_epi32(x.b, K)}; }
// Shifts of the two int16 of a lane.
template <int K> HS_INLINE vi shl16(vi x) { return {_mm256_slli_epi16(x.a, K), _mm256_slli_epi16(x.b, K)}; }
template <int K> HS_INLINE vi shr16(vi x) { return {_mm256_srli_epi16(x.a, K), _mm256_srli_epi16(x.b, K)}; }
template <int K> HS_INLINE vi sar16(vi x) { return {_mm256_srai_epi16(x.a, K), _mm256_srai_epi16(x.b, K)}; }
HS_INLINE vf to_float(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
HS_INLINE vi round_to_int(vf x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
HS_INLINE vf as_float(vi x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

// x where key >= low, else 0.
HS_INLINE vf zero_below(vf x, vf key, vf low) {
    return {_mm256_and_ps(x.a, _mm256_cmp_ps(key.a, low.a, _CMP_GE_OQ)),
            _mm256_and_ps(x.b, _mm256_cmp_ps(key.b, low.b, _CMP_GE_OQ))};
}
// `above` where key >= low, else (also where key is no number) `below`.
HS_INLINE vf pick(vf key, vf low, vf above, vf below) {
    return {_mm256_blendv_ps(below.a, above.a, _mm256_cmp_ps(key.a, low.a, _CMP_GE_OQ)),
            _mm256_blendv_ps(below.b, above.b, _mm256_cmp_ps(key.b, low.b, _CMP_GE_OQ))};
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
HS_INLINE vf load_i8(const int8_t *p) {
    const __m128i *low = reinterpret_cast<const __m128i *>(p), *high = reinterpret_cast<const __m128i *>(p + 8);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(low))), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(high)))};
}
// Sixteen e4m3 floats / 256: their bits are those of a half whose exponent is biased by 8 more.
HS_INLINE vf load_f8_256th(const uint8_t *p) {
    const __m256i h = f8_to_half(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}
HS_INLINE __m256 lower(vf x) { return x.a; }
HS_INLINE __m256 upper(vf x) { return x.b; }
// Sixteen activations as int16, in quads of [0, 2, 1, 3].
HS_INLINE void store_pairs(int16_t *p, vi x) {
    store_quads(p, _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8));
}

// sum + the two int16 of each lane times the two at `a`. The barrier keeps sums where they are written: left alone, GCC
// collects the products of a whole sub-block, runs out of registers, spills them all, and adds them up at the end.
HS_INLINE vi add_pairs(vi sum, vi w, const int16_t *a) {
    const __m256i x = _mm256_set1_epi32(load_i32(a));
    vi r = {_mm256_add_epi32(sum.a, _mm256_madd_epi16(w.a, x)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(w.b, x))};
    __asm__ volatile("" : "+x"(r.a), "+x"(r.b));
    return r;
}

}  // namespace hs
