// Drawing a token from a row of logits on the card: homeserve/worker/sampling.py says what each step means, and this does
// the same steps in the same order on the same single-precision numbers. Only tokens travel to the host.
//
//     sample_adjust   blocks of 4096 tokens x rows   penalties, biases, bans, grammar; the largest logit of each chunk
//     sample_count    chunks x rows                  how many tokens, and how much mass, lie how far below the best
//     sample_gather   chunks x rows                  the few tokens that may be drawn, out of the vocabulary into a list
//     sample_draw     one block a row                top_k, typical_p, top_p, min_p, and the token      (sample_draw.h)
//     sample_told     one block a row                log-probabilities of a token and of the best      (sample_draw.h)
//     counts_add      one thread an entry            the tokens that penalties look back at
//
// A *row* is one draw, or one question for log-probabilities: both want the same histogram and the same kind of list, so
// they are rows of one table (`SampleRow`) and of the same launches.
//
// **Mass is an integer.** A token's weight is exp(-below) in units of 2^-44, cut off below; `below` is its distance from
// the best logit over the temperature, the best token's weight is one. Sums of integers do not depend on their order: so
// chunks add up with atomics, lists lie in any order, and yet a row's token is a function of the row alone, whatever the
// batch, the number of blocks or the width of a warp. 2^20 tokens fit 64 bits. Units are fine enough: all that is cut off
// of 262 144 tokens is 2^-27 of the best one, less than the rounding of exp(). Where the host's sums in double precision
// and these part, a draw differs if the random number falls between: some 10^-6 of all draws (none of 6000 in the test).
//
// **Nothing is sorted.** All filters are prefixes of an order: the k first, those up to a share of the mass. Keys are
// 64-bit integers, the bits of `below` (a float that is not negative is ordered as its bits are) with the token's id
// behind them, so no two are equal, and equal logits fall in order of id as they must. `select` (sample_select.h) finds
// the end of a prefix: 512 bins over an interval of keys, one pass, the bin that has the end becomes the interval. The
// draw itself is the same search with the id as key.
//
// **The first pass is for all of them.** Bins of 1/16 from the best cover all that has any mass, and the last one takes
// the rest. That histogram, made by all chunks together, has the end of top_k or of top_p to within one bin; a real row
// of 262 144 tokens leaves some tens to some thousands up to there. They are gathered, and sample_draw's one block turns
// over that list instead of a megabyte. A row that leaves more than 16 384 (a flat one under top_p) is read whole at each
// step. With a temperature alone there is nothing to search but ids: the chunks' masses say which chunk.
//
// **Cost.** Bytes a row, V tokens: adjust reads 4 V (and writes 4 V, and reads 8 V of counts and V / 8 of a mask, where the
// request has any), count and gather read 4 V each, from the second cache, where the head's matrix product has just put
// the logits; none is read that is not used. At V = 151 936 that is 0.6 MB a pass, one microsecond at 600 GB/s: launches
// cost as much, so the roof is latency. V / 4096 = 38 blocks a row keep a small card's multiprocessors busy with one row;
// 256 threads take 16 tokens each in four 16-byte loads, which are all under way at once. On sm_86 six blocks of adjust
// fit a multiprocessor (its 16 KiB of block memory), five of count, four of gather (registers). The head itself reads
// V x width weights: 300 times a pass at a width of 2560 and 4.5 bits. Sums in the histogram are 32-bit atomics in block
// memory, native on every card (64-bit ones are not), with the carry by hand; tokens without mass, the most of a sharp
// row, are counted in a register.
// sample_draw: one block of 512 threads, 68 registers. A pass over a list of 1000 is two reads a thread and a dozen
// barriers; three to ten passes are some ten microseconds. A pass over a whole row is bound by arithmetic, about 80
// instructions a token: 50 us at V = 151 936 on one multiprocessor, with three to five of them in a flat row's draw.
#pragma once

constexpr int CHUNK = 4096;            // tokens of a block
constexpr int CHUNK_THREADS = 256;
constexpr int BINS = 512;              // of a histogram; also threads of the blocks that draw
constexpr int LIST = 16384;            // tokens gathered at most
constexpr int TOP = 20;                // log-probabilities told at most
constexpr int ID_BITS = 20;
constexpr u64 WHOLE = 1ull << 53;      // a share of mass of one
constexpr float UNITS = 17592186044416.0f;   // of mass: 2^44
constexpr float BIN_WIDTH = 0.0625f;
constexpr float MASSLESS = 31.9375f;   // where the last bin begins: exp(-31.9) < 2^-44
constexpr u32 INFINITY_BITS = 0x7f800000u;

