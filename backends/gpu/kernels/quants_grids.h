// The types of one to three bits, whose weights are vectors of a table (grids.h): see quants.h. A block has 256 weights, a group
// is an eighth of it, `j` which; a vector is eight or four neighbours.
//
// An entry of a table is 16 bits, 0.5 to 4 KB in all, so that a table stays in the first cache; a vector's bytes are made of it
// with shifts. (Tables of whole bytes, as others have them, are four times as long.)
#pragma once

#include "grids.h"

// Eight numbers of two bits: the first four of them, one in each byte. `code >> 8`: the others.
DEVICE u32 four_of_two(u32 code) {
    code &= 255;
    return (code | code << 6 | code << 12 | code << 18) & 0x03030303u;
}

// Four numbers of four bits, one in each byte.
DEVICE u32 four_of_four(u32 code) {
    const u32 pairs = (code | code << 8) & 0x00ff00ffu;
    return (pairs | pairs << 4) & 0x0f0f0f0fu;
}

// The bytes negative whose bits (of four) are set. None of them is 0, so no carry leaves a byte.
DEVICE u32 signed_bytes(u32 word, u32 signs) {
    const u32 ones = (signs & 15) * 0x00204081u & 0x01010101u;
    return (word ^ ones * 255u) + ones;
}

// Seven signs are stored, the eighth makes the number of negative ones even.
DEVICE u32 eight_signs(u32 seven) {
    seven &= 127;
    u32 odd = seven ^ seven >> 4;
    odd ^= odd >> 2;
    odd ^= odd >> 1;
    return seven | (odd & 1) << 7;
}

// 0, 1, 2: 8, 25, 43
DEVICE u32 of_three(u32 numbers) { return 0x08080808u + numbers * 17u + (numbers >> 1 & 0x01010101u); }

DEVICE void put_eight(u32 code, u32 signs, u32 &first, u32 &second) {
    first = signed_bytes(of_three(four_of_two(code)), signs);
    second = signed_bytes(of_three(four_of_two(code >> 8)), signs >> 4);
}

// ------------------------------------------------------------------------------------------------------------ two bits

struct iq2_xxs {
    static constexpr int BLOCK = 256, FILE_BYTES = 66, P0 = 64, P1 = 2, P2 = 0, P3 = 0, SCALES = 1;
    static constexpr bool MINS = false;
    struct Bits { TwoWords q; u32 d; };   // four indices;  four times seven signs, four bits of scale
};
DEVICE iq2_xxs::Bits fetch(iq2_xxs, const Matrix<iq2_xxs> &m, i64 row, int group) {
    const i64 base = row * m.blocks;
    return {read64(m.p0 + 64 * base + 8 * group), read16(m.p1 + 2 * (base + group / 8))};
}
DEVICE void unpack(const iq2_xxs::Bits &b, Group &g) {
    UNROLL for (int i = 0; i < 4; i++)
        put_eight(IQ2_XXS_GRID[b.q.x >> 8 * i & 255], eight_signs(b.q.y >> 7 * i), g.words[2 * i], g.words[2 * i + 1]);
    g.scale[0] = low_half(b.d) * (0.5f + (float)(int)(b.q.y >> 28)) * 0.25f;
}

DEVICE void two_scales(float d, u32 fours, Group &g) {
    g.scale[0] = d * (0.5f + (float)(int)(fours & 15)) * 0.25f;
    g.scale[1] = d * (0.5f + (float)(int)(fours >> 4 & 15)) * 0.25f;
}

struct iq2_xs {
    static constexpr int BLOCK = 256, FILE_BYTES = 74, P0 = 64, P1 = 8, P2 = 2, P3 = 0, SCALES = 2;
    static constexpr bool MINS = false;
    struct Bits { TwoWords q; u32 scales, d; };   // four times nine bits of index and seven signs
};
DEVICE iq2_xs::Bits fetch(iq2_xs, const Matrix<iq2_xs> &m, i64 row, int group) {
    const i64 base = row * m.blocks;
    return {read64(m.p0 + 64 * base + 8 * group), m.p1[8 * base + group], read16(m.p2 + 2 * (base + group / 8))};
}
DEVICE void unpack(const iq2_xs::Bits &b, Group &g) {
    UNROLL for (int i = 0; i < 4; i++) {
        const u32 each = (i < 2 ? b.q.x : b.q.y) >> i % 2 * 16;
        put_eight(IQ2_XS_GRID[each & 511], eight_signs(each >> 9), g.words[2 * i], g.words[2 * i + 1]);
    }
    two_scales(low_half(b.d), b.scales, g);
}

