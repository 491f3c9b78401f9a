// RopeStore: head norms, rotation, and a row's K and V into its page. docs: backends/ops.py.
//
// A warp takes a query head, or a kv head (its v first: it may be the same buffer as k, before k's norm and rotation). The head lies
// in block memory of the warp alone meanwhile, because the pairs that turn together are n_rot / 2 dims apart and a page's V is padded.
//
//     grid     (rows, ceil((heads + kv_heads) / UNITS)), 128 threads
//     memory   9 KiB of heads, 2 KiB of cosines and sines, which the UNITS heads of a block share
//     moves    4 bytes read and written for each element of q and k in place, 4 read of v, and what the pool keeps. K of one slot
//              goes into a sector of its own for each dim; rows of one page follow each other, and the second cache puts their
//              sectors together. Against the projections around it this is a few per cent of a layer at worst: it has no roofline of
//              its own, only a launch's latency, so it is one launch for q, k and v.
//
// Latent rows (MLA, attention_many.h): v is null and only K is kept; of each head the dims from `turn_first` on turn, and k's norm is
// over its first `norm_dims` alone.
//
// Angles. Position times frequency must be exact to far below one turn at positions up to a million and more, and these cards
// have next to no double precision. So frequencies come as turns per position, in units of 2^-64 turns: their product with a position,
// modulo 2^64, is the angle without its whole turns, exactly. Two bits of it are the quarter, the rest becomes a float of at most pi/4.
#pragma once

#include "kv.h"

constexpr int ROPE_THREADS = 128, ROPE_UNITS = 8, ROPE_DIMS = 576;

struct RopeStore {
    float *q, *k;
    const float *v;                 // or null: there is no V
    u8 *k_pool, *v_pool;
    const int *positions, *slots;
    const u64 *turns;   // [pairs]
    const float *q_norm, *k_norm;   // [dims], or null
    int heads, kv_heads, dims, q_step, q_stride, k_stride, v_stride, pool_pages, pairs, interleaved, v_norm, turn_first,
        norm_dims;
    float eps, magnitude;
};

DEVICE void turn_of(u64 per_position, int position, float magnitude, float &cosine, float &sine) {
    const u64 angle = per_position * (u64)(i64)position;
    const u32 quarter = (u32)((angle + (1ull << 61)) >> 62);
    const i64 rest = (i64)(angle - ((u64)quarter << 62));                     // within an eighth of a turn
    const float r = (float)(i32)(rest >> 30) * (6.28318531f / 17179869184.0f);   // in units of 2^-34 turns
    cosine = sin_of_quarter(r, quarter + 1u) * magnitude;
    sine = sin_of_quarter(r, quarter) * magnitude;
}

// A head of the warp: into block memory, divided by its root mean square where asked.
DEVICE void take_head(float *line, const float *from, int dims) {
    warp_barrier();
    for (int d = lane(); d < dims; d += WARP) line[d] = from[d];
}

DEVICE void norm_head(float *line, int dims, float eps, const float *weight) {
    float squares = 0.0f;
    for (int d = lane(); d < dims; d += WARP) squares = fma_(line[d], line[d], squares);
    const float scale = 1.0f / sqrt_(group_sum(squares) / (float)dims + eps);
    for (int d = lane(); d < dims; d += WARP) line[d] = weight ? line[d] * scale * weight[d] : line[d] * scale;
}

DEVICE void turn_head(float *line, const RopeStore &a, const float *cosines, const float *sines) {
    warp_barrier();
    for (int i = lane(); i < a.pairs; i += WARP) {
        const int first = a.turn_first + (a.interleaved ? 2 * i : i), second = first + (a.interleaved ? 1 : a.pairs);
        const float x = line[first], y = line[second];
        line[first] = fma_(x, cosines[i], -(y * sines[i]));
        line[second] = fma_(x, sines[i], y * cosines[i]);
    }
    warp_barrier();
}

template <class Kv> DEVICE void store_keys(Kv, const float *line, u8 *page, int dims, int slot) {
    for (int d = lane(); d < dims; d += WARP) *(typename Kv::Code *)(page + k_at(Kv(), dims, d, slot)) = code_of(Kv(), line[d]);
}

template <class Kv> DEVICE void store_values(Kv, const float *line, u8 *page, int dims, int slot) {
    for (int d = lane(); d < (dims + 15) / 16 * 16; d += WARP)
        *(typename Kv::Code *)(page + v_at(Kv(), dims, d, slot)) = code_of(Kv(), d < dims ? line[d] : 0.0f);
}

