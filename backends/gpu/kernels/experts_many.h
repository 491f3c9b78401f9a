// experts_many: the product of linear_many for rows that go through different matrices. Line p of out = a line of x times the
// matrix of the expert that choice p chose; the lists of choices by expert come from group_rows.
//
//     out       float32 [pairs], lines `out_stride` apart: line p is that of choice p. Lines of experts that are not here stay
//               as they are
//     x         halves of halve_rows.h; choice p reads line p / used: `used` is the choices of a row, or 1 where x has a line
//               for each choice (the input of `down`). scales: of x's lines
//     w         planes or float lines of all experts that are here, [w_rows, cols]; expert e's matrix is rows [e * step +
//               first, ... + outs) (ExpertMatrix of backends/ops.py: step is its pitch, outs its height)
//     bias      [w_rows] or null
//     order, tiles      of group_rows, with the tile_rows of this variant
//
// Grid: (tiles, blocks over outs). Blocks of one expert follow each other and share its part of W.
//
// Reading x by choice costs nothing: a line is K halves at a step, 128 or 256 bytes in one piece wherever it lies. Rows that
// an expert lacks to fill its last tile are multiplied and thrown away: with 128 experts and 512 rows of 8 choices, 32 each,
// r32 wastes a third, r128 would waste three quarters. That is what the two variants are for here. All else is as in
// many_block.h.
#pragma once

#include "many_block.h"

template <class Q, class S>
DEVICE void experts_many(float *out, const half_t *x, const float *scales, const void *w, const float *bias, const int *order,
                         const int *tiles, int used, int outs, int cols, int pitch, int out_stride, int w_rows, int step,
                         int first) {
    SHARED(half_t, memory, S::LINES * S::STRIDE);
    const Words4 tile = load128(tiles + 4 * block_x());
    const int rows = (int)tile.z, first_out = block_y() * S::OUTS;
    if (rows == 0) return;
    // A pointer to this tile's choices, or where registers are short (RECOMPUTE) their place in the list of all.
    if constexpr (!RECOMPUTE) order += tile.y;
    const auto choice = [&](int row) { return RECOMPUTE ? order[tile.y + (u32)row] : order[row]; };
    const i64 matrix_row = (i64)tile.x * step + first;
    many_block<Q, S>(
        memory, x, scales, pitch, lines_of(Q(), w, w_rows, cols), bias, matrix_row + first_out, matrix_row + outs - 1, cols,
        [&](int row) { return choice(row < rows ? row : rows - 1) / used; },
        [&](int row, int col, float value) {
            col += first_out;
            if (row >= rows || col >= outs) return;
            out[(i64)choice(row) * out_stride + col] = value;
        });
}

#define EXPERTS_MANY(type, variant, Shape)                                                                                     \
    KERNEL(experts_many_##type##_##variant, Shape::THREADS, Shape::BLOCKS)                                                     \
    (float *out, const half_t *x, const float *scales, const void *w, const float *bias, const i32 *order, const i32 *tiles,   \
     i32 used, i32 outs, i32 cols, i32 pitch, i32 out_stride, i32 w_rows, i32 step, i32 first) {                               \
        experts_many<type, Shape>(out, x, scales, w, bias, order, tiles, used, outs, cols, pitch, out_stride, w_rows, step,    \
                                  first);                                                                                      \
    }
#define EXPERTS_MANY_OF(type) EXPERTS_MANY(type, r32, ManyR32) EXPERTS_MANY(type, r128, ManyR128)
