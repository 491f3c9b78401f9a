// out = sum over a row's choices of weight * what that expert gave, in the order of choice.
//
// Block: 256 threads, four columns each, of one row; grid (ceil(width / 1024), rows). Each thread reads `used` times 16 bytes,
// all of them independent, and writes 16 once: the sum stays in registers, nothing is added to in memory, and so the order of
// the sum is that of the choice, whatever order the experts were computed in. 30 registers, no block memory.
//
// Roofline: memory, used * 4 bytes read and 4 written a number, all useful. (8 experts, 2048 columns, one row: 72 KB, less
// than a launch.)
//
// Row of `parts` that has choice p of row r: places[r * used + p], or r * used + p without `places`; -1: nobody computed it.
// Experts outside first .. end-1 are on other ranks and add nothing here; their parts are not read.
#pragma once

#include "rows.h"

DEVICE void experts_combine_row(const float *parts, int parts_stride, const int *places, const int *ids, const float *weights,
                                float *out, int out_stride, int used, int first, int end, int width) {
    const int row = block_y(), c = column(), left = width - c;
    if (left <= 0) return;
    Floats4 sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
    for (int p = 0; p < used; p++) {
        const int choice = row * used + p, expert = ids[choice];
        const int place = places ? places[choice] : choice;
        if (expert < first || expert >= end || place < 0) continue;
        const float weight = weights[choice];
        const Floats4 part = load4(row_at(parts, place, parts_stride) + c, left);
        UNROLL for (int i = 0; i < 4; i++) sum.v[i] = fma_(weight, part.v[i], sum.v[i]);
    }
    store4(row_at(out, row, out_stride) + c, sum, left);
}
