// The K types, 256 weights to a block: see quants.h. A group is an eighth of a block.
#pragma once

// ------------------------------------------------------------------------------------- Q4_K: scales and mins of six bits
//
// The 16 bytes in front of a block, in another order than in the file, so that a group's are two shifts away:
//
//     d, dmin          two halves
//     scales           lower four bits of the eight scales, group 0's lowest
//     mins             the same of the mins
//     upper            bits 2j, 2j + 1: upper two of scale j;  bits 16 + 2j, 17 + 2j: of min j

DEVICE void scales_of_six(const Words4 &head, int j, Group &g) {
    const u32 scale = (head.y >> 4 * j & 15) | (head.w >> 2 * j & 3) << 4;
    const u32 min = (head.z >> 4 * j & 15) | (head.w >> (16 + 2 * j) & 3) << 4;
    g.scale[0] = low_half(head.x) * (float)scale;
    g.min[0] = -(high_half(head.x) * (float)min);
}

struct q4_k {
    static constexpr int BLOCK = 256, P0 = 128, P1 = 16, P2 = 0, P3 = 0, SCALES = 1;
    static constexpr bool MINS = true;
    struct Bits { Words4 q, head; int j; };
};
DEVICE q4_k::Bits fetch(q4_k, const Matrix<q4_k> &m, i64 row, int group) {
    const i64 at = row * m.blocks + group / 8;
    return {load_once(m.p0 + 128 * at + 16 * (group % 8)), load128(m.p1 + 16 * at), group % 8};
}
DEVICE void unpack(const q4_k::Bits &b, Group &g) {
    nibbles(b.q, g.words);
    scales_of_six(b.head, b.j, g);
}
