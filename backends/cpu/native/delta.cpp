// A delta net between its projections: causal convolution, gated delta rule, gated norm (DeltaNet of backends/base.py).
//
// Two stages. The first treats every row of the batch by itself: it sees the rows of `mixed` before its own, in the batch or in
// its sequence's slot. The second walks each sequence's rows in order, one value head at a time; heads and sequences are
// independent, so they are the chunks. Columns of a head's matrix M are independent too (column j needs v_j, and of M only
// itself), so a block of columns is taken through all rows of the sequence before the next one: it stays in L1.
//
//     u = e^g M^T k;  d = b (v - u);  M = e^g M + k d^T;  o = M^T q       16 or 32 columns at once, two passes over M
//
// Every row does the same operations in the same order wherever a chunk of the prompt begins or ends: a prompt cut into
// other chunks gives the same bits. That is why there is no chunked form, which would sum by chunk.
//
// A slot, all layers one after the other, so that copying a sequence's state is one copy. A layer:
//     [kernel - 1][channels]                       the last rows of `mixed`, oldest first
//     [value heads][blocks of 16 columns][key_dim][16]      M, from `matrix_at` on; columns beyond value_dim stay zero
//
// A slot may hold more heads than the step has: those of the whole model, where ranks share one memory (`first_key`). Then the
// step's q, k and value heads lie in the slot as they do in the model, in runs, and it touches nothing else of it:
//
//     the step's channels                     q q k k v v v v
//     those of a slot, tiled value heads      . q q . | . k k . | . v v . . v v .
//
// What the first stage leaves for the second, a row: q and k of each key head, v of each value head, each padded to 16; then
// b and e^g of each value head. Rows of lanes whose states are held have a store of their own for it (accept.cpp).
#include <cmath>
#include <cstring>

#include "activation.h"
#include "kernels.h"
#include "simd.h"

