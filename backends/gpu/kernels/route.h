// Which experts a row runs, and with what weights (Routing of backends/ops.py).
//
// A row is one group of 32 lanes, a block four rows; each lane holds every 32nd logit in registers, PER of them (4: up to 128
// experts, 16: up to 512). The best of all is found by five exchanges between lanes, `used` times; then lane p has the p-th
// choice, and the weights of all choices are computed side by side.
//
// Numbers are compared as integers that are ordered as the floats are (the sign turned), and of equal ones the lower index
// wins: the same choice on every card, in every run, and a NaN chooses an expert that there is. -0 and 0 are equal.
//
// No block memory, 51 registers at 16 logits a lane. Roofline: latency. A row reads 4 bytes an expert once (2 KB at 512) and
// writes 8 a choice; 10 choices are 10 x 10 dependent shuffles, near 3 us, whatever the number of rows up to four for each
// multiprocessor's scheduler. That is little beside the experts, which read megabytes.
#pragma once

#include "floats.h"

enum RouteFunc { ROUTE_SOFTMAX, ROUTE_SIGMOID, ROUTE_CHOSEN };

constexpr float ROUTE_SUM_MIN = 6.1035e-5f;   // what a sum of chosen weights is at least divided by

// Greater where x is greater; never 0.
DEVICE u32 ordered(float x) {
    const u32 bits = float_bits(x + 0.0f);
    const u32 order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return order ? order : 1u;
}

// The better of this lane's and its partner's: the greater, of equal ones the one with the lower index.
DEVICE void take_better(u32 &best, int &at, int mask) {
    const u32 other = shuffle_xor(best, mask);
    const int other_at = shuffle_xor(at, mask);
    const bool better = other > best || (other == best && other_at < at);
    best = better ? other : best;
    at = better ? other_at : at;
}

template <int PER>
DEVICE void route_rows(const float *logits, int stride, const float *selection, const float *gains, int *ids, float *weights,
                       int rows, int experts, int used, int func, int normalise, float scale) {
    const float least = bits_float(0xff800000u);
    const int wanted = block_x() * (threads() / 32) + thread() / 32, l = thread() % 32;
    const int row = wanted < rows ? wanted : rows - 1;   // all lanes take part in the exchanges
    const float *x = logits + (i64)row * stride;

    float v[PER], most = least, sum = 0.0f;
    UNROLL for (int i = 0; i < PER; i++) {
        v[i] = l + 32 * i < experts ? x[l + 32 * i] : least;
        most = max_(most, v[i]);
    }
    if (func == ROUTE_SOFTMAX) {
        most = group_max<32>(most);
        UNROLL for (int i = 0; i < PER; i++) {
            v[i] = l + 32 * i < experts ? exp_(v[i] - most) : 0.0f;
            sum += v[i];
        }
        sum = group_sum<32>(sum);
    }
    u32 order[PER];
    UNROLL for (int i = 0; i < PER; i++) {
        const int e = l + 32 * i;
        order[i] = 0;
        if (e >= experts) continue;
        float score = func == ROUTE_SOFTMAX ? v[i] / sum : func == ROUTE_SIGMOID ? sigmoid(v[i]) : v[i];
        if (selection) score += selection[e];
        order[i] = ordered(score);
    }

    int mine = 0;   // lane p: the p-th choice
    for (int p = 0; p < used; p++) {
        u32 best = 0;
        int at = 32 * PER;
        UNROLL for (int i = 0; i < PER; i++)
            if (order[i] > best) best = order[i], at = l + 32 * i;
        take_better(best, at, 16);
        take_better(best, at, 8);
        take_better(best, at, 4);
        take_better(best, at, 2);
        take_better(best, at, 1);
        UNROLL for (int i = 0; i < PER; i++)
            if (at == l + 32 * i) order[i] = 0;
        if (l == p) mine = at;
    }

    const bool chose = l < used;
    const float logit = chose ? x[mine] : least;
    float weight = 0.0f;
    if (func == ROUTE_CHOSEN) {
        const float top = group_max<32>(logit);
        weight = chose ? exp_(logit - top) : 0.0f;
        weight /= group_sum<32>(weight);
    } else if (chose) {
        weight = func == ROUTE_SOFTMAX ? exp_(logit - most) / sum : sigmoid(logit);
    }
    if (normalise) weight /= max_(group_sum<32>(weight), ROUTE_SUM_MIN);
    weight *= scale;
    if (!chose || wanted >= rows) return;
    if (gains) weight *= gains[mine];
    ids[(i64)row * used + l] = mine;
    weights[(i64)row * used + l] = weight;
}
