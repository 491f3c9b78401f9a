// A delta net between its projections (DeltaNet of backends/ops.py), row by row; delta_chunks.h has the form for long prompts.
//
//     delta_conv        each row and head by itself: convolution, silu, q and k to unit length, the three gates    -> convolved
//     delta_recurrent   each lane, value head and 32 columns of M: all rows in order                               -> out, M
//     delta_finish      each row and head: out = rms(out) norm silu(z), quantised too where asked; the windows
//     delta_accept      of a held lane, the rows that count: M and the window
//
// Three launches a layer at decode. The convolution is not part of the second: its blocks would each do the convolution of
// their head again, eight times of it, and a window cannot be moved on before the last of them has read it. The norm is not
// either, since it needs all columns of a head and the second cuts them; but there must be a launch behind the second anyway,
// to quantise what the next matrix reads, so the norm is that launch, and moves the windows on.
//
//     u = M^T k;  d = b (v - e^g u);  M = e^g M + k d^T;  o = M^T q
//
// A slot's layer, as on the CPU (backends/cpu/delta.py): [kernel - 1][channels] floats, the last rows of `mixed`, oldest first,
// padded to 16; then [value heads][blocks of 16 columns][key_dim][16] floats, M; columns beyond value_dim stay zero.
//
// delta_recurrent. A group of 32 lanes has one block of 16 columns whole, in registers: lane l the columns 4 (l % 4) .. + 3 of
// the rows 32 i + 4 (l / 4) .. + 3, so 64 registers at key_dim 128. Above, a group has 8 columns, and a lane 64 registers again
// (three symbols, by the largest key_dim). Every load is 16 bytes, the group's loads are one run of memory (two at 8 columns, in
// pieces of 32), k and q of a row are 16 bytes a lane. Sums over the rows of M are three or four exchanges between lanes. Groups
// of a block never meet: no barrier, no block memory. Block: two groups (one wave of 64 where waves are that wide), so that one
// lane at 32 heads of 128 is 128 blocks, some for each multiprocessor; registers allow 7 blocks of them at 128 (14 warps).
//
// Roofline: memory. At one row M is read once and written once and nothing else counts: 2 x 64 KiB a head of 128 x 128, all
// useful, against 2 KB of rows. All loads of a group are issued before the first sum: 8 KiB in flight a group, 2 MiB at 32
// heads, more than any card needs. At 960 GB/s a layer of 32 heads takes 4.4 us. Up to some 30 rows (drafts, the tail of a
// prompt) M stays where it is, and a row more costs its 330 instructions a warp, not the memory's time.
//
// Held lanes. Nothing of the slot is written. The rows' convolved values lie in places that stay (`kept`), `mixed` too, and
// over v the kernel writes d. So delta_accept plays the rows that count again without any sum over M: element by element
// M = fma(k, d, e^g M), the very operation that delta_recurrent does to it, so the bits are those of a run of these rows alone.
//
// A row of `convolved` or `kept`, in floats (pad: to a multiple of 16, zeros behind a head):
//     q [key_heads][pad key_dim] | k the same | v [value_heads][pad value_dim] | b [value_heads] | e^g | g | pad
#pragma once

#include "quantised.h"
#include "rows.h"

struct DeltaShape {
    int key_heads, value_heads, key_dim, value_dim;
    int tiled;   // value head h goes with key head h % key_heads, else with h // (value_heads // key_heads)
};

DEVICE int pad16(int n) { return (n + 15) / 16 * 16; }
DEVICE int delta_keys_at(const DeltaShape &d) { return d.key_heads * pad16(d.key_dim); }
DEVICE int delta_values_at(const DeltaShape &d) { return 2 * delta_keys_at(d); }
DEVICE int delta_gates_at(const DeltaShape &d) { return delta_values_at(d) + d.value_heads * pad16(d.value_dim); }
DEVICE int delta_channels(const DeltaShape &d) { return 2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim; }
DEVICE int delta_key_head(const DeltaShape &d, int head) {
    return d.tiled ? head % d.key_heads : head / (d.value_heads / d.key_heads);
}
DEVICE i64 delta_matrix_floats(const DeltaShape &d) { return (i64)d.key_dim * pad16(d.value_dim); }

