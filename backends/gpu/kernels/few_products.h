// Products of a few rows of activations with rows of a matrix, each weight read once: what linear_few.h and experts_few.h share.
//
// A *team* of neighbouring lanes (8, 16 or 32, whole teams in a warp) has FEW_OUTS rows of the matrix and up to R rows of
// activations. Lane i of the team takes groups i, i + team, ... of these rows: it fetches their bits, unpacks them once,
// multiplies them with each row's activations, and in the end the team adds up. With one or two rows a lane fetches the next
// group's bits before it works on this one's; with more the work of other warps is long enough to wait behind.
//
// Where a result's terms are added depends on the team alone, which follows from the matrix's shape (ops/linear.py). So a row
// has the same bits in every variant, with whatever rows beside it, on every card.
//
// Activations of packed types are two planes of signed bytes (quantised.h): sixteen dot4 for a group, hi and lo in turn. The
// integers are exact, |256 hi + lo| stays below 2^27 (32 x 128 x 32512); scales and sums are single precision.
#pragma once

#include "quantised.h"
#include "quants.h"

constexpr int FEW_OUTS = 2;   // rows of the matrix in a lane's hands: activations are read once for both

// Rows of activations for packed types, and the same for floats.
struct Acts { const i8 *hi, *lo; const float *scale, *sum; };
struct FloatActs { const float *x; int stride; };

// Which rows a team works on. Those past an end are the last one again: they are computed and not stored.
struct FewRows {
    i64 weight[FEW_OUTS];   // of the matrix
    int first, last;        // of the activations: first, first + 1, ... but none past last
};

struct Act {
    Words4 hi[2], lo[2];
    float scale, sum[2];
};

// Group number `at` of the activations, counted from their beginning.
DEVICE Act act_of(const Acts &acts, int at) {
    Act a;
    UNROLL for (int i = 0; i < 2; i++) {
        a.hi[i] = load128(acts.hi + 32 * (i64)at + 16 * i);
        a.lo[i] = load128(acts.lo + 32 * (i64)at + 16 * i);
    }
    a.scale = acts.scale[at];
    const u64 sums = *(const u64 *)(acts.sum + 2 * (i64)at);
    a.sum[0] = bits_float((u32)sums);
    a.sum[1] = bits_float((u32)(sums >> 32));
    return a;
}

// Sixteen products, weights [16 part, ... + 16).
DEVICE int sixteen(const Group &g, const Words4 (&q)[2], int part, int sum) {
    UNROLL for (int i = 0; i < 4; i++) sum = dot4((int)g.words[4 * part + i], (int)word_of(q[part], i), sum);
    return sum;
}

template <class Q> DEVICE float add_group(const Group &g, const Act &a, float sum) {
    float product;
    if constexpr (Q::SCALES == 1) {
        const int hi = sixteen(g, a.hi, 1, sixteen(g, a.hi, 0, 0)), lo = sixteen(g, a.lo, 1, sixteen(g, a.lo, 0, 0));
        product = g.scale[0] * (float)(256 * hi + lo);
    } else {
        const int first = 256 * sixteen(g, a.hi, 0, 0) + sixteen(g, a.lo, 0, 0);
        const int second = 256 * sixteen(g, a.hi, 1, 0) + sixteen(g, a.lo, 1, 0);
        product = fma_(g.scale[1], (float)second, g.scale[0] * (float)first);
    }
    sum = fma_(a.scale, product, sum);
    if constexpr (Q::MINS) {
        if constexpr (Q::SCALES == 1)
            sum = fma_(g.min[0], a.sum[0] + a.sum[1], sum);
        else
            sum = fma_(g.min[1], a.sum[1], fma_(g.min[0], a.sum[0], sum));
    }
    return sum;
}

template <class Q>
DEVICE void fetch_few(Q, typename Q::Bits (&bits)[FEW_OUTS], const Matrix<Q> &m, const FewRows &rows, int group) {
    UNROLL for (int n = 0; n < FEW_OUTS; n++) bits[n] = fetch(Q(), m, rows.weight[n], group);
}

