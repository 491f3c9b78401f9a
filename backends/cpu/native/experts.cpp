// Experts: a row runs a few of many gated feed-forward networks, and adds up what they give.
//
// Batch rows that chose the same expert pass over its weights together, so the weights of each chosen expert come from
// memory once a plan, however many rows chose it. A row with one of its experts is a *pair*; pairs are sorted by expert,
// within one by row:
//
//     route     each row: its experts and their weights from its logits                         chosen, weights [rows, used]
//     (sort)    where each expert's pairs begin, the row of each pair, the place of each choice  by who opens the next stage
//     up        each expert: gate and up of its pairs, a few groups of 16 at a time, activated where they are: [pairs, inner]
//     down      each expert: [pairs, width]
//     combine   each row: the weighted sum of its pairs, in the order of its choices
//
// Where some experts lie on other ranks, a choice of one of those is no pair, and has no place (-1).
//
// So a row's bits depend on its own logits and inputs alone: the tiles of a linear layer keep that rule (linear.cpp), and
// the sum's order is the row's own.
#include <cmath>

#include "activation.h"
#include "kernels.h"
#include "simd.h"

namespace hs {
namespace {

constexpr float LEAST_SUM = 6.103515625e-5f;   // a sum of chosen weights below this does not divide
constexpr int COMBINE_RUN = 512;               // columns of one item of the last stage, a multiple of the activation block

int pairs_of(const Run &run, const hs_step &step) { return run.rows(step) * step.experts->used; }

// What a choice is made by: probabilities, or the logits themselves where only the chosen ones are normalised.
void scores_of(const hs_experts &e, const float *logits, float *scores) {
    if (e.func == HS_ROUTE_CHOSEN) {
        for (int i = 0; i < e.count; i++) scores[i] = logits[i];
        return;
    }
    if (e.func == HS_ROUTE_SIGMOID) {
        for (int i = 0; i < e.count; i++) scores[i] = 1.0f / (1.0f + std::exp(-logits[i]));
        return;
    }
    float largest = logits[0], sum = 0.0f;
    for (int i = 1; i < e.count; i++) largest = logits[i] > largest ? logits[i] : largest;
    for (int i = 0; i < e.count; i++) sum += scores[i] = std::exp(logits[i] - largest);
    for (int i = 0; i < e.count; i++) scores[i] /= sum;
}

// The `used` experts of largest score + selection, largest first, equal ones by index. `ranked` holds what they were chosen by.
void choose(const hs_experts &e, const float *scores, int32_t *chosen, float *ranked) {
    int filled = 0;
    for (int i = 0; i < e.count; i++) {
        const float value = e.selection ? scores[i] + e.selection[i] : scores[i];
        if (filled == e.used && !(value > ranked[filled - 1])) continue;
        int at = filled < e.used ? filled++ : filled - 1;
        for (; at > 0 && value > ranked[at - 1]; at--) ranked[at] = ranked[at - 1], chosen[at] = chosen[at - 1];
        ranked[at] = value;
        chosen[at] = i;
    }
}

void weigh(const hs_experts &e, const float *scores, const int32_t *chosen, float *weights) {
    if (e.func == HS_ROUTE_CHOSEN) {
        float largest = scores[chosen[0]];
        for (int n = 1; n < e.used; n++) largest = scores[chosen[n]] > largest ? scores[chosen[n]] : largest;
        float sum = 0.0f;
        for (int n = 0; n < e.used; n++) sum += weights[n] = std::exp(scores[chosen[n]] - largest);
        for (int n = 0; n < e.used; n++) weights[n] /= sum;
    } else {
        for (int n = 0; n < e.used; n++) weights[n] = scores[chosen[n]];
    }
    float by = e.scale;
    if (e.normalise) {
        float sum = 0.0f;
        for (int n = 0; n < e.used; n++) sum += weights[n];
        by /= sum > LEAST_SUM ? sum : LEAST_SUM;
    }
    for (int n = 0; n < e.used; n++) weights[n] *= by;
    if (!e.gains) return;
    for (int n = 0; n < e.used; n++) weights[n] *= e.gains[chosen[n]];
}

// Which of the stacks' matrices a choice means, or -1 where they have none of that expert.
int matrix_of(const hs_experts &e, int chosen) { return chosen >= e.first && chosen - e.first < e.held ? chosen - e.first : -1; }

// Counts of pairs become where each expert's begin; the experts that have any are listed. Experts count from the first here.
int sort_pairs(const hs_experts &e, int rows) {
    for (int i = 0; i <= e.held; i++) e.starts[i] = 0;
    for (int p = 0; p < rows * e.used; p++) {
        const int expert = matrix_of(e, e.chosen[p]);
        if (expert >= 0) e.starts[expert + 1]++;
    }
    int active = 0;
    for (int i = 0; i < e.held; i++) {
        if (e.starts[i + 1] > 0) e.active[active++] = i;
        e.starts[i + 1] += e.starts[i];
    }
    // Rows ascend, so the pairs of an expert are in order of row. `starts` moves on as places are given, and back after.
    for (int p = 0; p < rows * e.used; p++) {
        const int expert = matrix_of(e, e.chosen[p]);
        const int place = expert >= 0 ? e.starts[expert]++ : -1;
        e.places[p] = place;
        if (place >= 0) e.pair_rows[place] = p / e.used;
    }
    for (int i = e.held; i > 0; i--) e.starts[i] = e.starts[i - 1];
    e.starts[0] = 0;
    return active;
}

// Groups of one chunk: an even number, so that a chunk of activations is whole blocks of 32.
int up_groups(const hs_experts &e) {
    const size_t bytes = group_bytes(e.gate.matrix.type, e.gate.matrix.cols) + group_bytes(e.up.matrix.type, e.up.matrix.cols);
    return (groups_in_cache(bytes) + 1) / 2 * 2;
}
int down_groups(const hs_experts &e) { return groups_in_cache(group_bytes(e.down.matrix.type, e.down.matrix.cols)); }

struct Slice {
    int expert, first_pair, pairs, first, last;   // groups [first, last)
};

int slices(const hs_stack &stack, int length) { return (groups_of(stack.matrix.rows) + length - 1) / length; }

Slice slice_of(const hs_experts &e, const hs_stack &stack, int length, int chunk) {
    const int each = slices(stack, length), groups = groups_of(stack.matrix.rows);
    const int expert = e.active[chunk / each], first = chunk % each * length;
    return {expert, e.starts[expert], e.starts[expert + 1] - e.starts[expert], first, first + length < groups ? first + length : groups};
}

void run_slice(const hs_stack &stack, const Slice &slice, const Rows &rows, float *dst, int64_t stride) {
    hs_matrix matrix = stack.matrix;
    matrix.data += stack.expert_bytes * static_cast<int64_t>(slice.expert);
    const float *bias = stack.bias ? stack.bias + static_cast<int64_t>(padded(matrix.rows)) * slice.expert : nullptr;
    linear_groups(matrix, bias, dst + stride * slice.first_pair, stride, rows, slice.pairs, slice.first, slice.last);
}

}  // namespace

int route_chunks(const Run &run, const hs_step &step) { return run.rows(step); }

void route_chunk(const Run &, const hs_step &step, int row) {
    const hs_experts &e = *step.experts;
    float *scores = e.scores + static_cast<int64_t>(e.count) * row;
    int32_t *chosen = e.chosen + static_cast<int64_t>(e.used) * row;
    float *weights = e.weights + static_cast<int64_t>(e.used) * row;
    scores_of(e, step.add + step.add_stride * row, scores);
    choose(e, scores, chosen, weights);
    weigh(e, scores, chosen, weights);
}

int expert_up_chunks(const Run &run, const hs_step &step) {
    const hs_experts &e = *step.experts;
    if (pairs_of(run, step) == 0) return 0;
    *e.active_count = sort_pairs(e, run.rows(step));
    return *e.active_count * slices(e.gate, up_groups(e));
}

void expert_up_chunk(const Run &, const hs_step &step, int chunk) {
    const hs_experts &e = *step.experts;
    const Slice slice = slice_of(e, e.gate, up_groups(e), chunk);
    const Rows rows{step.activation, activation_bytes(step.width), step.src, step.src_stride, e.pair_rows + slice.first_pair};
    run_slice(e.gate, slice, rows, e.gate_out, e.inner_stride);
    run_slice(e.up, slice, rows, e.up_out, e.inner_stride);
    for (int p = slice.first_pair; p < slice.first_pair + slice.pairs; p++) {
        float *gate = e.gate_out + e.inner_stride * p;
        const float *up = e.up_out + e.inner_stride * p;
        for (int c = GROUP * slice.first; c < GROUP * slice.last; c += GROUP) store(gate + c, gated_v(step.gate, load(gate + c), load(up + c)));
        if (!e.pair_activation) continue;
        ActBlock *blocks = reinterpret_cast<ActBlock *>(e.pair_activation + activation_bytes(e.down.matrix.cols) * static_cast<size_t>(p));
        quantise_blocks(gate, blocks, GROUP * slice.first / 32, GROUP * slice.last / 32);
    }
}

int expert_down_chunks(const Run &run, const hs_step &step) {
    const hs_experts &e = *step.experts;
    return pairs_of(run, step) == 0 ? 0 : *e.active_count * slices(e.down, down_groups(e));
}

void expert_down_chunk(const Run &, const hs_step &step, int chunk) {
    const hs_experts &e = *step.experts;
    const Slice slice = slice_of(e, e.down, down_groups(e), chunk);
    const size_t bytes = activation_bytes(e.down.matrix.cols);
    const Rows rows{e.pair_activation ? e.pair_activation + bytes * static_cast<size_t>(slice.first_pair) : nullptr, bytes,
                    e.gate_out + e.inner_stride * slice.first_pair, e.inner_stride, nullptr};
    run_slice(e.down, slice, rows, e.down_out, e.out_stride);
}

int combine_chunks(const Run &run, const hs_step &step) {
    return run.rows(step) * ((step.experts->down.matrix.rows + COMBINE_RUN - 1) / COMBINE_RUN);
}

void combine_chunk(const Run &, const hs_step &step, int chunk) {
    const hs_experts &e = *step.experts;
    const int width = e.down.matrix.rows, runs = (width + COMBINE_RUN - 1) / COMBINE_RUN, row = chunk / runs;
    const int first = chunk % runs * COMBINE_RUN, last = first + COMBINE_RUN < width ? first + COMBINE_RUN : width;
    const int32_t *places = e.places + static_cast<int64_t>(e.used) * row;
    const float *weights = e.weights + static_cast<int64_t>(e.used) * row;
    float *out = step.dst + step.dst_stride * row;
    for (int c = first; c < last; c += GROUP) {
        vf sum = set1(0.0f);
        for (int n = 0; n < e.used; n++)
            if (places[n] >= 0) sum = fma(set1(weights[n]), load(e.down_out + e.out_stride * places[n] + c), sum);
        store(out + c, sum);
    }
}

}  // namespace hs
