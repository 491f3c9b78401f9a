// Element types of the KV pool: 16 of them to and from a vector of floats.
//
// One layer's pool, page by page (a page is 16 slots), kv head by kv head:
//     K  [head_dim][16 slots]   scores of 16 positions are 16 lanes, summed over dims without a horizontal sum
//     V  [16 slots][head_dim, padded to 16]   a position's value is added to 16 dims at once
#pragma once

#include <cstdint>

#include "simd.h"

namespace hs {

struct KvF32 {
    using Elem = float;
    HS_INLINE vf get(const Elem *p) { return load(p); }
    HS_INLINE void put(Elem *p, vf x) { store(p, x); }
};

struct KvF16 {
    using Elem = uint16_t;
    HS_INLINE vf get(const Elem *p) { return load_f16(p); }
    HS_INLINE void put(Elem *p, vf x) { store_f16(p, x); }
};

struct KvBF16 {
    using Elem = uint16_t;
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

}  // namespace hs
