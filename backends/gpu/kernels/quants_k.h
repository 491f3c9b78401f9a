// The types with blocks of 256 whose weights are numbers: K types, IQ4_XS, ternary ones. See quants.h. A group is an eighth of
// a block; `j` is which.
#pragma once

// ------------------------------------------------------------------------------- Q4_K, Q5_K: scales and mins of six bits
//
// The 16 bytes in front of a block, in another order than in the file, so that a group's are two shifts away:
//
//     x   d, dmin      two halves
//     y   scales       lower four bits of the eight scales, group 0's lowest
//     z   mins         the same of the mins
//     w   upper        bits 2j, 2j + 1: upper two of scale j;  bits 16 + 2j, 17 + 2j: of min j

DEVICE void scales_of_six(const Words4 &head, int j, Group &g) {
    const u32 scale = (head.y >> 4 * j & 15) | (head.w >> 2 * j & 3) << 4;
    const u32 min = (head.z >> 4 * j & 15) | (head.w >> (16 + 2 * j) & 3) << 4;
    g.scale[0] = low_half(head.x) * (float)(int)scale;
    g.min[0] = -(high_half(head.x) * (float)(int)min);
}

struct q4_k {
    static constexpr int BLOCK = 256, FILE_BYTES = 144, P0 = 128, P1 = 16, P2 = 0, P3 = 0, SCALES = 1;
    static constexpr bool MINS = true;
    struct Bits { Words4 q, head; int j; };
};
DEVICE q4_k::Bits fetch(q4_k, const Matrix<q4_k> &m, i64 row, int group) {
    const i64 base = row * m.blocks;
    return {load_once(m.p0 + 128 * base + 16 * group), load128(m.p1 + 16 * (base + group / 8)), group % 8};
}
DEVICE void unpack(const q4_k::Bits &b, Group &g) {
    nibbles(b.q, g.words);
    scales_of_six(b.head, b.j, g);
}

struct q5_k {
    static constexpr int BLOCK = 256, FILE_BYTES = 176, P0 = 128, P1 = 32, P2 = 16, P3 = 0, SCALES = 1;
    static constexpr bool MINS = true;
    struct Bits { Words4 q, head; u32 fifth; int j; };
};
DEVICE q5_k::Bits fetch(q5_k, const Matrix<q5_k> &m, i64 row, int group) {
    const i64 base = row * m.blocks;
    return {load_once(m.p0 + 128 * base + 16 * group), load128(m.p2 + 16 * (base + group / 8)),
            read32(m.p1 + 32 * base + 4 * group), group % 8};
}
DEVICE void unpack(const q5_k::Bits &b, Group &g) {
    nibbles(b.q, g.words);
    UNROLL for (int i = 0; i < 8; i++) g.words[i] |= bits_at(b.fifth, i, 4);
    scales_of_six(b.head, b.j, g);
}

// --------------------------------------------------------------------------------------------------- Q6_K, Q3_K, Q2_K

struct q6_k {
    static constexpr int BLOCK = 256, FILE_BYTES = 210, P0 = 128, P1 = 64, P2 = 16, P3 = 2, SCALES = 2;
    static constexpr bool MINS = false;
    struct Bits { Words4 q; TwoWords upper; u32 scales, d; };
};
DEVICE q6_k::Bits fetch(q6_k, const Matrix<q6_k> &m, i64 row, int group) {
    const i64 base = row * m.blocks;
    return {load_once(m.p0 + 128 * base + 16 * group), read64(m.p1 + 64 * base + 8 * group),
            read16(m.p2 + 16 * base + 2 * group), read16(m.p3 + 2 * (base + group / 8))};
}
DEVICE void unpack(const q6_k::Bits &b, Group &g) {
    nibbles_at(b.q, 2, g.words);
    UNROLL for (int i = 0; i < 8; i++) g.words[i] = (g.words[i] | twos_at(b.upper, i, 6)) ^ TURN;
    const float d = low_half(b.d) * 0.25f;
    g.scale[0] = d * byte_value(b.scales, 0);
    g.scale[1] = d * byte_value(b.scales, 1);
}

// Scales of six bits: the lower four of sixteen, group j's in byte j, then the upper two, group j's in bits 4j ... 4j + 3.
struct q3_k {
    static constexpr int BLOCK = 256, FILE_BYTES = 110, P0 = 64, P1 = 32, P2 = 12, P3 = 2, SCALES = 2;
    static constexpr bool MINS = false;
    struct Bits { TwoWords q; u32 third, low, upper, d; int j; };
};
DEVICE q3_k::Bits fetch(q3_k, const Matrix<q3_k> &m, i64 row, int group) {
    const i64 base = row * m.blocks, block = base + group / 8;
    return {read64(m.p0 + 64 * base + 8 * group), read32(m.p1 + 32 * base + 4 * group), m.p2[12 * block + group % 8],
            read32(m.p2 + 12 * block + 8), read16(m.p3 + 2 * block), group % 8};
}
DEVICE void unpack(const q3_k::Bits &b, Group &g) {
    UNROLL for (int i = 0; i < 8; i++) g.words[i] = (twos_at(b.q, i, 5) | bits_at(b.third, i, 7)) ^ TURN;
    const float d = low_half(b.d) * 0.03125f;
    const u32 upper = b.upper >> 4 * b.j;
    g.scale[0] = d * (float)((int)((b.low & 15) | (upper & 3) << 4) - 32);
    g.scale[1] = d * (float)((int)(b.low >> 4 | (upper >> 2 & 3) << 4) - 32);
}

