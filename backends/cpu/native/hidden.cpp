// A row beside the hidden state of the row before it: what a drafting layer starts from.
//
//     dst [r] = src[r] columns first .. | add[r - 1] columns first ..        for a lane's first row: its slot's
//
// A slot has one row of the layer, or the step's columns of it where ranks share states. All rows are joined before anything is
// written to a slot: a lane's first row reads what its last one replaces.
#include <cstring>

#include "kernels.h"

namespace hs {
namespace {

float *state_of(const hs_join &join, int slot) { return join.states + join.slot_floats * slot; }

// `add` of the row before, from the step's first column on; null: there is none.
const float *row_before(const Run &run, const hs_step &step, int row) {
    const int lane = run.batch.row_lanes[row];
    if (step.join->chained) {
        const int chain = run.batch.chain[row];
        if (chain >= 0) return step.add + step.add_stride * chain + step.first;
    } else if (row > 0 && run.batch.row_lanes[row - 1] == lane) {
        return step.add + step.add_stride * (row - 1) + step.first;
    }
    return run.batch.positions[row] > 0 ? state_of(*step.join, run.batch.states[lane]) : nullptr;
}

size_t bytes_of(const hs_step &step) { return sizeof(float) * static_cast<size_t>(step.width); }

}  // namespace

int join_chunks(const Run &run, const hs_step &) { return run.batch.rows; }

void join_chunk(const Run &run, const hs_step &step, int row) {
    float *out = step.dst + step.dst_stride * row;
    std::memcpy(out, step.src + step.src_stride * row + step.first, bytes_of(step));
    if (const float *before = row_before(run, step, row)) std::memcpy(out + step.width, before, bytes_of(step));
    else std::memset(out + step.width, 0, bytes_of(step));
}

int join_keep_chunks(const Run &run, const hs_step &step) { return step.join->chained ? 0 : run.lane_runs; }

void join_keep_chunk(const Run &run, const hs_step &step, int chunk) {
    const hs_join &join = *step.join;
    const int first = run.program.lane_runs[2 * chunk], rows = run.program.lane_runs[2 * chunk + 1], place = run.place(first);
    const float *right = step.add + step.add_stride * first + step.first;
    if (place < 0) {
        std::memcpy(state_of(join, run.batch.states[run.batch.row_lanes[first]]), right + step.add_stride * (rows - 1), bytes_of(step));
        return;
    }
    for (int t = 0; t < rows; t++) std::memcpy(join.kept + join.kept_stride * (place + t), right + step.add_stride * t, bytes_of(step));
}

void join_accept(const hs_step &step, const hs_kept &kept) {
    const hs_join &join = *step.join;
    std::memcpy(state_of(join, kept.slot), join.kept + join.kept_stride * (kept.place + kept.rows - 1), bytes_of(step));
}

}  // namespace hs
