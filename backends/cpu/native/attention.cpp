// Paged attention: softmax(scale q K^T) V over the pages of a sequence.
//
// The rule: the bits of a row's result depend on its position and its sequence's KV rows alone. So positions are cut into
// partitions of PARTITION from position 0 on, whatever the chunking of the prompt; each partition gives a maximum, a sum
// of exponentials and an unnormalised output in one fixed order of operations; and partitions are merged one by one,
// ascending, by one function. A long decode may then spread its partitions over threads (split mode) and gets the same
// bits as a prefill that walks them in a loop.
//
// A work item is a tile (up to TILE_ROWS consecutive rows of one sequence) times a kv head: all its queries (rows times
// the heads of the group) share the loads of K and V, MAX_QUERIES at a time (attention_kernels.h). Keys that a query must not
// see are masked in the scores by lane and left out of the sum over V, never multiplied by zero: an unwritten slot may hold
// anything.
//
// Memory bounds a decode: each page of K and V is read once for all heads of the group. What is needed next is prefetched a
// page ahead, in the order in which it will be read (K of a partition, its V, K of what this thread will likely take next):
// earlier would be too early, since lines on their way from memory and lines on their way from L2 wait in the same few
// buffers of a core. Arithmetic bounds a prefill: a few pages at a time are opened into floats for all queries of a tile, and
// as many sums as there are registers stay in them.
//
// Sinks are one more logit of a head, without a value: they join a query's sum once, after its last partition.
//
// Partial attention: some pages of a sequence lie on other ranks (-1 in its table). What a partition is made of is then its
// own pages, moved together in their order, and each query sees a range of those; the kernels know of nothing else. The rule
// holds: what is here of a partition depends on the sequence alone. A head gives its output and its log-sum-exp.
#include <cmath>

#include "attention_kernels.h"

