// What the x86 levels share: sixteen lanes reduced to one by 256- and 128-bit registers.
#pragma once

namespace hs {

#define HS_HAVE_YMM

HS_INLINE float ymm_sum(__m256 a, __m256 b) {
    const __m256 eight = _mm256_add_ps(a, b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

HS_INLINE float ymm_max(__m256 a, __m256 b) {
    const __m256 eight = _mm256_max_ps(a, b);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// Sixteen e4m3 floats as sign-extended bytes: sign to bit 15, the other seven bits to 7..13.
HS_INLINE __m256i f8_to_half(__m256i x) { return _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(-0x4080)); }

// Sixteen int16 in order; each four of them become [0, 2, 1, 3], the order in which weights are split into pairs.
HS_INLINE void store_quads(int16_t *p, __m256i x) {
    const __m256i low = _mm256_shufflelo_epi16(x, 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm256_shufflehi_epi16(low, 0xd8));
}

}  // namespace hs
