// The types with small blocks, 32 or 64 weights: see quants.h.
#pragma once

// ---------------------------------------------------------------------------------------------- what several types share

// The four low bits of a group, byte j: weight j below, weight j + 16 above.
DEVICE void nibbles(const Words4 &q, u32 (&words)[8]) {
    UNROLL for (int i = 0; i < 4; i++) {
        words[i] = word_of(q, i) & 0x0f0f0f0fu;
        words[4 + i] = word_of(q, i) >> 4 & 0x0f0f0f0fu;
    }
}

// Left by a number that may be negative.
DEVICE u32 shifted(u32 v, int by) { return by >= 0 ? v << by : v >> -by; }

// The same as bits `at` .. at + 3 of their bytes.
DEVICE void nibbles_at(const Words4 &q, int at, u32 (&words)[8]) {
    UNROLL for (int i = 0; i < 4; i++) {
        words[i] = shifted(word_of(q, i), at) & 0x0f0f0f0fu << at;
        words[4 + i] = shifted(word_of(q, i), at - 4) & 0x0f0f0f0fu << at;
    }
}

// One bit of each of the group's weights: bit 8j + k is weight 4k + j's. It becomes bit `at` of its byte.
DEVICE u32 bits_at(u32 ones, int k, int at) { return shifted(ones, at - k) & 0x01010101u << at; }

// Two bits of each: byte j of word i, bits 2k and 2k + 1: weight 16i + 4k + j. They become bits at, at + 1.
DEVICE u32 twos_at(const TwoWords &twos, int k, int at) {
    return shifted(k < 4 ? twos.x : twos.y, at - 2 * (k % 4)) & 0x03030303u << at;
}

constexpr u32 TURN = 0x80808080u;   // turns q into q minus half its range, in the upper bits of a byte

// --------------------------------------------------------------------------------------------------------- Q4_0, Q4_1

struct q4_0 {
    static constexpr int BLOCK = 32, FILE_BYTES = 18, P0 = 16, P1 = 2, P2 = 0, P3 = 0, SCALES = 1;
    static constexpr bool MINS = false;
    struct Bits { Words4 q; u32 d; };
};
DEVICE q4_0::Bits fetch(q4_0, const Matrix<q4_0> &m, i64 row, int group) {
    const i64 at = row * m.blocks + group;
    return {load_once(m.p0 + 16 * at), read16(m.p1 + 2 * at)};
}
DEVICE void unpack(const q4_0::Bits &b, Group &g) {
    nibbles_at(b.q, 4, g.words);
    UNROLL for (int i = 0; i < 8; i++) g.words[i] ^= TURN;
    g.scale[0] = low_half(b.d) * 0.0625f;
}

struct q4_1 {
    static constexpr int BLOCK = 32, FILE_BYTES = 20, P0 = 16, P1 = 4, P2 = 0, P3 = 0, SCALES = 1;
    static constexpr bool MINS = true;
    struct Bits { Words4 q; u32 dm; };
};
DEVICE q4_1::Bits fetch(q4_1, const Matrix<q4_1> &m, i64 row, int group) {
    const i64 at = row * m.blocks + group;
    return {load_once(m.p0 + 16 * at), read32(m.p1 + 4 * at)};
}
DEVICE void unpack(const q4_1::Bits &b, Group &g) {
    nibbles(b.q, g.words);
    g.scale[0] = low_half(b.dm);
    g.min[0] = high_half(b.dm);
}

// --------------------------------------------------------------------------------------------------------- Q5_0, Q5_1

struct q5_0 {
    static constexpr int BLOCK = 32, FILE_BYTES = 22, P0 = 16, P1 = 4, P2 = 2, P3 = 0, SCALES = 1;
    static constexpr bool MINS = false;
    struct Bits { Words4 q; u32 fifth, d; };
};
DEVICE q5_0::Bits fetch(q5_0, const Matrix<q5_0> &m, i64 row, int group) {
    const i64 at = row * m.blocks + group;
    return {load_once(m.p0 + 16 * at), read32(m.p1 + 4 * at), read16(m.p2 + 2 * at)};
}
DEVICE void unpack(const q5_0::Bits &b, Group &g) {
    nibbles_at(b.q, 3, g.words);
    UNROLL for (int i = 0; i < 8; i++) g.words[i] = (g.words[i] | bits_at(b.fifth, i, 7)) ^ TURN;
    g.scale[0] = low_half(b.d) * 0.125f;
}

struct q5_1 {
    static constexpr int BLOCK = 32, FILE_BYTES = 24, P0 = 16, P1 = 4, P2 = 4, P3 = 0, SCALES = 1;
    static constexpr bool MINS = true;
    struct Bits { Words4 q; u32 fifth, dm; };
};
DEVICE q5_1::Bits fetch(q5_1, const Matrix<q5_1> &m, i64 row, int group) {
    const i64 at = row * m.blocks + group;
    return {load_once(m.p0 + 16 * at), read32(m.p1 + 4 * at), read32(m.p2 + 4 * at)};
}
DEVICE void unpack(const q5_1::Bits &b, Group &g) {
    nibbles(b.q, g.words);
    UNROLL for (int i = 0; i < 8; i++) g.words[i] |= bits_at(b.fifth, i, 4);
    g.scale[0] = low_half(b.dm);
    g.min[0] = high_half(b.dm);
}