namespace hs {
namespace {

constexpr int TILE_ROWS = 16;   // consecutive rows of one sequence that share their loads of K and V

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
    const uint8_t *page_at(int number, bool keys) const {
        return (keys ? step.k_pool : step.v_pool) + kv_block(kv_head, number, pool_pages) * head_page_bytes(step.kv_type, step.head_dim, keys);
    }
    int first_page(int partition) const { return most(query(0).first, partition * PARTITION) / GROUP; }
    int last_page(int partition) const { return least(batch.positions[first_row + rows - 1], partition * PARTITION + PARTITION - 1) / GROUP; }
    // Where the keys of a partition begin, or something harmless where none are here.
    const void *keys_of(int partition) const {
        const int32_t *of = table(), end = last_page(partition);
        int page = first_page(partition);
        while (page < end && of[page] < 0) page++;
        if (of[page] < 0) return of;
        return page_at(of[page], true);
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

// Floats of opened pages, 64 KiB: smaller blocks pay more for sums that come and go, and half of L2 is for what they are made of.
constexpr int OPEN_FLOATS = 16384;

struct Scratch {
    alignas(64) float scaled[TOGETHER_FLOATS];
    alignas(64) float out[TOGETHER_FLOATS];
    alignas(64) float part[TOGETHER_FLOATS];
    alignas(64) float scores[TOGETHER][PARTITION];   // then weights
    alignas(64) float opened[OPEN_FLOATS];
    Span spans[TOGETHER];
    float max[TOGETHER], sum[TOGETHER];
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

// What is read of one partition: own pages of one sequence and kv head. `next` is what will likely be read after it: a hint.
struct Pass {
    const Item &item;
    const Pages &pages;
    const void *next;
    int queries;   // of the scratch
    int first, end;   // pages that any of them sees

    Pass(const Item &item, const Pages &pages, const void *next, int queries, const Span *spans)
        : item(item), pages(pages), next(next), queries(queries), first(PAGES), end(0) {
        for (int q = 0; q < queries; q++) {
            if (spans[q].empty()) continue;
            first = least(first, spans[q].first / GROUP);
            end = most(end, (spans[q].last + GROUP - 1) / GROUP);
        }
    }

    bool straight() const { return is_straight(item.step.kv_type, item.query_count()); }
    const void *page(int number, bool keys) const { return item.page_at(pages.list()[number], keys); }

    // Calls `use` with each block of the K or V of what the queries see: all of it where it lies, or a few opened pages.
    template <class Use> void blocks(bool keys, float *opened, Use use) const {
        const hs_step &step = item.step;
        const int wide = padded(step.head_dim);
        Block block{first, end, step.head_dim, wide, {}};
        // Behind the last page of K come the values, then what is read next.
        const auto after = [&](int number) { return number < end ? page(number, keys) : keys ? page(least(first + number - end, end - 1), false) : next; };
        if (straight()) {
            for (int number = first; number < end + 4; number++) block.at[number - first] = after(number);
            use(block);
            return;
        }
        const int each = most(1, OPEN_FLOATS / (GROUP * wide));
        for (block.first = first; block.first < end; block.first = block.end) {
            block.end = least(end, block.first + each);
            const int size = keys ? GROUP * step.head_dim : GROUP * wide;
            for (int number = block.first; number < block.end; number++) {
                float *to = opened + (number - block.first) * size;
                open_page(step.kv_type, step.head_dim, keys, page(number, keys), after(number + 1), to);
                block.at[number - block.first] = to;
            }
            for (int i = 0; i < 4; i++) block.at[block.end - block.first + i] = opened;
            use(block);
        }
    }

    // The queries MAX_QUERIES at a time, where any of them sees something.
    template <class Do> void groups(const Span *spans, Do some) const {
        for (int at = 0; at < queries; at += MAX_QUERIES) {
            const int count = least(MAX_QUERIES, queries - at);
            bool any = false;
            for (int q = at; q < at + count; q++) any = any || !spans[q].empty();
            if (any) some(at, kernels_for(item.step.kv_type, straight(), count));
        }
    }
};

// One partition for the queries in `scratch`, whose spans of it are there: maxima, sums, unnormalised outputs.
void run_partition(const Pass &pass, Scratch &scratch) {
    const hs_step &step = pass.item.step;
    const int wide = padded(step.head_dim);
    const float *queries[TOGETHER];
    float *scores[TOGETHER], *outs[TOGETHER];
    for (int q = 0; q < pass.queries; q++) {
        queries[q] = scratch.scaled + q * wide;
        scores[q] = scratch.scores[q];
        outs[q] = scratch.part + q * wide;
    }
    pass.blocks(true, scratch.opened, [&](const Block &block) {
        pass.groups(scratch.spans, [&](int at, const Kernels &kernels) {
            kernels.scores(block, scratch.spans + at, queries + at, scores + at);
        });
    });
    const float factor = pass.straight() && step.kv_type == HS_F8 ? KvF8::FACTOR : 1.0f;
    for (int q = 0; q < pass.queries; q++)
        if (!scratch.spans[q].empty()) weigh_scores(scratch.scores[q], scratch.spans[q], factor, step.softcap, scratch.max[q], scratch.sum[q]);
    std::memset(scratch.part, 0, sizeof(float) * static_cast<size_t>(wide * pass.queries));
    pass.blocks(false, scratch.opened, [&](const Block &block) {
        pass.groups(scratch.spans, [&](int at, const Kernels &kernels) { kernels.values(block, scratch.spans + at, outs + at, scores + at); });
    });
}

void run_whole(const Item &item) {
    Scratch scratch;
    Query info[TOGETHER];
    const int wide = padded(item.step.head_dim);
    for (int from = 0; from < item.query_count(); from += together(item.step)) {
        const int all = take_queries(item, from, together(item.step), info, scratch.scaled);
        for (int p = item.first_partition(); p <= item.last_partition(); p++) {
            const Pages pages = item.pages(p);
            for (int q = 0; q < all; q++) scratch.spans[q] = item.span(info[q], pages, p);
            const Pass pass(item, pages, p < item.last_partition() ? item.keys_of(p + 1) : item.table(), all, scratch.spans);
            if (pass.first >= pass.end) continue;
            run_partition(pass, scratch);
            for (int q = 0; q < all; q++) {
                Query &query = info[q];
                if (scratch.spans[q].empty()) continue;
                merge(query.max, query.sum, scratch.out + q * wide, scratch.max[q], scratch.sum[q], scratch.part + q * wide, wide, query.started);
                query.started = true;
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
void run_part(const Item &item, const void *next, int item_index, int partition, int partitions) {
    Scratch scratch;
    Query info[TOGETHER];
    const int wide = padded(item.step.head_dim);
    const Pages pages = item.pages(partition);
    for (int from = 0; from < item.query_count(); from += together(item.step)) {
        const int all = take_queries(item, from, together(item.step), info, scratch.scaled);
        for (int q = 0; q < all; q++) scratch.spans[q] = item.span(info[q], pages, partition);
        const Pass pass(item, pages, next, all, scratch.spans);
        if (pass.first < pass.end) run_partition(pass, scratch);
        for (int q = 0; q < all; q++) {
            float *partial = partial_at(item, item_index, partition, partitions, from + q);
            partial[1] = scratch.spans[q].empty() ? 0.0f : scratch.sum[q];
            if (scratch.spans[q].empty()) continue;
            partial[0] = scratch.max[q];
            std::memcpy(partial + 16, scratch.part + q * wide, sizeof(float) * static_cast<size_t>(wide));
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
    const void *after = item.table();
    // A thread takes its chunks in order.
    const int next = chunk + 1;
    if (next < attention_chunks(run, step)) {
        const Item then = item_at(run, step, next / run.partitions);
        if (has(then, next % run.partitions)) after = then.keys_of(next % run.partitions);
    }
    run_part(item, after, index, partition, run.partitions);
}

int merge_chunks(const Run &run, const hs_step &step) { return is_split(run, step) ? item_count(run, step) : 0; }

void merge_chunk(const Run &run, const hs_step &step, int chunk) { merge_parts(item_at(run, step, chunk), chunk, run.partitions); }

}  // namespace hs
