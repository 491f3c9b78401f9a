// Attention of a few queries over one partition: scores of its pages of K, weights, sums of its pages of V.
//
// Everything is computed in floats, one chain of additions for each score (over dims, ascending) and for each dim of the output
// (over positions, ascending). So it does not matter for the bits where the floats come from, and there are two ways:
//
//     straight   elements are converted as they are loaded: F32 always, the other types while few queries share a page
//     opened     a few pages are converted into a buffer that stays in L1, and all queries of a tile pass over them: conversion
//                is paid once, and there is one set of kernels, that of F32
//
// An element of Q8_0 times its scale is exact (8 bits times 11), so it too is one float.
#pragma once

#include <cmath>

#include "kernels.h"
#include "kv.h"
#include "simd.h"

namespace hs {
namespace {

constexpr int PARTITION = 256;
constexpr int PAGES = PARTITION / GROUP;
constexpr float NEGATIVE_INFINITY = -INFINITY;

inline int least(int a, int b) { return a < b ? a : b; }
inline int most(int a, int b) { return a > b ? a : b; }

// Positions [first, last) of a partition, counted from its first one.
struct Span {
    int first, last;

    bool empty() const { return first >= last; }
    Span within(int from, int to) const {
        const int low = most(first, from);
        return {low, most(low, least(last, to))};
    }
};

// Pages [first, end) of a partition as they lie somewhere, K or V of one head. Behind the last one, `at` says what will be
// read next: a hint only.
struct Block {
    int first, end, dims, wide;
    const void *at[PAGES + 4];

