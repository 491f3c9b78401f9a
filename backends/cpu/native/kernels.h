// What the kernels offer to the program runner: for each kind of step, into how many chunks it falls and what one chunk
// does. Chunks are independent, so any number of threads may share a step, and each is computed the same way whoever does
// it and however many there are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hs_cpu.h"
#include "layout.h"
#include "team.h"

namespace hs {

constexpr int MAX_HEAD_DIM = 512;   // of attention; capability.py refuses what is larger

// One run of a program, as its steps see it.
struct Run {
    const hs_program &program;
    const hs_batch &batch;
    int threads;
    int tile_count;      // attention's row tiles: pairs (first row, rows) in program.tiles
    int tile_rows_most;  // rows of the largest tile
    int partitions;      // KV partitions of the longest sequence

    int lane_runs;       // runs of rows of one lane: pairs (first row, rows) in program.lane_runs
    const int32_t *places;  // where rows of held lanes are kept; null: no lane is held

    int pool_pages(const hs_step &step) const { return program.groups[step.kv_group].slots / GROUP; }
    int rows(const hs_step &step) const { return step.scope ? batch.logit_row_count : batch.rows; }
    int place(int row) const { return places ? places[row] : -1; }
};

// repack.cpp
void repack_group(int type, int rows, int cols, const uint8_t *src, uint8_t *dst, int group);
void unpack_row(const hs_matrix &matrix, int row, float *dst);

// quantise.cpp: blocks [first, last) of a row
void quantise_blocks(const float *row, ActBlock *out, int first, int last);

// linear.cpp
struct Rows {
    const uint8_t *activation;  // of packed types
    size_t activation_stride;
    const float *src;  // of float types
    int64_t src_stride;
    const int32_t *index;  // which rows of them, or null: the first ones

    int at(int row) const { return index ? index[row] : row; }
};

// Groups [first, last) of one matrix for all of `rows`: tiles of rows outside, groups inside, so that the activations of a
// tile stay in L1 and the weights of the chunk in L2.
void linear_groups(const hs_matrix &matrix, const float *bias, float *dst, int64_t dst_stride, const Rows &rows, int row_count, int first,
                   int last);
// How many groups of so many bytes may make up a chunk.
int groups_in_cache(size_t bytes);
int linear_chunks(const Run &run, const hs_step &step);
void linear_chunk(const Run &run, const hs_step &step, int chunk);
// The first weights that a thread will read in this step, where memory is what it will wait for.
Ahead linear_ahead(const Run &run, const hs_step &step, int thread);

// rowops.cpp
int row_chunks(const Run &run, const hs_step &step);      // steps that take whole rows
int column_chunks(const Run &run, const hs_step &step);   // steps that may cut a row: gate, quantise, softcap, add, scale, zero
void rope_table_chunk(const Run &run, const hs_step &step, int chunk);
void embed_chunk(const Run &run, const hs_step &step, int chunk);
void norm_chunk(const Run &run, const hs_step &step, int chunk);
void rope_store_chunk(const Run &run, const hs_step &step, int chunk);
void select_chunk(const Run &run, const hs_step &step, int chunk);
void quantise_chunk(const Run &run, const hs_step &step, int chunk);
void gate_chunk(const Run &run, const hs_step &step, int chunk);
void softcap_chunk(const Run &run, const hs_step &step, int chunk);
void scale_chunk(const Run &run, const hs_step &step, int chunk);
void zero_chunk(const Run &run, const hs_step &step, int chunk);
void add_gated_chunk(const Run &run, const hs_step &step, int chunk);

// experts.cpp: four stages
int route_chunks(const Run &run, const hs_step &step);
void route_chunk(const Run &run, const hs_step &step, int chunk);
int expert_up_chunks(const Run &run, const hs_step &step);
void expert_up_chunk(const Run &run, const hs_step &step, int chunk);
int expert_down_chunks(const Run &run, const hs_step &step);
void expert_down_chunk(const Run &run, const hs_step &step, int chunk);
int combine_chunks(const Run &run, const hs_step &step);
void combine_chunk(const Run &run, const hs_step &step, int chunk);

// checks.cpp: whether every index that a step will follow leads somewhere, so that a wrong plan is an error and never a wild read
bool batch_is_sound(const hs_program &program, const hs_batch &batch);
bool kept_is_sound(const hs_program &program, const hs_kept *kept, int count);

// delta.cpp: convolution, then the recurrence
void cut_lane_runs(Run &run);
int delta_conv_chunks(const Run &run, const hs_step &step);
void delta_conv_chunk(const Run &run, const hs_step &step, int chunk);
int delta_rule_chunks(const Run &run, const hs_step &step);
void delta_rule_chunk(const Run &run, const hs_step &step, int chunk);
int delta_accept_parts(const hs_delta &delta);
void delta_accept(const hs_delta &delta, const hs_kept &kept, int part);

// hidden.cpp: the rows, then what stays of them
int join_chunks(const Run &run, const hs_step &step);
void join_chunk(const Run &run, const hs_step &step, int chunk);
int join_keep_chunks(const Run &run, const hs_step &step);
void join_keep_chunk(const Run &run, const hs_step &step, int chunk);
void join_accept(const hs_step &step, const hs_kept &kept);

// accept.cpp
void accept_kept(Team &team, const hs_program &program, const hs_kept *kept, int count);

// attention.cpp: two stages, of which the second has chunks only where the first was split by partition
void cut_tiles(Run &run);
size_t partial_floats(int threads, int heads, int kv_heads, int head_dim, int lane_pages);
int attention_chunks(const Run &run, const hs_step &step);
void attention_chunk(const Run &run, const hs_step &step, int chunk);
int merge_chunks(const Run &run, const hs_step &step);
void merge_chunk(const Run &run, const hs_step &step, int chunk);

}  // namespace hs
