// Element types of the KV pool: how a page lies in memory, and how 16 of its elements become floats and back.
//
// One layer's pool, kv head by kv head, page by page (a page is 16 slots): a head's pages lie one after the other, because one
// head reads them, and memory that is read front to back comes faster by a quarter than in pieces of 2 KiB.
//     K  [head_dim][16 slots]   scores of 16 positions are 16 lanes, summed over dims without a horizontal sum
//     V  [16 slots][head_dim, padded to 16]   a position's value is added to 16 dims at once
//
// Q8_0 shares one half-precision scale among 32 dims of a slot (head_dim is a multiple of 32). Scales of 16 slots lie side
// by side, so that they are lanes too, in front of what they scale:
//     K  [head_dim / 32] x (scales [16 slots] | [32 dims][16 slots])
//     V  [head_dim / 32][16 slots] scales | [16 slots][head_dim]
// A score sums the 32 products of a block before it multiplies by the scale; a value's scale goes into its weight.
//
// F8 is a float of 8 bits: sign, 4 of exponent (bias 7), 3 of mantissa. It is read as a half, 256 times too small, and the
// factor is paid once for each score and each weight. It is exact: a power of two.
#pragma once

#include <cstdint>

#include "layout.h"
#include "simd.h"

namespace hs {

constexpr int KV_BLOCK = 32;   // dims that share a scale in Q8_0

// Where one kv head's part of a page lies in the pools of K and V, counted in such parts.
constexpr size_t kv_block(int head, int page, int pool_pages) {
    return static_cast<size_t>(head) * static_cast<size_t>(pool_pages) + static_cast<size_t>(page);
}

// Elements of K and of V that one page holds for one kv head, where elements are not grouped.
template <class Element> struct KvPlain {
    using Elem = Element;
    static constexpr bool BLOCKS = false;
    static constexpr float FACTOR = 1.0f;   // of what `get` gives, to be multiplied in
    static constexpr size_t k_elems(int dims) { return static_cast<size_t>(dims) * GROUP; }
    static constexpr size_t v_elems(int dims) { return static_cast<size_t>(padded(dims)) * GROUP; }
};

struct KvF32 : KvPlain<float> {
    HS_INLINE vf get(const Elem *p) { return load(p); }
    HS_INLINE void put(Elem *p, vf x) { store(p, x); }
};

struct KvF16 : KvPlain<uint16_t> {
    HS_INLINE vf get(const Elem *p) { return load_f16(p); }
    HS_INLINE void put(Elem *p, vf x) { store_f16(p, x); }
};

struct KvBF16 : KvPlain<uint16_t> {
    HS_INLINE vf get(const Elem *p) { return load_bf16(p); }
    HS_INLINE void put(Elem *p, vf x) {
        float f[16];
        store(f, x);
        for (int i = 0; i < 16; i++) {
            uint32_t bits;
            std::memcpy(&bits, &f[i], 4);
            // Round to nearest even; a NaN keeps its sign and stays a NaN.
            const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
            p[i] = static_cast<uint16_t>(nan ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
        }
    }
};

struct KvF8 : KvPlain<uint8_t> {
    static constexpr float FACTOR = 256.0f;
    HS_INLINE vf get(const Elem *p) { return load_f8_256th(p); }
    // Round to nearest even. What is larger than 448 becomes 448; a NaN becomes the code after it, which reads as 480.
    HS_INLINE void put(Elem *p, vf x) {
        float f[16];
        store(f, x);
        for (int i = 0; i < 16; i++) p[i] = code(f[i]);
    }
    HS_INLINE uint8_t code(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        const uint32_t sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
        if (size > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
        if (size >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);   // 448
        if (size < 0x3c800000u) {                                            // below 2^-6: steps of 2^-9
            float f;
            std::memcpy(&f, &size, 4);
            f += 16384.0f;   // its unit in the last place is 2^-9, so the float's own adder rounds
            uint32_t shifted;
            std::memcpy(&shifted, &f, 4);
            return static_cast<uint8_t>(sign | (shifted - 0x46800000u));
        }
        return static_cast<uint8_t>(sign | ((size + 0x7ffffu + (size >> 20 & 1u) - 0x3c000000u) >> 20));
    }
};

struct KvQ8 {
    using Elem = uint8_t;
    static constexpr bool BLOCKS = true;
    static constexpr float FACTOR = 1.0f;
    static constexpr size_t SCALES = 2 * GROUP;                            // bytes of the scales of one block of K
    static constexpr size_t K_BLOCK_BYTES = SCALES + KV_BLOCK * GROUP;
    static constexpr size_t k_elems(int dims) { return static_cast<size_t>(dims / KV_BLOCK) * K_BLOCK_BYTES; }
    static constexpr size_t v_elems(int dims) { return k_elems(dims); }
    static constexpr size_t v_head(int dims) { return static_cast<size_t>(dims / KV_BLOCK) * SCALES; }   // bytes before the values
    HS_INLINE vf get(const Elem *p) { return load_i8(reinterpret_cast<const int8_t *>(p)); }
    HS_INLINE vf scales(const Elem *p) { return load_f16(reinterpret_cast<const uint16_t *>(p)); }
};

}  // namespace hs