// The convolved values of row t of a lane's.
DEVICE float *delta_row(float *convolved, float *kept, int stride, const LaneRun &run, int t) {
    return run.place < 0 ? row_at(convolved, run.first + t, stride) : row_at(kept, run.place + t, stride);
}

// log(1 + exp(x)), near 0 as exact as elsewhere: the rounding of 1 + e is divided out.
DEVICE float softplus(float x) {
    if (x > 20.0f) return x;
    const float e = exp_(x), u = 1.0f + e;
    return u == 1.0f ? e : log_(u) * (e / (u - 1.0f));
}

constexpr int DELTA_HEAD_MOST = 256;   // channels of a head

struct DeltaConv {
    const float *mixed, *beta, *alpha, *conv, *dt_bias, *a, *states;
    int mixed_stride, beta_stride, alpha_stride, kernel;
    i64 slot_floats;
    float eps;
};

// A row of a lane: `before` rows of it lie before this one in the batch, `position` in its sequence.
struct DeltaPlace { int row, before, position; };

// `mixed` of a channel so many rows back: of the batch, before the lane's rows of its window, before its sequence zero.
DEVICE float delta_tap(const DeltaConv &c, const float *window, int channels, const DeltaPlace &at, int back, int channel) {
    if (back > at.position) return 0.0f;
    if (back <= at.before) return row_at(c.mixed, at.row - back, c.mixed_stride)[channel];
    return window[(i64)(c.kernel - 1 - (back - at.before)) * channels + channel];
}

// One channel of one row. Kernels of models are 4 rows long: then the weights are one load, and all loads are in flight at once.
DEVICE float delta_convolve(const DeltaConv &c, const float *window, int channels, const DeltaPlace &at, int channel) {
    float sum = 0.0f;
    if (c.kernel == 4) {
        const Floats4 weight = load4(c.conv + 4 * (i64)channel);
        UNROLL for (int back = 3; back >= 0; back--)
            sum = fma_(weight.v[3 - back], delta_tap(c, window, channels, at, back, channel), sum);
    } else {
        for (int back = c.kernel - 1; back >= 0; back--)
            sum = fma_(c.conv[(i64)channel * c.kernel + c.kernel - 1 - back],
                       delta_tap(c, window, channels, at, back, channel), sum);
    }
    return silu(sum);
}