// What a row holds: a NaN anywhere, or no token above minus infinity. Its token is then the one that an argmax gives.
enum Status { DRAWN = 0, NOT_A_NUMBER = 1, NOTHING = 2 };

// One row. Places count elements of the launch's arrays; -1 stands for none.
struct SampleRow {
    i32 logits;                  // row of the logits
    i32 adjusted;                // row of `z` that takes the adjusted logits; -1: the row has no such step
    i32 slot;                    // whose counts penalties look at
    i32 input_first, inputs;     // tokens beside the counts: a draft's row has those of the rows before it
    i32 input_generated;         // from which of them on they are output
    i32 bias_first, biases;      // in `lists`: pairs of a token and a float's bits
    i32 ban_first, bans;         // in `lists`: tokens that cannot be drawn
    i32 mask;                    // row of the grammars' bits, a token's bit set where it is allowed
    i32 top_k;                   // 0: all
    i32 told;                    // -1: the row is drawn; else how many of the most likely are told
    i32 token;                   // of a told row: its token; -1: what row `drawn_by` draws
    i32 drawn_by;
    float temperature;           // 0: greedy
    float repetition;            // 1: none
    float reach;                 // -log(min_p); infinite: none
    u64 seed;
    i64 position;
    u64 top_p, typical_p;        // in 2^-53; WHOLE: none
    double presence, frequency;
};
static_assert(sizeof(SampleRow) == 120, "backends.gpu.ops.sampling.ROW");

// What the launches of a row hand on, one record after another in `work`, 16-byte aligned. Python: `work_bytes`.
struct Work {
    u64 *mass;      // [BINS]
    u32 *count;     // [BINS]
    u32 *listed;    // how long the list is
    u64 *best;      // [chunks] the largest logit of each, packed
    u64 *part;      // [chunks] its mass
    u64 *list;      // [LIST] keys
};

DEVICE int chunks_of(int vocab) { return ceil_div(vocab, CHUNK); }

DEVICE Work work_of(u8 *work, int row, int vocab) {
    const int chunks = chunks_of(vocab);
    u8 *at = work + (u64)row * (u64)(BINS * 12 + 16 + (chunks + chunks % 2) * 16 + LIST * 8);
    Work w;
    w.mass = (u64 *)at;
    w.count = (u32 *)(w.mass + BINS);
    w.listed = w.count + BINS;
    w.best = (u64 *)(w.listed + 4);
    w.part = w.best + chunks;
    w.list = w.part + chunks + chunks % 2 * 2;
    return w;
}

// ------------------------------------------------------------------------------------------------------------ numbers