    const void *page(int number) const { return at[number - first]; }
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

// What Q queries see of one block.
template <int Q> struct Seen {
    int first[Q], last[Q], low = PARTITION, high = 0, common_low = 0, common_high = PARTITION;

    Seen(const Span *spans, const Block &block) {
        for (int q = 0; q < Q; q++) {
            const Span span = spans[q].within(block.first * GROUP, block.end * GROUP);
            first[q] = span.first;
            last[q] = span.last;
            common_low = most(common_low, first[q]);
            common_high = least(common_high, last[q]);
            if (span.empty()) continue;
            low = least(low, first[q]);
            high = most(high, last[q]);
        }
    }
};

// Scores of the 16 positions of each of P pages from `page` on, into scores[q][position].
template <class Kv, int Q, int P>
__attribute__((noinline)) void score_pages(const Block &block, int page, const float *const *queries, float *const *scores) {
    using Elem = typename Kv::Elem;
    const Elem *k[P], *ahead[P];
    vf s[Q][P];
    int d = 0;
    HS_UNROLL
    for (int p = 0; p < P; p++) {
        k[p] = static_cast<const Elem *>(block.page(page + p));
        ahead[p] = static_cast<const Elem *>(block.page(page + P + p));
    }
    HS_UNROLL
    for (int q = 0; q < Q; q++) {
        HS_UNROLL
        for (int p = 0; p < P; p++) s[q][p] = set1(0.0f);
    }
    const auto x = [&](int q) __attribute__((always_inline)) { return set1(queries[q][d]); };
    const auto y = [&](int p) __attribute__((always_inline)) { return Kv::get(k[p] + GROUP * d); };
    if constexpr (Kv::BLOCKS) {
        for (size_t at = 0; d < block.dims; at += Kv::K_BLOCK_BYTES) {
            vf scales[P];
            HS_UNROLL
            for (int p = 0; p < P; p++) {
                prefetch_range(ahead[p] + at, Kv::K_BLOCK_BYTES);
                scales[p] = Kv::scales(k[p] + at);
            }
            const auto scaled = [&](int p) __attribute__((always_inline)) { return mul(Kv::get(k[p] + at + Kv::SCALES + GROUP * (d % KV_BLOCK)), scales[p]); };
            for (const int end = d + KV_BLOCK; d < end; d++) add_outer<Q, P>(s, x, scaled);
        }
    } else if constexpr (sizeof(Elem) * GROUP == 64) {
        for (; d < block.dims; d++) {
            HS_UNROLL
            for (int p = 0; p < P; p++) prefetch(ahead[p] + GROUP * d);
            add_outer<Q, P>(s, x, y);
        }
    } else {
        while (d < block.dims) {
            HS_UNROLL
            for (int p = 0; p < P; p++) prefetch_range(ahead[p] + GROUP * d, sizeof(Elem) * GROUP * STRIDE_DIMS);
            for (const int end = least(block.dims, d + STRIDE_DIMS); d < end; d++) add_outer<Q, P>(s, x, y);
        }
    }
    HS_UNROLL
    for (int q = 0; q < Q; q++) {
        HS_UNROLL
        for (int p = 0; p < P; p++) store(scores[q] + (page + p) * GROUP, s[q][p]);
    }
}

// All pages of a block that Q queries see.
template <class Kv, int Q> void score_block(const Block &block, const Span *spans, const float *const *queries, float *const *scores) {
    const Seen<Q> seen(spans, block);
    const int end = (seen.high + GROUP - 1) / GROUP;
    constexpr int P = PAGES_AT_ONCE<Q>;
    int page = seen.low / GROUP;
    for (; page + P <= end; page += P) score_pages<Kv, Q, P>(block, page, queries, scores);
    if constexpr (P > 1)
        for (; page < end; page++) score_pages<Kv, Q, 1>(block, page, queries, scores);
}

// Weights in place of the sums of products that a query has with the pages it sees: times `factor`, capped, without the
// positions at the edges that it does not see; then e^(score - max).
inline void weigh_scores(float *scores, const Span &span, float factor, float cap, float &max, float &sum) {
    const int first = span.first / GROUP * GROUP;
    vf top = set1(NEGATIVE_INFINITY), total = set1(0.0f);
    for (int at = first; at < span.last; at += GROUP) {
        vf x = mul(load(scores + at), set1(factor));
        if (cap > 0.0f) x = mul(tanh_v(div(x, set1(cap))), set1(cap));
        if (span.first > at || span.last < at + GROUP) x = keep_lanes(x, span.first - at, span.last - at, NEGATIVE_INFINITY);
        top = max_v(top, x);
        store(scores + at, x);
    }
    max = lane_max(top);
    const vf shift = set1(max);
    for (int at = first; at < span.last; at += GROUP) {
        const vf e = exp_v(sub(load(scores + at), shift));
        total = add(total, e);
        store(scores + at, e);
    }
    sum = lane_sum(total);
}

// out[q] += Σ_j weights[q][j] V[j] for positions [first, last), C vectors of 16 dims at once.
template <class Kv, int Q, int C>
__attribute__((noinline)) void add_values(const Block &block, float *const *out, float *const *weights, int first, int last, int dim) {
    using Elem = typename Kv::Elem;
    vf acc[Q][C];
    HS_UNROLL
    for (int q = 0; q < Q; q++) {
        HS_UNROLL
        for (int c = 0; c < C; c++) acc[q][c] = load(out[q] + dim + 16 * c);
    }
    for (int j = first; j < last;) {
        const int page = j / GROUP, end = least(last, (page + 1) * GROUP);
        size_t offset = static_cast<size_t>(j % GROUP) * static_cast<size_t>(block.wide) + static_cast<size_t>(dim);
        const Elem *v = static_cast<const Elem *>(block.page(page));
        alignas(64) float scales[(C + 1) / 2][GROUP];
        if constexpr (Kv::BLOCKS) {
            for (int b = 0; b < (C + 1) / 2; b++) store(scales[b], Kv::scales(v + static_cast<size_t>(dim / KV_BLOCK + b) * Kv::SCALES));
            offset += Kv::v_head(block.dims);
        }
        v += offset;
        // The next page's, behind the last one the first page's next dims, then what comes after the block.
        const Elem *ahead = static_cast<const Elem *>(block.page(block.end));
        if (end < last) ahead = static_cast<const Elem *>(block.page(page + 1)) + offset;
        else if (dim + 16 * C < block.wide) ahead = static_cast<const Elem *>(block.page(first / GROUP)) + offset + 16 * C;
        for (; j < end; j++, v += block.wide, ahead += block.wide) {
            prefetch_range(ahead, 16 * C * sizeof(*v));
            add_outer<Q, C>(
                acc,
                [&](int q) __attribute__((always_inline)) {
                    if constexpr (Kv::FACTOR != 1.0f) return set1(weights[q][j] * Kv::FACTOR);
                    else return set1(weights[q][j]);
                },
                [&](int c) __attribute__((always_inline)) {
                    if constexpr (Kv::BLOCKS) return mul(Kv::get(v + 16 * c), set1(scales[c / 2][j % GROUP]));
                    else return Kv::get(v + 16 * c);
                });
        }
    }
    HS_UNROLL
    for (int q = 0; q < Q; q++) {
        HS_UNROLL
        for (int c = 0; c < C; c++) store(out[q] + dim + 16 * c, acc[q][c]);
    }
}

template <class Kv, int Q> void add_all_values(const Block &block, float *const *out, float *const *weights, int first, int last) {
    if (first >= last) return;
    constexpr int C = Q * 4 <= MAX_SUMS ? 4 : Q * 2 <= MAX_SUMS ? 2 : 1;
    int dim = 0;
    for (; dim + 16 * C <= block.wide; dim += 16 * C) add_values<Kv, Q, C>(block, out, weights, first, last, dim);
    if constexpr (C > 1)
        for (; dim < block.wide; dim += 16) add_values<Kv, Q, 1>(block, out, weights, first, last, dim);
}

// Positions that all queries see go together; the few at the edges one query at a time, in the same ascending order.
template <class Kv, int Q> void value_block(const Block &block, const Span *spans, float *const *out, float *const *weights) {
    const Seen<Q> seen(spans, block);
    const int middle = most(seen.common_high, seen.common_low);
    if constexpr (Q > 1)
        for (int q = 0; q < Q; q++) add_all_values<Kv, 1>(block, out + q, weights + q, seen.first[q], least(seen.common_low, seen.last[q]));
    add_all_values<Kv, Q>(block, out, weights, seen.common_low, middle);
    if constexpr (Q > 1)
        for (int q = 0; q < Q; q++) add_all_values<Kv, 1>(block, out + q, weights + q, most(middle, seen.first[q]), seen.last[q]);
}

struct Kernels {
    void (*scores)(const Block &, const Span *, const float *const *queries, float *const *scores);
    void (*values)(const Block &, const Span *, float *const *out, float *const *weights);
};

template <class Kv, int Q> constexpr Kernels KERNELS = {&score_block<Kv, Q>, &value_block<Kv, Q>};

constexpr int STRAIGHT = 3;   // queries of a page up to which its elements are converted as they are loaded

template <class Kv> Kernels few_kernels(int queries) {
    return queries == 1 ? KERNELS<Kv, 1> : queries == 2 ? KERNELS<Kv, 2> : KERNELS<Kv, 3>;
}

inline Kernels float_kernels(int queries) {
    switch (queries) {
        case 4: return KERNELS<KvF32, 4>;
        case 5: return KERNELS<KvF32, MAX_QUERIES >= 6 ? 5 : 1>;
        case 6: return KERNELS<KvF32, MAX_QUERIES >= 6 ? 6 : 1>;
        case 7: return KERNELS<KvF32, MAX_QUERIES >= 8 ? 7 : 1>;
        case 8: return KERNELS<KvF32, MAX_QUERIES >= 8 ? 8 : 1>;
        default: return few_kernels<KvF32>(queries);
    }
}

// The kernels for at most MAX_QUERIES queries over pages of a type, or over opened ones.
inline Kernels kernels_for(int kv_type, bool straight, int queries) {
    if (straight && kv_type == HS_F16) return few_kernels<KvF16>(queries);
    if (straight && kv_type == HS_BF16) return few_kernels<KvBF16>(queries);
    if (straight && kv_type == HS_F8) return few_kernels<KvF8>(queries);
    if (straight && kv_type == HS_Q8_0) return few_kernels<KvQ8>(queries);
    return float_kernels(queries);
}

inline bool is_straight(int kv_type, int queries) { return kv_type == HS_F32 || queries <= STRAIGHT; }

// `count` elements, a multiple of 16, as floats. What lies at `ahead` will be wanted next.
template <class Kv> void open_elements(const void *from, const void *ahead, size_t count, float *to) {
    const typename Kv::Elem *p = static_cast<const typename Kv::Elem *>(from), *next = static_cast<const typename Kv::Elem *>(ahead);
    constexpr size_t STEP = 64 / sizeof(*p);
    for (size_t i = 0; i < count; i += STEP) {
        prefetch(next + i);
        for (size_t j = i; j < i + STEP && j < count; j += 16) {
            if constexpr (Kv::FACTOR != 1.0f) store(to + j, mul(Kv::get(p + j), set1(Kv::FACTOR)));
            else store(to + j, Kv::get(p + j));
        }
    }
}

void open_q8_keys(const uint8_t *p, const uint8_t *ahead, int dims, float *to) {
    for (int d = 0; d < dims; d += KV_BLOCK, p += KvQ8::K_BLOCK_BYTES, ahead += KvQ8::K_BLOCK_BYTES) {
        prefetch_range(ahead, KvQ8::K_BLOCK_BYTES);
        const vf scale = KvQ8::scales(p);
        for (int i = 0; i < KV_BLOCK; i++, to += GROUP) store(to, mul(KvQ8::get(p + KvQ8::SCALES + GROUP * i), scale));
    }
}

void open_q8_values(const uint8_t *p, const uint8_t *ahead, int dims, float *to) {
    const uint8_t *values = p + KvQ8::v_head(dims);
    prefetch_range(ahead, KvQ8::v_elems(dims));
    for (int d = 0; d < dims; d += KV_BLOCK, p += KvQ8::SCALES) {
        alignas(64) float scales[GROUP];
        store(scales, KvQ8::scales(p));
        for (int j = 0; j < GROUP; j++) {
            const vf scale = set1(scales[j]);
            for (int i = d; i < d + KV_BLOCK; i += 16) store(to + j * dims + i, mul(KvQ8::get(values + j * dims + i), scale));
        }
    }
}

inline size_t element_bytes(int kv_type) { return kv_type == HS_F32 ? 4 : kv_type == HS_F16 || kv_type == HS_BF16 ? 2 : 1; }

// Bytes of one head's K, or V, in a page.
inline size_t head_page_bytes(int kv_type, int dims, bool keys) {
    if (kv_type == HS_Q8_0) return KvQ8::k_elems(dims);
    return element_bytes(kv_type) * (keys ? KvF32::k_elems(dims) : KvF32::v_elems(dims));
}

// One page of K, or V, as floats.
inline void open_page(int kv_type, int dims, bool keys, const void *from, const void *ahead, float *to) {
    const size_t count = keys ? KvF32::k_elems(dims) : KvF32::v_elems(dims);
    if (kv_type == HS_Q8_0) {
        const uint8_t *p = static_cast<const uint8_t *>(from), *next = static_cast<const uint8_t *>(ahead);
        keys ? open_q8_keys(p, next, dims, to) : open_q8_values(p, next, dims, to);
    } else if (kv_type == HS_F16) {
        open_elements<KvF16>(from, ahead, count, to);
    } else if (kv_type == HS_BF16) {
        open_elements<KvBF16>(from, ahead, count, to);
    } else {
        open_elements<KvF8>(from, ahead, count, to);
    }
}

}  // namespace
}  // namespace hs
