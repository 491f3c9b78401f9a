// pack: rows as they lie in the file become planes. The counterpart of backends/gpu/planes.py, which draws what goes where.
//
//     planes         the matrix on the card, [matrix_rows, cols]
//     src            a staging buffer: blocks of a file, `src_row_bytes` from row to row, aligned to nothing
//     first_row, first_col, rows, cols_here       the part of the matrix that they are: of whole blocks
//
// A thread makes one group of 32 weights, or where a scale belongs to a whole block, also that in the thread of the block's
// first group. Reads are single bytes: a block of 17 to 210 bytes has no alignment. Writes are as wide as the planes allow,
// neighbours side by side.
//
// Block: 256 threads, grid (ceil(rows * groups / 256)). 40 registers, no block memory. Roofline: the link that brings the
// file, 12 to 25 GB/s (or main memory, where it is shared: 100 GB/s on gfx1103). A group costs 32 to 50 byte loads, whose 18
// bytes come from L1 after the first: 40 cycles of a multiprocessor a warp and load at the worst, some 300 GB/s on a card
// with 82. So it is hidden behind the copy. Bytes moved for each byte of weights: one read, one written.
#pragma once

#include "quants.h"

// ------------------------------------------------------------------------------------------------------ parts of a group
//
// `code(e)` is the field of weight e in its lowest bits; what lies above is cut off.

template <class F> DEVICE void put_fours(u8 *to, F code) {
    u32 words[4];
    UNROLL for (int i = 0; i < 4; i++) {
        words[i] = 0;
        UNROLL for (int j = 0; j < 4; j++)
            words[i] |= ((code(4 * i + j) & 15u) | (code(4 * i + j + 16) & 15u) << 4) << 8 * j;
    }
    store128(to, {words[0], words[1], words[2], words[3]});
}

template <class F> DEVICE void put_twos(u8 *to, F code) {
    u32 words[2];
    UNROLL for (int i = 0; i < 2; i++) {
        words[i] = 0;
        UNROLL for (int j = 0; j < 4; j++)
            UNROLL for (int k = 0; k < 4; k++) words[i] |= (code(16 * i + 4 * k + j) & 3u) << (8 * j + 2 * k);
    }
    *(u64 *)to = (u64)words[0] | (u64)words[1] << 32;
}

template <class F> DEVICE void put_ones(u8 *to, F code) {
    u32 word = 0;
    UNROLL for (int j = 0; j < 4; j++)
        UNROLL for (int k = 0; k < 8; k++) word |= (code(4 * k + j) & 1u) << (8 * j + k);
    *(u32 *)to = word;
}

DEVICE u32 bytes_of(const u8 *from, int count) {
    u32 word = 0;
    UNROLL for (int i = 0; i < 4; i++)
        if (i < count) word |= (u32)from[i] << 8 * i;
    return word;
}

// As they are: 1, 2, 4, 8 or 16 bytes to a place that is a multiple of as many.
template <int COUNT> DEVICE void put_bytes(u8 *to, const u8 *from) {
    if constexpr (COUNT == 1) *to = *from;
    if constexpr (COUNT == 2) *(u16 *)to = (u16)bytes_of(from, 2);
    if constexpr (COUNT == 4) *(u32 *)to = bytes_of(from, 4);
    if constexpr (COUNT == 8) *(u64 *)to = bytes_of(from, 4) | (u64)bytes_of(from + 4, 4) << 32;
    if constexpr (COUNT == 16)
        store128(to, {bytes_of(from, 4), bytes_of(from + 4, 4), bytes_of(from + 8, 4), bytes_of(from + 12, 4)});
}

// Where group j of a block goes: `at` counts blocks from the matrix's beginning.
struct To { u8 *p0, *p1, *p2, *p3; };

template <class Q> DEVICE To block_of(const Matrix<Q> &m, i64 at) {
    return {(u8 *)m.p0 + Q::P0 * at, (u8 *)m.p1 + Q::P1 * at, (u8 *)m.p2 + Q::P2 * at, (u8 *)m.p3 + Q::P3 * at};
}

