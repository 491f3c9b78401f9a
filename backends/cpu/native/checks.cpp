// What is looked at before a program runs, and before states of held lanes are written.
#include "kernels.h"

namespace hs {
namespace {

bool within(const int32_t *values, int count, int limit, int lowest = 0) {
    for (int i = 0; i < count; i++)
        if (values[i] < lowest || values[i] >= limit) return false;
    return true;
}

// Rows of a lane must be one run in order of position, without a gap, and no two lanes may share a state.
bool states_are_sound(const hs_program &program, const hs_batch &batch) {
    if (!within(batch.row_lanes, batch.rows, batch.lanes)) return false;
    for (int row = 0; row < batch.rows; row++) {
        const int lane = batch.row_lanes[row];
        if (row > 0 && lane == batch.row_lanes[row - 1]) {
            if (batch.positions[row] != batch.positions[row - 1] + 1) return false;
            continue;
        }
        const int slot = batch.states[lane];
        if (slot < 0 || slot >= program.state_slots) return false;
        for (int before = 0; before < row; before++)
            if (batch.states[batch.row_lanes[before]] == slot) return false;
    }
    return true;
}

// Slots of the rows and pages that they will read in one KV group; a page may be -1 where all its readers pass it over.
bool group_is_sound(const hs_program &program, const hs_batch &batch, int group) {
    const hs_kv_group &kv = program.groups[group];
    if (!within(batch.slots + static_cast<int64_t>(group) * batch.rows, batch.rows, kv.slots)) return false;
    for (int row = 0, first = 0; row < batch.rows; row++) {
        // The last row of a run of one lane has its highest position, its first one looks back farthest: one look at the
        // table serves them all.
        if (row + 1 < batch.rows && batch.row_lanes[row + 1] == batch.row_lanes[row] && batch.positions[row + 1] > batch.positions[row]) continue;
        const int seen = kv.window > 0 ? batch.positions[first] - kv.window + 1 : 0;
        const int page = seen > 0 ? seen / GROUP : 0;
        const int64_t lane = static_cast<int64_t>(group) * batch.lanes + batch.row_lanes[row];
        const int32_t *pages = batch.tables + lane * batch.lane_pages + page;
        if (!within(pages, batch.positions[row] / GROUP + 1 - page, kv.slots / GROUP, kv.partial ? -1 : 0)) return false;
        first = row + 1;
    }
    return true;
}

// Behind the last row of the lane that row `first` begins.
int end_of_lane(const hs_batch &batch, int first) {
    int end = first + 1;
    while (end < batch.rows && batch.row_lanes[end] == batch.row_lanes[first]) end++;
    return end;
}

// Rows of held lanes have places of their own, and all of them have one.
bool holds_are_sound(const hs_program &program, const hs_batch &batch) {
    for (int first = 0, end = 0; first < batch.rows; first = end) {
        end = end_of_lane(batch, first);
        const int place = batch.hold[batch.row_lanes[first]], rows = end - first;
        if (place < -1 || place > program.held_rows) return false;
        if (place < 0) continue;
        if (rows > program.held_rows - place) return false;
        for (int other = 0, rest = 0; other < first; other = rest) {
            rest = end_of_lane(batch, other);
            const int there = batch.hold[batch.row_lanes[other]];
            if (there >= 0 && there < place + rows && place < there + (rest - other)) return false;
        }
    }
    return true;
}

}  // namespace

bool batch_is_sound(const hs_program &program, const hs_batch &batch) {
    if (batch.rows < 1 || batch.rows > program.max_rows || batch.logit_row_count < 0 || batch.logit_row_count > program.max_logit_rows)
        return false;
    if (program.vocab_rows > 0 && !within(batch.tokens, batch.rows, program.vocab_rows)) return false;
    if (!within(batch.logit_rows, batch.logit_row_count, batch.rows)) return false;
    if (program.state_slots > 0 && !(within(batch.positions, batch.rows, INT32_MAX) && states_are_sound(program, batch))) return false;
    if (program.state_slots > 0 && batch.hold && !holds_are_sound(program, batch)) return false;
    if (program.chained && !(batch.chain && batch.chain_rows <= program.max_rows && within(batch.chain, batch.rows, batch.chain_rows, -1)))
        return false;
    if (program.group_count == 0) return within(batch.positions, batch.rows, INT32_MAX);
    const int capacity = batch.lane_pages > INT32_MAX / GROUP ? INT32_MAX : batch.lane_pages * GROUP;
    if (!within(batch.positions, batch.rows, capacity) || !within(batch.row_lanes, batch.rows, batch.lanes)) return false;
    for (int group = 0; group < program.group_count; group++)
        if (!group_is_sound(program, batch, group)) return false;
    return true;
}

bool kept_is_sound(const hs_program &program, const hs_kept *kept, int count) {
    for (int i = 0; i < count; i++) {
        const hs_kept &lane = kept[i];
        if (lane.slot < 0 || lane.slot >= program.state_slots || lane.position < 0) return false;
        if (lane.place < 0 || lane.place > program.held_rows || lane.rows < 0 || lane.rows > program.held_rows - lane.place) return false;
        for (int before = 0; before < i; before++)
            if (kept[before].slot == lane.slot) return false;
    }
    return true;
}

}  // namespace hs
