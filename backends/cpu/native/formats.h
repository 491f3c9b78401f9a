// Packed formats: how the 16 x 32 weights of a sub-block of each type (layout.h) become pairs of int16.
//
// A weight of a sub-block is  scale * factor * (q - OFFSET) + min,  and a format says what its parts are:
//
//     each(s, half, emit)   emit(even, odd, quad) for every column quad of a half (of the whole, where HALVES is 1): the
//                           values q of columns 0 and 2 of the quad, and of 1 and 3, as int16 in the lanes of 16 rows
//     scale(s)              float, of the whole sub-block
//     factor(s, half)       integer scale of a half; formats with HALVES 2 have it, others have none
//     min(s, half)          float; MINS of them: none, one for the sub-block, one for each half
//     MANY_FROM             batch rows from which it pays to unpack into memory first (packed.h), by measurement
//
// factor * (q - OFFSET) fits int16 in every format, and its products with int16 activations sum up exactly in int32 over
// a sub-block; over a half only, where WIDE (Q6_K: |factor * q| <= 4096, so 16 columns stay just below 2^31).
#pragma once

#include "layout.h"
#include "simd.h"

namespace hs {

constexpr int PREFETCH = 4096;   // bytes between the loads and what is asked of memory

HS_INLINE vf half_row(const uint8_t *p) { return load_f16(reinterpret_cast<const uint16_t *>(p)); }

// Bytes c0 c1 c2 c3 of every lane as two pairs of int16, c0 c2 and c1 c3: unsigned bytes, then signed ones.
HS_INLINE vi even_bytes(vi x) { return and_v(x, set1i(0x00ff00ff)); }
HS_INLINE vi odd_bytes(vi x) { return shr16<8>(x); }
HS_INLINE vi even_signed(vi x) { return sar16<8>(shl16<8>(x)); }
HS_INLINE vi odd_signed(vi x) { return sar16<8>(x); }

// Four weight vectors of nibbles (with a fifth bit from `high` where BITS is 5).
template <int BITS, class Emit> HS_INLINE void each_nibble(const uint8_t *w, vi high, Emit emit) {
    const vi nibbles = set1i(0x0f0f0f0f), pairs = set1i(0x000f000f), fifth = set1i(0x10101010);
    HS_UNROLL
    for (int i = 0; i < 4; i++) {
        prefetch(w + 64 * i + PREFETCH);
        const vi v = load_bytes(w + 64 * i);
        if (BITS == 4) {
            emit(and_v(v, pairs), and_v(shr16<8>(v), pairs), i);
            emit(and_v(shr16<4>(v), pairs), shr16<12>(v), i + 4);
        } else {
            const vi low = or_v(and_v(v, nibbles), and_v(shl_by(high, 4 - i), fifth));
            const vi top = or_v(and_v(shr16<4>(v), nibbles), and_v(shr_by(high, i), fifth));
            emit(even_bytes(low), odd_bytes(low), i);
            emit(even_bytes(top), odd_bytes(top), i + 4);
        }
    }
}

// Four weight vectors of nibbles that number entries of a table.
template <class Emit> HS_INLINE void each_coded(const uint8_t *w, const int8_t (&table)[16], Emit emit) {
    const vi nibbles = set1i(0x0f0f0f0f);
    HS_UNROLL
    for (int i = 0; i < 4; i++) {
        prefetch(w + 64 * i + PREFETCH);
        const vi v = load_bytes(w + 64 * i);
        const vi low = look_up(table, and_v(v, nibbles)), top = look_up(table, and_v(shr16<4>(v), nibbles));
        emit(even_signed(low), odd_signed(low), i);
        emit(even_signed(top), odd_signed(top), i + 4);
    }
}

// What formats have unless they say otherwise.
struct Plain {
    static constexpr int SUBS = 1, HALVES = 1, MINS = 0, OFFSET = 0, MANY_FROM = 12;
    static constexpr bool WIDE = false;
    HS_MEMBER vi factor(int, int) const { return set1i(1); }
    HS_MEMBER vf min(int, int) const { return set1(0.0f); }
};

// Q4_0, Q4_1, Q5_0, Q5_1.
template <int BITS, bool MIN> struct Simple : Plain {
    static constexpr int MINS = MIN, OFFSET = MIN ? 0 : BITS == 4 ? 8 : 16, MANY_FROM = BITS == 4 ? 72 : 12;
    static constexpr int HIGH_AT = MIN ? 64 : 32;
    static constexpr int LOW_AT = HIGH_AT + (BITS == 5 ? 64 : 0);
    static constexpr size_t BYTES = LOW_AT + 256;
    const uint8_t *w;
    HS_MEMBER explicit Simple(const uint8_t *at) : w(at) { prefetch(w + PREFETCH); }
    HS_MEMBER vf scale(int) const { return half_row(w); }
    HS_MEMBER vf min(int, int) const { return half_row(w + 32); }
    template <class Emit> HS_MEMBER void each(int, int, Emit emit) const {
        each_nibble<BITS>(w + LOW_AT, BITS == 5 ? load_bytes(w + HIGH_AT) : vi{}, emit);
    }
};

struct Q8 : Plain {
    static constexpr int MANY_FROM = 72;
    static constexpr size_t BYTES = 544;
    const uint8_t *w;
    HS_MEMBER explicit Q8(const uint8_t *at) : w(at) { prefetch(w + PREFETCH); }
    HS_MEMBER vf scale(int) const { return half_row(w); }
    template <class Emit> HS_MEMBER void each(int, int, Emit emit) const {
        HS_UNROLL
        for (int i = 0; i < 8; i++) {
            prefetch(w + 32 + 64 * i + PREFETCH);
            const vi v = load_bytes(w + 32 + 64 * i);
            emit(even_signed(v), odd_signed(v), i);
        }
    }
};

struct Iq4Nl : Plain {
    static constexpr int MANY_FROM = 12;
    static constexpr size_t BYTES = 288;
    const uint8_t *w;
    HS_MEMBER explicit Iq4Nl(const uint8_t *at) : w(at) { prefetch(w + PREFETCH); }
    HS_MEMBER vf scale(int) const { return half_row(w); }
    template <class Emit> HS_MEMBER void each(int, int, Emit emit) const { each_coded(w + 32, IQ4_TABLE, emit); }
};

// Scales are exponents: e put where a float has its own is 2^(e - 127), and zero for e = 0, where 2^-128 is meant.
struct Mxfp4 : Plain {
    static constexpr int MANY_FROM = 24;
    static constexpr size_t BYTES = 272;
    const uint8_t *w;
    HS_MEMBER explicit Mxfp4(const uint8_t *at) : w(at) { prefetch(w + PREFETCH); }
    HS_MEMBER vf scale(int) const { return mul(as_float(shl<23>(widen_u8(w))), set1(0.5f)); }
    template <class Emit> HS_MEMBER void each(int, int, Emit emit) const { each_coded(w + 16, MXFP4_TABLE, emit); }
};

struct Iq4Xs : Plain {
    static constexpr int SUBS = 8, MANY_FROM = 10;
    static constexpr size_t BYTES = 2176;
    const uint8_t *w;
    vf d;
    vi high, low;
    HS_MEMBER explicit Iq4Xs(const uint8_t *at)
        : w(at), d(half_row(at)), high(widen_u16(reinterpret_cast<const uint16_t *>(at + 32))), low(load_bytes(at + 64)) {
        for (int i = 0; i < 2; i++) prefetch(w + 64 * i + PREFETCH);
    }
    HS_MEMBER vf scale(int s) const {
        const vi bits = or_v(and_v(shr_by(low, 4 * s), set1i(15)), shl<4>(and_v(shr_by(high, 2 * s), set1i(3))));
        return mul(d, to_float(sub(bits, set1i(32))));
    }
    template <class Emit> HS_MEMBER void each(int s, int, Emit emit) const { each_coded(w + 128 + 256 * s, IQ4_TABLE, emit); }
};

// Q4_K, Q5_K. The 12 packed scale bytes become four word vectors: scales 0-3, 4-7, minima 0-3, 4-7.
template <int BITS> struct KScaled : Plain {
    static constexpr int SUBS = 8, MINS = 1, MANY_FROM = BITS == 4 ? 12 : 8;
    static constexpr int SUB_BYTES = BITS == 5 ? 320 : 256;
    static constexpr size_t BYTES = 256 + 8 * SUB_BYTES;
    const uint8_t *w;
    vf d, dmin;
    vi scales[2], mins[2];
    HS_MEMBER explicit KScaled(const uint8_t *at) : w(at), d(half_row(at)), dmin(sub(set1(0.0f), half_row(at + 32))) {
        for (int i = 0; i < 4; i++) prefetch(w + 64 * i + PREFETCH);
        const vi u0 = load_bytes(w + 64), u1 = load_bytes(w + 128), u2 = load_bytes(w + 192);
        const vi six = set1i(0x3f3f3f3f), four = set1i(0x0f0f0f0f), top = set1i(0x30303030);
        scales[0] = and_v(u0, six);
        scales[1] = or_v(and_v(u2, four), and_v(shr<2>(u0), top));
        mins[0] = and_v(u1, six);
        mins[1] = or_v(and_v(shr<4>(u2), four), and_v(shr<2>(u1), top));
    }
    HS_MEMBER vf of_byte(const vi (&words)[2], int s, vf by) const {
        return mul(by, to_float(and_v(shr_by(s < 4 ? words[0] : words[1], 8 * (s & 3)), set1i(0xff))));
    }
    HS_MEMBER vf scale(int s) const { return of_byte(scales, s, d); }
    HS_MEMBER vf min(int s, int) const { return of_byte(mins, s, dmin); }
    template <class Emit> HS_MEMBER void each(int s, int, Emit emit) const {
        const uint8_t *sub_block = w + 256 + SUB_BYTES * s;
        if (BITS == 5) prefetch(sub_block + 256 + PREFETCH);
        each_nibble<BITS>(sub_block + (BITS == 5 ? 64 : 0), BITS == 5 ? load_bytes(sub_block) : vi{}, emit);
    }
};

// Q6_K: a signed scale of eight bits for each 16 columns; values less 32.
struct Q6K : Plain {
    static constexpr int SUBS = 8, HALVES = 2, OFFSET = 32, MANY_FROM = 6;
    static constexpr bool WIDE = true;
    static constexpr size_t BYTES = 3360;
    const uint8_t *w;
    vf d;
    HS_MEMBER explicit Q6K(const uint8_t *at) : w(at), d(half_row(at)) {
        for (int i = 0; i < 5; i++) prefetch(w + 64 * i + PREFETCH);
    }
    HS_MEMBER vf scale(int) const { return d; }
    HS_MEMBER vi factor(int s, int half) const {
        return sar<24>(shl_by(load_bytes(w + 32 + 64 * (s / 2)), 24 - 16 * (s & 1) - 8 * half));
    }
    template <class Emit> HS_MEMBER void each(int s, int half, Emit emit) const {
        const uint8_t *sub_block = w + 288 + 384 * s;
        const vi nibbles = set1i(0x0f0f0f0f), top = set1i(0x30303030);
        const vi high = load_bytes(sub_block + 256 + 64 * half);
        prefetch(sub_block + 256 + 64 * half + PREFETCH);
        HS_UNROLL
        for (int i = 0; i < 4; i++) {
            if (half == 0) prefetch(sub_block + 64 * i + PREFETCH);
            const vi v = load_bytes(sub_block + 64 * i);
            const vi bits = i < 2 ? shl_by(high, 4 - 2 * i) : shr_by(high, 2 * i - 4);
            const vi q = or_v(and_v(half ? shr16<4>(v) : v, nibbles), and_v(bits, top));
            emit(even_bytes(q), odd_bytes(q), 4 * half + i);
        }
    }
};

// Q2_K: a scale and a minimum of four bits each for 16 columns.
struct Q2K : Plain {
    static constexpr int SUBS = 8, HALVES = 2, MINS = 2, MANY_FROM = 10;
    static constexpr size_t BYTES = 1344;
    const uint8_t *w;
    vf d, dmin;
    HS_MEMBER explicit Q2K(const uint8_t *at) : w(at), d(half_row(at)), dmin(sub(set1(0.0f), half_row(at + 32))) {
        for (int i = 0; i < 5; i++) prefetch(w + 64 * i + PREFETCH);
    }
    HS_MEMBER vi nibble(int s, int at) const {
        return and_v(shr_by(load_bytes(w + 64 + 64 * (s / 2)), 16 * (s & 1) + at), set1i(15));
    }
    HS_MEMBER vf scale(int) const { return d; }
    HS_MEMBER vi factor(int s, int half) const { return nibble(s, 8 * half); }
    HS_MEMBER vf min(int s, int half) const { return mul(dmin, to_float(nibble(s, 8 * half + 4))); }
    template <class Emit> HS_MEMBER void each(int s, int half, Emit emit) const {
        const uint8_t *p = w + 320 + 128 * s + 64 * half;
        prefetch(p + PREFETCH);
        const vi v = load_bytes(p), pairs = set1i(0x00030003);
        HS_UNROLL
        for (int i = 0; i < 4; i++)
            emit(and_v(shr_by(v, 2 * i), pairs), and_v(shr_by(v, 2 * i + 8), pairs), 4 * half + i);
    }
};

// Q3_K: six-bit scales for 16 columns each, less 32; values of three bits, less 4.
struct Q3K : Plain {
    static constexpr int SUBS = 8, HALVES = 2, OFFSET = 4, MANY_FROM = 6;
    static constexpr size_t BYTES = 1760;
    const uint8_t *w;
    vf d;
    vi scales[4];
    HS_MEMBER explicit Q3K(const uint8_t *at) : w(at), d(half_row(at)) {
        for (int i = 0; i < 4; i++) prefetch(w + 64 * i + PREFETCH);
        const vi u0 = load_bytes(w + 32), u1 = load_bytes(w + 96), u2 = load_bytes(w + 160);
        const vi four = set1i(0x0f0f0f0f), top = set1i(0x30303030);
        scales[0] = or_v(and_v(u0, four), and_v(shl<4>(u2), top));
        scales[1] = or_v(and_v(u1, four), and_v(shl<2>(u2), top));
        scales[2] = or_v(and_v(shr<4>(u0), four), and_v(u2, top));
        scales[3] = or_v(and_v(shr<4>(u1), four), and_v(shr<2>(u2), top));
    }
    HS_MEMBER vf scale(int) const { return d; }
    HS_MEMBER vi factor(int s, int half) const {
        return sub(and_v(shr_by(scales[s / 2], 16 * (s & 1) + 8 * half), set1i(0x3f)), set1i(32));
    }
    template <class Emit> HS_MEMBER void each(int s, int half, Emit emit) const {
        const uint8_t *sub_block = w + 224 + 192 * s;
        prefetch(sub_block + 64 * half + PREFETCH);
        if (half == 0) prefetch(sub_block + 128 + PREFETCH);
        const vi v = load_bytes(sub_block + 64 * half), high = shr_by(load_bytes(sub_block + 128), 4 * half);
        const vi two = set1i(0x03030303), third = set1i(0x04040404);
        HS_UNROLL
        for (int i = 0; i < 4; i++) {
            const vi bits = i < 2 ? shl_by(high, 2 - i) : shr_by(high, i - 2);
            const vi q = or_v(and_v(shr_by(v, 2 * i), two), and_v(bits, third));
            emit(even_bytes(q), odd_bytes(q), 4 * half + i);
        }
    }
};

}  // namespace hs
