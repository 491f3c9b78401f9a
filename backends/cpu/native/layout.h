// The R16 layout: how a packed weight matrix lies in memory, drawn.
//
// A matrix [rows, cols] is a sequence of groups of 16 rows; a group is the sequence of its blocks along the columns (32
// columns, 256 for K types, 1 for floats). In a block, what belongs to one column quad of all 16 rows lies together:
//
//     "word vector", 64 bytes:   row 0        row 1        …  row 15          lane r = row r of the group
//                                c0 c1 c2 c3  c0 c1 c2 c3  …  c0 c1 c2 c3     four columns, a byte each
//
// so a kernel loads 16 rows at once, needs no horizontal sum, and reads memory front to back. Headers (block scales) are
// vectors of 16 halves, one per row. The bits are those of the file, permuted; the size is the same. The last group is
// padded with zero rows where 16 does not divide the rows.
//
// Every integer type is brought to one shape, a sub-block of 32 columns:
//     nibbles   4 word vectors; vector i holds column quad i in the low and quad i + 4 in the high nibbles
//     high bits 5-bit types: 1 word vector, bit j of byte c = bit 4 of column 4j + c
//               6-bit type:  2 word vectors, one for columns 0..15, one for 16..31; bits 2i.. of byte c = bits 4-5 of 4i + c
//     pairs     2- and 3-bit types: 2 word vectors laid out like those high bits, with bits 0-1 of each column
//
//     Q4_0  d[16] | nibbles                                       288 bytes
//     Q4_1  d[16] m[16] | nibbles                                 320
//     Q5_0  d[16] | high | nibbles                                352
//     Q5_1  d[16] m[16] | high | nibbles                          384
//     Q8_0  d[16] | 8 word vectors, one per column quad           544
//     Q4_K  d[16] dmin[16] S[3 word vectors] | 8 x nibbles        2304     S: the file's 12 packed scale bytes as 3 words
//     Q5_K  d[16] dmin[16] S[3] | 8 x (high | nibbles)            2816
//     Q6_K  d[16] scales[4 word vectors] | 8 x (nibbles | 2 high) 3360     byte k of vector t = scale of columns 16(4t+k)..
//     Q2_K  d[16] dmin[16] scales[4 word vectors] | 8 x pairs     1344     as Q6_K's; low nibble scale, high nibble minimum
//     Q3_K  d[16] S[3 word vectors] | 8 x (pairs | high)          1760     high: bit 2, as in 5-bit types
//
// Types whose nibbles are numbers of entries in a table of 16 integers:
//     MXFP4   e[16 bytes] | nibbles                               272      scale 2^(e - 128)
//     IQ4_NL  d[16] | nibbles                                     288
//     IQ4_XS  d[16] H[16 halfwords] L[word vector] | 8 x nibbles  2176     scale of sub-block s: bits 4s.. of L, 2s.. of H
//
//     F32 / F16 / BF16   one column: 16 values                    64 / 32
#pragma once

#include <cstddef>
#include <cstdint>

#include "hs_cpu.h"

namespace hs {

constexpr int GROUP = 16;

// Columns of a block, and its bytes for 16 rows; 0 where the type is unknown.
constexpr int block_cols(int type) {
    switch (type) {
        case HS_F32: case HS_F16: case HS_BF16: return 1;
        case HS_Q4_0: case HS_Q4_1: case HS_Q5_0: case HS_Q5_1: case HS_Q8_0: case HS_IQ4_NL: case HS_MXFP4: return 32;
        case HS_Q2_K: case HS_Q3_K: case HS_Q4_K: case HS_Q5_K: case HS_Q6_K: case HS_IQ4_XS: return 256;
        default: return 0;
    }
}

// Bytes of one block of one row, in the file; 16 times that in R16.
constexpr int file_block_bytes(int type) {
    switch (type) {
        case HS_F32: return 4;
        case HS_F16: case HS_BF16: return 2;
        case HS_Q4_0: return 18;
        case HS_Q4_1: return 20;
        case HS_Q5_0: return 22;
        case HS_Q5_1: return 24;
        case HS_Q8_0: return 34;
        case HS_Q2_K: return 84;
        case HS_Q3_K: return 110;
        case HS_Q4_K: return 144;
        case HS_Q5_K: return 176;
        case HS_Q6_K: return 210;
        case HS_IQ4_NL: return 18;
        case HS_IQ4_XS: return 136;
        case HS_MXFP4: return 17;
        default: return 0;
    }
}

// What the nibbles of the table types stand for. MXFP4: twice the values of E2M1.
constexpr int8_t IQ4_TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t MXFP4_TABLE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

constexpr size_t group_block_bytes(int type) { return static_cast<size_t>(GROUP) * static_cast<size_t>(file_block_bytes(type)); }
constexpr bool is_float(int type) { return type == HS_F32 || type == HS_F16 || type == HS_BF16; }
// Floats from one row of a buffer, or of V in a KV page, to the next.
constexpr int padded(int width) { return (width + 15) / 16 * 16; }
constexpr int groups_of(int rows) { return (rows + GROUP - 1) / GROUP; }
constexpr size_t group_bytes(int type, int cols) {
    return group_block_bytes(type) * static_cast<size_t>(cols / block_cols(type));
}
// From one group of a matrix to the next: more than its own bytes where it is some columns of a wider one.
inline size_t group_step(const hs_matrix &matrix) {
    return group_bytes(matrix.type, matrix.stored_cols ? matrix.stored_cols : matrix.cols);
}

// Activations of 32 columns as int16: x ≈ d * q, the largest magnitude maps to 32767. Each four columns lie in the order
// 0, 2, 1, 3, because the bytes of a lane are split into pairs by taking every other one. `half_sum` are the
// sums of q over columns 0..15 and 16..31, for offsets; `s` = d * (their sum), for minima.
struct ActBlock {
    int16_t q[32];
    float d;
    float s;
    int32_t half_sum[2];
};
static_assert(sizeof(ActBlock) == 80, "activation blocks are packed");

// Bytes of one row of them.
constexpr size_t activation_bytes(int cols) { return static_cast<size_t>(cols / 32) * sizeof(ActBlock); }

}  // namespace hs
