// Level baseline: compiler vectors of 64 bytes, lowered to SSE2, NEON or whatever there is. One intrinsic, for
// the product that the compiler does not find by itself.
#pragma once

#include <cmath>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hs {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int16_t i16x32 __attribute__((vector_size(64)));
typedef uint16_t u16x32 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

struct vf {
    f32x16 v;
};
struct vi {
    i32x16 v;
};
constexpr int LINEAR_ROWS = 4, LINEAR_GROUPS = 1;   // of the largest linear tile
constexpr int MAX_QUERIES = 4;   // queries that attention takes at once
constexpr int MAX_SUMS = 4;      // vectors of its sums that stay in registers beside their operands

HS_INLINE vf set1(float x) { return {f32x16{} + x}; }
HS_INLINE vf load(const float *p) {
    vf r;
    std::memcpy(&r.v, p, 64);
    return r;
}
HS_INLINE void store(float *p, vf x) { std::memcpy(p, &x.v, 64); }
HS_INLINE vf add(vf x, vf y) { return {x.v + y.v}; }
HS_INLINE vf sub(vf x, vf y) { return {x.v - y.v}; }
HS_INLINE vf mul(vf x, vf y) { return {x.v * y.v}; }
HS_INLINE vf div(vf x, vf y) { return {x.v / y.v}; }
HS_INLINE vf max_v(vf x, vf y) { return {x.v > y.v ? x.v : y.v}; }
HS_INLINE vf min_v(vf x, vf y) { return {x.v < y.v ? x.v : y.v}; }
HS_INLINE vf fma(vf x, vf y, vf z) { return {x.v * y.v + z.v}; }

HS_INLINE vi set1i(int32_t x) { return {i32x16{} + x}; }
HS_INLINE vi load_bytes(const void *p) {
    vi r;
    std::memcpy(&r.v, p, 64);
    return r;
}
HS_INLINE void store_bytes(void *p, vi x) { std::memcpy(p, &x.v, 64); }
// Sixteen unsigned bytes or halfwords as int32.
HS_INLINE vi widen_u8(const uint8_t *p) {
    u8x16 bytes;
    std::memcpy(&bytes, p, 16);
    return {__builtin_convertvector(bytes, i32x16)};
}
HS_INLINE vi widen_u16(const uint16_t *p) {
    u16x16 words;
    std::memcpy(&words, p, 32);
    return {__builtin_convertvector(words, i32x16)};
}
// Each byte of x, 0 to 15, replaced by that entry of a table: one at a time, since SSE2 has no shuffle of bytes.
HS_INLINE vi look_up(const int8_t (&table)[16], vi x) {
    uint8_t at[64];
    int8_t found[64];
    std::memcpy(at, &x.v, 64);
    for (int i = 0; i < 64; i++) found[i] = table[at[i]];
    return load_bytes(found);
}
HS_INLINE vi add(vi x, vi y) { return {x.v + y.v}; }
HS_INLINE vi sub(vi x, vi y) { return {x.v - y.v}; }
HS_INLINE vi muli(vi x, vi y) { return {reinterpret_cast<i32x16>(reinterpret_cast<u32x16>(x.v) * reinterpret_cast<u32x16>(y.v))}; }
HS_INLINE vi sub16(vi x, vi y) { return {reinterpret_cast<i32x16>(reinterpret_cast<u16x32>(x.v) - reinterpret_cast<u16x32>(y.v))}; }
HS_INLINE vi mul16(vi x, vi y) { return {reinterpret_cast<i32x16>(reinterpret_cast<u16x32>(x.v) * reinterpret_cast<u16x32>(y.v))}; }
HS_INLINE vi and_v(vi x, vi y) { return {x.v & y.v}; }
HS_INLINE vi or_v(vi x, vi y) { return {x.v | y.v}; }
HS_INLINE vi shl_by(vi x, int k) { return {reinterpret_cast<i32x16>(reinterpret_cast<u32x16>(x.v) << static_cast<uint32_t>(k))}; }
HS_INLINE vi shr_by(vi x, int k) { return {reinterpret_cast<i32x16>(reinterpret_cast<u32x16>(x.v) >> static_cast<uint32_t>(k))}; }
template <int K> HS_INLINE vi shl(vi x) { return shl_by(x, K); }
template <int K> HS_INLINE vi shr(vi x) { return shr_by(x, K); }
template <int K> HS_INLINE vi sar(vi x) { return {x.v >> K}; }
// Shifts of the two int16 of a lane.
template <int K> HS_INLINE vi shl16(vi x) { return {reinterpret_cast<i32x16>(reinterpret_cast<u16x32>(x.v) << K)}; }
template <int K> HS_INLINE vi shr16(vi x) { return {reinterpret_cast<i32x16>(reinterpret_cast<u16x32>(x.v) >> K)}; }
template <int K> HS_INLINE vi sar16(vi x) { return {reinterpret_cast<i32x16>(reinterpret_cast<i16x32>(x.v) >> K)}; }
HS_INLINE vf to_float(vi x) { return {__builtin_convertvector(x.v, f32x16)}; }
HS_INLINE vf as_float(vi x) { return {reinterpret_cast<f32x16>(x.v)}; }
// One register of z = x * y + z.
constexpr int VF_PARTS = 1;
HS_INLINE void fma_part(int, vf x, vf y, vf &z) { z = fma(x, y, z); }
HS_INLINE vf abs_v(vf x) { return {reinterpret_cast<f32x16>(reinterpret_cast<i32x16>(x.v) & 0x7fffffff)}; }
// Round to nearest even by the float's own adder: adding 1.5 * 2^23 leaves no bits below one. Right for |x| < 2^22.
HS_INLINE vi round_to_int(vf x) {
    const f32x16 magic = f32x16{} + 12582912.0f;
    return {reinterpret_cast<i32x16>(x.v + magic) - reinterpret_cast<i32x16>(magic)};
}

