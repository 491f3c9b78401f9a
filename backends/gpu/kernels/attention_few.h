// Attention of few queries, decode and verify: memory bound, so all that counts is that each page is read once, front to back.
//
//     block    128 threads: up to 8 queries of one kv head (4 where elements are bytes) over one part, 128 positions a step
//     grid     (kv heads x passes over the tile's queries, parts, tiles)
//
// A step has three phases with a barrier after each of the first two:
//
//     scores    each 32 threads (a *team*: the same on waves of 64) take two pages. A page's K is [dims][16 slots], so lanes side by
//               side load it as it lies; a lane has SIZE slots of every 32nd vector's dim, in registers, for all queries. Lanes
//               that have other dims of the same slots then halve their slots with each other until each has one: 32 positions on
//               32 lanes, log2 steps, no score summed twice.
//     weights   16 (32) threads for each query: the largest score so far, e^(score - largest), in block memory. The largest of
//               a step rescales what was summed before (online softmax). Each thread keeps its own sum of weights.
//     values    a row of V is dims / SIZE lanes; the block reads 128 SIZE / dims rows at once, each thread sums its SIZE dims for all
//               queries. At the end of the part the rows are added up in order.
//
// Bytes. f16 at 128 dims moves 64 KiB for a step of K and V and writes 4 KiB of parts for every 256 positions or more: 97 % or better
// of what moves is K and V, each sector once; the queries of a group that do not fit a pass find it in the second cache. A team has 8
// loads of 16 bytes in flight for each lane, a block 16 KiB, two blocks of a multiprocessor 32 KiB: the 936 GB/s of an RTX 3090 at
// some 600 ns need 7 KiB on each of 82. Arithmetic: 8 queries cost 8 fma and about 4 other instructions for an element; f16 at 936 GB/s
// is 0.47e12 elements a second, 5.6e12 instructions of the 17.8e12 that the card has. So bandwidth is the roof, down to elements of
// a byte; more queries than two passes go to matrix cores (attention_many.h).
//
// Registers: sums of SIZE x queries twice (64 + 64), 32 of loads, addresses: no spills with two blocks on a multiprocessor.
//
// A position that a query does not see is left out, never multiplied by zero: a slot that nobody wrote may hold anything.
#pragma once

#include "attention.h"

constexpr int FEW_THREADS = 128, FEW_STEP = 128, FEW_TEAM = 32, FEW_MAX_PAGES = 256;   // pages of a part
constexpr int FEW_SCORES = FEW_STEP + 16;   // a query's line of scores: two of them meet no bank twice

template <class Kv> DEVICE constexpr int few_queries(Kv) { return Kv::BYTES == 1 ? 4 : 8; }

// Block memory in floats: queries [DIMS][Q], scores [Q][FEW_SCORES], weights [FEW_STEP][Q + 4], the largest scores' factors [Q]. At the
// end it holds sums instead, FEW_STAGE floats at a time.
constexpr int FEW_STAGE = 4096;
template <int DIMS, int Q> DEVICE constexpr int few_floats() {
    return DIMS * Q + Q * FEW_SCORES + FEW_STEP * (Q + 4) + Q > FEW_STAGE ? DIMS * Q + Q * FEW_SCORES + FEW_STEP * (Q + 4) + Q : FEW_STAGE;
}

template <class Kv, int DIMS, int Q> struct Few {
    static constexpr int SIZE = Kv::SIZE;
    static constexpr int CHUNKS = PAGE / SIZE;               // vectors of one dim of a page of K
    static constexpr int LANES = FEW_TEAM / CHUNKS;          // lanes with other dims of the same slots
    static constexpr int COLUMNS = DIMS / SIZE;              // vectors of a row of V
    static constexpr int ROWS = FEW_THREADS / COLUMNS;       // rows of V that the block reads at once
    static constexpr int WEIGHTS = Q + 4;                    // a position's line of weights
    static constexpr int PER_QUERY = FEW_THREADS / Q;        // threads of the softmax of a query
    const Attention &a;
    const int *pages;                                        // of the part, -1: not here or not seen
    float *queries, *scores, *weights, *factors;
    int kv_head, count, first, last;                         // queries; positions that any of them sees, of this part
};

// Q floats of block memory, 16 bytes at once.
template <int Q> DEVICE void load_floats(float (&x)[Q], const float *at) {
    UNROLL for (int i = 0; i < Q; i += 4) {
        const Words4 four = load128(at + i);
        UNROLL for (int j = 0; j < 4; j++) x[i + j] = bits_float(word_at(four, j));
    }
}