// --------------------------------------------------------------------------------------------------------------- Q8_0
//
// The first 16 and the last 16 of each group are planes of their own: neighbouring lanes then read neighbouring 16 bytes.

struct q8_0 {
    static constexpr int BLOCK = 32, FILE_BYTES = 34, P0 = 16, P1 = 16, P2 = 2, P3 = 0, SCALES = 1;
    static constexpr bool MINS = false;
    struct Bits { Words4 low, high; u32 d; };
};
DEVICE q8_0::Bits fetch(q8_0, const Matrix<q8_0> &m, i64 row, int group) {
    const i64 at = row * m.blocks + group;
    return {load_once(m.p0 + 16 * at), load_once(m.p1 + 16 * at), read16(m.p2 + 2 * at)};
}
DEVICE void unpack(const q8_0::Bits &b, Group &g) {
    UNROLL for (int i = 0; i < 4; i++) {
        g.words[i] = word_of(b.low, i);
        g.words[4 + i] = word_of(b.high, i);
    }
    g.scale[0] = low_half(b.d);
}

// ------------------------------------------------------------------------------------- four bits that number a value
//
// pick16 looks sixteen signed bytes up, eight at a time, with the byte permutation that both vendors have.

DEVICE void picked(const Words4 &q, const Words4 &table, u32 (&words)[8]) {
    UNROLL for (int i = 0; i < 4; i++) pick16(table, word_of(q, i), words[i], words[4 + i]);
}

// -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
DEVICE Words4 uneven_sixteen() { return {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}; }

// Floats of four bits, doubled: 0 1 2 3 4 6 8 12 and their negatives
DEVICE Words4 e2m1_doubled() { return {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu}; }

struct iq4_nl {
    static constexpr int BLOCK = 32, FILE_BYTES = 18, P0 = 16, P1 = 2, P2 = 0, P3 = 0, SCALES = 1;
    static constexpr bool MINS = false;
    struct Bits { Words4 q; u32 d; };
};
DEVICE iq4_nl::Bits fetch(iq4_nl, const Matrix<iq4_nl> &m, i64 row, int group) {
    const i64 at = row * m.blocks + group;
    return {load_once(m.p0 + 16 * at), read16(m.p1 + 2 * at)};
}
DEVICE void unpack(const iq4_nl::Bits &b, Group &g) {
    picked(b.q, uneven_sixteen(), g.words);
    g.scale[0] = low_half(b.d);
}

// The scale is a power of two, 2^(e - 128) with the doubled values; the two smallest are not normal floats.
struct mxfp4 {
    static constexpr int BLOCK = 32, FILE_BYTES = 17, P0 = 16, P1 = 1, P2 = 0, P3 = 0, SCALES = 1;
    static constexpr bool MINS = false;
    struct Bits { Words4 q; u32 e; };
};
DEVICE mxfp4::Bits fetch(mxfp4, const Matrix<mxfp4> &m, i64 row, int group) {
    const i64 at = row * m.blocks + group;
    return {load_once(m.p0 + 16 * at), m.p1[at]};
}
DEVICE void unpack(const mxfp4::Bits &b, Group &g) {
    picked(b.q, e2m1_doubled(), g.words);
    g.scale[0] = bits_float(b.e < 2 ? 0x00200000u << b.e : (b.e - 1) << 23);
}

// Scales are floats of 8 bits, 4 of exponent (bias 7) and 3 of mantissa: put into the float's own fields they are small by
// 2^120, which is also right for those without an exponent. 0x7f is no number and counts as zero.
DEVICE float e4m3_halved(u32 code) {
    return (code & 0xff) == 0x7f ? 0.0f : bits_float((code & 0x7f) << 20) * bits_float((119 + 127) << 23);
}

struct nvfp4 {
    static constexpr int BLOCK = 64, FILE_BYTES = 36, P0 = 32, P1 = 4, P2 = 0, P3 = 0, SCALES = 2;
    static constexpr bool MINS = false;
    struct Bits { Words4 q; u32 e; };
};
DEVICE nvfp4::Bits fetch(nvfp4, const Matrix<nvfp4> &m, i64 row, int group) {
    const i64 at = row * m.blocks * 2 + group;
    return {load_once(m.p0 + 16 * at), read16(m.p1 + 2 * at)};
}
DEVICE void unpack(const nvfp4::Bits &b, Group &g) {
    picked(b.q, e2m1_doubled(), g.words);
    g.scale[0] = e4m3_halved(b.e);
    g.scale[1] = e4m3_halved(b.e >> 8);
}
