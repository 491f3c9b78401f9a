// What the attention kernels share: their arguments, which queries a block has, how results are finished or left as parts.
//
// A *tile* is a run of rows of one sequence, positions ascending: (first row, rows) in `tiles`; no rows: nothing to do, so that a
// recorded graph can have more tiles than a plan. Its queries are its rows times the heads that share a kv head; a block takes some of
// them (a *pass*), because they share the loads of K and V.
//
// Positions are cut into *parts* of `part_pages` pages from position 0 on, whatever the batch. Blocks compute parts independently
// (few rows alone would not fill a card), `attention_merge` puts them together in ascending order. So a row's bits depend on its
// position, its sequence and `part_pages`, which is fixed for a program. A part leaves, for each query, its largest score, the sum of
// exponentials below that, and the values' sum, not divided:
//
//     part_stats [tile][row of the tile][head][part % max_parts][2]     part_values the same [dims]
//
// A query sees at most `max_parts` parts (fewer than there are, under a window), and they follow each other, so the remainder is theirs
// alone.
#pragma once

#include "kv.h"

DEVICE float nothing() { return bits_float(0xff800000u); }   // minus infinity: the largest of no scores

struct Attention {
    float *out;
    const float *q;
    const u8 *k_pool, *v_pool;
    const int *tables;      // pages [lanes][lane_pages]; -1 where another rank has it
    const int *positions;   // [rows]
    const int *lanes;       // [rows]
    const int *tiles;       // [tiles][2]
    float *part_stats, *part_values;
    const float *sinks;     // [heads], or null
    int heads, kv_heads, q_step, q_stride, out_stride, lane_pages, pool_pages, window, tile_rows, part_pages, max_parts, gated, partial;
    float scale, softcap;
};

// The parameters of an entry, in the order of the struct.
#define ATTENTION_PARAMS                                                                                                        \
    float *out, const float *q, const u8 *k_pool, const u8 *v_pool, const int *tables, const int *positions, const int *lanes,  \
        const int *tiles, float *part_stats, float *part_values, const float *sinks, i32 heads, i32 kv_heads, i32 q_step,       \
        i32 q_stride, i32 out_stride, i32 lane_pages, i32 pool_pages, i32 window, i32 tile_rows, i32 part_pages, i32 max_parts, \
        i32 gated, i32 partial, float scale, float softcap
#define ATTENTION_ARGS                                                                                                     \
    {out, q, k_pool, v_pool, tables, positions, lanes, tiles, part_stats, part_values, sinks, heads, kv_heads, q_step,      \
     q_stride, out_stride, lane_pages, pool_pages, window, tile_rows, part_pages, max_parts, gated, partial, scale, softcap}

struct Tile { int index, row, rows, queries; };   // `queries` of one kv head

DEVICE Tile tile_at(const Attention &a, int index) {
    const int rows = a.tiles[2 * index + 1];
    return {index, a.tiles[2 * index], rows, rows * (a.heads / a.kv_heads)};
}

// One query and the positions that it sees, both included.
struct Query { int row, head, first, last; };

DEVICE Query query_at(const Attention &a, const Tile &tile, int kv_head, int index) {
    const int group = a.heads / a.kv_heads, row = tile.row + index / group, last = a.positions[row];
    return {row, kv_head * group + index % group, a.window > 0 && last >= a.window ? last - a.window + 1 : 0, last};
}

DEVICE i64 part_at(const Attention &a, const Tile &tile, int row, int head, int part) {
    return (((i64)tile.index * a.tile_rows + (row - tile.row)) * a.heads + head) * a.max_parts + part % a.max_parts;
}

DEVICE float capped(float score, float softcap) { return softcap > 0.0f ? softcap * tanh_(score / softcap) : score; }

// e^(x - top), also where nothing was seen yet.
DEVICE float power_below(float x, float top) { return x == nothing() ? 0.0f : exp_(x - top); }

// What the sum of values is multiplied by: one over the sum of exponentials, with that of the sink; 0 without any position.
DEVICE float normaliser(float top, float sum, const float *sinks, int head) {
    if (!sinks) return sum > 0.0f || sum != sum ? 1.0f / sum : 0.0f;
    const float sink = sinks[head], both = max_(top, sink), own = power_below(top, both);
    return own / (sum * own + exp_(sink - both));
}

// Of a rank's partial attention: the logarithm of the denominator.
DEVICE float log_sum(float top, float sum) { return top == nothing() ? nothing() : top + log_(sum); }

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exp_(-x)); }