// 32 dims as whole numbers of one scale, the largest magnitude / 127. Where one of them is no number, or infinite, the scale is no
// number: it is not hidden. Lanes 0-31 have one block, lanes 32-63 of a wide wave the next.
DEVICE i8 quantise_dim(float x, half_t &scale) {
    const float d = group_max<32>(abs_(x)) / 127.0f + group_sum<32>(x * 0.0f);
    scale = float_to_half(d);
    return (i8)(int)round_(max_(min_(x / (d > 0.0f ? d : 1.0f), 127.0f), -127.0f));
}

DEVICE void store_keys(KvQ8, const float *line, u8 *page, int dims, int slot) {
    for (int first = 0; first < dims; first += WARP) {
        const int d = first + lane();
        half_t scale;
        const i8 code = quantise_dim(d < dims ? line[d] : 0.0f, scale);
        if (d >= dims) continue;
        *(i8 *)(page + k_at(KvQ8(), dims, d, slot)) = code;
        if (d % KV_BLOCK == 0) *(half_t *)(page + k_scale_at(d, slot)) = scale;
    }
}

DEVICE void store_values(KvQ8, const float *line, u8 *page, int dims, int slot) {
    for (int first = 0; first < dims; first += WARP) {
        const int d = first + lane();
        half_t scale;
        const i8 code = quantise_dim(d < dims ? line[d] : 0.0f, scale);
        if (d >= dims) continue;
        *(i8 *)(page + v_at(KvQ8(), dims, d, slot)) = code;
        if (d % KV_BLOCK == 0) *(half_t *)(page + v_scale_at(d, slot)) = scale;
    }
}

DEVICE void write_head(float *to, const float *line, int dims) {
    for (int d = lane(); d < dims; d += WARP) to[d] = line[d];
}

DEVICE void prepare_query(const RopeStore &a, float *line, const float *cosines, const float *sines, int head) {
    float *q = a.q + (i64)block_x() * a.q_stride + head * a.q_step;
    take_head(line, q, a.dims);
    if (a.q_norm) norm_head(line, a.dims, a.eps, a.q_norm);
    turn_head(line, a, cosines, sines);
    write_head(q, line, a.dims);
}

template <class Kv> DEVICE void store_head(const RopeStore &a, float *line, const float *cosines, const float *sines, int head) {
    const int row = block_x(), slot = a.slots[row];
    float *k = a.k + (i64)row * a.k_stride + head * a.dims;
    if (a.v) {
        take_head(line, a.v + (i64)row * a.v_stride + head * a.dims, a.dims);
        if (a.v_norm) norm_head(line, a.dims, a.eps, nullptr);
        warp_barrier();
        store_values(Kv(), line, head_page(a.v_pool, head, slot / PAGE, a.pool_pages, v_page_bytes(Kv(), a.dims)), a.dims, slot % PAGE);
    }
    take_head(line, k, a.dims);
    if (a.k_norm) norm_head(line, a.norm_dims, a.eps, a.k_norm);
    turn_head(line, a, cosines, sines);
    write_head(k, line, a.dims);
    store_keys(Kv(), line, head_page(a.k_pool, head, slot / PAGE, a.pool_pages, k_page_bytes(Kv(), a.dims)), a.dims, slot % PAGE);
}

template <class Kv> DEVICE void rope_store(const RopeStore &a) {
    SHARED(float, lines, ROPE_THREADS / WARP * ROPE_DIMS);
    SHARED(float, cosines, ROPE_DIMS / 2);
    SHARED(float, sines, ROPE_DIMS / 2);
    for (int i = thread(); i < a.pairs; i += threads()) turn_of(a.turns[i], a.positions[block_x()], a.magnitude, cosines[i], sines[i]);
    block_barrier();
    float *line = lines + warp() * ROPE_DIMS;
    const int first = block_y() * ROPE_UNITS, all = a.heads + a.kv_heads, end = first + ROPE_UNITS < all ? first + ROPE_UNITS : all;
    for (int unit = first + warp(); unit < end; unit += ROPE_THREADS / WARP) {
        if (unit < a.heads)
            prepare_query(a, line, cosines, sines, unit);
        else
            store_head<Kv>(a, line, cosines, sines, unit - a.heads);
    }
}