// Block: 128 threads, a head for each 32 of them; grid (ceil(heads / 4), ceil(rows / each)), `each` rows one after the other
// (1 at decode; 8 in a prompt, where a row's taps are then in the first cache). Lanes take neighbouring channels.
DEVICE void delta_conv_block(const DeltaConv &c, const DeltaShape &d, float *convolved, float *kept, int stride, const int *runs,
                             const int *lanes, int rows, int each) {
    const int heads = 2 * d.key_heads + d.value_heads, channels = delta_channels(d);
    const int wanted = block_x() * 4 + thread() / 32, l = thread() % 32;
    const bool there = wanted < heads;
    const int head = there ? wanted : 0, keys = 2 * d.key_heads, value = head - keys;
    const int dim = head < keys ? d.key_dim : d.value_dim;
    const int from = head < keys ? head * d.key_dim : keys * d.key_dim + value * d.value_dim;
    const int to = head < keys ? head * pad16(d.key_dim) : delta_values_at(d) + value * pad16(d.value_dim);
    const int end = (block_y() + 1) * each, last = end < rows ? end : rows;
    for (int row = block_y() * each; row < last; row++) {
        const LaneRun run = run_of(runs, lanes[row]);
        const int t = row - run.first;
        const float *window = c.states + c.slot_floats * run.slot;
        float y[DELTA_HEAD_MOST / 32], squares = 0.0f;
        UNROLL for (int i = 0; i < DELTA_HEAD_MOST / 32; i++) {
            const int at = l + 32 * i;
            y[i] = at < dim ? delta_convolve(c, window, channels, {row, t, run.position + t}, from + at) : 0.0f;
            squares = fma_(y[i], y[i], squares);
        }
        squares = group_sum<32>(squares);
        float scale = 1.0f;
        if (head < keys) scale = 1.0f / sqrt_(squares + c.eps);
        if (head < d.key_heads) scale /= sqrt_((float)d.key_dim);
        if (!there) continue;
        float *out = delta_row(convolved, kept, stride, run, t);
        UNROLL for (int i = 0; i < DELTA_HEAD_MOST / 32; i++)
            if (l + 32 * i < pad16(dim)) out[to + l + 32 * i] = y[i] * scale;
        if (value < 0 || l != 0) continue;
        float *gates = out + delta_gates_at(d) + value;
        const float g = softplus(row_at(c.alpha, row, c.alpha_stride)[value] + c.dt_bias[value]) * c.a[value];
        gates[0] = sigmoid(row_at(c.beta, row, c.beta_stride)[value]);
        gates[d.value_heads] = exp_(g);
        gates[2 * d.value_heads] = g;
    }
}

// The sum over the lanes of a group that have the same columns: every QUADS-th of 32.
template <int QUADS> DEVICE float sum_of_parts(float v) {
    UNROLL for (int mask = QUADS; mask < 32; mask *= 2) v += shuffle_xor(v, mask);
    return v;
}

// Block: 64 threads; grid (ceil(value_dim / (8 QUADS)), value_heads, lanes). `matrices`: M of slot 0.
template <int KEYS>
DEVICE void delta_recurrent(const DeltaShape &d, float *convolved, float *kept, int stride, float *matrices, i64 slot_floats,
                            float *out, int out_stride, const int *runs) {
    const LaneRun run = run_of(runs, block_z());
    if (run.rows == 0 || run.chunk >= 0) return;
    constexpr int QUADS = KEYS > 128 ? 2 : 4, STEP = 4 * 32 / QUADS;   // columns a group has, by four; rows of M between a lane's
    const int head = block_y(), l = thread() % 32, part = 4 * (l / QUADS), key_pad = pad16(d.key_dim);
    const int column = 4 * QUADS * (2 * block_x() + thread() / 32) + 4 * (l % QUADS), block = column / 16;
    const bool here = 16 * block < d.value_dim;   // the other lanes take part in the exchanges
    const int q_at = delta_key_head(d, head) * key_pad, k_at = q_at + delta_keys_at(d);
    const int v_at = delta_values_at(d) + head * pad16(d.value_dim) + column, gates_at = delta_gates_at(d) + head;
    float *matrix = matrices + slot_floats * run.slot + delta_matrix_floats(d) * head + (i64)block * d.key_dim * 16 + column % 16;
    constexpr Floats4 NONE = {{0.0f, 0.0f, 0.0f, 0.0f}};

    // Behind the last row of M there are none: k and q are 0 there, so what stands in for them is the last one again. That costs
    // no predicate that must be kept for each row.
    const bool begun = here && run.position > 0;
    Floats4 m[KEYS / STEP][4];
    UNROLL for (int i = 0; i < KEYS / STEP; i++)
        UNROLL for (int r = 0; r < 4; r++) {
            const int key = STEP * i + part + r;
            m[i][r] = begun ? load4(matrix + 16 * (key < d.key_dim ? key : d.key_dim - 1)) : NONE;
        }
    for (int t = 0; t < run.rows; t++) {
        float *row = delta_row(convolved, kept, stride, run, t);
        const float b = row[gates_at], decay = row[gates_at + d.value_heads];
        const Floats4 v = here ? load4(row + v_at) : NONE;
        Floats4 k[KEYS / STEP], change = NONE, read = NONE;
        UNROLL for (int i = 0; i < KEYS / STEP; i++) {
            k[i] = STEP * i + part < key_pad ? load4(row + k_at + STEP * i + part) : NONE;
            UNROLL for (int r = 0; r < 4; r++)
                UNROLL for (int j = 0; j < 4; j++) change.v[j] = fma_(k[i].v[r], m[i][r].v[j], change.v[j]);
        }
        UNROLL for (int j = 0; j < 4; j++) change.v[j] = b * fma_(-decay, sum_of_parts<QUADS>(change.v[j]), v.v[j]);
        warp_barrier();   // all lanes have read v
        UNROLL for (int i = 0; i < KEYS / STEP; i++) {
            const Floats4 q = STEP * i + part < key_pad ? load4(row + q_at + STEP * i + part) : NONE;
            UNROLL for (int r = 0; r < 4; r++)
                UNROLL for (int j = 0; j < 4; j++) {
                    m[i][r].v[j] = fma_(k[i].v[r], change.v[j], decay * m[i][r].v[j]);
                    read.v[j] = fma_(q.v[r], m[i][r].v[j], read.v[j]);
                }
        }
        UNROLL for (int j = 0; j < 4; j++) read.v[j] = sum_of_parts<QUADS>(read.v[j]);
        if (!here || part != 0) continue;
        store4(row_at(out, run.first + t, out_stride) + head * d.value_dim + column, read, d.value_dim - column);
        if (run.place >= 0) store4(row + v_at, change);
    }
    if (!here || run.place >= 0) return;
    UNROLL for (int i = 0; i < KEYS / STEP; i++)
        UNROLL for (int r = 0; r < 4; r++) {
            const int key = STEP * i + part + r;
            if (key < d.key_dim) store4(matrix + 16 * key, m[i][r]);
        }
}