// ------------------------------------------------------------------------------------------- small blocks: fields in a row

// Four bits of weight e as blocks of 32 have them: byte e mod 16, upper half from 16 on.
DEVICE u32 half_byte(const u8 *quants, int e) { return quants[e % 16] >> e / 16 * 4; }

DEVICE void pack_group(q4_0, const To &to, const u8 *b, int) {
    put_fours(to.p0, [&](int e) { return half_byte(b + 2, e); });
    put_bytes<2>(to.p1, b);
}
DEVICE void pack_group(iq4_nl, const To &to, const u8 *b, int) { pack_group(q4_0(), to, b, 0); }
DEVICE void pack_group(q4_1, const To &to, const u8 *b, int) {
    put_fours(to.p0, [&](int e) { return half_byte(b + 4, e); });
    put_bytes<4>(to.p1, b);
}
DEVICE void pack_group(q5_0, const To &to, const u8 *b, int) {
    put_fours(to.p0, [&](int e) { return half_byte(b + 6, e); });
    put_ones(to.p1, [&](int e) { return (u32)b[2 + e / 8] >> e % 8; });
    put_bytes<2>(to.p2, b);
}
DEVICE void pack_group(q5_1, const To &to, const u8 *b, int) {
    put_fours(to.p0, [&](int e) { return half_byte(b + 8, e); });
    put_ones(to.p1, [&](int e) { return (u32)b[4 + e / 8] >> e % 8; });
    put_bytes<4>(to.p2, b);
}
DEVICE void pack_group(q8_0, const To &to, const u8 *b, int) {
    put_bytes<16>(to.p0, b + 2);
    put_bytes<16>(to.p1, b + 18);
    put_bytes<2>(to.p2, b);
}
DEVICE void pack_group(mxfp4, const To &to, const u8 *b, int) {
    put_fours(to.p0, [&](int e) { return half_byte(b + 1, e); });
    put_bytes<1>(to.p1, b);
}
DEVICE void pack_group(nvfp4, const To &to, const u8 *b, int j) {
    put_fours(to.p0 + 16 * j, [&](int e) { return (u32)b[4 + 16 * j + e / 16 * 8 + e % 8] >> e % 16 / 8 * 4; });
    put_bytes<2>(to.p1 + 2 * j, b + 2 * j);
}

// ---------------------------------------------------------------------------------------------------- blocks of 256 weights

// Two bits of weight e of group j in the K types: 128 weights in 32 bytes.
DEVICE u32 quarter(const u8 *quants, int j, int e) { return quants[j / 4 * 32 + e] >> j % 4 * 2; }

DEVICE void pack_group(q2_k, const To &to, const u8 *b, int j) {
    put_twos(to.p0 + 8 * j, [&](int e) { return quarter(b + 16, j, e); });
    put_bytes<2>(to.p1 + 2 * j, b + 2 * j);
    if (j == 0) put_bytes<4>(to.p2, b + 80);
}

DEVICE void pack_group(q3_k, const To &to, const u8 *b, int j) {
    put_twos(to.p0 + 8 * j, [&](int e) { return quarter(b + 32, j, e); });
    put_ones(to.p1 + 4 * j, [&](int e) { return (u32)b[e] >> j; });
    const u8 *scales = b + 96;
    const int i = 2 * j % 8, shift = j / 4 * 4;
    to.p2[j] = (u8)((scales[i] >> shift & 15) | (scales[i + 1] >> shift & 15) << 4);
    if (j > 0) return;
    u32 upper = 0;
    UNROLL for (int k = 0; k < 16; k++) upper |= (scales[8 + k % 4] >> k / 4 * 2 & 3u) << 2 * k;
    *(u32 *)(to.p2 + 8) = upper;
    put_bytes<2>(to.p3, b + 108);
}

