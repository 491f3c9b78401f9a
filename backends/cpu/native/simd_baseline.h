// Level baseline: compiler vectors of 64 bytes, lowered to SSE2, NEON or whatever there is. No intrinsics.
#pragma once

#include <cmath>

namespace hs {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int16_t i16x32 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct vf {
    f32x16 v;
};
struct vi {
    i32x16 v;
};
constexpr int MAX_TILE = 4;
constexpr int MAX_QUERIES = 4;
constexpr uint8_t Q8_FLIP = 0x80;   // Q8_0 bytes are kept as q + 128, so that one unsigned dot serves every type
constexpr bool Q8_OFFSET = true;

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
HS_INLINE vi add(vi x, vi y) { return {x.v + y.v}; }
HS_INLINE vi sub(vi x, vi y) { return {x.v - y.v}; }
HS_INLINE vi and_v(vi x, vi y) { return {x.v & y.v}; }
HS_INLINE vi or_v(vi x, vi y) { return {x.v | y.v}; }
HS_INLINE vi shl_by(vi x, int k) { return {reinterpret_cast<i32x16>(reinterpret_cast<u32x16>(x.v) << static_cast<uint32_t>(k))}; }
HS_INLINE vi shr_by(vi x, int k) { return {reinterpret_cast<i32x16>(reinterpret_cast<u32x16>(x.v) >> static_cast<uint32_t>(k))}; }
template <int K> HS_INLINE vi shl(vi x) { return shl_by(x, K); }
template <int K> HS_INLINE vi shr(vi x) { return shr_by(x, K); }
template <int K> HS_INLINE vi sar(vi x) { return {x.v >> K}; }
HS_INLINE vf to_float(vi x) { return {__builtin_convertvector(x.v, f32x16)}; }
HS_INLINE vf as_float(vi x) { return {reinterpret_cast<f32x16>(x.v)}; }
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
// Low byte of each lane to 16 consecutive bytes.
HS_INLINE void store_low_bytes(int8_t *p, vi x) {
    typedef int8_t i8x16 __attribute__((vector_size(16)));
    const i8x16 bytes = __builtin_convertvector(x.v, i8x16);
    std::memcpy(p, &bytes, 16);
}

// ---- integer dot products

HS_INLINE int32_t pair_of(int32_t low, int32_t high) {
    return static_cast<int32_t>((static_cast<uint32_t>(low) & 0xffffu) | (static_cast<uint32_t>(high) << 16));
}
// Both int16 of a lane, sign-extended and added.
HS_INLINE i32x16 halves_sum(i16x32 x) {
    const u32x16 u = reinterpret_cast<u32x16>(x);
    return (reinterpret_cast<i32x16>(u << 16) >> 16) + (reinterpret_cast<i32x16>(u) >> 16);
}

template <int BITS> constexpr int cadence = BITS == 6 ? 4 : 8;   // int32 sums need no finishing; 6-bit scales change every 4
using dots = vi;

HS_INLINE dots dots_zero() { return {i32x16{}}; }
// Even and odd bytes as int16: 255 * 127 still fits the low half of a product.
HS_INLINE dots dots_add(dots s, vi w, const int8_t *a) {
    const i16x32 bytes = reinterpret_cast<i16x32>(w.v);
    const i16x32 even = bytes & static_cast<int16_t>(0x00ff);
    const i16x32 odd = reinterpret_cast<i16x32>(reinterpret_cast<u32x16>(w.v) >> 8) & static_cast<int16_t>(0x00ff);
    const i16x32 x = reinterpret_cast<i16x32>(i32x16{} + pair_of(a[0], a[2]));
    const i16x32 y = reinterpret_cast<i16x32>(i32x16{} + pair_of(a[1], a[3]));
    return {s.v + halves_sum(even * x) + halves_sum(odd * y)};
}
HS_INLINE vi dots_sum(dots s) { return s; }
HS_INLINE vi lane_factor(vi x) { return x; }
HS_INLINE vi dots_scaled(dots s, vi factor) { return {s.v * factor.v}; }
HS_INLINE vi dots8_add(vi s, vi w, const int8_t *a) { return dots_add(s, w, a); }
// Two int16 per lane times two int16 broadcast, summed.
HS_INLINE vi pair_dot(vi w, int32_t pair) {
    const i32x16 low = (reinterpret_cast<i32x16>(reinterpret_cast<u32x16>(w.v) << 16)) >> 16, high = w.v >> 16;
    return {low * static_cast<int16_t>(pair & 0xffff) + high * (pair >> 16)};
}

}  // namespace hs
