// Ops that treat each number of a row by itself: gated activations, sums into a row, scale, soft cap, zero, selected rows.
//
// Block: 256 threads, each four neighbouring columns, so 1024 columns of one row; grid (ceil(width / 1024), rows). Loads and
// stores are 16 bytes a lane wherever a row is aligned (rows of any width and stride are allowed, the rest goes by single
// floats). Nothing is kept in block memory, at most 36 registers, so the threads of a multiprocessor are all there.
//
// Roofline: memory, or at one row the launch itself. Useful bytes are all bytes: an activation reads 8 and writes 4 for each
// number (12 of 12), add_gated reads 8 and writes 4. A row of 16384 columns at decode is 192 KB, 0.2 us of a card's bandwidth,
// under the 2 us that a launch in a graph costs: what is left to gain there is a launch less, and that is why a gated
// activation quantises what it computes for the linear layer behind it (quantised output, quantised.h).
#pragma once

#include "quantised.h"

enum Gate { SILU, GELU, SWIGLU_OAI };

// act(gate) * up
template <Gate KIND> DEVICE float gated(float gate, float up) {
    if (KIND == SILU) return silu(gate) * up;
    if (KIND == GELU) {
        const float inner = 0.7978845608f * (gate + 0.044715f * gate * gate * gate);
        return 0.5f * gate * (1.0f + tanh_(inner)) * up;
    }
    const float held = gate > 7.0f ? 7.0f : gate, within = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;   // NaN stays
    return held * sigmoid(1.702f * held) * (within + 1.0f);
}

DEVICE int column() { return 4 * (block_x() * threads() + thread()); }

DEVICE float *row_at(float *buffer, int row, int stride) { return buffer + (i64)row * stride; }
DEVICE const float *row_at(const float *buffer, int row, int stride) { return buffer + (i64)row * stride; }

// The planes of `to` may be null; with them the width is a multiple of 32, and every lane of a warp takes part.
template <Gate KIND>
DEVICE void gated_activation(const float *gate, int gate_stride, const float *up, int up_stride, float *out, int out_stride,
                             const Quantised &to) {
    const int row = block_y(), c = column(), left = to.width - c;
    const Floats4 g = load4(row_at(gate, row, gate_stride) + c, left), u = load4(row_at(up, row, up_stride) + c, left);
    Floats4 y;
    UNROLL for (int i = 0; i < 4; i++) y.v[i] = gated<KIND>(g.v[i], u.v[i]);
    if (out) store4(row_at(out, row, out_stride) + c, y, left);
    if (to.hi) quantise4(to, row, c, y.v, left > 0);
}

// into += sigmoid(gate) * src, one gate a row; without a gate into += src.
DEVICE void add_gated_row(const float *src, int src_stride, float *into, int into_stride, const float *gate, int gate_stride,
                          int width) {
    const int row = block_y(), c = column(), left = width - c;
    if (left <= 0) return;
    const float by = gate ? sigmoid(*row_at(gate, row, gate_stride)) : 1.0f;
    float *to = row_at(into, row, into_stride) + c;
    const Floats4 x = load4(row_at(src, row, src_stride) + c, left);
    Floats4 y = load4(to, left);
    UNROLL for (int i = 0; i < 4; i++) y.v[i] = fma_(by, x.v[i], y.v[i]);
    store4(to, y, left);
}

DEVICE void scale_row(float *src, int stride, const float *weight, int width) {
    const int c = column(), left = width - c;
    if (left <= 0) return;
    float *at = row_at(src, block_y(), stride) + c;
    Floats4 x = load4(at, left);
    UNROLL for (int i = 0; i < 4; i++) x.v[i] *= *weight;
    store4(at, x, left);
}

DEVICE void softcap_row(float *src, int stride, float cap, int width) {
    const int c = column(), left = width - c;
    if (left <= 0) return;
    float *at = row_at(src, block_y(), stride) + c;
    Floats4 x = load4(at, left);
    UNROLL for (int i = 0; i < 4; i++) x.v[i] = cap * tanh_(x.v[i] / cap);
    store4(at, x, left);
}

DEVICE void zero_row(float *out, int stride, int width) {
    const int c = column(), left = width - c;
    if (left > 0) store4(row_at(out, block_y(), stride) + c, {{0.0f, 0.0f, 0.0f, 0.0f}}, left);
}

// out[i] = src[rows[i]] + add[rows[i]], `add` or not.
DEVICE void select_row(const float *src, int src_stride, const float *add, int add_stride, const int *rows, float *out,
                       int out_stride, int width) {
    const int c = column(), left = width - c;
    if (left <= 0) return;
    const int row = rows[block_y()];
    Floats4 x = load4(row_at(src, row, src_stride) + c, left);
    if (add) {
        const Floats4 more = load4(row_at(add, row, add_stride) + c, left);
        UNROLL for (int i = 0; i < 4; i++) x.v[i] += more.v[i];
    }
    store4(row_at(out, block_y(), out_stride) + c, x, left);
}