struct iq2_s {
    static constexpr int BLOCK = 256, FILE_BYTES = 82, P0 = 64, P1 = 16, P2 = 2, P3 = 0, SCALES = 2;
    static constexpr bool MINS = false;
    struct Bits { TwoWords q; u32 rest, d; };   // four indices, 32 signs;  two upper bits of each index, scales
};
DEVICE iq2_s::Bits fetch(iq2_s, const Matrix<iq2_s> &m, i64 row, int group) {
    const i64 base = row * m.blocks;
    return {read64(m.p0 + 64 * base + 8 * group), read16(m.p1 + 16 * base + 2 * group), read16(m.p2 + 2 * (base + group / 8))};
}
DEVICE void unpack(const iq2_s::Bits &b, Group &g) {
    UNROLL for (int i = 0; i < 4; i++) {
        const u32 index = (b.q.x >> 8 * i & 255) | (b.rest >> 2 * i & 3) << 8;
        put_eight(IQ2_S_GRID[index], b.q.y >> 8 * i, g.words[2 * i], g.words[2 * i + 1]);
    }
    two_scales(low_half(b.d), b.rest >> 8, g);
}

// ---------------------------------------------------------------------------------------------------------- three bits

struct iq3_xxs {
    static constexpr int BLOCK = 256, FILE_BYTES = 98, P0 = 64, P1 = 32, P2 = 2, P3 = 0, SCALES = 1;
    static constexpr bool MINS = false;
    struct Bits { TwoWords q; u32 rest, d; };   // eight indices;  four times seven signs, four bits of scale
};
DEVICE iq3_xxs::Bits fetch(iq3_xxs, const Matrix<iq3_xxs> &m, i64 row, int group) {
    const i64 base = row * m.blocks;
    return {read64(m.p0 + 64 * base + 8 * group), read32(m.p1 + 32 * base + 4 * group), read16(m.p2 + 2 * (base + group / 8))};
}
// 0 ... 7: 4, 12 ... 52, 62
DEVICE u32 of_eight(u32 numbers) {
    return 0x04040404u + numbers * 8u + ((numbers + 0x01010101u) >> 3 & 0x01010101u) * 2u;
}
DEVICE void unpack(const iq3_xxs::Bits &b, Group &g) {
    UNROLL for (int i = 0; i < 8; i++) {
        const u32 code = IQ3_XXS_GRID[(i < 4 ? b.q.x : b.q.y) >> i % 4 * 8 & 255];
        g.words[i] = signed_bytes(of_eight(four_of_four(code)), eight_signs(b.rest >> i / 2 * 7) >> i % 2 * 4);
    }
    g.scale[0] = low_half(b.d) * (0.5f + (float)(int)(b.rest >> 28)) * 0.5f;
}

// Plane 2 of a block: the ninth bits of the indices, a byte a group; then four bits of scale a group.
struct iq3_s {
    static constexpr int BLOCK = 256, FILE_BYTES = 110, P0 = 64, P1 = 32, P2 = 12, P3 = 2, SCALES = 1;
    static constexpr bool MINS = false;
    struct Bits { TwoWords q; u32 signs, ninth, scales, d; int j; };
};
DEVICE iq3_s::Bits fetch(iq3_s, const Matrix<iq3_s> &m, i64 row, int group) {
    const i64 base = row * m.blocks, block = base + group / 8;
    return {read64(m.p0 + 64 * base + 8 * group), read32(m.p1 + 32 * base + 4 * group), m.p2[12 * block + group % 8],
            read32(m.p2 + 12 * block + 8), read16(m.p3 + 2 * block), group % 8};
}
DEVICE void unpack(const iq3_s::Bits &b, Group &g) {
    UNROLL for (int i = 0; i < 8; i++) {
        const u32 index = ((i < 4 ? b.q.x : b.q.y) >> i % 4 * 8 & 255) | (b.ninth >> i & 1) << 8;
        g.words[i] = signed_bytes(four_of_four(IQ3_S_GRID[index]), b.signs >> 4 * i);
    }
    g.scale[0] = low_half(b.d) * (float)(int)(1 + 2 * (b.scales >> 4 * b.j & 15));
}