namespace hs {
namespace {

constexpr int UNIT_CHANNELS = 512;   // channels that a chunk of the convolution takes at least

HS_INLINE vf load_upto(const float *p, int count) {
    if (count >= GROUP) return load(p);
    alignas(64) float some[GROUP] = {};
    for (int i = 0; i < count; i++) some[i] = p[i];
    return load(some);
}
HS_INLINE void store_upto(float *p, vf x, int count) {
    if (count >= GROUP) {
        store(p, x);
        return;
    }
    alignas(64) float some[GROUP];
    store(some, x);
    for (int i = 0; i < count; i++) p[i] = some[i];
}

int64_t window_channels(const hs_delta &d) {
    return 2 * static_cast<int64_t>(d.state_key_heads) * d.key_dim + static_cast<int64_t>(d.state_value_heads) * d.value_dim;
}

// The heads of a convolution: q of each key head, k of each, v of each value head. Where one begins in a row of `mixed`,
int channel_at(const hs_delta &d, int head) {
    const int keys = 2 * d.key_heads;
    return head < keys ? head * d.key_dim : keys * d.key_dim + (head - keys) * d.value_dim;
}
// which of the states' value heads one of the step's is,
int state_head(const hs_delta &d, int value_head) {
    if (d.tiled) return value_head / d.key_heads * d.state_key_heads + d.first_key + value_head % d.key_heads;
    return d.first_key * (d.value_heads / d.key_heads) + value_head;
}
// and where one begins in a row of the window.
int64_t window_at(const hs_delta &d, int head) {
    if (head < d.key_heads) return static_cast<int64_t>(d.first_key + head) * d.key_dim;
    if (head < 2 * d.key_heads) return static_cast<int64_t>(d.state_key_heads + d.first_key + head - d.key_heads) * d.key_dim;
    return 2 * static_cast<int64_t>(d.state_key_heads) * d.key_dim +
           static_cast<int64_t>(state_head(d, head - 2 * d.key_heads)) * d.value_dim;
}

// Offsets in a row of the first stage's results.
int key_at(const hs_delta &d) { return d.key_heads * padded(d.key_dim); }
int value_at(const hs_delta &d) { return 2 * key_at(d); }
int gates_at(const hs_delta &d) { return value_at(d) + d.value_heads * padded(d.value_dim); }

float *state_of(const hs_delta &d, int slot) { return d.states + d.slot_floats * slot; }
float *state_of(const Run &run, const hs_delta &d, int lane) { return state_of(d, run.batch.states[lane]); }

float *convolved_row(const Run &run, const hs_delta &d, int row) {
    const int place = run.place(row);
    return place < 0 ? d.convolved + d.convolved_stride * row : d.kept + d.convolved_stride * place;
}

int64_t matrix_floats(const hs_delta &d) { return static_cast<int64_t>(d.key_dim) * padded(d.value_dim); }

int heads_of_chunk(const hs_delta &d) {
    const int widest = d.key_dim > d.value_dim ? d.key_dim : d.value_dim;
    return UNIT_CHANNELS > widest ? UNIT_CHANNELS / widest : 1;
}
int conv_parts(const hs_delta &d) {
    const int heads = 2 * d.key_heads + d.value_heads, each = heads_of_chunk(d);
    return (heads + each - 1) / each;
}

// The rows that the convolution of `row` sees, oldest first; null before the beginning of the sequence. Returns how many of them
// are rows of the window: those before the sequence's rows in the batch.
int taps_of(const Run &run, const hs_step &step, int row, const float **taps) {
    const hs_delta &d = *step.delta;
    const int lane = run.batch.row_lanes[row], position = run.batch.positions[row];
    const float *window = state_of(run, d, lane);
    int before = 0;   // rows of this lane before this one in the batch
    while (before < d.kernel - 1 && row - before > 0 && run.batch.row_lanes[row - before - 1] == lane) before++;
    for (int back = 0; back < d.kernel; back++) {
        const float *tap = nullptr;
        if (back <= before) tap = step.src + step.src_stride * (row - back);
        else if (back <= position) tap = window + (d.kernel - 1 - (back - before)) * window_channels(d);
        taps[d.kernel - 1 - back] = tap;
    }
    return d.kernel - 1 - before;
}

// One head of `dim` channels: convolved, silu, to `out`. The first `old` of `rows` are of the window. Returns the sum of squares.
float convolve_head(const hs_delta &d, const float *const *rows, int old, int head, int dim, float *out) {
    const int from = channel_at(d, head);
    const int64_t channels = channel_at(d, 2 * d.key_heads + d.value_heads), inside = window_at(d, head);
    const float *taps[HS_DELTA_KERNEL_MOST];
    for (int j = 0; j < d.kernel; j++) taps[j] = rows[j] ? rows[j] + (j < old ? inside : from) : nullptr;
    vf squares = set1(0.0f);
    for (int c = 0; c < dim; c += GROUP) {
        vf sum = set1(0.0f);
        for (int j = 0; j < d.kernel; j++)
            if (taps[j]) sum = fma(load_upto(d.conv + channels * j + from + c, dim - c), load_upto(taps[j] + c, dim - c), sum);
        const vf y = silu_v(sum);
        squares = fma(y, y, squares);
        store(out + c, y);
    }
    return lane_sum(squares);
}

void scale_row(float *x, int width, float by) {
    for (int c = 0; c < width; c += GROUP) store(x + c, mul(load(x + c), set1(by)));
}

void gates_of_row(const hs_step &step, int row, float *gates) {
    const hs_delta &d = *step.delta;
    const float *beta = step.third + step.third_stride * row, *alpha = d.alpha + d.alpha_stride * row;
    for (int h = 0; h < d.value_heads; h++) {
        const float x = alpha[h] + d.dt_bias[h];
        const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
        gates[h] = 1.0f / (1.0f + std::exp(-beta[h]));
        gates[d.value_heads + h] = std::exp(softplus * d.a[h]);
    }
}

// One head of one sequence, as the recurrence walks it.
struct Head {
    const float *q, *k;   // of the first row; `stride` floats to the next
    float *v;
    const float *gates;   // b; e^g lies `decay_at` behind
    int64_t stride;
    int decay_at;
    float *out;
    int64_t out_stride;
    const int32_t *positions;
    int rows, key_dim, value_dim;
};

// G blocks of 16 columns from column `from` on, through all rows. HELD: M stays as it is, its copy is changed, and what each row
// adds to it takes the place of v.
template <int G, bool HELD> void recur(const Head &head, float *matrix, int from, float *copy) {
    const int64_t block = static_cast<int64_t>(head.key_dim) * GROUP;
    const float *before = matrix;
    if (HELD) matrix = copy;
    for (int t = 0; t < head.rows; t++) {
        const float *q = head.q + head.stride * t, *k = head.k + head.stride * t;
        float *v = head.v + head.stride * t + from;
        const float b = head.gates[head.stride * t];
        const vf decay = set1(head.gates[head.stride * t + head.decay_at]);
        if (head.positions[t] == 0) {
            for (int64_t i = 0; i < block * G; i += GROUP) store(matrix + i, set1(0.0f));
            before = matrix;
        }
        vf sum[G][2], step[G];
        HS_UNROLL
        for (int g = 0; g < G; g++) sum[g][0] = sum[g][1] = set1(0.0f);
        for (int i = 0; i < head.key_dim; i += 2) {
            HS_UNROLL
            for (int odd = 0; odd < 2; odd++) {
                if (i + odd == head.key_dim) break;
                HS_UNROLL
                for (int g = 0; g < G; g++) sum[g][odd] = fma(set1(k[i + odd]), load(before + block * g + GROUP * (i + odd)), sum[g][odd]);
            }
        }
        HS_UNROLL
        for (int g = 0; g < G; g++) {
            step[g] = mul(set1(b), sub(load(v + GROUP * g), mul(decay, add(sum[g][0], sum[g][1]))));
            sum[g][0] = sum[g][1] = set1(0.0f);
            if (HELD) store(v + GROUP * g, step[g]);
        }
        for (int i = 0; i < head.key_dim; i += 2) {
            HS_UNROLL
            for (int odd = 0; odd < 2; odd++) {
                if (i + odd == head.key_dim) break;
                const vf ki = set1(k[i + odd]), qi = set1(q[i + odd]);
                HS_UNROLL
                for (int g = 0; g < G; g++) {
                    const int64_t at = block * g + GROUP * (i + odd);
                    const vf m = fma(ki, step[g], mul(decay, load(before + at)));
                    store(matrix + at, m);
                    sum[g][odd] = fma(qi, m, sum[g][odd]);
                }
            }
        }
        float *out = head.out + head.out_stride * t + from;
        HS_UNROLL
        for (int g = 0; g < G; g++) store_upto(out + GROUP * g, add(sum[g][0], sum[g][1]), head.value_dim - from - GROUP * g);
        if (HELD) before = matrix;
    }
}

// What `recur` did to G blocks of M in the first `head.rows` rows of a held lane, all of them in one pass.
template <int G> void replay(const Head &head, float *matrix, int from, bool anew) {
    const int64_t block = static_cast<int64_t>(head.key_dim) * GROUP;
    for (int i = 0; i < head.key_dim; i++) {
        float *at = matrix + GROUP * i;
        vf m[G];
        HS_UNROLL
        for (int g = 0; g < G; g++) m[g] = anew ? set1(0.0f) : load(at + block * g);
        for (int t = 0; t < head.rows; t++) {
            const float *added = head.v + head.stride * t + from;
            const vf ki = set1(head.k[head.stride * t + i]), decay = set1(head.gates[head.stride * t + head.decay_at]);
            HS_UNROLL
            for (int g = 0; g < G; g++) m[g] = fma(ki, load(added + GROUP * g), mul(decay, m[g]));
        }
        HS_UNROLL
        for (int g = 0; g < G; g++) store(at + block * g, m[g]);
    }
}

// out = rms(out) * norm * silu(z), one head of one row.
void gated_norm(const hs_delta &d, const float *z, float *out) {
    vf squares = set1(0.0f);
    for (int c = 0; c < d.value_dim; c += GROUP) {
        const vf x = load_upto(out + c, d.value_dim - c);
        squares = fma(x, x, squares);
    }
    const vf scale = set1(1.0f / std::sqrt(lane_sum(squares) / static_cast<float>(d.value_dim) + d.eps));
    for (int c = 0; c < d.value_dim; c += GROUP) {
        const int count = d.value_dim - c;
        const vf normed = mul(mul(load_upto(out + c, count), scale), load_upto(d.norm + c, count));
        store_upto(out + c, mul(normed, silu_v(load_upto(z + c, count))), count);
    }
}

// The window of a slot: the last kernel - 1 rows of `mixed`, `rows` new ones behind what is left of the old ones. `past` rows
// came before.
void keep_window(const hs_delta &d, float *window, const float *mixed, int64_t stride, int rows, int past) {
    const int64_t channels = window_channels(d);
    const int heads = 2 * d.key_heads + d.value_heads;
    const int keep = d.kernel - 1;
    for (int i = 0; i < keep; i++) {
        const int at = rows - keep + i;   // of the new rows, or before them where negative
        const float *from = at >= 0 ? mixed + stride * at : at + past >= 0 ? window + channels * (i + rows) : nullptr;
        for (int h = 0; h < heads; h++) {
            const int64_t inside = window_at(d, h);
            const int dim = h < 2 * d.key_heads ? d.key_dim : d.value_dim;
            float *to = window + channels * i + inside;
            const float *own = from ? from + (at >= 0 ? channel_at(d, h) : inside) : nullptr;
            for (int c = 0; c < dim; c++) to[c] = own ? own[c] : 0.0f;
        }
    }
}

// What is to stay of `mixed`: in the window, or of a held lane all rows in their places.
void keep_mixed(const Run &run, const hs_step &step, int first, int rows) {
    const hs_delta &d = *step.delta;
    const float *mixed = step.src + step.src_stride * first;
    const int place = run.place(first), lane = run.batch.row_lanes[first];
    if (place < 0) {
        keep_window(d, state_of(run, d, lane), mixed, step.src_stride, rows, run.batch.positions[first]);
        return;
    }
    const auto bytes = sizeof(float) * static_cast<size_t>(channel_at(d, 2 * d.key_heads + d.value_heads));
    for (int t = 0; t < rows; t++) std::memcpy(d.kept_mixed + d.mixed_stride * (place + t), mixed + step.src_stride * t, bytes);
}

// Value head h of a sequence whose first row's results of the first stage are `row`.
Head head_of(const hs_delta &d, float *row, int h, int rows) {
    const int key_head = d.tiled ? h % d.key_heads : h / (d.value_heads / d.key_heads);
    const float *q = row + key_head * padded(d.key_dim);
    Head head{};
    head.q = q;
    head.k = q + key_at(d);
    head.v = row + value_at(d) + h * padded(d.value_dim);
    head.gates = row + gates_at(d) + h;
    head.stride = d.convolved_stride;
    head.decay_at = d.value_heads;
    head.rows = rows;
    head.key_dim = d.key_dim;
    head.value_dim = d.value_dim;
    return head;
}

// Two blocks of columns at a time, and the last one alone where their number is odd.
template <bool HELD> void recur_all(const Head &head, float *matrix, float *copy) {
    const int64_t block = static_cast<int64_t>(head.key_dim) * GROUP;
    int from = 0;
    for (; from + GROUP < head.value_dim; from += 2 * GROUP, matrix += 2 * block) recur<2, HELD>(head, matrix, from, copy);
    if (from < head.value_dim) recur<1, HELD>(head, matrix, from, copy);
}
void replay_all(const Head &head, float *matrix, bool anew) {
    const int64_t block = static_cast<int64_t>(head.key_dim) * GROUP;
    int from = 0;
    for (; from + GROUP < head.value_dim; from += 2 * GROUP, matrix += 2 * block) replay<2>(head, matrix, from, anew);
    if (from < head.value_dim) replay<1>(head, matrix, from, anew);
}

}  // namespace

void cut_lane_runs(Run &run) {
    int32_t *runs = run.program.lane_runs;
    run.lane_runs = 0;
    for (int row = 0; row < run.batch.rows; row++) {
        const bool begins = row == 0 || run.batch.row_lanes[row] != run.batch.row_lanes[row - 1];
        if (begins) runs[2 * run.lane_runs] = row, runs[2 * run.lane_runs + 1] = 0, run.lane_runs++;
        runs[2 * run.lane_runs - 1]++;
    }
    if (!run.batch.hold || !run.program.places) return;
    for (int i = 0; i < run.lane_runs; i++) {
        const int first = runs[2 * i], place = run.batch.hold[run.batch.row_lanes[first]];
        for (int t = 0; t < runs[2 * i + 1]; t++) run.program.places[first + t] = place < 0 ? -1 : place + t;
    }
    run.places = run.program.places;
}

int delta_conv_chunks(const Run &run, const hs_step &step) { return run.batch.rows * conv_parts(*step.delta); }

void delta_conv_chunk(const Run &run, const hs_step &step, int chunk) {
    const hs_delta &d = *step.delta;
    const int parts = conv_parts(d), row = chunk / parts, part = chunk % parts, each = heads_of_chunk(d);
    float *out = convolved_row(run, d, row);
    const float *taps[HS_DELTA_KERNEL_MOST];
    const int old = taps_of(run, step, row, taps);
    if (part == 0) gates_of_row(step, row, out + gates_at(d));
    const int heads = 2 * d.key_heads + d.value_heads, last = (part + 1) * each < heads ? (part + 1) * each : heads;
    for (int h = part * each; h < last; h++) {
        if (h >= 2 * d.key_heads) {
            const int value = h - 2 * d.key_heads;
            convolve_head(d, taps, old, h, d.value_dim, out + value_at(d) + value * padded(d.value_dim));
            continue;
        }
        float *to = out + h * padded(d.key_dim);
        const float squares = convolve_head(d, taps, old, h, d.key_dim, to);
        float scale = 1.0f / std::sqrt(squares + d.eps);
        if (h < d.key_heads) scale /= std::sqrt(static_cast<float>(d.key_dim));
        scale_row(to, d.key_dim, scale);
    }
}

int delta_rule_chunks(const Run &run, const hs_step &step) { return run.lane_runs * (step.delta->value_heads + 1); }

void delta_rule_chunk(const Run &run, const hs_step &step, int chunk) {
    const hs_delta &d = *step.delta;
    const int lane_run = chunk / (d.value_heads + 1), h = chunk % (d.value_heads + 1);
    const int first = run.program.lane_runs[2 * lane_run], rows = run.program.lane_runs[2 * lane_run + 1];
    if (h == d.value_heads) {
        keep_mixed(run, step, first, rows);
        return;
    }
    float *out = step.dst + step.dst_stride * first + h * d.value_dim;
    Head head = head_of(d, convolved_row(run, d, first), h, rows);
    head.out = out;
    head.out_stride = step.dst_stride;
    head.positions = run.batch.positions + first;
    float *matrix = state_of(run, d, run.batch.row_lanes[first]) + d.matrix_at + matrix_floats(d) * state_head(d, h);
    if (run.place(first) < 0) recur_all<false>(head, matrix, nullptr);
    else recur_all<true>(head, matrix, d.copies + d.copy_floats * Team::current());
    for (int t = 0; t < rows; t++) {
        const int r = first + t;
        gated_norm(d, step.add + step.add_stride * r + h * d.value_dim, out + step.dst_stride * t);
        if (!step.activation) continue;
        ActBlock *blocks_of_row = reinterpret_cast<ActBlock *>(step.activation + activation_bytes(step.width) * static_cast<size_t>(r));
        quantise_blocks(out + step.dst_stride * t - h * d.value_dim, blocks_of_row, h * d.value_dim / 32, (h + 1) * d.value_dim / 32);
    }
}

int delta_accept_parts(const hs_delta &d) { return d.value_heads + 1; }

void delta_accept(const hs_delta &d, const hs_kept &kept, int part) {
    float *state = state_of(d, kept.slot);
    if (part == d.value_heads) {
        keep_window(d, state, d.kept_mixed + d.mixed_stride * kept.place, d.mixed_stride, kept.rows, kept.position);
        return;
    }
    const Head head = head_of(d, d.kept + d.convolved_stride * kept.place, part, kept.rows);
    replay_all(head, state + d.matrix_at + matrix_floats(d) * state_head(d, part), kept.position == 0);
}

}  // namespace hs