// x where key >= low, else 0.
HS_INLINE vf zero_below(vf x, vf key, vf low) {
    return {reinterpret_cast<f32x16>(reinterpret_cast<i32x16>(x.v) & (key.v >= low.v))};
}
// `above` where key >= low, else (also where key is no number) `below`.
HS_INLINE vf pick(vf key, vf low, vf above, vf below) { return {key.v >= low.v ? above.v : below.v}; }
// Lane i of x where first <= i < last, else `other`.
HS_INLINE vf keep_lanes(vf x, int first, int last, float other) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const i32x16 keep = (lane >= first) & (lane < last);
    const i32x16 rest = reinterpret_cast<i32x16>(f32x16{} + other);
    return {reinterpret_cast<f32x16>((reinterpret_cast<i32x16>(x.v) & keep) | (rest & ~keep))};
}

HS_INLINE u32x16 widen(const uint16_t *p) {
    u16x16 h;
    std::memcpy(&h, p, 32);
    return __builtin_convertvector(h, u32x16);
}
// Half to float: shift the bits into place and let one multiplication by 2^112 correct exponent and subnormals alike.
HS_INLINE vf load_f16(const uint16_t *p) {
    const u32x16 h = widen(p);
    const f32x16 scaled = reinterpret_cast<f32x16>((h & 0x7fffu) << 13) * 0x1p112f;
    const u32x16 special = reinterpret_cast<u32x16>((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return {reinterpret_cast<f32x16>(reinterpret_cast<u32x16>(scaled) | special | ((h & 0x8000u) << 16))};
}
HS_INLINE vf load_bf16(const uint16_t *p) { return {reinterpret_cast<f32x16>(widen(p) << 16)}; }

HS_INLINE i32x16 widen_bytes(const void *p) {
    i8x16 bytes;
    std::memcpy(&bytes, p, 16);
    return __builtin_convertvector(bytes, i32x16);
}
HS_INLINE vf load_i8(const int8_t *p) { return {__builtin_convertvector(widen_bytes(p), f32x16)}; }
// Sixteen e4m3 floats / 256: seven bits go to where exponent and mantissa of a float begin, 2^112 corrects the bias.
HS_INLINE vf load_f8_256th(const uint8_t *p) {
    const u32x16 x = reinterpret_cast<u32x16>(widen_bytes(p));
    const f32x16 scaled = reinterpret_cast<f32x16>((x & 0x7fu) << 20) * 0x1p112f;
    return {reinterpret_cast<f32x16>(reinterpret_cast<u32x16>(scaled) | (x & 0x80000000u))};
}

HS_INLINE uint16_t half_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);   // 65520 and more round to infinity
    if (magnitude < 0x38800000u) {                                                // below 2^-14: subnormal halves
        float m;
        std::memcpy(&m, &magnitude, 4);
        m += 0.5f;   // the sum's unit in the last place is 2^-24, that of subnormal halves
        uint32_t shifted;
        std::memcpy(&shifted, &m, 4);
        return static_cast<uint16_t>(sign | (shifted - 0x3f000000u));
    }
    const uint32_t odd = (magnitude >> 13) & 1u;
    return static_cast<uint16_t>(sign | ((magnitude + 0xfffu + odd - 0x38000000u) >> 13));
}
HS_INLINE void store_f16(uint16_t *p, vf x) {
    for (int i = 0; i < 16; i++) p[i] = half_of(x.v[i]);
}
// Sixteen activations as int16, in quads of [0, 2, 1, 3], the order in which weights are split into pairs.
HS_INLINE void store_pairs(int16_t *p, vi x) {
    for (int q = 0; q < 16; q += 4) {
        p[q] = static_cast<int16_t>(x.v[q]);
        p[q + 1] = static_cast<int16_t>(x.v[q + 2]);
        p[q + 2] = static_cast<int16_t>(x.v[q + 1]);
        p[q + 3] = static_cast<int16_t>(x.v[q + 3]);
    }
}

// sum + the two int16 of each lane times the two at `a`.
HS_INLINE vi add_pairs(vi sum, vi w, const int16_t *a) {
#if defined(__SSE2__)
    struct Quarters {
        __m128i at[4];
    } x, r;
    std::memcpy(&x, &w.v, 64);
    const __m128i both = _mm_set1_epi32(load_i32(a));
    for (int i = 0; i < 4; i++) r.at[i] = _mm_madd_epi16(x.at[i], both);
    vi products;
    std::memcpy(&products.v, &r, 64);
    return {sum.v + products.v};
#else
    const i32x16 low = reinterpret_cast<i32x16>(reinterpret_cast<u32x16>(w.v) << 16) >> 16, high = w.v >> 16;
    return {sum.v + low * static_cast<int32_t>(a[0]) + high * static_cast<int32_t>(a[1])};
#endif
}

}  // namespace hs