// ------------------------------------------------------------------------------------------------------------- one bit
//
// Weights are -1, 0, 1 and an eighth more or less: as bytes eight times that, so seven or nine times a sign, or one.

DEVICE void put_eight_of_one(u32 code, u32 less, u32 &first, u32 &second) {
    const u32 add = less ? 0x77777777u : 0x79797979u;   // 128 - 8 - 1 or + 1
    first = (four_of_two(code) * 8u + add) ^ TURN;
    second = (four_of_two(code >> 8) * 8u + add) ^ TURN;
}

struct iq1_s {
    static constexpr int BLOCK = 256, FILE_BYTES = 50, P0 = 32, P1 = 16, P2 = 2, P3 = 0, SCALES = 1;
    static constexpr bool MINS = false;
    struct Bits { u32 q, rest, d; };   // four indices;  three upper bits of each, three of scale, less or more
};
DEVICE iq1_s::Bits fetch(iq1_s, const Matrix<iq1_s> &m, i64 row, int group) {
    const i64 base = row * m.blocks;
    return {read32(m.p0 + 32 * base + 4 * group), read16(m.p1 + 16 * base + 2 * group), read16(m.p2 + 2 * (base + group / 8))};
}
DEVICE void unpack(const iq1_s::Bits &b, Group &g) {
    UNROLL for (int i = 0; i < 4; i++) {
        const u32 index = (b.q >> 8 * i & 255) | (b.rest >> 3 * i & 7) << 8;
        put_eight_of_one(IQ1_S_GRID[index], b.rest >> 15, g.words[2 * i], g.words[2 * i + 1]);
    }
    g.scale[0] = low_half(b.d) * (float)(int)(1 + 2 * (b.rest >> 12 & 7)) * 0.125f;
}

// d is the upper four bits of a block's four words of scales, the rest of these are four times three bits.
struct iq1_m {
    static constexpr int BLOCK = 256, FILE_BYTES = 56, P0 = 32, P1 = 16, P2 = 8, P3 = 0, SCALES = 2;
    static constexpr bool MINS = false;
    struct Bits { u32 q, rest; TwoWords scales; int j; };   // four indices;  four times three upper bits, less or more
};
DEVICE iq1_m::Bits fetch(iq1_m, const Matrix<iq1_m> &m, i64 row, int group) {
    const i64 base = row * m.blocks;
    return {read32(m.p0 + 32 * base + 4 * group), read16(m.p1 + 16 * base + 2 * group), read64(m.p2 + 8 * (base + group / 8)),
            group % 8};
}
DEVICE void unpack(const iq1_m::Bits &b, Group &g) {
    UNROLL for (int i = 0; i < 4; i++) {
        const u32 index = (b.q >> 8 * i & 255) | (b.rest >> 4 * i & 7) << 8;
        put_eight_of_one(IQ1_S_GRID[index], b.rest >> (4 * i + 3) & 1, g.words[2 * i], g.words[2 * i + 1]);
    }
    const u32 half = (b.scales.x >> 12 & 15) | (b.scales.x >> 28) << 4 | (b.scales.y >> 12 & 15) << 8 | (b.scales.y >> 28) << 12;
    const float d = low_half(half) * 0.125f;
    const u32 threes = (b.j < 4 ? b.scales.x : b.scales.y) >> (b.j / 2 % 2 * 16 + b.j % 2 * 6);
    g.scale[0] = d * (float)(int)(1 + 2 * (threes & 7));
    g.scale[1] = d * (float)(int)(1 + 2 * (threes >> 3 & 7));
}