// One channel of a window moves on over `rows` rows of `mixed` (the first at `mixed`), before which `past` came.
DEVICE void delta_keep_channel(float *window, int channels, int kernel, const float *mixed, int stride, int rows, int past,
                               int channel) {
    for (int i = 0; i < kernel - 1; i++) {
        const int at = rows - (kernel - 1) + i;   // of the new rows, or before them where negative
        float v = 0.0f;
        if (at >= 0) v = row_at(mixed, at, stride)[channel];
        else if (at + past >= 0) v = window[(i64)(i + rows) * channels + channel];
        window[(i64)i * channels + channel] = v;
    }
}

struct DeltaFinish {
    float *out, *states, *kept_mixed;
    const float *z, *norm, *mixed;
    int out_stride, z_stride, mixed_stride, kept_stride, kernel;
    i64 slot_floats;
    float eps;
};

// out of one head of one row, by 32 lanes, four neighbouring columns each, at most twice. Every lane of the warp calls it.
DEVICE void delta_norm_head(const DeltaFinish &f, const DeltaShape &d, const Quantised &to, int row, int head, bool there) {
    const int l = thread() % 32;
    float *out = row_at(f.out, row, f.out_stride) + head * d.value_dim;
    const float *z = row_at(f.z, row, f.z_stride) + head * d.value_dim;
    Floats4 x[DELTA_HEAD_MOST / 128];
    float squares = 0.0f;
    UNROLL for (int i = 0; i < DELTA_HEAD_MOST / 128; i++) {
        const int c = 4 * l + 128 * i;
        x[i] = load4(out + c, there ? d.value_dim - c : 0);
        UNROLL for (int j = 0; j < 4; j++) squares = fma_(x[i].v[j], x[i].v[j], squares);
    }
    const float scale = 1.0f / sqrt_(group_sum<32>(squares) / (float)d.value_dim + f.eps);
    UNROLL for (int i = 0; i < DELTA_HEAD_MOST / 128; i++) {
        const int c = 4 * l + 128 * i, left = there ? d.value_dim - c : 0;
        const Floats4 gate = load4(z + c, left), norm = load4(f.norm + c, left);
        UNROLL for (int j = 0; j < 4; j++) x[i].v[j] = x[i].v[j] * scale * norm.v[j] * silu(gate.v[j]);
        store4(out + c, x[i], left);
        if (to.hi) quantise4(to, row, head * d.value_dim + c, x[i].v, left > 0);
    }
}

