// Histograms of mass, and the end of a prefix of an order by them. sample.h says why.
#pragma once

// Before a loop that stays one: its body is long, and what it waits for is not the branch.
#if defined(EMULATED)
#define ROLLED
#else
#define ROLLED _Pragma("unroll 1")
#endif

struct Bins { u32 *low, *high, *count; };   // block memory, [BINS] each; mass = high 2^32 + low

DEVICE void clear_bins(const Bins &bins) {
    for (int i = thread(); i < BINS; i += threads()) bins.low[i] = 0, bins.high[i] = 0, bins.count[i] = 0;
    block_barrier();
}

DEVICE void add_to_bin(const Bins &bins, int bin, u64 mass) {
    atomic_add(&bins.count[bin], 1u);
    if (mass == 0) return;
    const u32 low = (u32)mass;
    const u32 before = atomic_add(&bins.low[bin], low);
    const u32 high = (u32)(mass >> 32) + (before + low < before ? 1u : 0u);   // no two additions see the same `before`
    if (high) atomic_add(&bins.high[bin], high);
}

DEVICE u64 bin_mass(const Bins &bins, int bin) { return (u64)bins.high[bin] << 32 | bins.low[bin]; }

// Block (chunk, row) of sample_count: the row's histogram over `below`, and the mass of each chunk.
DEVICE void count(const float *logits, const float *z, const SampleRow *rows, u8 *work_memory, int vocab, int pitch) {
    SHARED(u32, low, BINS);
    SHARED(u32, high, BINS);
    SHARED(u32, counted, BINS);
    SHARED(u64, part, CHUNK_THREADS / WARP);
    const Bins bins = {low, high, counted};
    const SampleRow &row = rows[block_y()];
    const Work work = work_of(work_memory, block_y(), vocab);
    const u64 packed_best = best_of(work, vocab, part);
    if (is_greedy(row, packed_best)) return;
    const float best = packed_value(packed_best), temperature = row.temperature;
    clear_bins(bins);
    const int first = block_x() * CHUNK, end = first + CHUNK < vocab ? first + CHUNK : vocab;
    u32 massless = 0;
    each_token(seen_row(row, logits, z, vocab, pitch), first, end, [&](int, float v) {
        const float below = (best - v) / temperature;
        if (below < MASSLESS) add_to_bin(bins, bin_of(below), mass_of(below));
        else massless++;
    });
    if (massless) atomic_add(&counted[BINS - 1], massless);
    block_barrier();
    u64 all = 0;
    for (int i = thread(); i < BINS; i += threads()) {
        const u64 mass = bin_mass(bins, i);
        if (mass) atomic_add(&work.mass[i], mass);
        if (counted[i]) atomic_add(&work.count[i], counted[i]);
        all += mass;
    }
    all = block_fold<false>(all, part);
    if (thread() == 0) work.part[block_x()] = all;
}

// ------------------------------------------------------------------------------------------------------------- prefix

// Sum of the values of all threads before this one. `part`: threads() / WARP of block memory.
DEVICE u64 sum_before(u64 v, u64 *part) {
    u64 sum = v;
    ROLLED for (int by = 1; by < WARP; by *= 2) {
        const u64 other = shuffle64(sum, lane() >= by ? lane() - by : lane());
        if (lane() >= by) sum += other;
    }
    block_barrier();
    if (lane() == WARP - 1) part[warp()] = sum;
    block_barrier();
    for (int i = 0; i < warp(); i++) sum += part[i];
    return sum - v;
}

// Where a prefix ends: the first of some bins at which their amounts, from the first on, reach `needed`.
struct End { int bin; u64 before, amount; };   // what the bins before it have, and itself

// `amount` of each thread's `PER` bins, in order; `found`: block memory of 3. `needed` is at least one and at most all.
template <int PER> DEVICE End end_of(const u64 (&amount)[PER], u64 needed, u64 *part, u64 *found) {
    u64 mine = 0;
    UNROLL for (int i = 0; i < PER; i++) mine += amount[i];
    u64 before = sum_before(mine, part);
    UNROLL for (int i = 0; i < PER; i++) {
        if (before < needed && needed <= before + amount[i]) {
            found[0] = (u64)(thread() * PER + i);
            found[1] = before;
            found[2] = amount[i];
        }
        before += amount[i];
    }
    block_barrier();
    return {(int)found[0], found[1], found[2]};
}

// Of a share of some mass, at least one unit.
DEVICE u64 needed_of(u64 mass, u64 share) {
    bool rest;
    u64 whole = share_of(mass, share, rest);
    whole += rest ? 1 : 0;
    return whole ? whole : 1;
}