// Vectors of keys that are under way at a time: gfx10 has 256 registers and no more, and with eight of them it spills.
#if defined(__GFX10__)
constexpr int KEYS_AT_ONCE = 4;
#else
constexpr int KEYS_AT_ONCE = 8;
#endif

// sums[q][slot] += over this lane's dims of one page. Loads of one run of vectors at a time: those of two do not fit registers.
template <class Kv, int DIMS, int Q> DEVICE void add_dims(const Few<Kv, DIMS, Q> &f, const u8 *page, float (&sums)[Q][Kv::SIZE]) {
    typedef Few<Kv, DIMS, Q> F;
    constexpr int VECTORS = (DIMS + F::LANES - 1) / F::LANES, MOST = Kv::BYTES == 1 ? 4 : KEYS_AT_ONCE, AT_ONCE = VECTORS < MOST ? VECTORS : MOST;
    const int lane = thread() % FEW_TEAM, chunk = lane % F::CHUNKS, mine = lane / F::CHUNKS;
    Keys<Kv> k[AT_ONCE];
#if !defined(EMULATED)
    _Pragma("unroll 1")
#endif
    for (int base = 0; base < VECTORS; base += AT_ONCE) {
        UNROLL for (int i = 0; i < AT_ONCE; i++) {
            const int dim = (base + i) * F::LANES + mine;
            if (dim < DIMS) fetch(k[i], page, DIMS, dim, chunk * F::SIZE);
        }
        UNROLL for (int i = 0; i < AT_ONCE; i++) {
            const int dim = (base + i) * F::LANES + mine;
            if (dim >= DIMS) continue;
            float x[Kv::SIZE], q[Q];
            open(k[i], x);
            load_floats(q, f.queries + dim * Q);
            UNROLL for (int j = 0; j < Q; j++) {
                UNROLL for (int s = 0; s < Kv::SIZE; s++) sums[j][s] = fma_(x[s], q[j], sums[j][s]);
            }
        }
    }
}

// Lanes that have other dims of the same slots halve their slots with each other: `sums[q][0]` is left, of one slot, still to be added
// to that of the lane that differs in the next bit.
template <int HALF, int MASK, int Q, int SIZE> DEVICE void share_slots(float (&sums)[Q][SIZE]) {
    if constexpr (HALF > 0) {
        const bool upper = thread() & MASK;
        UNROLL for (int q = 0; q < Q; q++) {
            UNROLL for (int s = 0; s < HALF; s++) {
                const float give = upper ? sums[q][s] : sums[q][s + HALF], keep = upper ? sums[q][s + HALF] : sums[q][s];
                sums[q][s] = keep + shuffle_xor(give, MASK);
            }
        }
        share_slots<HALF / 2, MASK / 2>(sums);
    }
}

// Which of the team's 32 positions, over two pages, the lane ends up with.
template <class Kv> DEVICE int position_of_lane() {
    constexpr int CHUNKS = PAGE / Kv::SIZE;
    const int lane = thread() % FEW_TEAM;
    return (lane / CHUNKS % 2) * PAGE + lane % CHUNKS * Kv::SIZE + lane / (2 * CHUNKS);
}

// Scores of the step's 128 positions into block memory. What is not here gets any number.
template <class Kv, int DIMS, int Q> DEVICE void score_step(const Few<Kv, DIMS, Q> &f, const int *pages) {
    constexpr int LAST = PAGE / Kv::SIZE;
    const int two = thread() / FEW_TEAM * 2;
    float kept[Q];
#if !defined(EMULATED)
    _Pragma("unroll 1")   // one page's sums and loads at a time
#endif
    for (int p = 0; p < 2; p++) {
        float sums[Q][Kv::SIZE];
        UNROLL for (int q = 0; q < Q; q++) {
            UNROLL for (int s = 0; s < Kv::SIZE; s++) sums[q][s] = 0.0f;
        }
        const int page = pages[two + p];
        if (page >= 0) add_dims(f, head_page(f.a.k_pool, f.kv_head, page, f.a.pool_pages, k_page_bytes(Kv(), DIMS)), sums);
        share_slots<Kv::SIZE / 2, FEW_TEAM / 2>(sums);
        UNROLL for (int q = 0; q < Q; q++) {
            const bool second = thread() & LAST;
            if (p == 0) {
                kept[q] = sums[q][0];
            } else {   // one of the two lanes takes the slot of the first page, one that of the second
                const float give = second ? kept[q] : sums[q][0], keep = second ? sums[q][0] : kept[q];
                kept[q] = keep + shuffle_xor(give, LAST);
            }
        }
    }
    const int at = thread() / FEW_TEAM * FEW_TEAM + position_of_lane<Kv>();
    UNROLL for (int q = 0; q < Q; q++) f.scores[q * FEW_SCORES + at] = kept[q];
}

