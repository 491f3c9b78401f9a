// Levels avx512 (F, BW, VL, DQ) and avx512vnni: sixteen lanes are one zmm register.
//
// HS_INTRINSICS_HEADER names another source of the intrinsics: the tests build this file against SIMDe, so that a machine
// without AVX-512 can still prove its arithmetic.
#pragma once

#ifdef HS_INTRINSICS_HEADER
#include HS_INTRINSICS_HEADER
#else
#include <immintrin.h>
#endif

#include "simd_ymm.h"

namespace hs {

struct vf {
    __m512 v;
};
struct vi {
    __m512i v;
};
constexpr int LINEAR_ROWS = 8, LINEAR_GROUPS = 2;   // of the largest linear tile: 16 sums, more than the products in flight
constexpr int MAX_QUERIES = 8;   // queries that attention takes at once
constexpr int MAX_SUMS = 24;     // vectors of its sums that stay in registers beside their operands

HS_INLINE vf set1(float x) { return {_mm512_set1_ps(x)}; }
HS_INLINE vf load(const float *p) { return {_mm512_loadu_ps(p)}; }
HS_INLINE void store(float *p, vf x) { _mm512_storeu_ps(p, x.v); }
HS_INLINE vf add(vf x, vf y) { return {_mm512_add_ps(x.v, y.v)}; }
HS_INLINE vf sub(vf x, vf y) { return {_mm512_sub_ps(x.v, y.v)}; }
HS_INLINE vf mul(vf x, vf y) { return {_mm512_mul_ps(x.v, y.v)}; }
HS_INLINE vf div(vf x, vf y) { return {_mm512_div_ps(x.v, y.v)}; }
HS_INLINE vf max_v(vf x, vf y) { return {_mm512_max_ps(x.v, y.v)}; }
HS_INLINE vf min_v(vf x, vf y) { return {_mm512_min_ps(x.v, y.v)}; }
HS_INLINE vf fma(vf x, vf y, vf z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
// One register of z = x * y + z.
constexpr int VF_PARTS = 1;
HS_INLINE void fma_part(int, vf x, vf y, vf &z) { z = fma(x, y, z); }
HS_INLINE vf abs_v(vf x) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff)))};
}

HS_INLINE vi set1i(int32_t x) { return {_mm512_set1_epi32(x)}; }
HS_INLINE vi load_bytes(const void *p) { return {_mm512_loadu_si512(p)}; }
HS_INLINE void store_bytes(void *p, vi x) { _mm512_storeu_si512(p, x.v); }
// Sixteen unsigned bytes or halfwords as int32.
HS_INLINE vi widen_u8(const uint8_t *p) {
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    return {_mm512_cvtepu16_epi32(words)};
}
HS_INLINE vi widen_u16(const uint16_t *p) {
    return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}
// Each byte of x, 0 to 15, replaced by that entry of a table.
HS_INLINE vi look_up(const int8_t (&table)[16], vi x) {
    const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), x.v)};
}
HS_INLINE vi add(vi x, vi y) { return {_mm512_add_epi32(x.v, y.v)}; }
HS_INLINE vi sub(vi x, vi y) { return {_mm512_sub_epi32(x.v, y.v)}; }
HS_INLINE vi muli(vi x, vi y) { return {_mm512_mullo_epi32(x.v, y.v)}; }
HS_INLINE vi sub16(vi x, vi y) { return {_mm512_sub_epi16(x.v, y.v)}; }
HS_INLINE vi mul16(vi x, vi y) { return {_mm512_mullo_epi16(x.v, y.v)}; }
HS_INLINE vi and_v(vi x, vi y) { return {_mm512_and_si512(x.v, y.v)}; }
HS_INLINE vi or_v(vi x, vi y) { return {_mm512_or_si512(x.v, y.v)}; }
template <int K> HS_INLINE vi shl(vi x) { return {_mm512_slli_epi32(x.v, K)}; }
template <int K> HS_INLINE vi shr(vi x) { return {_mm512_srli_epi32(x.v, K)}; }
HS_INLINE vi shl_by(vi x, int k) { return {_mm512_sll_epi32(x.v, _mm_cvtsi32_si128(k))}; }
HS_INLINE vi shr_by(vi x, int k) { return {_mm512_srl_epi32(x.v, _mm_cvtsi32_si128(k))}; }
template <int K> HS_INLINE vi sar(vi x) { return {_mm512_srai_epi32(x.v, K)}; }
// Shifts of the two int16 of a lane.
template <int K> HS_INLINE vi shl16(vi x) { return {_mm512_slli_epi16(x.v, K)}; }
template <int K> HS_INLINE vi shr16(vi x) { return {_mm512_srli_epi16(x.v, K)}; }
template <int K> HS_INLINE vi sar16(vi x) { return {_mm512_srai_epi16(x.v, K)}; }
HS_INLINE vf to_float(vi x) { return {_mm512_cvtepi32_ps(x.v)}; }
HS_INLINE vi round_to_int(vf x) { return {_mm512_cvtps_epi32(x.v)}; }
HS_INLINE vf as_float(vi x) { return {_mm512_castsi512_ps(x.v)}; }

// x where key >= low, else 0.
HS_INLINE vf zero_below(vf x, vf key, vf low) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(key.v, low.v, _CMP_GE_OQ), x.v)};
}
// `above` where key >= low, else (also where key is no number) `below`.
HS_INLINE vf pick(vf key, vf low, vf above, vf below) {
    return {_mm512_mask_mov_ps(below.v, _mm512_cmp_ps_mask(key.v, low.v, _CMP_GE_OQ), above.v)};
}
// Lane i of x where first <= i < last, else `other`.
HS_INLINE vf keep_lanes(vf x, int first, int last, float other) {
    const int lo = first < 0 ? 0 : first > 16 ? 16 : first, hi = last < 0 ? 0 : last > 16 ? 16 : last;
    const uint32_t keep = hi > lo ? ((1u << hi) - 1u) & ~((1u << lo) - 1u) : 0u;
    return {_mm512_mask_mov_ps(_mm512_set1_ps(other), static_cast<__mmask16>(keep), x.v)};
}

HS_INLINE vf load_f16(const uint16_t *p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}
HS_INLINE void store_f16(uint16_t *p, vf x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
HS_INLINE vf load_bf16(const uint16_t *p) {
    const __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
HS_INLINE vf load_i8(const int8_t *p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))))};
}
// Sixteen e4m3 floats / 256: their bits are those of a half whose exponent is biased by 8 more.
HS_INLINE vf load_f8_256th(const uint8_t *p) {
    return {_mm512_cvtph_ps(f8_to_half(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))))};
}
HS_INLINE __m256 lower(vf x) { return _mm512_castps512_ps256(x.v); }
HS_INLINE __m256 upper(vf x) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.v), 1)); }
// Sixteen activations as int16, in quads of [0, 2, 1, 3].
HS_INLINE void store_pairs(int16_t *p, vi x) { store_quads(p, _mm512_cvtsepi32_epi16(x.v)); }

// sum + the two int16 of each lane times the two at `a`.
HS_INLINE vi add_pairs(vi sum, vi w, const int16_t *a) {
    const __m512i x = _mm512_set1_epi32(load_i32(a));
#ifdef HS_LEVEL_IS_AVX512VNNI
    return {_mm512_dpwssd_epi32(sum.v, w.v, x)};
#else
    return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(w.v, x))};
#endif
}

}  // namespace hs
