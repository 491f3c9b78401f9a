// A row beside the hidden state of the row before it: what a drafting layer starts from (JoinHidden of backends/ops.py).
//
//     out[r] = left[r] columns first .. | right[r - 1] columns first ..        for a lane's first row: its slot's
//
// Block: 256 threads, one column each, of one row; grid (ceil(width / 256), rows). The two halves of `out` need not be aligned
// to one another, so single floats: 128 bytes a warp, whole lines. Roofline: memory, 16 bytes moved a column and all useful, or
// the launch.
//
// What a lane's first row reads of the slot its last row replaces. Blocks have no order, so one and the same thread does both:
// that of the lane's first row, column by column. Rows of held lanes go to their places instead, and the slot stays.
#pragma once

#include "rows.h"

DEVICE void join_hidden_row(const float *left, int left_stride, const float *right, int right_stride, float *out, int out_stride,
                            float *states, i64 slot_floats, float *kept, int kept_stride, const int *runs, const int *lanes,
                            int first, int width) {
    const int row = block_y(), c = block_x() * threads() + thread();
    if (c >= width) return;
    const LaneRun run = run_of(runs, lanes[row]);
    float *state = states + slot_floats * run.slot + c;
    const float *own = right + first + c;
    float before = 0.0f;
    if (row > run.first) before = *row_at(own, row - 1, right_stride);
    else if (run.position > 0) before = *state;
    float *to = row_at(out, row, out_stride) + c;
    to[0] = row_at(left, row, left_stride)[first + c];
    to[width] = before;
    if (run.place >= 0) *(row_at(kept, run.place + row - run.first, kept_stride) + c) = *row_at(own, row, right_stride);
    else if (row == run.first) *state = *row_at(own, run.first + run.rows - 1, right_stride);
}

// A step of drafting: `chain[r]` is the row of `right`, as the step before left it, or -1: the lane's slot. Nothing stays.
DEVICE void join_chained_row(const float *left, int left_stride, const float *right, int right_stride, float *out, int out_stride,
                             const float *states, i64 slot_floats, const int *runs, const int *lanes, const int *chain, int first,
                             int width) {
    const int row = block_y(), c = block_x() * threads() + thread();
    if (c >= width) return;
    const LaneRun run = run_of(runs, lanes[row]);
    float before = 0.0f;
    if (chain[row] >= 0) before = row_at(right, chain[row], right_stride)[first + c];
    else if (run.position + row - run.first > 0) before = states[slot_floats * run.slot + c];
    float *to = row_at(out, row, out_stride) + c;
    to[0] = row_at(left, row, left_stride)[first + c];
    to[width] = before;
}

// The first accepts[i].rows rows of a held lane count: the last of them is what its slot has. accepts: i32 [n][4], slot, place,
// rows, position of the first row.
DEVICE void join_accept_row(const float *kept, int kept_stride, float *states, i64 slot_floats, const int *accepts, int width) {
    const int c = block_x() * threads() + thread();
    const Words4 one = load128(accepts + 4 * block_y());
    if (c >= width || one.z == 0) return;
    states[slot_floats * (int)one.x + c] = row_at(kept, (int)(one.y + one.z) - 1, kept_stride)[c];
}