// The running softmax of the query that this thread has a share of. A thread has positions 32 apart in a sum of its own, however many
// threads a query has: so both numbers of queries give the same bits.
template <int Q> struct Softmax { float top, sums[Q / 4]; int first, last; };

template <class Kv, int DIMS, int Q> DEVICE void weigh_step(const Few<Kv, DIMS, Q> &f, Softmax<Q> &m, int step, const int *pages) {
    typedef Few<Kv, DIMS, Q> F;
    const int q = thread() / F::PER_QUERY, mine = thread() % F::PER_QUERY;
    float s[Q], top = m.top;
    UNROLL for (int i = 0; i < Q; i++) {
        const int at = mine + i * F::PER_QUERY, position = step + at;
        const bool seen = position >= m.first && position <= m.last && pages[at / PAGE] >= 0;
        s[i] = seen ? capped(f.scores[q * FEW_SCORES + at], f.a.softcap) : nothing();
        top = max_(top, s[i]);
    }
    top = group_max<F::PER_QUERY>(top);
    const float factor = m.top == top ? 1.0f : power_below(m.top, top);
    m.top = top;
    UNROLL for (int i = 0; i < Q / 4; i++) m.sums[i] *= factor;
    UNROLL for (int i = 0; i < Q; i++) {
        const float weight = power_below(s[i], top);
        m.sums[i % (Q / 4)] += weight;
        f.weights[(mine + i * F::PER_QUERY) * F::WEIGHTS + q] = weight;
    }
    if (mine == 0) f.factors[q] = factor;
}

template <class Kv, int DIMS, int Q>
DEVICE void add_values(const Few<Kv, DIMS, Q> &f, float (&sums)[Q][Kv::SIZE], int step, const int *pages) {
    typedef Few<Kv, DIMS, Q> F;
    constexpr int AT_ONCE = 4;
    const int column = thread() % F::COLUMNS, row = thread() / F::COLUMNS;
    if (row >= F::ROWS) return;
    float factors[Q];
    load_floats(factors, f.factors);
    UNROLL for (int q = 0; q < Q; q++) {
        UNROLL for (int d = 0; d < Kv::SIZE; d++) sums[q][d] *= factors[q];
    }
    for (int base = row; base < FEW_STEP; base += AT_ONCE * F::ROWS) {
        Values<Kv> v[AT_ONCE];
        bool here[AT_ONCE];
        UNROLL for (int i = 0; i < AT_ONCE; i++) {
            const int at = base + i * F::ROWS, position = step + at;
            here[i] = at < FEW_STEP && position >= f.first && position <= f.last && pages[at / PAGE] >= 0;
            if (here[i])
                fetch(v[i], head_page(f.a.v_pool, f.kv_head, pages[at / PAGE], f.a.pool_pages, v_page_bytes(Kv(), DIMS)), DIMS,
                      column * F::SIZE, at % PAGE);
        }
        UNROLL for (int i = 0; i < AT_ONCE; i++) {
            if (!here[i]) continue;
            float x[Kv::SIZE], weights[Q];
            open(v[i], x);
            load_floats(weights, f.weights + (base + i * F::ROWS) * F::WEIGHTS);
            UNROLL for (int q = 0; q < Q; q++) {
                if (weights[q] == 0.0f) continue;
                UNROLL for (int d = 0; d < Kv::SIZE; d++) sums[q][d] = fma_(x[d], weights[q], sums[q][d]);
            }
        }
    }
}

// The block's rows of V added up in order, some queries at a time, and left as a part.
template <class Kv, int DIMS, int Q>
DEVICE void leave_values(const Few<Kv, DIMS, Q> &f, const Tile &tile, int first_query, int part, float *stage, const float (&sums)[Q][Kv::SIZE]) {
    typedef Few<Kv, DIMS, Q> F;
    constexpr int EACH = F::ROWS * DIMS, AT_ONCE = FEW_STAGE / EACH < Q ? FEW_STAGE / EACH : Q;
    const int column = thread() % F::COLUMNS, row = thread() / F::COLUMNS;
    UNROLL for (int base = 0; base < Q; base += AT_ONCE) {
        block_barrier();
        UNROLL for (int i = 0; i < AT_ONCE; i++) {
            if (base + i >= Q || row >= F::ROWS) continue;
            UNROLL for (int d = 0; d < F::SIZE; d++) stage[i * EACH + row * DIMS + column * F::SIZE + d] = sums[base + i][d];
        }
        block_barrier();
        for (int at = thread(); at < AT_ONCE * DIMS; at += FEW_THREADS) {
            const int q = base + at / DIMS, d = at % DIMS;
            if (q >= f.count) break;
            float sum = 0.0f;
            for (int r = 0; r < F::ROWS; r++) sum += stage[at / DIMS * EACH + r * DIMS + d];
            const Query query = query_at(f.a, tile, f.kv_head, first_query + q);
            f.a.part_values[part_at(f.a, tile, query.row, query.head, part) * DIMS + d] = sum * factor_of(Kv());
        }
    }
}