DEVICE bool has_top_k(const SampleRow &row, int vocab) { return row.top_k > 0 && row.top_k < vocab; }
DEVICE bool has_reach(const SampleRow &row) { return float_bits(row.reach) != INFINITY_BITS; }
DEVICE bool is_filtered(const SampleRow &row, int vocab) {
    return has_top_k(row, vocab) || row.typical_p < WHOLE || row.top_p < WHOLE || has_reach(row);
}

// The chunk in which a mass is reached, by ids, and what is left of it there.
DEVICE End chunk_of(const Work &work, int vocab, u64 needed) {
    u64 before = 0;
    int chunk = 0;
    ROLLED while (chunk < chunks_of(vocab) - 1 && before + work.part[chunk] < needed) before += work.part[chunk++];
    return {chunk, before, 0};
}

DEVICE u64 bin_key(int bin) { return bin == BINS ? (u64)(INFINITY_BITS + 1) << ID_BITS : key_of((float)bin * BIN_WIDTH, 0); }

// What the histogram of the whole row tells of the row's first step.
struct First {
    u64 mass;                  // of all tokens
    u64 needed, low, high;     // of the step's search; needed 0: it has to look by itself
    int bin;                   // nothing behind it is kept
    bool listed;               // sample_gather has made a list of the tokens up to there
};

template <int PER> DEVICE First first_step(const SampleRow &row, const Work &work, int vocab, u64 *part, u64 *found) {
    u64 mass[PER], count[PER], sum = 0;
    UNROLL for (int i = 0; i < PER; i++) {
        mass[i] = work.mass[thread() * PER + i];
        count[i] = work.count[thread() * PER + i];
        sum += mass[i];
    }
    First first = {block_fold<false>(sum, part), 0, 0, 0, BINS - 1, false};
    if (!is_filtered(row, vocab)) {
        bool rest;
        const u64 needed = share_of(first.mass, chance_of(row.seed, row.position), rest) + 1;
        const End end = chunk_of(work, vocab, needed);
        first.needed = needed - end.before;
        first.low = (u64)end.bin * CHUNK;
        first.high = first.low + CHUNK < (u64)vocab ? first.low + CHUNK : (u64)vocab;
        return first;
    }
    const bool by_count = has_top_k(row, vocab);
    if (by_count || (row.typical_p == WHOLE && row.top_p < WHOLE)) {
        u64 amount[PER];
        UNROLL for (int i = 0; i < PER; i++) amount[i] = by_count ? count[i] : mass[i];
        const u64 needed = by_count ? (u64)row.top_k : needed_of(first.mass, row.top_p);
        const End end = end_of<PER>(amount, needed, part, found);
        first.needed = needed - end.before;
        first.bin = end.bin;
        first.low = bin_key(end.bin);
        first.high = bin_key(end.bin + 1);
    } else {
        first.bin = row.typical_p == WHOLE ? bin_of(row.reach) : BINS - 2;   // tokens without mass are none of the typical ones
    }
    u64 size = 0;
    UNROLL for (int i = 0; i < PER; i++) size += thread() * PER + i <= first.bin ? count[i] : 0;
    first.listed = block_fold<false>(size, part) <= LIST;
    return first;
}

// Block (chunk, row) of sample_gather: keys of the chunk's tokens up to the first filter's end, where they are few enough.
DEVICE void gather(const float *logits, const float *z, const SampleRow *rows, u8 *work_memory, int vocab, int pitch) {
    SHARED(u64, part, CHUNK_THREADS / WARP);
    SHARED(u64, found, 3);
    SHARED(u32, taken, 1);
    const SampleRow &row = rows[block_y()];
    const Work work = work_of(work_memory, block_y(), vocab);
    const u64 packed_best = best_of(work, vocab, part);
    if (is_greedy(row, packed_best)) return;
    if (!is_filtered(row, vocab)) return;
    const First filter = first_step<BINS / CHUNK_THREADS>(row, work, vocab, part, found);
    if (!filter.listed) return;
    const float best = packed_value(packed_best), temperature = row.temperature;
    const float *v = seen_row(row, logits, z, vocab, pitch);
    const int first = block_x() * CHUNK, end = first + CHUNK < vocab ? first + CHUNK : vocab;
    u32 mine = 0;
    each_token(v, first, end, [&](int, float value) { mine += bin_of((best - value) / temperature) <= filter.bin; });
    if (thread() == 0) taken[0] = 0;
    block_barrier();
    u32 at = mine ? atomic_add(taken, mine) : 0;
    block_barrier();
    if (thread() == 0 && taken[0]) found[0] = atomic_add(work.listed, taken[0]);
    block_barrier();
    at += (u32)found[0];
    if (mine == 0) return;
    each_token(v, first, end, [&](int id, float value) {
        const float below = (best - value) / temperature;
        if (bin_of(below) <= filter.bin) work.list[at++] = key_of(below, id);
    });
}

// ------------------------------------------------------------------------------------------------------------- select

