// What this machine can do at most: bytes read and integer operations, one call for each thread. Compiled by limits.py
// for the very CPU that it runs on; no part of the product.
//
// read_bytes: four vector streams added up, with prefetch, so that nothing but the memory limits it.
// integer peaks: eight independent accumulators in registers, nothing loaded. int16 is the instruction that homeserve's
// kernels use (pairs of int16 to int32), int8 the densest that the CPU has (unsigned times signed bytes).
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int ACCUMULATORS = 8;

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
using vec = __m512i;
inline vec none() { return _mm512_setzero_si512(); }
inline vec of(int v) { return _mm512_set1_epi32(v); }
inline vec plus(vec a, vec b) { return _mm512_add_epi32(a, b); }
inline vec load(const void *p) { return _mm512_loadu_si512(p); }
inline vec dot16(vec s, vec a, vec b) { return _mm512_dpwssd_epi32(s, a, b); }
inline vec dot8(vec s, vec a, vec b) { return _mm512_dpbusd_epi32(s, a, b); }
const char *INSTRUCTIONS = "vpdpwssd zmm, vpdpbusd zmm";
#elif defined(__AVX2__)
using vec = __m256i;
inline vec none() { return _mm256_setzero_si256(); }
inline vec of(int v) { return _mm256_set1_epi32(v); }
inline vec plus(vec a, vec b) { return _mm256_add_epi32(a, b); }
inline vec load(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
inline vec dot16(vec s, vec a, vec b) { return _mm256_add_epi32(s, _mm256_madd_epi16(a, b)); }
#if defined(__AVXVNNI__)
inline vec dot8(vec s, vec a, vec b) { return _mm256_dpbusd_avx_epi32(s, a, b); }
const char *INSTRUCTIONS = "vpmaddwd+vpaddd ymm, vpdpbusd ymm";
#else
inline vec dot8(vec s, vec a, vec b) {
    return _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
}
const char *INSTRUCTIONS = "vpmaddwd+vpaddd ymm, vpmaddubsw+vpmaddwd+vpaddd ymm";
#endif
#else
typedef int32_t vec __attribute__((vector_size(16)));
typedef int16_t half __attribute__((vector_size(16)));
inline vec none() { return vec{}; }
inline vec of(int v) { return vec{v, v, v, v}; }
inline vec plus(vec a, vec b) { return a + b; }
inline vec load(const void *p) { return *static_cast<const vec *>(p); }
inline vec dot16(vec s, vec a, vec b) { return s + reinterpret_cast<vec>(reinterpret_cast<half>(a) * reinterpret_cast<half>(b)); }
inline vec dot8(vec s, vec a, vec b) { return dot16(s, a, b); }
const char *INSTRUCTIONS = "what the compiler makes of vectors of 16 bytes";
#endif

// Keeps a value in a register and its computation in the program.
inline void hold(vec &v) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    __asm__ volatile("" : "+v"(v));
#elif defined(__x86_64__)
    __asm__ volatile("" : "+x"(v));
#else
    __asm__ volatile("" : "+w"(v));
#endif
}

// `hold(a)` before each product: else one product would do for all sums.
template <vec (*DOT)(vec, vec, vec)> void spin(int64_t rounds) {
    vec s0 = none(), s1 = none(), s2 = none(), s3 = none(), s4 = none(), s5 = none(), s6 = none(), s7 = none();
    vec a = of(0x01020304);
    const vec b = of(0x04030201);
    for (int64_t i = 0; i < rounds; i++) {
        hold(a), s0 = DOT(s0, a, b);
        hold(a), s1 = DOT(s1, a, b);
        hold(a), s2 = DOT(s2, a, b);
        hold(a), s3 = DOT(s3, a, b);
        hold(a), s4 = DOT(s4, a, b);
        hold(a), s5 = DOT(s5, a, b);
        hold(a), s6 = DOT(s6, a, b);
        hold(a), s7 = DOT(s7, a, b);
    }
    s0 = plus(plus(plus(s0, s1), plus(s2, s3)), plus(plus(s4, s5), plus(s6, s7)));
    hold(s0);
}

}  // namespace

extern "C" {

const char *limits_instructions() { return INSTRUCTIONS; }

// Reads `bytes` (a multiple of 4096) from `data`.
void limits_read(const uint8_t *data, size_t bytes) {
    vec sums[4] = {none(), none(), none(), none()};
    const size_t quarter = bytes / 4;
    for (size_t at = 0; at < quarter; at += sizeof(vec))
        for (size_t stream = 0; stream < 4; stream++) {
            const uint8_t *p = data + stream * quarter + at;
            __builtin_prefetch(p + 4096, 0, 3);
            sums[stream] = plus(sums[stream], load(p));
        }
    for (vec &sum : sums) hold(sum);
}

// Operations (a product and a sum are two) of one round.
int64_t limits_int16_ops() { return int64_t{ACCUMULATORS} * static_cast<int64_t>(sizeof(vec)); }
int64_t limits_int8_ops() { return int64_t{ACCUMULATORS} * static_cast<int64_t>(sizeof(vec)) * 2; }
void limits_int16(int64_t rounds) { spin<dot16>(rounds); }
void limits_int8(int64_t rounds) { spin<dot8>(rounds); }
}