// At most Q of the tile's queries, from `first_query` on, over one part.
template <class Kv, int DIMS, int Q>
DEVICE void attend_part(const Attention &a, const Tile &tile, int kv_head, int first_query, int part, float *memory, int *pages) {
    typedef Few<Kv, DIMS, Q> F;
    F f = {a, pages, memory, memory + DIMS * Q, memory + DIMS * Q + Q * FEW_SCORES,
           memory + DIMS * Q + Q * FEW_SCORES + FEW_STEP * F::WEIGHTS, kv_head, tile.queries - first_query, 0, 0};
    if (f.count > Q) f.count = Q;
    const int begin = part * a.part_pages * PAGE, end = begin + a.part_pages * PAGE;
    const int seen_first = query_at(a, tile, kv_head, first_query).first, seen_last = query_at(a, tile, kv_head, first_query + f.count - 1).last;
    f.first = begin > seen_first ? begin : seen_first;
    f.last = end - 1 < seen_last ? end - 1 : seen_last;

    const int *table = a.tables + (i64)a.lanes[tile.row] * a.lane_pages;
    for (int i = thread(); i < a.part_pages; i += FEW_THREADS) {
        const int page = begin / PAGE + i;
        pages[i] = page >= f.first / PAGE && page <= f.last / PAGE && f.first <= f.last ? table[page] : -1;
    }
    for (int i = thread(); i < DIMS * Q; i += FEW_THREADS) {
        const int q = i / DIMS, d = i % DIMS;
        float x = 0.0f;
        if (q < f.count) {
            const Query query = query_at(a, tile, kv_head, first_query + q);
            x = a.q[(i64)query.row * a.q_stride + query.head * a.q_step + d] * a.scale * factor_of(Kv());
        }
        f.queries[d * Q + q] = x;
    }
    Softmax<Q> m = {nothing(), {}, 1, 0};
    const int own = thread() / F::PER_QUERY;
    if (own < f.count) {
        const Query query = query_at(a, tile, kv_head, first_query + own);
        m.first = query.first;
        m.last = query.last;
    }
    float sums[Q][Kv::SIZE];
    UNROLL for (int q = 0; q < Q; q++) {
        UNROLL for (int d = 0; d < Kv::SIZE; d++) sums[q][d] = 0.0f;
    }
    block_barrier();
    for (int step = begin + (f.first - begin) / FEW_STEP * FEW_STEP; step <= f.last; step += FEW_STEP) {
        const int *of_step = pages + (step - begin) / PAGE;
        score_step(f, of_step);
        block_barrier();
        weigh_step(f, m, step, of_step);
        block_barrier();
        add_values(f, sums, step, of_step);
    }
    const float sum = group_sum<F::PER_QUERY>(Q == 8 ? m.sums[0] + m.sums[Q / 4 - 1] : m.sums[0]);
    if (own < f.count && thread() % F::PER_QUERY == 0) {
        const Query query = query_at(a, tile, kv_head, first_query + own);
        float *stats = a.part_stats + 2 * part_at(a, tile, query.row, query.head, part);
        stats[0] = m.top;
        stats[1] = sum;
    }
    leave_values(f, tile, first_query, part, memory, sums);
}

template <class Kv, int DIMS> DEVICE void attention_few(const Attention &a) {
    constexpr int MOST = few_queries(Kv());
    SHARED(float, memory, (few_floats<DIMS, MOST>()));
    SHARED(int, pages, FEW_MAX_PAGES);
    const Tile tile = tile_at(a, block_z());
    const int passes = blocks_x() / a.kv_heads, kv_head = block_x() / passes, first_query = block_x() % passes * MOST;
    if (first_query >= tile.queries) return;
    // Parts are counted from the first that any query of the tile sees.
    const int part = query_at(a, tile, kv_head, 0).first / (a.part_pages * PAGE) + block_y();
    if (part > query_at(a, tile, kv_head, tile.queries - 1).last / (a.part_pages * PAGE)) return;
    if (MOST > 4 && tile.queries - first_query > 4)
        attend_part<Kv, DIMS, MOST>(a, tile, kv_head, first_query, part, memory, pages);
    else
        attend_part<Kv, DIMS, 4>(a, tile, kv_head, first_query, part, memory, pages);
}
