// What the kernels offer to the program runner. Every function works on the items [first, last) of its step, so that any
// number of threads may share a step, and computes each item the same way whoever does it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hs_cpu.h"
#include "layout.h"
#include "team.h"

namespace hs {

// repack.cpp
void repack_group(int type, int rows, int cols, const uint8_t *src, uint8_t *dst, int group);
void unpack_row(const hs_matrix &matrix, int row, float *dst);

// quantise.cpp: blocks [first, last) of a row
void quantise_blocks(const float *row, ActBlock *out, int first, int last);

// linear.cpp: batch rows x weight rows, all groups of all parts of a step
void run_linear(const hs_step &step, int rows, Team &team);

// rowops.cpp
void run_rope_table(const hs_step &step, const hs_batch &batch, Team &team);
void run_embed(const hs_step &step, const hs_batch &batch, Team &team);
void run_norm(const hs_step &step, int rows, Team &team);
void run_quantise(const hs_step &step, int rows, Team &team);
void run_rope_store(const hs_step &step, const hs_batch &batch, Team &team);
void run_gate(const hs_step &step, int rows, Team &team);
void run_select(const hs_step &step, const hs_batch &batch, Team &team);

// attention.cpp
constexpr int TILE_ROWS = 8;   // consecutive rows of one sequence that share their loads of K and V
int cut_tiles(const hs_batch &batch, int32_t *tiles);   // pairs (first row, rows); returns how many
size_t partial_floats(int threads, int heads, int kv_heads, int head_dim, int lane_pages);
void run_attention(const hs_step &step, const hs_batch &batch, const int32_t *tiles, int tile_count, Team &team, int thread);

}  // namespace hs
