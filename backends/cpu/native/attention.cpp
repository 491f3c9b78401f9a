// Paged attention: softmax(scale q K^T) V over the pages of a sequence.
//
// The rule: the bits of a row's result depend on its position and its sequence's KV rows alone. So positions are cut into
// partitions of PARTITION from position 0 on, whatever the chunking of the prompt; each partition gives a maximum, a sum
// of exponentials and an unnormalised output in one fixed order of operations; and partitions are merged one by one,
// ascending, by one function. A long decode may then spread its partitions over threads (split mode) and gets the same
// bits as a prefill that walks them in a loop.
//
// A work item is a tile (up to TILE_ROWS consecutive rows of one sequence) times a kv head: all its queries (rows times
// the heads of the group) share the loads of K and V, MAX_QUERIES at a time. Keys that a query must not see are masked
// in the scores by lane and left out of the sum over V, never multiplied by zero: an unwritten slot may hold anything.
//
// Memory bounds a decode: each page of K and V is read once for all heads of the group. What is needed next is prefetched a
// page ahead, in the order in which it will be read (K of a partition, its V, K of what this thread will likely take next):
// earlier would be too early, since lines on their way from memory and lines on their way from L2 wait in the same few
// buffers of a core. Arithmetic bounds a prefill: queries of a tile walk a partition together while it lies in L2, and as
// many sums as there are registers stay in them.
//
// Sinks are one more logit of a head, without a value: they join a query's sum once, after its last partition.
//
// Partial attention: some pages of a sequence lie on other ranks (-1 in its table). What a partition is made of is then its
// own pages, moved together in their order, and each query sees a range of those; the kernels know of nothing else. The rule
// holds: what is here of a partition depends on the sequence alone. A head gives its output and its log-sum-exp.
#include <cmath>

#include "kernels.h"
#include "kv.h"
#include "simd.h"

namespace hs {
namespace {

constexpr int PARTITION = 256;
constexpr int PAGES = PARTITION / GROUP;
constexpr int TILE_ROWS = 16;   // consecutive rows of one sequence that share their loads of K and V
constexpr float NEGATIVE_INFINITY = -INFINITY;

int least(int a, int b) { return a < b ? a : b; }
int most(int a, int b) { return a > b ? a : b; }

// One query: where it comes from, the keys [first, last) that it sees, and its running result.
struct Query {
    const float *source;
    int row, head, first, last;
    bool started;
    float max, sum;
};

// Results of one or more partitions: `out` is Σ e^(s - max) v, not yet divided by `sum`.
void merge(float &max, float &sum, float *out, float part_max, float part_sum, const float *part, int wide, bool started) {
    if (!started) {
        max = part_max;
        sum = part_sum;
        std::memcpy(out, part, sizeof(float) * static_cast<size_t>(wide));
        return;
    }
    const float top = max > part_max ? max : part_max;
    alignas(64) float scales[16] = {max - top, part_max - top};
    store(scales, exp_v(load(scales)));
    const vf old_scale = set1(scales[0]), new_scale = set1(scales[1]);
    sum = sum * scales[0] + part_sum * scales[1];
    max = top;
    for (int c = 0; c < wide; c += 16) store(out + c, fma(load(part + c), new_scale, mul(load(out + c), old_scale)));
}

// Positions [first, last) of a partition, counted from its first one.
struct Span {
    int first, last;
};

// The pages of one partition that are here. Those of other ranks are left out and the rest moved together.
struct Pages {
    const int32_t *at;   // in the lane's table, of the partition's first page
    bool partial;
    int32_t own[PAGES];
    int before[PAGES + 1];   // own pages before each one

    Pages(const int32_t *table, int partition, int first, int end, bool partial) : at(table + partition * PAGES), partial(partial) {
        if (!partial) return;
        before[0] = 0;
        for (int page = 0; page < PAGES; page++) {
            const int number = partition * PAGES + page;
            const bool here = number >= first && number < end && at[page] >= 0;
            if (here) own[before[page]] = at[page];
            before[page + 1] = before[page] + (here ? 1 : 0);
        }
    }