// d, dmin and the 12 bytes behind them, in the order of quants_k.h.
DEVICE void put_scales_of_six(u8 *to, const u8 *head) {
    const u8 *six = head + 4;
    Words4 w = {bytes_of(head, 4), 0, 0, 0};
    UNROLL for (int j = 0; j < 4; j++) {
        w.y |= (six[j] & 15u) << 4 * j | (six[j + 8] & 15u) << 4 * (j + 4);
        w.z |= (six[j + 4] & 15u) << 4 * j | (u32)(six[j + 8] >> 4) << 4 * (j + 4);
        w.w |= (six[j] >> 4 & 3u) << 2 * j | (u32)(six[j] >> 6) << 2 * (j + 4);
        w.w |= (six[j + 4] >> 4 & 3u) << (16 + 2 * j) | (u32)(six[j + 4] >> 6) << (16 + 2 * (j + 4));
    }
    store128(to, w);
}

// Four bits of weight e of group j in Q4_K and Q5_K: 64 weights in 32 bytes.
DEVICE u32 paired(const u8 *quants, int j, int e) { return quants[j / 2 * 32 + e] >> j % 2 * 4; }

DEVICE void pack_group(q4_k, const To &to, const u8 *b, int j) {
    put_fours(to.p0 + 16 * j, [&](int e) { return paired(b + 16, j, e); });
    if (j == 0) put_scales_of_six(to.p1, b);
}
DEVICE void pack_group(q5_k, const To &to, const u8 *b, int j) {
    put_fours(to.p0 + 16 * j, [&](int e) { return paired(b + 48, j, e); });
    put_ones(to.p1 + 4 * j, [&](int e) { return (u32)b[16 + e] >> j; });
    if (j == 0) put_scales_of_six(to.p2, b);
}
DEVICE void pack_group(q6_k, const To &to, const u8 *b, int j) {
    put_fours(to.p0 + 16 * j, [&](int e) { return (u32)b[j / 4 * 64 + j % 2 * 32 + e] >> j % 4 / 2 * 4; });
    put_twos(to.p1 + 8 * j, [&](int e) { return quarter(b + 128, j, e); });
    put_bytes<2>(to.p2 + 2 * j, b + 192 + 2 * j);
    if (j == 0) put_bytes<2>(to.p3, b + 208);
}
DEVICE void pack_group(iq4_xs, const To &to, const u8 *b, int j) {
    put_fours(to.p0 + 16 * j, [&](int e) { return half_byte(b + 8 + 16 * j, e); });
    if (j == 0) put_bytes<8>(to.p1, b);
}
DEVICE void pack_group(tq2_0, const To &to, const u8 *b, int j) {
    put_twos(to.p0 + 8 * j, [&](int e) { return quarter(b, j, e); });
    if (j == 0) put_bytes<2>(to.p1, b + 64);
}

// ------------------------------------------------------------------------------------------ blocks whose fields only part

// Group j's bytes of a field, one after the other in the file and in its plane.
template <int COUNT> DEVICE void put_share(u8 *plane, const u8 *field, int j) {
    put_bytes<COUNT>(plane + COUNT * j, field + COUNT * j);
}

