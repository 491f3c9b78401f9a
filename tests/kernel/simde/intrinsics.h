/* AVX-512 for machines that have none: SIMDe, and the few intrinsics of ours that its older releases lack.
 *
 * Only tests build against this. What is missing goes through arrays: slow, obvious, and exact where the instruction is.
 */
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace simde_extra {

template <class To, class From> inline To cast(const From &from) {
    static_assert(sizeof(To) == sizeof(From), "a cast keeps every bit");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
template <class T> struct Lanes {
    T at[16];
};

inline simde__m512 to_float(simde__m512i x) {
    const auto from = cast<Lanes<int32_t>>(x);
    Lanes<float> to;
    for (int i = 0; i < 16; i++) to.at[i] = static_cast<float>(from.at[i]);
    return cast<simde__m512>(to);
}
inline simde__m512i round_to_int(simde__m512 x) {
    const auto from = cast<Lanes<float>>(x);
    Lanes<int32_t> to;
    for (int i = 0; i < 16; i++) {
        const float r = std::nearbyint(from.at[i]);
        to.at[i] = r >= -2147483648.0f && r < 2147483648.0f ? static_cast<int32_t>(r) : INT32_MIN;
    }
    return cast<simde__m512i>(to);
}
inline simde__m512i shift_right_arithmetic(simde__m512i x, int count) {
    auto lanes = cast<Lanes<int32_t>>(x);
    for (int32_t &lane : lanes.at) lane >>= count;
    return cast<simde__m512i>(lanes);
}
inline simde__m512 from_half(simde__m256i x) {
    struct Two {
        simde__m128i low, high;
    };
    struct Out {
        simde__m256 low, high;
    };
    const auto from = cast<Two>(x);
    return cast<simde__m512>(Out{simde_mm256_cvtph_ps(from.low), simde_mm256_cvtph_ps(from.high)});
}
inline simde__m256i to_half(simde__m512 x) {
    struct Two {
        simde__m256 low, high;
    };
    struct Out {
        simde__m128i low, high;
    };
    const auto from = cast<Two>(x);
    return cast<simde__m256i>(Out{simde_mm256_cvtps_ph(from.low, 0), simde_mm256_cvtps_ph(from.high, 0)});
}
inline simde__m512i widen(simde__m256i x) {
    const auto from = cast<Lanes<uint16_t>>(x);
    Lanes<int32_t> to;
    for (int i = 0; i < 16; i++) to.at[i] = from.at[i];
    return cast<simde__m512i>(to);
}
inline simde__m512i widen_bytes(simde__m128i x) {
    const auto from = cast<Lanes<int8_t>>(x);
    Lanes<int32_t> to;
    for (int i = 0; i < 16; i++) to.at[i] = from.at[i];
    return cast<simde__m512i>(to);
}
inline simde__m256i narrow(simde__m512i x) {
    const auto from = cast<Lanes<int32_t>>(x);
    Lanes<int16_t> to;
    for (int i = 0; i < 16; i++)
        to.at[i] = static_cast<int16_t>(from.at[i] < -32768 ? -32768 : from.at[i] > 32767 ? 32767 : from.at[i]);
    return cast<simde__m256i>(to);
}

}  // namespace simde_extra

// A release of SIMDe gives this alias the arguments of its masked sister.
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)

#undef _mm512_srai_epi32
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtps_epi32
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_ph
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtsepi32_epi16
#define _mm512_srai_epi32(x, count) simde_extra::shift_right_arithmetic(x, count)
#define _mm512_cvtepi32_ps(x) simde_extra::to_float(x)
#define _mm512_cvtps_epi32(x) simde_extra::round_to_int(x)
#define _mm512_cvtph_ps(x) simde_extra::from_half(x)
#define _mm512_cvtps_ph(x, rounding) simde_extra::to_half(x)
#define _mm512_cvtepu16_epi32(x) simde_extra::widen(x)
#define _mm512_cvtepi8_epi32(x) simde_extra::widen_bytes(x)
#define _mm512_cvtsepi32_epi16(x) simde_extra::narrow(x)