    const int32_t *list() const { return partial ? own : at; }
    bool empty() const { return partial && before[PAGES] == 0; }
    // Where a position lies among the own ones; one that is not here, where the next own one does.
    int moved(int position) const {
        const int page = position / GROUP;
        if (!partial || page == PAGES) return partial ? before[PAGES] * GROUP : position;
        return before[page] * GROUP + (before[page + 1] > before[page] ? position % GROUP : 0);
    }
    Span seen(int first, int last, int origin) const {
        first = least(most(first - origin, 0), PARTITION);
        last = most(least(last - origin, PARTITION), first);
        return {moved(first), moved(last)};
    }
};

// What is read of one partition: the pages of one sequence and kv head, numbered from the partition's first one. `next` is
// what will likely be read after it: a hint only.
struct Layer {
    const hs_step &step;
    const int32_t *table;
    int kv_head, wide, pool_pages;
    const void *next;

    template <class Kv> const typename Kv::Elem *keys(int page) const {
        return reinterpret_cast<const typename Kv::Elem *>(step.k_pool) + block(page) * Kv::k_elems(step.head_dim);
    }
    template <class Kv> const typename Kv::Elem *values(int page) const {
        return reinterpret_cast<const typename Kv::Elem *>(step.v_pool) + block(page) * Kv::v_elems(step.head_dim);
    }
    size_t block(int page) const { return kv_block(kv_head, table[page], pool_pages); }
};

// sums[q][n] += x(q) * y(n). Few x stay in registers while the y go by, a register of each at a time; of many x, one is
// there at a time. Sums are where the registers go, and the barrier in `fma_part` keeps the compiler from spilling them.
template <int Q, int N, class X, class Y> HS_INLINE void add_outer(vf (*sums)[N], X x, Y y) {
    if constexpr (Q <= 3) {
        vf xs[Q];
        HS_UNROLL
        for (int q = 0; q < Q; q++) xs[q] = x(q);
        HS_UNROLL
        for (int n = 0; n < N; n++) {
            HS_UNROLL
            for (int part = 0; part < VF_PARTS; part++) {
                const vf one = y(n);
                HS_UNROLL
                for (int q = 0; q < Q; q++) fma_part(part, one, xs[q], sums[q][n]);
            }
        }
    } else {
        vf ys[N];
        HS_UNROLL
        for (int n = 0; n < N; n++) ys[n] = y(n);
        HS_UNROLL
        for (int q = 0; q < Q; q++) {
            const vf one = x(q);
            HS_UNROLL
            for (int n = 0; n < N; n++) {
                HS_UNROLL
                for (int part = 0; part < VF_PARTS; part++) fma_part(part, ys[n], one, sums[q][n]);
            }
        }
    }
}

// Pages of K whose scores are summed at once: as many as keep their sums in registers.
template <int Q> constexpr int PAGES_AT_ONCE = Q * 4 <= MAX_SUMS ? 4 : Q * 2 <= MAX_SUMS ? 2 : 1;
constexpr int STRIDE_DIMS = 8;   // dims between two looks ahead

HS_INLINE void prefetch_range(const void *p, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) prefetch(static_cast<const char *>(p) + at);
}

// scores[q][p] = queries[q] . K, for the 16 positions of each of P pages. What lies at `ahead` will be wanted soon.
template <class Kv, int Q, int P>
HS_INLINE void page_scores(const typename Kv::Elem *const *k, const typename Kv::Elem *const *ahead, int dims, const float *queries, int stride,
                           vf (*s)[P]) {
    HS_UNROLL
    for (int q = 0; q < Q; q++) {
        HS_UNROLL
        for (int p = 0; p < P; p++) s[q][p] = set1(0.0f);
    }
    for (int d = 0; d < dims;) {
        HS_UNROLL
        for (int p = 0; p < P; p++) prefetch_range(ahead[p] + GROUP * d, sizeof(typename Kv::Elem) * GROUP * STRIDE_DIMS);

        for (const int end = least(dims, d + STRIDE_DIMS); d < end; d++) {
            add_outer<Q, P>(s, [&](int q) { return set1(queries[stride * q + d]); }, [&](int p) { return Kv::get(k[p] + GROUP * d); });
        }
    }
}

// The same where 32 dims share a scale.
template <class Kv, int Q, int P>
HS_INLINE void block_scores(const typename Kv::Elem *const *k, const typename Kv::Elem *const *ahead, int dims, const float *queries, int stride,
                            vf (*s)[P]) {
    HS_UNROLL
    for (int q = 0; q < Q; q++) {
        HS_UNROLL
        for (int p = 0; p < P; p++) s[q][p] = set1(0.0f);
    }
    for (size_t d = 0, at = 0; d < static_cast<size_t>(dims); d += KV_BLOCK, at += Kv::K_BLOCK_BYTES) {
        const typename Kv::Elem *values[P], *next[P];
        vf part[Q][P];
        HS_UNROLL
        for (int p = 0; p < P; p++) values[p] = k[p] + at + Kv::SCALES;
        HS_UNROLL
        for (int p = 0; p < P; p++) next[p] = ahead[p] + at + Kv::SCALES;
        page_scores<Kv, Q, P>(values, next, KV_BLOCK, queries + d, stride, part);
        HS_UNROLL
        for (int p = 0; p < P; p++) {
            const vf scale = Kv::scales(k[p] + at);
            HS_UNROLL
            for (int q = 0; q < Q; q++) s[q][p] = fma(part[q][p], scale, s[q][p]);
        }
    }
}

// out[q] += Σ_j weights[q][j] V[j] for positions [first, last), C vectors of 16 dims at once.
template <class Kv, int Q, int C>
void add_values(const Layer &layer, float *const *out, const float *const *weights, int first, int last, int dim) {
    vf acc[Q][C];
    HS_UNROLL
    for (int q = 0; q < Q; q++) {
        HS_UNROLL
        for (int c = 0; c < C; c++) acc[q][c] = load(out[q] + dim + 16 * c);
    }
    for (int j = first; j < last;) {
        const int page = j / GROUP, end = least(last, (page + 1) * GROUP);
        size_t offset = static_cast<size_t>(j % GROUP) * static_cast<size_t>(layer.wide) + static_cast<size_t>(dim);
        if constexpr (Kv::BLOCKS) offset += Kv::v_head(layer.step.head_dim);
        const typename Kv::Elem *v = layer.values<Kv>(page) + offset;
        // The next page's, behind the last one the first page's next dims, then what the partition after this one begins with.
        const typename Kv::Elem *ahead = static_cast<const typename Kv::Elem *>(layer.next);
        if (end < last) ahead = layer.values<Kv>(page + 1) + offset;
        else if (dim + 16 * C < layer.wide) ahead = layer.values<Kv>(first / GROUP) + offset + 16 * C;
        for (; j < end; j++, v += layer.wide, ahead += layer.wide) {
            prefetch_range(ahead, 16 * C * sizeof(*v));
            add_outer<Q, C>(acc, [&](int q) { return set1(weights[q][j]); }, [&](int c) { return Kv::get(v + 16 * c); });
        }
    }
    HS_UNROLL
    for (int q = 0; q < Q; q++) {
        HS_UNROLL
        for (int c = 0; c < C; c++) store(out[q] + dim + 16 * c, acc[q][c]);
    }
}

// The same where 32 dims share a scale: the scales of a block are multiplied into the weights first.
template <class Kv, int Q>
void add_block_values(const Layer &layer, float *const *out, const float *const *weights, int first, int last) {
    constexpr int C = Q * 2 <= MAX_SUMS ? 2 : 1;
    alignas(64) float scaled[Q][PARTITION];
    const float *rows[Q];
    for (int q = 0; q < Q; q++) rows[q] = scaled[q];
    for (int dim = 0; dim < layer.wide; dim += KV_BLOCK) {
        for (int page = first / GROUP; page * GROUP < last; page++) {
            const vf scale = Kv::scales(layer.values<Kv>(page) + static_cast<size_t>(dim / KV_BLOCK) * Kv::SCALES);
            const int at = page * GROUP;
            HS_UNROLL
            for (int q = 0; q < Q; q++) store(scaled[q] + at, mul(load(weights[q] + at), scale));
        }
        for (int c = 0; c < KV_BLOCK; c += 16 * C) add_values<Kv, Q, C>(layer, out, rows, first, last, dim + c);
    }
}

template <class Kv, int Q>
void add_all_values(const Layer &layer, float *const *out, const float *const *weights, int first, int last) {
    if (first >= last) return;
    if constexpr (Kv::BLOCKS) {
        add_block_values<Kv, Q>(layer, out, weights, first, last);
        return;
    }
    constexpr int C = Q * 4 <= MAX_SUMS ? 4 : Q * 2 <= MAX_SUMS ? 2 : 1;
    int dim = 0;
    for (; dim + 16 * C <= layer.wide; dim += 16 * C) add_values<Kv, Q, C>(layer, out, weights, first, last, dim);
    for (; dim < layer.wide; dim += 16) add_values<Kv, Q, 1>(layer, out, weights, first, last, dim);
}

// What Q queries see of one partition.
template <int Q> struct Seen {
    int first[Q], last[Q], low = PARTITION, high = 0, common_low = 0, common_high = PARTITION;

    explicit Seen(const Span *spans) {
        for (int q = 0; q < Q; q++) {
            first[q] = spans[q].first;
            last[q] = spans[q].last;
            low = least(low, first[q]);
            high = most(high, last[q]);
            common_low = most(common_low, first[q]);
            common_high = least(common_high, last[q]);
        }
    }
};

// Scores of P pages from `page` on, into scores[q][position]; raises `top`.
template <class Kv, int Q, int P>
HS_INLINE void score_pages(const Layer &layer, const Seen<Q> &seen, int page, int last_page, const float *queries, int stride, float (*scores)[PARTITION],
                           vf *top) {
    const int dims = layer.step.head_dim;
    const float cap = layer.step.softcap;
    const typename Kv::Elem *k[P], *ahead[P];
    HS_UNROLL
    for (int p = 0; p < P; p++) {
        k[p] = layer.keys<Kv>(page + p);
        // Behind the last page of K come the values.
        ahead[p] = page + P + p < last_page ? layer.keys<Kv>(page + P + p) : layer.values<Kv>(least(seen.low / GROUP + p, last_page - 1));
    }
    vf s[Q][P];
    if constexpr (Kv::BLOCKS)
        block_scores<Kv, Q, P>(k, ahead, dims, queries, stride, s);
    else
        page_scores<Kv, Q, P>(k, ahead, dims, queries, stride, s);
    HS_UNROLL
    for (int p = 0; p < P; p++) {
        const int at = (page + p) * GROUP;
        HS_UNROLL
        for (int q = 0; q < Q; q++) {
            vf x = s[q][p];
            if constexpr (Kv::FACTOR != 1.0f) x = mul(x, set1(Kv::FACTOR));
            if (cap > 0.0f) x = mul(tanh_v(div(x, set1(cap))), set1(cap));
            if (seen.first[q] > at || seen.last[q] < at + GROUP) x = keep_lanes(x, seen.first[q] - at, seen.last[q] - at, NEGATIVE_INFINITY);
            top[q] = max_v(top[q], x);
            store(scores[q] + at, x);
        }
    }
}

// One partition for Q queries: maxima, sums and unnormalised outputs (zeroed by the caller).
template <class Kv, int Q>
void one_partition(const Layer &layer, const float *queries, int stride, const Span *spans, float *maxima, float *sums, float *const *outs) {
    alignas(64) float scores[Q][PARTITION];
    const Seen<Q> seen(spans);
    const int *const first = seen.first, *const last = seen.last;
    const int common_low = seen.common_low, common_high = seen.common_high;
    const int first_page = seen.low / GROUP, last_page = (seen.high + GROUP - 1) / GROUP;
    vf top[Q], total[Q];
    for (int q = 0; q < Q; q++) top[q] = set1(NEGATIVE_INFINITY), total[q] = set1(0.0f);
    constexpr int P = PAGES_AT_ONCE<Q>;
    int page = first_page;
    for (; page + P <= last_page; page += P) score_pages<Kv, Q, P>(layer, seen, page, last_page, queries, stride, scores, top);
    for (; page < last_page; page++) score_pages<Kv, Q, 1>(layer, seen, page, last_page, queries, stride, scores, top);
    const float *weights[Q];
    for (int q = 0; q < Q; q++) {
        weights[q] = scores[q];
        maxima[q] = lane_max(top[q]);
        const vf shift = set1(maxima[q]);
        // Only a query's own pages: a page that it does not see adds zeros, but need not.
        for (int page = first[q] / GROUP; page * GROUP < last[q]; page++) {
            float *p = scores[q] + page * GROUP;
            const vf e = exp_v(sub(load(p), shift));
            total[q] = add(total[q], e);
            store(p, Kv::FACTOR == 1.0f ? e : mul(e, set1(Kv::FACTOR)));
        }
        sums[q] = lane_sum(total[q]);
    }
    // Positions that all queries see go together; the few at the edges one query at a time, in the same ascending order.
    const int middle = most(common_high, common_low);
    for (int q = 0; q < Q; q++) {
        float *const out[1] = {outs[q]};
        const float *const weight[1] = {weights[q]};
        add_all_values<Kv, 1>(layer, out, weight, first[q], least(common_low, last[q]));
    }
    add_all_values<Kv, Q>(layer, outs, weights, common_low, middle);
    for (int q = 0; q < Q; q++) {
        float *const out[1] = {outs[q]};
        const float *const weight[1] = {weights[q]};
        add_all_values<Kv, 1>(layer, out, weight, most(middle, first[q]), last[q]);
    }
}

using PartitionFunction = void (*)(const Layer &, const float *, int, const Span *, float *, float *, float *const *);

template <class Kv> PartitionFunction partition_function(int queries) {
    switch (queries) {
        case 1: return &one_partition<Kv, 1>;
        case 2: return &one_partition<Kv, 2>;
        case 3: return &one_partition<Kv, 3>;
        case 4: return &one_partition<Kv, 4>;
        case 5: return &one_partition<Kv, MAX_QUERIES >= 6 ? 5 : 1>;
        case 6: return &one_partition<Kv, MAX_QUERIES >= 6 ? 6 : 1>;
        case 7: return &one_partition<Kv, MAX_QUERIES >= 8 ? 7 : 1>;
        default: return &one_partition<Kv, MAX_QUERIES >= 8 ? 8 : 1>;
    }
}

PartitionFunction partition_function(int kv_type, int queries) {
    if (kv_type == HS_F16) return partition_function<KvF16>(queries);
    if (kv_type == HS_BF16) return partition_function<KvBF16>(queries);
    if (kv_type == HS_Q8_0) return partition_function<KvQ8>(queries);
    if (kv_type == HS_F8) return partition_function<KvF8>(queries);
    return partition_function<KvF32>(queries);
}

size_t key_page_bytes(int kv_type, int dims) {
    if (kv_type == HS_F16 || kv_type == HS_BF16) return KvF16::k_elems(dims) * 2;
    if (kv_type == HS_Q8_0) return KvQ8::k_elems(dims);
    if (kv_type == HS_F8) return KvF8::k_elems(dims);
    return KvF32::k_elems(dims) * 4;
}

// Rows of one tile with one kv head.
struct Item {
    const hs_step &step;
    const hs_batch &batch;
    int first_row, rows, kv_head, pool_pages;