DEVICE void pack_group(tq1_0, const To &to, const u8 *b, int j) {
    for (int i = j; i < 52; i += 8) to.p0[i] = b[i];
    if (j == 0) put_bytes<2>(to.p1, b + 52);
}
DEVICE void pack_group(iq2_xxs, const To &to, const u8 *b, int j) {
    put_share<8>(to.p0, b + 2, j);
    if (j == 0) put_bytes<2>(to.p1, b);
}
DEVICE void pack_group(iq2_xs, const To &to, const u8 *b, int j) {
    put_share<8>(to.p0, b + 2, j);
    put_share<1>(to.p1, b + 66, j);
    if (j == 0) put_bytes<2>(to.p2, b);
}
DEVICE void pack_group(iq2_s, const To &to, const u8 *b, int j) {
    put_bytes<4>(to.p0 + 8 * j, b + 2 + 4 * j);
    put_bytes<4>(to.p0 + 8 * j + 4, b + 34 + 4 * j);
    to.p1[2 * j] = b[66 + j];
    to.p1[2 * j + 1] = b[74 + j];
    if (j == 0) put_bytes<2>(to.p2, b);
}
DEVICE void pack_group(iq3_xxs, const To &to, const u8 *b, int j) {
    put_share<8>(to.p0, b + 2, j);
    put_share<4>(to.p1, b + 66, j);
    if (j == 0) put_bytes<2>(to.p2, b);
}
DEVICE void pack_group(iq3_s, const To &to, const u8 *b, int j) {
    put_share<8>(to.p0, b + 2, j);
    put_share<4>(to.p1, b + 74, j);
    to.p2[j] = b[66 + j];
    if (j < 4) to.p2[8 + j] = b[106 + j];
    if (j == 0) put_bytes<2>(to.p3, b);
}
DEVICE void pack_group(iq1_s, const To &to, const u8 *b, int j) {
    put_share<4>(to.p0, b + 2, j);
    put_share<2>(to.p1, b + 34, j);
    if (j == 0) put_bytes<2>(to.p2, b);
}
DEVICE void pack_group(iq1_m, const To &to, const u8 *b, int j) {
    put_share<4>(to.p0, b, j);
    put_share<2>(to.p1, b + 32, j);
    put_share<1>(to.p2, b + 48, j);
}

// ---------------------------------------------------------------------------------------------------------------- entries

template <class Q>
DEVICE void pack(Q, u8 *planes, const u8 *src, int matrix_rows, int cols, int first_row, int first_col, int rows, int cols_here,
                 i64 src_row_bytes) {
    constexpr int EACH = Q::BLOCK / GROUP;
    const int groups = cols_here / GROUP;
    const i64 at = (i64)block_x() * threads() + thread();
    const int row = (int)(at / groups), group = (int)(at % groups);
    if (row >= rows) return;
    const auto m = matrix<Q>(planes, matrix_rows, cols);
    const i64 block = (i64)(first_row + row) * m.blocks + first_col / Q::BLOCK + group / EACH;
    pack_group(Q(), block_of(m, block), src + row * src_row_bytes + (i64)(group / EACH) * Q::FILE_BYTES, group % EACH);
}

// A thread copies one number; those behind a row's last column write the zeros that fill it up to 16 bytes.
template <class F>
DEVICE void pack_float(F, u8 *planes, const u8 *src, int cols, int first_row, int first_col, int rows, int cols_here,
                       i64 src_row_bytes) {
    const int padded = (int)(float_row_bytes(cols, F::SIZE) / F::SIZE);
    const int width = first_col + cols_here == cols ? padded - first_col : cols_here;
    const i64 at = (i64)block_x() * threads() + thread();
    const int row = (int)(at / width), col = (int)(at % width);
    if (row >= rows) return;
    u8 *to = planes + (i64)F::SIZE * ((i64)(first_row + row) * padded + first_col + col);
    const u8 *from = src + row * src_row_bytes + (i64)F::SIZE * col;
    UNROLL for (int i = 0; i < F::SIZE; i++) to[i] = col < cols_here ? from[i] : 0;
}

#define PACK(type)                                                                                                             \
    KERNEL(pack_##type, 256, 4)                                                                                                \
    (u8 *planes, const u8 *src, i32 matrix_rows, i32 cols, i32 first_row, i32 first_col, i32 rows, i32 cols_here,              \
     i64 src_row_bytes) {                                                                                                      \
        pack(type(), planes, src, matrix_rows, cols, first_row, first_col, rows, cols_here, src_row_bytes);                    \
    }
#define PACK_FLOAT(type)                                                                                                       \
    KERNEL(pack_##type, 256, 4)                                                                                                \
    (u8 *planes, const u8 *src, i32 matrix_rows, i32 cols, i32 first_row, i32 first_col, i32 rows, i32 cols_here,              \
     i64 src_row_bytes) {                                                                                                      \
        pack_float(type(), planes, src, cols, first_row, first_col, rows, cols_here, src_row_bytes);                           \
    }
