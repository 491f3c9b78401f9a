// Packed weights on a card: how 32 of them come out of the planes that backends/gpu/planes.py draws.
//
// A matrix of a packed type lies in up to four planes, each row-major by itself: the low bits of the quants (16 bytes for 32
// weights of the 4-bit types), what they have above that, scales. Everything works by *groups* of 32 neighbours of a row, and
// one lane takes a whole group at a time:
//
//     fetch(q4_k(), matrix, row, group)    loads the group's bits, no arithmetic: several may be in flight before one is needed
//     unpack(bits, group)                  makes of them a Group:
//
//         words[8]          32 signed bytes in the order of the row, as dot4 wants them
//         scale[2]          of the first and the last 16;  of a type with SCALES == 1 only scale[0] is set, it is that of all
//         min[2]            as many as scales, of a type with MINS; else not set
//
//     weight i = scale * words_as_bytes[i] + min
//
// The arithmetic is chosen for few instructions. A nibble stands in the upper half of its byte where the type is signed: with
// the top bit turned it *is* 16 (q - 8), one instruction for four weights, and the 1/16 goes into the scale (Q5: 8, Q6: 4,
// Q3: 32). High bits lie transposed, so that four of them come out with a shift and a mask. Both products are exact in
// float32, so a weight has the bits that the file's own formula gives it.
//
// The types, in lower case, are empty structs:
//
//     BLOCK             weights of a block in the file, which has FILE_BYTES
//     P0 .. P3          bytes of a block in each plane, 0 where there is none
//     SCALES, MINS      as above
//
// and floats (f32, f16, bf16) have SIZE instead: one plane, rows padded with zeros to 16 bytes.
//
// `EACH_QUANT(X)` expands X(type) for all packed types, `EACH_FLOAT(X)` for floats. With -DQUANT=q4_k the one has that type
// alone and the other none; with -DQUANT=bf16 the other way round. X may paste its argument.
#pragma once

#include "device.h"

constexpr int GROUP = 32;          // weights that share words, scales and mins here
constexpr int PLANE_ALIGN = 128;   // bytes: every plane of a matrix begins on a multiple

template <class Q> struct Matrix {
    const u8 *p0, *p1, *p2, *p3;
    int blocks;   // of a row
};

struct Group {
    u32 words[8];
    float scale[2], min[2];
};

DEVICE i64 plane_bytes(int rows, int blocks, int bytes) {
    return ((i64)rows * blocks * bytes + PLANE_ALIGN - 1) / PLANE_ALIGN * PLANE_ALIGN;
}

// The planes of a packed matrix of `rows` times `cols` that begin at `at`.
template <class Q> DEVICE Matrix<Q> matrix(const void *at, int rows, int cols) {
    Matrix<Q> m;
    m.blocks = cols / Q::BLOCK;
    m.p0 = (const u8 *)at;
    m.p1 = m.p0 + plane_bytes(rows, m.blocks, Q::P0);
    m.p2 = m.p1 + plane_bytes(rows, m.blocks, Q::P1);
    m.p3 = m.p2 + plane_bytes(rows, m.blocks, Q::P2);
    return m;
}

DEVICE u32 word_of(const Words4 &q, int i) { return i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w; }

DEVICE u32 read16(const u8 *p) { return *(const u16 *)p; }
DEVICE u32 read32(const u8 *p) { return *(const u32 *)p; }
struct TwoWords { u32 x, y; };
DEVICE TwoWords read64(const u8 *p) {
    const u64 v = *(const u64 *)p;
    return {(u32)v, (u32)(v >> 32)};
}

// The two halves in a word of memory.
DEVICE float low_half(u32 pair) { return half_to_float((half_t)pair); }
DEVICE float high_half(u32 pair) { return half_to_float((half_t)(pair >> 16)); }

// Signed byte `i` (a constant after unrolling) of four.
DEVICE float byte_value(u32 word, int i) { return (float)(i8)(word >> 8 * i); }

// Weight i of 0 .. 31, a constant after unrolling.
template <class Q> DEVICE float weight_of(const Group &g, int i) {
    const int part = Q::SCALES == 2 ? i / 16 : 0;
    const float q = byte_value(g.words[i / 4], i % 4);
    if constexpr (Q::MINS)
        return fma_(g.scale[part], q, g.min[part]);
    else
        return g.scale[part] * q;
}

// Weights [16 part, ... + 16) as halves, two in a word, for tiles and library products.
template <class Q> DEVICE void halves_of(const Group &g, int part, u32 (&pairs)[8]) {
    UNROLL for (int i = 0; i < 8; i++) {
        const half_t low = float_to_half(weight_of<Q>(g, 16 * part + 2 * i));
        const half_t high = float_to_half(weight_of<Q>(g, 16 * part + 2 * i + 1));
        pairs[i] = (u32)low | (u32)high << 16;
    }
}

#include "quants_blocks.h"
#include "quants_k.h"
#include "quants_grids.h"

// ---------------------------------------------------------------------------------------------------------------- floats

struct f32 { static constexpr int SIZE = 4; };
struct f16 { static constexpr int SIZE = 2; };
struct bf16 { static constexpr int SIZE = 2; };

// 16 bytes of a row.
DEVICE void floats_of(f32, const Words4 &bits, float (&v)[4]) {
    UNROLL for (int i = 0; i < 4; i++) v[i] = bits_float(word_of(bits, i));
}
DEVICE void floats_of(f16, const Words4 &bits, float (&v)[8]) {
    UNROLL for (int i = 0; i < 8; i++) v[i] = half_to_float((half_t)(word_of(bits, i / 2) >> i % 2 * 16));
}
DEVICE void floats_of(bf16, const Words4 &bits, float (&v)[8]) {
    UNROLL for (int i = 0; i < 8; i++) v[i] = bits_float(i % 2 ? word_of(bits, i / 2) & 0xffff0000u : word_of(bits, i / 2) << 16);
}

// From row to row.
DEVICE i64 float_row_bytes(int cols, int size) { return ((i64)cols * size + 15) / 16 * 16; }

// ----------------------------------------------------------------------------------------------------------- lists of types

// A name that no line here defines counts as 0 for the preprocessor: of the types only these three are floats.
#define IS_FLOAT_f32 1
#define IS_FLOAT_f16 1
#define IS_FLOAT_bf16 1
#define PASTED_IS_FLOAT(type) IS_FLOAT_##type
#define IS_FLOAT(type) PASTED_IS_FLOAT(type)
#define ONE_TYPE(X, type) X(type)

#if !defined(QUANT)
#define EACH_QUANT(X)                                                                                                          \
    X(q4_0) X(q4_1) X(q5_0) X(q5_1) X(q8_0) X(q2_k) X(q3_k) X(q4_k) X(q5_k) X(q6_k) X(iq4_nl) X(iq4_xs) X(mxfp4) X(nvfp4)      \
    X(tq1_0) X(tq2_0) X(iq1_s) X(iq1_m) X(iq2_xxs) X(iq2_xs) X(iq2_s) X(iq3_xxs) X(iq3_s)
#define EACH_FLOAT(X) X(f32) X(f16) X(bf16)
#elif IS_FLOAT(QUANT)
#define EACH_QUANT(X)
#define EACH_FLOAT(X) ONE_TYPE(X, QUANT)
#else
#define EACH_QUANT(X) ONE_TYPE(X, QUANT)
#define EACH_FLOAT(X)
#endif
