// The last steps of a row, by one block: which token, and the log-probabilities. sample.h says what and why.
#pragma once

enum Step { TOP_K, TYPICAL_P, TOP_P, NEAREST, TOKEN };   // NEAREST: the most likely kept token, from which min_p counts

DEVICE bool has_step(const SampleRow &row, int step, int vocab) {
    switch (step) {
    case TOP_K: return has_top_k(row, vocab);
    case TYPICAL_P: return row.typical_p < WHOLE;
    case TOP_P: return row.top_p < WHOLE;
    case NEAREST: return has_reach(row);
    default: return true;
    }
}

DEVICE void note_end(const SampleRow &row, Kept &kept, int step, u64 last) {
    if (thread() == 0) {
        if (step == TYPICAL_P) kept.last_surprise = last, kept.typical = 1;
        else if (step == NEAREST) kept.reach = key_below(last) + row.reach;
        else if (last < kept.last) kept.last = last;
    }
    block_barrier();
}

// The steps in their order. Each that the row has is a search; what it ends at bounds what is kept.
DEVICE int drawn(const Source &s, const SampleRow &row, const First &first, const Bins &bins, Kept &kept, u64 *part, u64 *found) {
    keep_all(kept);
    u64 needed = first.needed, last = 0;
    ROLLED for (int step = TOP_K; step <= TOKEN; step++) {
        if (!has_step(row, step, s.vocab)) continue;
        const bool by_mass = step != TOP_K && step != NEAREST;
        Search search = {BY_LOGIT, by_mass, step >= NEAREST, needed, row.top_p, 0, bin_key(BINS)};
        if (step == TYPICAL_P) {
            search.order = BY_SURPRISE;
            search.share = row.typical_p;
        } else if (step == NEAREST) {
            search.needed = 1;
            if (row.typical_p == WHOLE) search.high = 1;   // the best one is kept: nothing to search
        } else if (step == TOKEN) {
            search.order = BY_ID;
            search.share = chance_of(row.seed, row.position);
            search.high = (u64)s.vocab;
        }
        if (needed) search.low = first.low, search.high = first.high;
        needed = 0;
        last = select(s, kept, search, bins, part, found);
        note_end(row, kept, step, last);
    }
    return (int)last;
}

DEVICE Source source_of(const SampleRow &row, const Work &work, const First &first, const float *v, float best, int vocab) {
    return {first.listed ? work.list : nullptr, (int)*work.listed, v, vocab, best, row.temperature};
}

// Block (row): tokens int [rows], statuses int [rows] (`Status`). Where the status is not DRAWN the token is the largest
// logit's, NaN being the largest. Rows that are told are left alone.
DEVICE void draw(const float *logits, const float *z, const SampleRow *rows, u8 *work_memory, i32 *tokens, i32 *statuses,
                 int vocab, int pitch) {
    SHARED(u32, low, BINS);
    SHARED(u32, high, BINS);
    SHARED(u32, counted, BINS);
    SHARED(u64, part, BINS / WARP);
    SHARED(u64, found, 3);
    SHARED(Kept, kept, 1);
    const SampleRow &row = rows[block_x()];
    if (row.told >= 0) return;
    const Work work = work_of(work_memory, block_x(), vocab);
    const u64 best = best_of(work, vocab, part);
    int token = packed_id(best);
    if (!is_greedy(row, best)) {
        const First first = first_step<1>(row, work, vocab, part, found);
        const float *v = seen_row(row, logits, z, vocab, pitch);
        const Source s = source_of(row, work, first, v, packed_value(best), vocab);
        token = drawn(s, row, first, {low, high, counted}, kept[0], part, found);
    }
    if (thread() == 0) {
        tokens[block_x()] = token;
        statuses[block_x()] = status_of(best);
    }
}

// What is told of a row. `value`s are natural logarithms, -9999 for what cannot be; `top` is in order of likelihood, of
// equal ones by id.
struct Told {
    i32 status, count, token;
    float value;
    i32 ids[TOP];
    float values[TOP];
};
static_assert(sizeof(Told) == 176, "backends.gpu.ops.sampling.TOLD");

// Block (row), of those that are told; `tokens` as sample_draw has left them. A told row has temperature 1, no other step,
// and as top_k what is told of it.
DEVICE void tell(const float *logits, const SampleRow *rows, u8 *work_memory, const i32 *tokens, Told *told, int vocab,
                 int pitch) {
    SHARED(u32, low, BINS);
    SHARED(u32, high, BINS);
    SHARED(u32, counted, BINS);
    SHARED(u64, part, BINS / WARP);
    SHARED(u64, found, 3);
    SHARED(Kept, kept, 1);
    SHARED(u64, top, TOP);
    SHARED(u32, taken, 1);
    const SampleRow &row = rows[block_x()];
    if (row.told < 0) return;
    Told &out = told[block_x()];
    const Work work = work_of(work_memory, block_x(), vocab);
    const u64 best = best_of(work, vocab, part);
    const int token = row.token >= 0 ? row.token : tokens[row.drawn_by];
    const bool whole = is_greedy(row, best);   // no mass was counted
    const int wanted = whole ? 0 : row.told < vocab ? row.told : vocab;
    const float *v = logits + (u64)row.logits * (u64)pitch;
    if (thread() == 0) {
        out.status = status_of(best);
        out.count = wanted;
        out.token = token;
        taken[0] = 0;
    }
    if (whole) {
        if (thread() == 0) out.value = -9999.0f;
        return;
    }
    const First first = first_step<1>(row, work, vocab, part, found);
    const Source s = source_of(row, work, first, v, packed_value(best), vocab);
    const float log_mass = log_((float)((double)first.mass * (1.0 / UNITS)));
    const auto value_of = [&](float below) { return max_(-(below + log_mass), -9999.0f); };
    if (thread() == 0) out.value = value_of(s.best - v[token]);
    if (wanted == 0) return;
    keep_all(kept[0]);
    if (has_top_k(row, vocab)) {
        const Search search = {BY_LOGIT, false, false, first.needed, 0, first.low, first.high};
        const u64 last = select(s, kept[0], search, {low, high, counted}, part, found);
        if (thread() == 0) kept[0].last = last;
        block_barrier();
    }
    each_key(s, 0, vocab, [&](u64 key) {
        if (is_kept(kept[0], key)) top[atomic_add(taken, 1u)] = key;
    });
    block_barrier();
    if (thread() >= wanted) return;
    const u64 mine = top[thread()];
    int place = 0;
    for (int i = 0; i < wanted; i++) place += top[i] < mine;
    out.ids[place] = key_id(mine);
    out.values[place] = value_of(key_below(mine));
}
