// The types with blocks of 32: see quants.h.
#pragma once

// ------------------------------------------------------------------------------------------------ four bits, in uniform order
//
// Byte j of a group's 16 has weight j in its lower half and weight j + 16 in its upper one.

DEVICE void nibbles(const Words4 &q, u32 (&words)[8]) {
    UNROLL for (int i = 0; i < 4; i++) {
        words[i] = word_of(q, i) & 0x0f0f0f0fu;
        words[4 + i] = word_of(q, i) >> 4 & 0x0f0f0f0fu;
    }
}

// d, and what 32 weights have of it.
struct q4_0 {
    static constexpr int BLOCK = 32, P0 = 16, P1 = 2, P2 = 0, P3 = 0, SCALES = 1;
    static constexpr bool MINS = false;
    struct Bits { Words4 q; u32 d; };
};
DEVICE q4_0::Bits fetch(q4_0, const Matrix<q4_0> &m, i64 row, int group) {
    const i64 at = row * m.blocks + group;
    return {load_once(m.p0 + 16 * at), read16(m.p1 + 2 * at)};
}
DEVICE void unpack(const q4_0::Bits &b, Group &g) {
    UNROLL for (int i = 0; i < 4; i++) {
        g.words[i] = (word_of(b.q, i) << 4 & 0xf0f0f0f0u) ^ 0x80808080u;
        g.words[4 + i] = (word_of(b.q, i) & 0xf0f0f0f0u) ^ 0x80808080u;
    }
    g.scale[0] = low_half(b.d) * 0.0625f;
}

// -------------------------------------------------------------------------------------------------------------- eight bits
//
// The first 16 and the last 16 of each group are planes of their own: neighbouring lanes then read neighbouring 16 bytes.

struct q8_0 {
    static constexpr int BLOCK = 32, P0 = 16, P1 = 16, P2 = 2, P3 = 0, SCALES = 1;
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