    int group() const { return step.heads / step.kv_heads; }
    int query_count() const { return rows * group(); }
    Query query(int index) const {
        const int row = first_row + index / group(), head = kv_head * group() + index % group();
        const int position = batch.positions[row];
        const int first = step.window > 0 ? most(0, position - step.window + 1) : 0;
        return {step.src + step.src_stride * row + static_cast<int64_t>(head) * step.q_step, row, head, first, position + 1, false, 0.0f, 0.0f};
    }
    const int32_t *table() const {
        const int64_t lane = static_cast<int64_t>(step.kv_group) * batch.lanes + batch.row_lanes[first_row];
        return batch.tables + lane * batch.lane_pages;
    }
    Pages pages(int partition) const { return {table(), partition, first_page(partition), last_page(partition) + 1, step.partial != 0}; }
    Layer layer(const Pages &pages) const { return {step, pages.list(), kv_head, padded(step.head_dim), pool_pages, table()}; }
    int first_page(int partition) const { return most(query(0).first, partition * PARTITION) / GROUP; }
    int last_page(int partition) const { return least(batch.positions[first_row + rows - 1], partition * PARTITION + PARTITION - 1) / GROUP; }
    // Where the keys of a partition begin, or something harmless where none are here.
    const void *keys_of(int partition) const {
        const int32_t *of = table(), end = last_page(partition);
        int page = first_page(partition);
        while (page < end && of[page] < 0) page++;
        if (of[page] < 0) return of;
        return step.k_pool + kv_block(kv_head, of[page], pool_pages) * key_page_bytes(step.kv_type, step.head_dim);
    }
    Span span(const Query &query, const Pages &pages, int partition) const { return pages.seen(query.first, query.last, partition * PARTITION); }
    int first_partition() const { return query(0).first / PARTITION; }
    int last_partition() const { return batch.positions[first_row + rows - 1] / PARTITION; }
};

// What a query's output is multiplied by: one over the sum of its exponentials, that of the head's sink among them.
float normaliser(const hs_step &step, const Query &query) {
    if (!step.weight) return 1.0f / query.sum;
    const float sink = step.weight[query.head], top = query.max > sink ? query.max : sink;
    alignas(64) float scales[16] = {query.max - top, sink - top};
    store(scales, exp_v(load(scales)));
    return scales[0] / (query.sum * scales[0] + scales[1]);
}

// A query's logarithm of the sum of its exponentials goes behind all heads' outputs; no row here, and it is that of 0.
void finish_partial(const hs_step &step, const Query &query, const float *out) {
    float *row = step.dst + step.dst_stride * query.row, *dst = row + static_cast<int64_t>(query.head) * step.head_dim;
    row[step.heads * step.head_dim + query.head] = query.started ? query.max + std::log(query.sum) : NEGATIVE_INFINITY;
    const float scale = query.started ? 1.0f / query.sum : 0.0f;
    for (int c = 0; c < step.head_dim; c++) dst[c] = query.started ? out[c] * scale : 0.0f;
}

// The first `count` (at most 16) of the floats at `p`, the rest zeros.
vf load_some(const float *p, int count) {
    if (count >= 16) return load(p);
    alignas(64) float some[16] = {};
    std::memcpy(some, p, sizeof(float) * static_cast<size_t>(count));
    return load(some);
}

void store_some(float *p, vf x, int count) {
    if (count >= 16) {
        store(p, x);
        return;
    }
    alignas(64) float some[16];
    store(some, x);
    std::memcpy(p, some, sizeof(float) * static_cast<size_t>(count));
}

void finish(const hs_step &step, const Query &query, const float *out) {
    if (step.partial) return finish_partial(step, query, out);
    float *dst = step.dst + step.dst_stride * query.row + static_cast<int64_t>(query.head) * step.head_dim;
    const float *gate = step.gated ? query.source + step.head_dim : nullptr;
    const vf scale = set1(normaliser(step, query));
    for (int c = 0; c < step.head_dim; c += 16) {
        const int count = step.head_dim - c;
        vf x = mul(load(out + c), scale);
        if (gate) x = mul(x, sigmoid_v(load_some(gate + c, count)));
        store_some(dst + c, x, count);
    }
    if (step.activation) {
        ActBlock *blocks = reinterpret_cast<ActBlock *>(step.activation) + static_cast<int64_t>(query.row) * (step.width / 32);
        const int from = query.head * step.head_dim / 32;
        quantise_blocks(step.dst + step.dst_stride * query.row, blocks, from, from + step.head_dim / 32);
    }
}

// Queries of a tile that walk its partitions together, so that a partition is read once for all of them: this many floats
// of them, and no more than so many.
constexpr int TOGETHER = 48, TOGETHER_FLOATS = 24 * MAX_HEAD_DIM;

struct Scratch {
    alignas(64) float scaled[TOGETHER_FLOATS];
    alignas(64) float out[TOGETHER_FLOATS];
    alignas(64) float part[MAX_QUERIES][MAX_HEAD_DIM];
};

// How many queries of a tile go together, a multiple of MAX_QUERIES.
int together(const hs_step &step) { return least(TOGETHER, TOGETHER_FLOATS / padded(step.head_dim)) / MAX_QUERIES * MAX_QUERIES; }

int take_queries(const Item &item, int from, int most_queries, Query *info, float *scaled) {
    const int count = least(most_queries, item.query_count() - from), dims = item.step.head_dim;
    for (int q = 0; q < count; q++, scaled += padded(dims)) {
        info[q] = item.query(from + q);
        for (int d = 0; d < dims; d++) scaled[d] = info[q].source[d] * item.step.scale;
    }
    return count;
}

void compute_partition(const Layer &layer, const Span *spans, int count, const float *scaled, Scratch &scratch, float *maxima, float *sums) {
    float *outs[MAX_QUERIES];
    for (int q = 0; q < count; q++) {
        outs[q] = scratch.part[q];
        std::memset(outs[q], 0, sizeof(float) * static_cast<size_t>(layer.wide));
    }
    partition_function(layer.step.kv_type, count)(layer, scaled, layer.wide, spans, maxima, sums, outs);
}

void run_whole(const Item &item) {
    Scratch scratch;
    Query info[TOGETHER];
    Span spans[MAX_QUERIES];
    float maxima[MAX_QUERIES], sums[MAX_QUERIES];
    const int wide = padded(item.step.head_dim);
    for (int from = 0; from < item.query_count(); from += together(item.step)) {
        const int all = take_queries(item, from, together(item.step), info, scratch.scaled);
        for (int p = item.first_partition(); p <= item.last_partition(); p++) {
            const Pages pages = item.pages(p);
            if (pages.empty()) continue;
            Layer layer = item.layer(pages);
            if (p < item.last_partition()) layer.next = item.keys_of(p + 1);
            for (int at = 0; at < all; at += MAX_QUERIES) {
                const int count = least(MAX_QUERIES, all - at);
                bool any = false;
                for (int q = 0; q < count; q++) {
                    spans[q] = item.span(info[at + q], pages, p);
                    any = any || spans[q].first < spans[q].last;
                }
                if (!any) continue;
                compute_partition(layer, spans, count, scratch.scaled + at * wide, scratch, maxima, sums);
                for (int q = 0; q < count; q++) {
                    Query &query = info[at + q];
                    if (spans[q].first == spans[q].last) continue;
                    merge(query.max, query.sum, scratch.out + (at + q) * wide, maxima[q], sums[q], scratch.part[q], wide, query.started);
                    query.started = true;
                }
            }
        }
        for (int q = 0; q < all; q++) finish(item.step, info[q], scratch.out + q * wide);
    }
}

// Where a query's partial result of one partition lies: maximum, sum, 14 unused floats, then the output.
float *partial_at(const Item &item, int item_index, int partition, int partitions, int query) {
    const int64_t size = 16 + padded(item.step.head_dim);
    return item.step.partials + ((static_cast<int64_t>(item_index) * partitions + partition) * item.group() + query) * size;
}

// A query's result of one partition, to its place among the partial ones; a sum of 0 says that it sees nothing there.
void run_part(const Item &item, const Pages &pages, Layer layer, int item_index, int partition, int partitions) {
    Scratch scratch;
    Query info[MAX_QUERIES];
    Span spans[MAX_QUERIES];
    float maxima[MAX_QUERIES], sums[MAX_QUERIES];
    for (int from = 0; from < item.query_count(); from += MAX_QUERIES) {
        const int count = take_queries(item, from, MAX_QUERIES, info, scratch.scaled);
        for (int q = 0; q < count; q++) spans[q] = item.span(info[q], pages, partition);
        const bool any = spans[0].first < spans[0].last;   // of one row, so all of them do or none
        if (any) compute_partition(layer, spans, count, scratch.scaled, scratch, maxima, sums);
        for (int q = 0; q < count; q++) {
            float *partial = partial_at(item, item_index, partition, partitions, from + q);
            partial[1] = any ? sums[q] : 0.0f;
            if (!any) continue;
            partial[0] = maxima[q];
            std::memcpy(partial + 16, scratch.part[q], sizeof(float) * static_cast<size_t>(layer.wide));
        }
    }
}

void merge_parts(const Item &item, int item_index, int partitions) {
    alignas(64) float out[MAX_HEAD_DIM];
    for (int index = 0; index < item.query_count(); index++) {
        Query query = item.query(index);
        for (int p = item.first_partition(); p <= item.last_partition(); p++) {
            const float *partial = partial_at(item, item_index, p, partitions, index);
            if (partial[1] == 0.0f) continue;
            merge(query.max, query.sum, out, partial[0], partial[1], partial + 16, padded(item.step.head_dim), query.started);
            query.started = true;
        }
        finish(item.step, query, out);
    }
}

constexpr int SPLIT_ITEMS = 4;   // below this many items per thread, single-row tiles are split by partition

int item_count(const Run &run, const hs_step &step) { return run.tile_count * step.kv_heads; }

Item item_at(const Run &run, const hs_step &step, int index) {
    const int32_t *tile = run.program.tiles + 2 * (index / step.kv_heads);
    return {step, run.batch, tile[0], tile[1], index % step.kv_heads, run.pool_pages(step)};
}

bool has(const Item &item, int partition) { return partition >= item.first_partition() && partition <= item.last_partition(); }

bool is_split(const Run &run, const hs_step &step) {
    return run.threads > 1 && run.tile_rows_most == 1 && run.partitions > 1 && item_count(run, step) < SPLIT_ITEMS * run.threads;
}

}  // namespace