struct q2_k {
    static constexpr int BLOCK = 256, FILE_BYTES = 84, P0 = 64, P1 = 16, P2 = 4, P3 = 0, SCALES = 2;
    static constexpr bool MINS = true;
    struct Bits { TwoWords q; u32 scales, dm; };
};
DEVICE q2_k::Bits fetch(q2_k, const Matrix<q2_k> &m, i64 row, int group) {
    const i64 base = row * m.blocks;
    return {read64(m.p0 + 64 * base + 8 * group), read16(m.p1 + 16 * base + 2 * group),
            read32(m.p2 + 4 * (base + group / 8))};
}
DEVICE void unpack(const q2_k::Bits &b, Group &g) {
    UNROLL for (int i = 0; i < 8; i++) g.words[i] = twos_at(b.q, i, 0);
    const float d = low_half(b.dm), dmin = high_half(b.dm);
    UNROLL for (int part = 0; part < 2; part++) {
        const u32 scale = b.scales >> 8 * part;
        g.scale[part] = d * (float)(int)(scale & 15);
        g.min[part] = -(dmin * (float)(int)(scale >> 4 & 15));
    }
}

// ------------------------------------------------------------------------------------------------------------- IQ4_XS

// The 8 bytes in front of a block are the file's: d, upper two bits of eight scales, lower four of them.
struct iq4_xs {
    static constexpr int BLOCK = 256, FILE_BYTES = 136, P0 = 128, P1 = 8, P2 = 0, P3 = 0, SCALES = 1;
    static constexpr bool MINS = false;
    struct Bits { Words4 q; TwoWords head; int j; };
};
DEVICE iq4_xs::Bits fetch(iq4_xs, const Matrix<iq4_xs> &m, i64 row, int group) {
    const i64 base = row * m.blocks;
    return {load_once(m.p0 + 128 * base + 16 * group), read64(m.p1 + 8 * (base + group / 8)), group % 8};
}
DEVICE void unpack(const iq4_xs::Bits &b, Group &g) {
    picked(b.q, uneven_sixteen(), g.words);
    const u32 scale = (b.head.y >> 4 * b.j & 15) | (b.head.x >> (16 + 2 * b.j) & 3) << 4;
    g.scale[0] = low_half(b.head.x) * (float)((int)scale - 32);
}

// ------------------------------------------------------------------------------------------------------------ ternary

struct tq2_0 {
    static constexpr int BLOCK = 256, FILE_BYTES = 66, P0 = 64, P1 = 2, P2 = 0, P3 = 0, SCALES = 1;
    static constexpr bool MINS = false;
    struct Bits { TwoWords q; u32 d; };
};
DEVICE tq2_0::Bits fetch(tq2_0, const Matrix<tq2_0> &m, i64 row, int group) {
    const i64 base = row * m.blocks;
    return {read64(m.p0 + 64 * base + 8 * group), read16(m.p1 + 2 * (base + group / 8))};
}
// Each byte less one: with the top bit set no borrow leaves it.
DEVICE u32 less_one(u32 word) { return ((word | TURN) - 0x01010101u) ^ TURN; }

DEVICE void unpack(const tq2_0::Bits &b, Group &g) {
    UNROLL for (int i = 0; i < 8; i++) g.words[i] = less_one(twos_at(b.q, i, 0));
    g.scale[0] = low_half(b.d);
}

// Five digits of base 3 to a byte, the first one the highest: digit n is the upper part of 3 (byte 3^n mod 256). The first 160
// weights are digits 0 .. 4 of bytes 0 .. 31, the next 80 those of bytes 32 .. 47, the last 16 digits 0 .. 3 of bytes 48 .. 51.
struct tq1_0 {
    static constexpr int BLOCK = 256, FILE_BYTES = 54, P0 = 52, P1 = 2, P2 = 0, P3 = 0, SCALES = 1;
    static constexpr bool MINS = false;
    struct Bits { u32 q[8]; u32 d; int j; };
};
DEVICE tq1_0::Bits fetch(tq1_0, const Matrix<tq1_0> &m, i64 row, int group) {
    const i64 block = row * m.blocks + group / 8;
    tq1_0::Bits b;
    b.j = group % 8;
    b.d = read16(m.p1 + 2 * block);
    UNROLL for (int i = 0; i < 8; i++)
        b.q[i] = read32(m.p0 + 52 * block + (b.j < 5 ? 4 * i : b.j == 7 && i >= 4 ? 48 : 32 + 4 * (i % 4)));
    return b;
}
DEVICE u32 digits_of_three(u32 bytes, int n) {
    const u32 power = n == 0 ? 1 : n == 1 ? 3 : n == 2 ? 9 : n == 3 ? 27 : 81;
    const u32 even = ((bytes & 0x00ff00ffu) * power & 0x00ff00ffu) * 3 >> 8 & 0x00030003u;
    const u32 odd = ((bytes >> 8 & 0x00ff00ffu) * power & 0x00ff00ffu) * 3 & 0x03000300u;
    return even | odd;
}
DEVICE void unpack(const tq1_0::Bits &b, Group &g) {
    UNROLL for (int i = 0; i < 8; i++) {
        const int n = b.j < 5 ? b.j : b.j < 7 ? 2 * (b.j - 5) + i / 4 : i < 4 ? 4 : i - 4;
        g.words[i] = less_one(digits_of_three(b.q[i], n));
    }
    g.scale[0] = low_half(b.d);
}
