/* The C ABI of the native CPU library: with that of host memory (hs_host.h, hs_collective.h) everything that it exports, and
 * nothing else.
 *
 * One library is built per ISA level from the same source (baseline, avx2, avx512, avx512vnni); each has this ABI. Python
 * reaches it by ctypes (backends/cpu/abi.py mirrors every struct; `hs_abi_sizes` lets it prove that at load).
 *
 *   hs_matrix        a weight in the R16 layout (layout.h)
 *   hs_step          one op of a recorded program: kind, shapes and addresses
 *   hs_run(team, program, batch)   walks all steps in one call; the thread that calls it is the team's thread 0
 *
 * Memory belongs to the caller, which also keeps every address in a program alive. No function throws; those that can fail
 * return HS_OK or a negative HS_E code.
 */
#ifndef HS_CPU_H
#define HS_CPU_H

#include <stddef.h>
#include <stdint.h>

#include "hs_host.h"

#ifdef __cplusplus
extern "C" {
#endif

#define HS_ABI_VERSION 8

enum { HS_E_TYPE = -1, HS_E_BATCH = -3 };

/* Bits of hs_host_levels(): the levels whose code this CPU (and its operating system) can run. */
enum { HS_LEVEL_BASELINE = 1, HS_LEVEL_AVX2 = 2, HS_LEVEL_AVX512 = 4, HS_LEVEL_AVX512VNNI = 8 };

/* Weight types carry their GGUF ids; KV types too (F32, F16, BF16, Q8_0). F8 (e4m3) is a KV type that GGUF has not. */
enum {
    HS_F32 = 0, HS_F16 = 1, HS_Q4_0 = 2, HS_Q4_1 = 3, HS_Q5_0 = 6, HS_Q5_1 = 7, HS_Q8_0 = 8,
    HS_Q2_K = 10, HS_Q3_K = 11, HS_Q4_K = 12, HS_Q5_K = 13, HS_Q6_K = 14, HS_IQ4_NL = 20, HS_IQ4_XS = 23, HS_BF16 = 30,
    HS_MXFP4 = 39, HS_F8 = 1000
};

/* A weight matrix [rows, cols], 16 rows interleaved. It may be some columns (whole blocks) of a wider one: `stored_cols` is how wide
 * that is, 0: no wider. */
typedef struct hs_matrix {
    const uint8_t *data;
    int32_t type;
    int32_t rows;
    int32_t cols;
    int32_t stored_cols;
} hs_matrix;

/* One matrix of a linear step: dst[r] = src[r] @ matrix^T + bias. */
typedef struct hs_part {
    hs_matrix matrix;
    const float *bias;  /* [rows], or null */
    float *dst;         /* [batch rows, dst_stride] */
    int64_t dst_stride; /* floats between rows; at least rows rounded up to 16 */
} hs_part;

enum {
    HS_STEP_ROPE_TABLE = 1, /* table[r] = cos then sin of position * frequency, [pairs] each */
    HS_STEP_EMBED = 2,      /* dst[r] = scale * parts[0].matrix[token] */
    HS_STEP_NORM = 3,       /* src += add; dst = rms_norm(src) * weight */
    HS_STEP_QUANTISE = 4,   /* activation = int16 of src */
    HS_STEP_LINEAR = 5,     /* all parts, from activation (packed types) or src (float types) */
    HS_STEP_ROPE_STORE = 6, /* normalise and rotate q and k in place, store k and v; without add (k): q alone */
    HS_STEP_ATTENTION = 7,
    HS_STEP_GATE = 8,       /* dst = act(src) * add */
    HS_STEP_SELECT = 9,     /* dst[i] = src[logit_rows[i]] + add[logit_rows[i]] */
    HS_STEP_SOFTCAP = 10,   /* src = scale * tanh(src / scale) */
    HS_STEP_ADD_GATED = 11, /* dst += sigmoid(add[r][0]) * src; without add: dst += src */
    HS_STEP_EXPERTS = 12,   /* dst = what the experts that the logits `add` choose make of src (activation: int16 of it) */
    HS_STEP_DELTA = 13,     /* dst = delta net of src (mixed), add (z), third (beta) */
    HS_STEP_SCALE = 14,     /* src = weight[0] * src */
    HS_STEP_ZERO = 15,      /* dst = 0 */
    HS_STEP_JOIN = 16,      /* dst = columns `first` .. of src, then those of `add` of the row before */
    /* Exchanges between ranks (hs_collective.h), done by `act` for the rows of the scope; nothing where there are none. */
    HS_STEP_SUM = 17,       /* src = the sum over ranks */
    HS_STEP_GATHER = 18,    /* the parts of `act`, side by side */
    HS_STEP_MERGE = 19,     /* dst [kv_heads * head_dim] = heads `first` .. of the partial attentions src [heads * (head_dim + 1)] */
    HS_STEP_SEND = 20,      /* the parts of `act` as one message */
    HS_STEP_RECEIVE = 21
};

enum { HS_GATE_SILU = 0, HS_GATE_GELU = 1, HS_GATE_SWIGLU_OAI = 2 };
enum { HS_ROUTE_SOFTMAX = 0, HS_ROUTE_SIGMOID = 1, HS_ROUTE_CHOSEN = 2 };
enum { HS_DELTA_KERNEL_MOST = 8 };

/* One matrix of each expert, packed one after the other. */
typedef struct hs_stack {
    hs_matrix matrix;     /* of expert 0 */
    int64_t expert_bytes; /* from one expert's to the next one's */
    const float *bias;    /* [experts, rows rounded up to 16], or null */
} hs_stack;

/* What HS_STEP_EXPERTS needs besides its buffers. A pair is a row with one of its experts. */
typedef struct hs_experts {
    int32_t count;
    int32_t used;
    int32_t func;
    int32_t normalise;
    float scale;
    int32_t first; /* the stacks hold experts first .. first + held - 1; a chosen one that is not there adds nothing */
    int32_t held;
    int32_t reserved;
    const float *selection; /* [count], or null */
    const float *gains;     /* [count], or null */
    hs_stack gate;
    hs_stack up;
    hs_stack down;
    float *scores;            /* scratch [rows, count] */
    int32_t *chosen;          /* scratch [rows, used] */
    float *weights;           /* scratch [rows, used] */
    int32_t *places;          /* scratch [rows, used]: pair of each choice, -1 where its expert is not here */
    int32_t *pair_rows;       /* scratch [pairs] */
    int32_t *starts;          /* scratch [count + 1]: first pair of each expert that is here */
    int32_t *active;          /* scratch [count]: those that have pairs, counted from `first` */
    int32_t *active_count;    /* scratch [1] */
    float *gate_out;          /* scratch [pairs, inner_stride] */
    float *up_out;            /* scratch [pairs, inner_stride] */
    float *down_out;          /* scratch [pairs, out_stride]; may be that of up_out */
    uint8_t *pair_activation; /* scratch [pairs]: int16 of what goes into `down`; null where that is of a float type */
    int64_t inner_stride;
    int64_t out_stride;
} hs_experts;

/* What HS_STEP_DELTA needs besides its buffers (delta.cpp draws the layouts). Channels: q of all key heads, k, v of all value
 * heads. */
typedef struct hs_delta {
    int32_t key_heads;
    int32_t value_heads;
    int32_t key_dim;
    int32_t value_dim;
    int32_t kernel; /* at most HS_DELTA_KERNEL_MOST */
    int32_t tiled;
    float eps;
    int32_t first_key;         /* of this step's key heads among those that the states hold */
    int32_t state_key_heads;   /* how many key and value heads those are: of a rank that shares its states, */
    int32_t state_value_heads; /* the model's; else its own */
    const float *alpha;
    int64_t alpha_stride;
    const float *conv;        /* [kernel, channels] */
    const float *dt_bias;     /* [value_heads] */
    const float *a;           /* [value_heads] */
    const float *norm;        /* [value_dim] */
    float *convolved;         /* scratch [rows, convolved_stride] */
    int64_t convolved_stride; /* q and k by head and v by head, each padded to 16, and two floats for each value head */
    float *states;            /* this layer's part of slot 0 */
    int64_t slot_floats;
    int64_t matrix_at; /* floats from the start of the layer's part to its matrices */
    float *kept;          /* [held_rows, convolved_stride]: what `convolved` is to rows of lanes whose states are held; v gives way
                           * to what the row added, b (v - M^T k) */
    float *kept_mixed;    /* [held_rows, mixed_stride]: `mixed` of these rows */
    int64_t mixed_stride;
    float *copies;        /* scratch [threads, copy_floats]: the blocks of a held matrix that a thread works on */
    int64_t copy_floats;
} hs_delta;

/* What HS_STEP_JOIN needs besides its buffers. The row before is the batch's, or for a lane's first row the one that its slot has. */
typedef struct hs_join {
    int32_t chained; /* a draft step: it is row `chain` of `add`, as the step before left it, or for -1 the slot's; nothing stays */
    int32_t reserved;
    float *states;   /* this layer's part of slot 0, where the step's first column is */
    int64_t slot_floats;
    float *kept;     /* [held_rows, kept_stride]: `add` of rows of lanes whose states are held */
    int64_t kept_stride;
} hs_join;

/* One recorded op. Fields that a kind does not use are zero. Strides are in floats. */
typedef struct hs_step {
    int32_t kind;
    int32_t scope; /* 0: every row of the batch; 1: the rows whose logits are wanted */
    int32_t width;
    int32_t part_count;
    int32_t heads;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t window;
    int32_t rope_pairs;  /* 0: no rotation */
    int32_t interleaved; /* rope pairs (2i, 2i+1) instead of (i, i + pairs) */
    int32_t gate;
    int32_t kv_type;
    int32_t kv_group; /* of the layer: which of the batch's slots and tables are its own */
    int32_t q_step; /* floats from one head of q to the next */
    int32_t gated;  /* attention: head_dim values behind each head of q are its gate */
    int32_t v_norm; /* HS_STEP_ROPE_STORE: v is normalised, without weights */
    int32_t partial; /* attention: pages of -1 are passed over; dst has a log-sum-exp for each head behind the heads */
    int32_t first;   /* HS_STEP_EMBED: token of the table's first row, -1: the whole table is here. HS_STEP_MERGE: first own head.
                      * HS_STEP_JOIN: first column */
    float softcap;  /* of attention scores; 0: none */
    float eps;
    float scale; /* embedding scale, attention scale, rope magnitude, cap */
    int32_t reserved;
    float *src;
    float *add;
    float *dst;
    float *third; /* v of HS_STEP_ROPE_STORE */
    int64_t src_stride;
    int64_t add_stride;
    int64_t dst_stride;
    int64_t third_stride;
    const float *weight;       /* norm weight; of q's heads; attention: sinks [heads]. Null: none */
    const float *k_weight;     /* norm weight of k's heads, or null */
    const double *frequencies; /* of the rope table, [pairs] */
    float *table;              /* rope table [rows, 2 * pairs] */
    uint8_t *activation; /* where the int16 of dst (or of src) goes, or comes from; null: not wanted */
    const hs_part *parts;
    uint8_t *k_pool; /* this layer's K: [kv_heads][pages][head_dim][16] */
    uint8_t *v_pool; /* this layer's V: [kv_heads][pages][16][head_dim] */
    float *partials; /* attention scratch: partial results, hs_partial_floats() long */
    const hs_experts *experts;
    const hs_delta *delta;
    const hs_join *join;
    const struct hs_act *act; /* of an exchange */
} hs_step;

/* A group of attention layers that keep the same tokens: slots of its pool, and how many last tokens; 0: every one. */
typedef struct hs_kv_group {
    int32_t slots;
    int32_t window;
    int32_t partial; /* its attention is partial: a page of -1 lies on another rank */
    int32_t reserved;
} hs_kv_group;

typedef struct hs_program {
    const hs_step *steps;
    int32_t step_count;
    int32_t vocab_rows; /* rows of the embedding table: tokens are checked against it; 0: not checked */
    int32_t group_count; /* KV groups; 0: no attention */
    int32_t max_rows;
    int32_t max_logit_rows;
    int32_t state_slots; /* recurrent states are checked against it; 0: no recurrent layers */
    int32_t held_rows;   /* places for rows of lanes whose states are held */
    int32_t chained;     /* a draft step: the batch must have a chain */
    int32_t state_step_count;
    int32_t reserved;
    const int32_t *state_steps; /* numbers of the steps that write states */
    int32_t *places;     /* scratch [max_rows]: where each row is kept, -1: nowhere. Null without held rows */
    int32_t *tiles;      /* scratch for attention's row tiles, [2 * max_rows] */
    int32_t *lane_runs;  /* scratch for the runs of rows of one lane, [2 * max_rows] */
    const hs_kv_group *groups; /* slots and pages are checked against them */
} hs_program;

typedef struct hs_batch {
    int32_t rows;
    int32_t logit_row_count;
    int32_t lanes;
    int32_t lane_pages;
    const int32_t *tokens;
    const int32_t *positions;
    const int32_t *slots; /* [groups, rows] */
    const int32_t *row_lanes;
    const int32_t *tables; /* [groups, lanes, lane_pages]; pages before a group's window are not read */
    const int32_t *logit_rows;
    const int32_t *states; /* [lanes], the state slot of each; not read without recurrent layers */
    const int32_t *hold;   /* [lanes]: the place of the lane's first row where its state is held, its others behind it; -1: it is not.
                            * Null: none is */
    const int32_t *chain;  /* [rows]: the row of the draft step before that a row goes on from; -1: none. Null without draft steps */
    int64_t epoch;         /* with seq: what exchanges are stamped with */
    int64_t seq;
    int32_t failed_step;   /* written where an exchange fails: which step it was */
    int32_t chain_rows;    /* rows of the draft step before */
} hs_batch;

/* Of a lane whose state was held: its slot, where its rows are kept, how many of them count, and the position of the first. */
typedef struct hs_kept {
    int32_t slot;
    int32_t place;
    int32_t rows;
    int32_t position;
} hs_kept;

int32_t hs_abi_version(void);
/* Sizes of hs_matrix, hs_part, hs_stack, hs_experts, hs_delta, hs_join, hs_step, hs_kv_group, hs_program, hs_batch, hs_kept, in this
 * order. */
void hs_abi_sizes(int32_t out[11]);
const char *hs_level(void);
int32_t hs_host_levels(void);

/* Bytes of a matrix in the R16 layout, 0 where the type or the shape is not supported. */
size_t hs_packed_bytes(int32_t type, int32_t rows, int32_t cols);
/* Bytes of one row of quantised activations of `cols` columns. */
size_t hs_activation_bytes(int32_t cols);
/* Floats of attention scratch for one program. */
size_t hs_partial_floats(int32_t threads, int32_t heads, int32_t kv_heads, int32_t head_dim, int32_t lane_pages);

/* File layout -> R16 layout, by all threads of the team. */
int32_t hs_repack(hs_team *team, int32_t type, int32_t rows, int32_t cols, const uint8_t *src, uint8_t *dst);
/* The same for one matrix of each of `count` experts: rows [e * pitch + first, ... + rows) of src become dst's matrix e, each
 * hs_packed_bytes(type, rows, cols) long. */
int32_t hs_repack_stack(hs_team *team, int32_t type, int32_t count, int32_t pitch, int32_t first, int32_t rows, int32_t cols,
                        const uint8_t *src, uint8_t *dst);
/* Row `row` of a packed matrix, dequantised: dst[cols]. */
int32_t hs_unpack_row(const hs_matrix *matrix, int32_t row, float *dst);

/* HS_OK, HS_E_BATCH before anything was done, or what an exchange gave: nothing behind it was done then. */
int32_t hs_run(hs_team *team, const hs_program *program, hs_batch *batch);
/* The states of `count` lanes that the last hs_run held become what the rows that count leave. HS_OK, or HS_E_BATCH before anything
 * was written. */
int32_t hs_accept(hs_team *team, const hs_program *program, const hs_kept *kept, int32_t count);

#ifdef __cplusplus
}
#endif

#endif