// sums[r][n]: this lane's part of activations' row first + r times row weight[n] of the matrix.
template <class Q, int R>
DEVICE void few_products(Q, float (&sums)[R][FEW_OUTS], const void *w, i64 matrix_rows, int cols, const Acts &acts,
                         const FewRows &rows, int team) {
    const auto m = matrix<Q>(w, (int)matrix_rows, cols);
    const int groups = cols / GROUP;
    constexpr bool AHEAD = R <= 2;
    typename Q::Bits bits[FEW_OUTS];
    int group = lane() % team;
    if (AHEAD && group < groups) fetch_few(Q(), bits, m, rows, group);
    for (; group < groups; group += team) {
        if (!AHEAD) fetch_few(Q(), bits, m, rows, group);
        Group g[FEW_OUTS];
        UNROLL for (int n = 0; n < FEW_OUTS; n++) unpack(bits[n], g[n]);
        if (AHEAD && group + team < groups) fetch_few(Q(), bits, m, rows, group + team);
        UNROLL for (int r = 0; r < R; r++) {
            const int row = rows.first + r < rows.last ? rows.first + r : rows.last;
            const Act a = act_of(acts, row * groups + group);
            UNROLL for (int n = 0; n < FEW_OUTS; n++) sums[r][n] = add_group<Q>(g[n], a, sums[r][n]);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------- floats
//
// A lane takes 16 bytes of a row, 4 or 8 weights, and the same columns of x.

template <class F, int R>
DEVICE void few_float_products(F, float (&sums)[R][FEW_OUTS], const void *w, int cols, const FloatActs &acts,
                               const FewRows &rows, int team) {
    constexpr int EACH = 16 / F::SIZE;
    const i64 pitch = float_row_bytes(cols, F::SIZE);
    for (int at = lane() % team * EACH; at < cols; at += team * EACH) {
        float v[FEW_OUTS][EACH];
        UNROLL for (int n = 0; n < FEW_OUTS; n++)
            floats_of(F(), load_once((const u8 *)w + rows.weight[n] * pitch + (i64)at * F::SIZE), v[n]);
        UNROLL for (int r = 0; r < R; r++) {
            const int row = rows.first + r < rows.last ? rows.first + r : rows.last;
            const float *x = acts.x + (i64)row * acts.stride + at;
            UNROLL for (int i = 0; i < EACH; i += 4) {
                const Floats4 four = load4(x + i, cols - at - i);
                UNROLL for (int n = 0; n < FEW_OUTS; n++)
                    UNROLL for (int j = 0; j < 4; j++) sums[r][n] = fma_(v[n][i + j], four.v[j], sums[r][n]);
            }
        }
    }
}

template <int R>
DEVICE void few_products(f32, float (&sums)[R][FEW_OUTS], const void *w, i64, int cols, const FloatActs &acts,
                         const FewRows &rows, int team) {
    few_float_products(f32(), sums, w, cols, acts, rows, team);
}
template <int R>
DEVICE void few_products(f16, float (&sums)[R][FEW_OUTS], const void *w, i64, int cols, const FloatActs &acts,
                         const FewRows &rows, int team) {
    few_float_products(f16(), sums, w, cols, acts, rows, team);
}
template <int R>
DEVICE void few_products(bf16, float (&sums)[R][FEW_OUTS], const void *w, i64, int cols, const FloatActs &acts,
                         const FewRows &rows, int team) {
    few_float_products(bf16(), sums, w, cols, acts, rows, team);
}

// The sum over the lanes of a team; every lane gets it. The masks are constants, so that on AMD's cards no lane's address is
// computed; the branch is the same for all.
DEVICE float team_sum(float v, int team) {
    UNROLL for (int mask = 16; mask > 0; mask /= 2)
        if (mask < team) v += shuffle_xor(v, mask);
    return v;
}