// Unsigned integers in the order that NumPy's argmax knows: NaN above all, both zeros equal.
DEVICE u32 ordered(float v) {
    if (v != v) return 0xffffffffu;
    const u32 bits = float_bits(v + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The largest of these is the largest logit, among equals the one of the lowest id.
DEVICE u64 packed(float v, int id) { return (u64)ordered(v) << 32 | (u32)~id; }
DEVICE int packed_id(u64 p) { return (int)~(u32)p; }
DEVICE float packed_value(u64 p) {
    const u32 bits = (u32)(p >> 32);
    return bits_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);   // of a NaN's: a NaN
}

DEVICE Status status_of(u64 best) {
    const float v = packed_value(best);
    return v != v ? NOT_A_NUMBER : float_bits(v) == (INFINITY_BITS | 0x80000000u) ? NOTHING : DRAWN;
}

// Whether the best token is taken without a look at the others.
DEVICE bool is_greedy(const SampleRow &row, u64 best) {
    return row.temperature == 0.0f || status_of(best) != DRAWN || float_bits(packed_value(best)) == INFINITY_BITS;
}

DEVICE u64 mass_of(float below) { return below < MASSLESS ? (u64)(exp_(-below) * UNITS) : 0; }
DEVICE int bin_of(float below) { return below < MASSLESS ? (int)(below * (1.0f / BIN_WIDTH)) : BINS - 1; }

DEVICE u64 key_of(float below, int id) { return (u64)float_bits(below) << ID_BITS | (u32)id; }
DEVICE float key_below(u64 key) { return bits_float((u32)(key >> ID_BITS)); }
DEVICE int key_id(u64 key) { return (int)((u32)key & ((1u << ID_BITS) - 1)); }

// a * share / 2^53, and whether something was cut off.
DEVICE u64 share_of(u64 a, u64 share, bool &rest) {
    const u64 low = 0xffffffffull, a0 = a & low, a1 = a >> 32, b0 = share & low, b1 = share >> 32;
    const u64 p00 = a0 * b0, p01 = a0 * b1, p10 = a1 * b0;
    const u64 middle = (p00 >> 32) + (p01 & low) + (p10 & low);
    const u64 high = a1 * b1 + (p01 >> 32) + (p10 >> 32) + (middle >> 32);
    const u64 product = middle << 32 | (p00 & low);   // its low 64 bits
    rest = (product & (WHOLE - 1)) != 0;
    return high << 11 | product >> 53;
}

// splitmix64, as `uniform` of sampling.py: 53 random bits of a stream's position.
DEVICE u64 mixed(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

DEVICE u64 chance_of(u64 seed, i64 position) {
    const u64 golden = 0x9E3779B97F4A7C15ull;
    return mixed(mixed(seed + golden) + (u64)(position + 1) * golden) >> 11;
}

// -------------------------------------------------------------------------------------------------------- of a block

DEVICE u64 shuffle64(u64 v, int from) { return (u64)shuffle((u32)(v >> 32), from) << 32 | shuffle((u32)v, from); }

// Sum, or the largest, of all threads' values; `part` is block memory of threads() / WARP of them.
template <bool LARGEST> DEVICE u64 block_fold(u64 v, u64 *part) {
    UNROLL for (int mask = WARP / 2; mask > 0; mask /= 2) {
        const u64 other = shuffle64(v, lane() ^ mask);
        v = !LARGEST ? v + other : other > v ? other : v;
    }
    block_barrier();
    if (lane() == 0) part[warp()] = v;
    block_barrier();
    u64 all = part[0];
    for (int i = 1; i < threads() / WARP; i++) all = !LARGEST ? all + part[i] : part[i] > all ? part[i] : all;
    return all;
}

// Values at .. at + size - 1 of a row, size at most 4, zeros behind them. `wide`: the row begins at a multiple of 16 bytes.
DEVICE void four_of(const float *row, int at, int size, bool wide, float (&v)[4]) {
    if (wide && size == 4) {
        const Words4 w = load128(row + at);
        v[0] = bits_float(w.x), v[1] = bits_float(w.y), v[2] = bits_float(w.z), v[3] = bits_float(w.w);
    } else {
        UNROLL for (int i = 0; i < 4; i++) v[i] = i < size ? row[at + i] : 0.0f;
    }
}

// f(id, value) for tokens first .. end - 1 of a row, `first` a multiple of 4; the block's threads take four at a time.
template <class F> DEVICE void each_token(const float *row, int first, int end, F f) {
    const bool wide = (u64)row % 16 == 0;
    for (int at = first + 4 * thread(); at < end; at += 4 * threads()) {
        const int size = end - at < 4 ? end - at : 4;
        float v[4];
        four_of(row, at, size, wide, v);
        UNROLL for (int i = 0; i < 4; i++)
            if (i < size) f(at + i, v[i]);
    }
}

DEVICE int pitch_of(int vocab) { return ceil_div(vocab, 4) * 4; }   // of rows of `z`

// The row as its filters see it.
DEVICE const float *seen_row(const SampleRow &row, const float *logits, const float *z, int vocab, int pitch) {
    return row.adjusted < 0 ? logits + (u64)row.logits * (u64)pitch : z + (u64)row.adjusted * (u64)pitch_of(vocab);
}

DEVICE u64 best_of(const Work &work, int vocab, u64 *part) {
    u64 best = 0;
    for (int i = thread(); i < chunks_of(vocab); i += threads()) best = work.best[i] > best ? work.best[i] : best;
    return block_fold<true>(best, part);
}

// ------------------------------------------------------------------------------------------------------------- adjust

// One logit after the penalties. Every product and sum is rounded by itself, as NumPy rounds it: a product plus zero is
// what keeps a compiler from joining it with the sum behind it.
DEVICE float penalised(const SampleRow &row, float v, bool seen, int generated) {
    if (seen && row.repetition != 1.0f) v = v > 0.0f ? v / row.repetition : fma_(v, row.repetition, 0.0f);
    if (generated != 0) v -= (float)((row.frequency * (double)generated + 0.0) + row.presence);
    return v;
}

// Of `count` entries, `step` words each, whether entry `i` is the first of its token.
DEVICE bool is_first(const i32 *entries, int step, int i) {
    for (int j = 0; j < i; j++)
        if (entries[j * step] == entries[i * step]) return false;
    return true;
}

// The entries of a few tokens that fall into this chunk, over what the counts alone have made of them. `z` is the chunk.
DEVICE void adjust_listed(const SampleRow &row, float *z, const float *v, const i32 *lists, const i32 *inputs,
                          const i32 *counts, int first, int size, int vocab) {
    const i32 *extra = inputs + row.input_first;
    for (int i = thread(); i < row.inputs; i += threads()) {
        const int token = extra[i], at = token - first;
        if (at < 0 || at >= size || !is_first(extra, 1, i)) continue;
        int generated = row.slot < 0 ? 0 : counts[((u64)row.slot * 2 + 1) * (u64)vocab + (u64)token];
        for (int j = row.input_generated > i ? row.input_generated : i; j < row.inputs; j++) generated += extra[j] == token;
        z[at] = penalised(row, v[token], true, generated);
    }
    block_barrier();
    const i32 *bias = lists + row.bias_first;
    for (int i = thread(); i < row.biases; i += threads()) {
        const int at = bias[2 * i] - first;
        if (at < 0 || at >= size || !is_first(bias, 2, i)) continue;
        for (int j = i; j < row.biases; j++)
            if (bias[2 * j] == bias[2 * i]) z[at] += bits_float((u32)bias[2 * j + 1]);
    }
    block_barrier();
    const i32 *bans = lists + row.ban_first;
    for (int i = thread(); i < row.bans; i += threads()) {
        const int at = bans[i] - first;
        if (at >= 0 && at < size) z[at] = bits_float(INFINITY_BITS | 0x80000000u);
    }
    block_barrier();
}

// Block (chunk, row). logits float [.., pitch]; z float [.., vocab rounded up to 4]; counts int [slots, 2, vocab]: how often
// each token was seen, and generated; masks u32 [.., vocab / 32 rounded up]. Leaves the histogram empty.
DEVICE void adjust(const float *logits, float *z, const SampleRow *rows, const i32 *lists, const i32 *inputs,
                   const i32 *counts, const u32 *masks, u8 *work_memory, int vocab, int pitch) {
    SHARED(float, chunk, CHUNK);
    SHARED(u64, part, CHUNK_THREADS / WARP);
    const SampleRow &row = rows[block_y()];
    const Work work = work_of(work_memory, block_y(), vocab);
    const int first = block_x() * CHUNK, size = first + CHUNK < vocab ? CHUNK : vocab - first;
    const float *v = logits + (u64)row.logits * (u64)pitch;
    if (block_x() == 0) {
        for (int i = thread(); i < BINS; i += threads()) work.mass[i] = 0, work.count[i] = 0;
        if (thread() == 0) *work.listed = 0;
    }
    u64 best = 0;
    const auto look = [&](int id, float value) {
        const u64 p = packed(value, id);
        best = p > best ? p : best;
    };
    if (row.adjusted < 0) {
        each_token(v, first, first + size, look);
    } else {
        const i32 *seen = row.slot < 0 ? nullptr : counts + (u64)row.slot * 2 * (u64)vocab;
        each_token(v, first, first + size, [&](int id, float value) {
            chunk[id - first] = seen ? penalised(row, value, seen[id] != 0, seen[vocab + id]) : value;
        });
        block_barrier();
        adjust_listed(row, chunk, v, lists, inputs, counts, first, size, vocab);
        const u32 *mask = row.mask < 0 ? nullptr : masks + (u64)row.mask * (u64)ceil_div(vocab, 32);
        float *out = z + (u64)row.adjusted * (u64)pitch_of(vocab);
        each_token(chunk - first, first, first + size, [&](int id, float value) {
            if (mask && !(mask[id / 32] >> id % 32 & 1u)) value = bits_float(INFINITY_BITS | 0x80000000u);
            out[id] = value;
            look(id, value);
        });
    }
    best = block_fold<true>(best, part);
    if (thread() == 0) work.best[block_x()] = best;
}

// One thread an entry: `amount` (1, or -1 to take it back) for a token of a slot, and among the generated ones where its
// flag is set. Entries of slot -1 count nothing.
DEVICE void add_counts(i32 *counts, const i32 *tokens, const i32 *slots, const u8 *generated, int entries, int vocab,
                       int amount) {
    const int i = block_x() * threads() + thread();
    if (i >= entries || slots[i] < 0) return;
    i32 *seen = counts + (u64)slots[i] * 2 * (u64)vocab + (u64)tokens[i];
    atomic_add(seen, amount);
    if (generated[i]) atomic_add(seen + vocab, amount);
}

#include "sample_select.h"
#include "sample_draw.h"