// Tokens of a row as keys: those of a list, or all.
struct Source {
    const u64 *list;   // null: all
    int listed;
    const float *row;
    int vocab;
    float best, temperature;
};

// f(key) of the source's tokens; of a row, only ids first .. end - 1 need be looked at.
template <class F> DEVICE void each_key(const Source &s, int first, int end, F f) {
    const int stop = s.list ? s.listed : end;
    ROLLED for (int at = (s.list ? 0 : first) + thread(); at < stop; at += threads())
        f(s.list ? s.list[at] : key_of((s.best - s.row[at]) / s.temperature, at));
}

// What the filters so far have left. In block memory: it is read rarely enough, and scalar registers are few.
struct Kept {
    u64 last;                 // largest key in order of the logits
    u64 last_surprise;        // and in that of typical_p, where `typical`
    float log_mass, entropy;
    float reach;              // largest `below`
    u32 typical;
};

// Nothing is filtered yet.
DEVICE void keep_all(Kept &kept) {
    if (thread() == 0) kept = {~0ull, ~0ull, 0.0f, 0.0f, bits_float(INFINITY_BITS), 0};
    block_barrier();
}

enum Order { BY_LOGIT, BY_SURPRISE, BY_ID };

DEVICE u64 surprise_of(const Kept &kept, u64 key) {
    const float surprise = key_below(key) + kept.log_mass;
    return key_of(abs_(surprise - kept.entropy), key_id(key));
}

DEVICE bool is_kept(const Kept &kept, u64 key) {
    return key <= kept.last && key_below(key) <= kept.reach && (!kept.typical || surprise_of(kept, key) <= kept.last_surprise);
}

// The end of a prefix is looked for among keys low .. high - 1 of an order; what is before `low` does not count any more.
// `needed`: a mass, or a number of tokens; 0: the `share` of the mass that is kept, and of an order of ids, one unit more.
// `exact`: the last token's own key is wanted, not just one that parts it from those behind it.
struct Search { Order order; bool by_mass, exact; u64 needed, share, low, high; };

// typical_p orders by |surprise - entropy|, both natural logarithms of what is kept. `distance`: the sum of each mass times
// how far below the best it is.
DEVICE void note_surprise(Kept &kept, u64 mass, u64 distance) {
    if (thread() == 0) {
        kept.log_mass = log_((float)((double)mass * (1.0 / UNITS)));
        kept.entropy = (float)((double)kept.log_mass + (double)distance / (double)mass);
    }
    block_barrier();
}

DEVICE u64 needed_by(const Search &search, Kept &kept, u64 mass, u64 distance) {
    if (search.order == BY_SURPRISE) note_surprise(kept, mass, distance);
    bool rest;
    return search.order == BY_ID ? share_of(mass, search.share, rest) + 1 : needed_of(mass, search.share);
}

// The key of the token at which the kept ones, in the search's order, reach the needed mass or number; unless it has to be
// exact, one between that and the next token's. A pass of the loop sums up what is kept, or puts it into bins: one body for
// both keeps the code short.
DEVICE u64 select(const Source &s, Kept &kept, Search search, const Bins &bins, u64 *part, u64 *found) {
    const bool by_id = search.order == BY_ID;
    ROLLED while (search.needed == 0 || search.high - search.low > 1) {
        const bool summing = search.needed == 0;
        int shift = 0;
        while ((search.high - 1 - search.low) >> shift >= BINS) shift++;
        u64 mass = 0, distance = 0;
        clear_bins(bins);
        each_key(s, by_id ? (int)search.low : 0, by_id ? (int)search.high : s.vocab, [&](u64 key) {
            if (!is_kept(kept, key)) return;
            const float below = key_below(key);
            const float weight = below < MASSLESS ? exp_(-below) * UNITS : 0.0f;
            if (summing) {
                mass += (u64)weight;
                distance += weight > 0.0f ? (u64)(weight * below) : 0;
                return;
            }
            const u64 place = by_id ? (u64)key_id(key) : search.order == BY_LOGIT ? key : surprise_of(kept, key);
            if (place < search.low || place >= search.high) return;
            add_to_bin(bins, (int)((place - search.low) >> shift), search.by_mass ? (u64)weight : 1);
        });
        if (summing) {
            mass = block_fold<false>(mass, part);
            search.needed = needed_by(search, kept, mass, block_fold<false>(distance, part));
            continue;
        }
        block_barrier();
        const u64 amount[1] = {bin_mass(bins, thread())};
        const End end = end_of<1>(amount, search.needed, part, found);
        search.low += (u64)end.bin << shift;
        const u64 next = search.low + (1ull << shift);
        search.high = next < search.high ? next : search.high;
        search.needed -= end.before;
        const bool whole = end.amount == search.needed || bins.count[end.bin] == 1;
        block_barrier();
        if (whole && !search.exact) break;
    }
    return search.high - 1;
}
