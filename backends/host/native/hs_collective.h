/* The second part of the host's C ABI: exchanges with other ranks over shared memory (collective.cpp). It needs nothing of the
 * first (hs_host.h) but its rules: memory belongs to the caller, functions return HS_OK or a negative HS_E code.
 */
#ifndef HS_COLLECTIVE_H
#define HS_COLLECTIVE_H

#include "hs_host.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { HS_ACT_SUM = 1, HS_ACT_GATHER = 2, HS_ACT_MESSAGE = 3, HS_ACT_MERGE = 4 };
enum { HS_ACT_PARTS_MOST = 4 };

/* What is compared before a byte that another rank wrote is used (backends/acts.py). */
typedef struct hs_stamp {
    int64_t epoch;
    int64_t seq;
    int32_t kind;
    int32_t rows;
    int32_t width; /* floats of a row of the writer's matrix */
    int32_t piece;
    char label[32]; /* padded with zeros */
} hs_stamp;

/* The exchanges of one label: bounds, what they have cost (added to), and the last one's stamp and failure. */
typedef struct hs_exchange {
    int64_t timeout_ns; /* of one call */
    int64_t spin_ns;    /* of one wait, before it sleeps */
    int64_t calls;
    int64_t bytes;      /* written by this rank; of a receive: read */
    int64_t spun_ns;
    int64_t slept_ns;
    hs_stamp stamp;     /* epoch, seq, rows, width, label: the caller's; kind, piece: the call's */
    hs_stamp wanted;    /* after HS_E_LATE and HS_E_STAMP: what was waited for */
    hs_stamp found;     /* after HS_E_STAMP */
    int32_t peer;       /* after both: of which rank */
    int32_t reserved;
} hs_exchange;

/* A rank's view of the mailboxes of all ranks. */
typedef struct hs_mail {
    uint8_t *memory;     /* rank 0's mailbox, the others follow; zeros at first, 64-byte aligned */
    int64_t piece_bytes; /* a multiple of 64 */
    int32_t rank;
    int32_t ranks;
    uint32_t posted;     /* pieces so far */
    int32_t reserved;
} hs_mail;

/* One end of a channel. */
typedef struct hs_channel {
    uint8_t *memory;       /* zeros at first, 64-byte aligned */
    int64_t message_bytes; /* a multiple of 64 */
    int32_t depth;
    int32_t peer;          /* rank at the other end */
    uint32_t count;        /* messages so far */
    int32_t reserved;
} hs_channel;

/* One matrix of an exchange. What is sent or given lies at src [rows, width], what comes goes to out: [rows, width], or of a
 * gather [rows, sum of widths]. */
typedef struct hs_act_part {
    const float *src;
    float *out;
    int64_t src_stride;
    int64_t out_stride;
    const int32_t *widths; /* gather: [ranks], the width of each rank's src */
    int32_t width;
    int32_t reserved;
} hs_act_part;

/* An exchange as a step of a program. */
typedef struct hs_act {
    hs_mail *mail;
    hs_channel *channel;
    hs_exchange *exchange;
    const hs_act_part *parts;
    int32_t part_count; /* at most HS_ACT_PARTS_MOST */
    int32_t target;     /* gather: the only rank that gets `out`; -1: all */
} hs_act;

/* Partial attentions of all ranks become that of this rank's own heads (backends/base.py, MergeAttention). */
typedef struct hs_merge {
    const float *src; /* [rows, heads * (head_dim + 1)]: outputs, then log-sum-exps */
    float *out;       /* [rows, own * head_dim] */
    const float *sinks; /* [own], or null */
    const float *gate;  /* [rows, own * 2 * head_dim], or null */
    int64_t src_stride;
    int64_t out_stride;
    int64_t gate_stride;
    int32_t heads;
    int32_t head_dim;
    int32_t first;
    int32_t own;
} hs_merge;

/* Matrices are [rows, width] of the exchange's stamp, with `stride` floats from row to row. Sizes are checked before anything is
 * written; HS_E_LATE and HS_E_STAMP leave mailboxes and channel unusable. The stamp's width is set by the functions that take
 * parts. */

/* buffer = the sum of all ranks' buffers, in the order of the ranks */
int32_t hs_sum(hs_mail *mail, hs_exchange *exchange, float *buffer, int64_t stride);
/* Each part's out = the src of all ranks side by side. One exchange for all parts. */
int32_t hs_gather(hs_mail *mail, hs_exchange *exchange, const hs_act_part *parts, int32_t part_count, int32_t target);
/* Raises HS_E_SHAPE where a row does not fit a piece. */
int32_t hs_merge_heads(hs_mail *mail, hs_exchange *exchange, const hs_merge *merge);
/* Messages that may be sent now. */
int32_t hs_credit(const hs_channel *channel);
/* Rows of all parts side by side as one message. Never waits: HS_E_CREDIT where the channel is full. */
int32_t hs_send(hs_channel *channel, hs_exchange *exchange, const hs_act_part *parts, int32_t part_count);
int32_t hs_receive(hs_channel *channel, hs_exchange *exchange, const hs_act_part *parts, int32_t part_count);

#ifdef __cplusplus
}
#endif

#endif