// Block: 128 threads; grid (ceil(value_heads / 4) + ceil(channels / 128), rows). The blocks behind those of the heads move the
// windows on, once for each lane, those of its last row; of held lanes they keep `mixed`. Roofline: the launch, or memory.
DEVICE void delta_finish_block(const DeltaFinish &f, const DeltaShape &d, const Quantised &to, const int *runs, const int *lanes) {
    const int row = block_y(), parts = ceil_div(d.value_heads, 4);
    if (block_x() < parts) {
        const int head = 4 * block_x() + thread() / 32;
        delta_norm_head(f, d, to, row, head < d.value_heads ? head : 0, head < d.value_heads);
        return;
    }
    const int channels = delta_channels(d), channel = (block_x() - parts) * threads() + thread();
    const LaneRun run = run_of(runs, lanes[row]);
    if (channel >= channels) return;
    if (run.place >= 0) {
        row_at(f.kept_mixed, run.place + row - run.first, f.kept_stride)[channel] = row_at(f.mixed, row, f.mixed_stride)[channel];
    } else if (row == run.first + run.rows - 1) {
        delta_keep_channel(f.states + f.slot_floats * run.slot, channels, f.kernel, row_at(f.mixed, run.first, f.mixed_stride),
                           f.mixed_stride, run.rows, run.position, channel);
    }
}

// Block: 256 threads; grid (ceil(max(key_dim pad(value_dim) / 4, channels) / 256), value_heads + 1, held lanes). A thread takes
// 16 bytes of M through all rows that count: M read and written once, all useful; the rows come from the caches.
// accepts: i32 [n][4], slot, place, rows, position of the first row.
DEVICE void delta_accept_part(const DeltaShape &d, const float *kept, int stride, const float *kept_mixed, int mixed_stride,
                              float *states, float *matrices, i64 slot_floats, const int *accepts, int kernel) {
    const Words4 one = load128(accepts + 4 * block_z());
    const int slot = (int)one.x, place = (int)one.y, rows = (int)one.z, position = (int)one.w;
    const int head = block_y(), at = block_x() * threads() + thread();
    if (rows == 0) return;
    if (head == d.value_heads) {
        if (at < delta_channels(d))
            delta_keep_channel(states + slot_floats * slot, delta_channels(d), kernel, row_at(kept_mixed, place, mixed_stride),
                               mixed_stride, rows, position, at);
        return;
    }
    if (at >= delta_matrix_floats(d) / 4) return;
    const int block = at / (4 * d.key_dim), key = at / 4 % d.key_dim, column = 16 * block + 4 * (at % 4);
    const int k_at = delta_keys_at(d) + delta_key_head(d, head) * pad16(d.key_dim) + key;
    const int v_at = delta_values_at(d) + head * pad16(d.value_dim) + column;
    const int decay_at = delta_gates_at(d) + d.value_heads + head;
    float *matrix = matrices + slot_floats * slot + delta_matrix_floats(d) * head + 4 * (i64)at;
    Floats4 m = {{0.0f, 0.0f, 0.0f, 0.0f}};
    if (position > 0) m = load4(matrix);
    for (int t = 0; t < rows; t++) {
        const float *row = row_at(kept, place + t, stride);
        const float k = row[k_at], decay = row[decay_at];
        const Floats4 change = load4(row + v_at);
        UNROLL for (int j = 0; j < 4; j++) m.v[j] = fma_(k, change.v[j], decay * m.v[j]);
    }
    store4(matrix, m);
}