void cut_tiles(Run &run) {
    const hs_batch &batch = run.batch;
    int32_t *tiles = run.program.tiles;
    for (int row = 0; row < batch.rows;) {
        int length = 1;
        while (row + length < batch.rows && length < TILE_ROWS && batch.row_lanes[row + length] == batch.row_lanes[row] &&
               batch.positions[row + length] == batch.positions[row] + length)
            length++;
        tiles[2 * run.tile_count] = row;
        tiles[2 * run.tile_count + 1] = length;
        run.tile_count++;
        row += length;
        run.tile_rows_most = most(run.tile_rows_most, length);
        run.partitions = most(run.partitions, batch.positions[row - 1] / PARTITION + 1);
    }
}

size_t partial_floats(int threads, int heads, int kv_heads, int head_dim, int lane_pages) {
    const size_t partitions = (static_cast<size_t>(lane_pages) + PAGES - 1) / PAGES;
    return static_cast<size_t>(SPLIT_ITEMS * threads) * partitions * static_cast<size_t>(heads / kv_heads) *
           static_cast<size_t>(16 + padded(head_dim));
}

int attention_chunks(const Run &run, const hs_step &step) {
    return item_count(run, step) * (is_split(run, step) ? run.partitions : 1);
}

void attention_chunk(const Run &run, const hs_step &step, int chunk) {
    if (!is_split(run, step)) {
        run_whole(item_at(run, step, chunk));
        return;
    }
    const int index = chunk / run.partitions, partition = chunk % run.partitions;
    const Item item = item_at(run, step, index);
    if (!has(item, partition)) return;
    const Pages pages = item.pages(partition);
    Layer layer = item.layer(pages);
    // A thread takes its chunks in order.
    const int next = chunk + 1;
    if (next < attention_chunks(run, step)) {
        const Item then = item_at(run, step, next / run.partitions);
        if (has(then, next % run.partitions)) layer.next = then.keys_of(next % run.partitions);
    }
    run_part(item, pages, layer, index, partition, run.partitions);
}

int merge_chunks(const Run &run, const hs_step &step) { return is_split(run, step) ? item_count(run, step) : 0; }

void merge_chunk(const Run &run, const hs_step &step, int chunk) { merge_parts(item_at(run, step, chunk), chunk, run.partitions); }

}  // namespace hs
