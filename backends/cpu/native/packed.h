// Products of packed weights and int16 activations: two ways with one result.
//
// For a batch row, with the integer dot product of a sub-block (half scales and offsets inside it) exact in int32:
//
//     acc = 0;  for each sub-block:  acc = fma(scale * d, float(dot), acc);  acc = fma(min, s, acc);  y = acc + bias
//
// These float operations and their order are those of every path here, so a row's bits depend neither on the path nor on
// the tile it fell into.
//
// *Few rows* (`few`): weights go from memory through registers into the sums of N batch rows. One row waits for memory.
// *Many rows* (`Many`): a sub-block is unpacked once into int16 pairs, with offsets taken off and half scales multiplied
// in, and a slice of BLOCKS of them stays in L1 while all batch rows pass over it, `multiply` a tile of N of them at a time.
// Its integer sums live in registers: 2 x 6 on AVX2, where two weight vectors, a broadcast and a product fill the other four;
// the float sums lie in memory, read and written once for each sub-block. What a product costs is then the product.
#pragma once

#include "formats.h"
#include "kernels.h"

namespace hs {

constexpr int FEW = 4;       // batch rows of the largest tile that unpacks in registers
constexpr int BLOCKS = 16;   // sub-blocks of a slice: 19 KiB unpacked, which leaves room for the activations in L1

template <int N> using Columns = const ActBlock *const (&)[N];   // one activation block of each batch row
template <int N> using Dots = vi (&)[N];

HS_INLINE const ActBlock *activation_of(const Rows &rows, int row) {
    return reinterpret_cast<const ActBlock *>(rows.activation + rows.activation_stride * static_cast<size_t>(rows.at(row)));
}

// What the minimum of a half (of a sub-block, where there is one) is multiplied by.
template <int MINS> HS_INLINE float sum_of(const ActBlock &a, int half) {
    return MINS == 1 ? a.s : a.d * static_cast<float>(a.half_sum[half]);
}

// Where the sums of N batch rows start: what the offset takes away.
template <class Format, int N> HS_INLINE void begin(int half, Columns<N> a, Dots<N> dot) {
    HS_UNROLL
    for (int n = 0; n < N; n++) {
        const int32_t sum = Format::HALVES == 1 ? a[n]->half_sum[0] + a[n]->half_sum[1] : a[n]->half_sum[half];
        dot[n] = set1i(Format::OFFSET ? -Format::OFFSET * sum : 0);
    }
}

template <class Format, int N> HS_INLINE void add_half(const Format &format, int s, int half, Columns<N> a, Dots<N> dot) {
    begin<Format, N>(half, a, dot);
    format.each(s, half, [&](vi even, vi odd, int quad) __attribute__((always_inline)) {
        HS_UNROLL
        for (int n = 0; n < N; n++) dot[n] = add_pairs(dot[n], even, a[n]->q + 4 * quad);
        HS_UNROLL
        for (int n = 0; n < N; n++) dot[n] = add_pairs(dot[n], odd, a[n]->q + 4 * quad + 2);
    });
    if (Format::HALVES == 1) return;
    const vi factor = format.factor(s, half);
    HS_UNROLL
    for (int n = 0; n < N; n++) dot[n] = muli(dot[n], factor);
}

// N batch rows, 16 weight rows, all columns.
template <class Format, int N>
void few(const uint8_t *w, int cols, const Rows &rows, int first_row, const float *bias, float *out, int64_t stride) {
    vf acc[N];
    const ActBlock *a[N];
    HS_UNROLL
    for (int n = 0; n < N; n++) acc[n] = set1(0.0f), a[n] = activation_of(rows, first_row + n);
    for (int b = cols / (32 * Format::SUBS); b > 0; b--, w += Format::BYTES) {
        const Format format(w);
        for (int s = 0; s < Format::SUBS; s++) {
            vi dot[N];
            const vf scale = format.scale(s);
            add_half<Format, N>(format, s, 0, a, dot);
            if (Format::HALVES == 2) {
                vi second[N];
                if (Format::WIDE) {
                    HS_UNROLL
                    for (int n = 0; n < N; n++) acc[n] = fma(mul(scale, set1(a[n]->d)), to_float(dot[n]), acc[n]);
                }
                add_half<Format, N>(format, s, 1, a, second);
                HS_UNROLL
                for (int n = 0; n < N; n++) dot[n] = Format::WIDE ? second[n] : add(dot[n], second[n]);
            }
            HS_UNROLL
            for (int n = 0; n < N; n++) acc[n] = fma(mul(scale, set1(a[n]->d)), to_float(dot[n]), acc[n]);
            HS_UNROLL
            for (int m = 0; m < Format::MINS; m++) {
                const vf min = format.min(s, m);
                HS_UNROLL
                for (int n = 0; n < N; n++) acc[n] = fma(min, set1(sum_of<Format::MINS>(*a[n], m)), acc[n]);
            }
            HS_UNROLL
            for (int n = 0; n < N; n++) a[n]++;
        }
    }
    HS_UNROLL
    for (int n = 0; n < N; n++) store(out + stride * n, bias ? add(acc[n], load(bias)) : acc[n]);
}

// A sub-block of 16 rows, unpacked: 16 vectors of pairs in the order of an activation block, scale, and the minima.
struct alignas(64) Unpacked {
    uint8_t pairs[16][64];
    float scale[16];
    float min[2][16];
};

template <class Format> HS_INLINE void unpack(const Format &format, int s, Unpacked &to) {
    HS_UNROLL
    for (int half = 0; half < Format::HALVES; half++) {
        const vi factor = format.factor(s, half), both = or_v(and_v(factor, set1i(0xffff)), shl<16>(factor));
        const vi offset = set1i(Format::OFFSET * 0x10001);
        format.each(s, half, [&](vi even, vi odd, int quad) __attribute__((always_inline)) {
            if (Format::OFFSET) even = sub16(even, offset), odd = sub16(odd, offset);
            if (Format::HALVES == 2) even = mul16(even, both), odd = mul16(odd, both);
            store_bytes(to.pairs[2 * quad], even);
            store_bytes(to.pairs[2 * quad + 1], odd);
        });
    }
    store(to.scale, format.scale(s));
    HS_UNROLL
    for (int m = 0; m < Format::MINS; m++) store(to.min[m], format.min(s, m));
}

// Sub-blocks [first, last) of one group.
template <class Format> void unpack_slice(const uint8_t *w, int first, int last, Unpacked *to) {
    w += Format::BYTES * static_cast<size_t>(first / Format::SUBS);
    for (int b = first; b < last; b += Format::SUBS, w += Format::BYTES) {
        const Format format(w);
        for (int s = 0; s < Format::SUBS; s++) unpack(format, s, *to++);
    }
}

// Where float sums of a tile come from and go to: rows of `stride` floats. No `from` is a start at zero; `bias` comes with the
// last slice, and is added after it.
struct Sums {
    const float *from;
    int64_t from_stride;
    float *to;
    int64_t to_stride;
    const float *bias;
};

// Weights that will be unpacked next, and how many lines of them each sub-block of a tile asks memory for: unpacking is much
// faster than memory, and products need none of it.
struct Next {
    const uint8_t *at;
    int lines;
};

// Adds a slice of W groups to the sums of N batch rows.
template <int W, int N, int MINS, bool WIDE>
void multiply(const Unpacked *w, int blocks, const Rows &rows, int first_row, int first_block, const Sums &sums, Next next) {
    alignas(64) float acc[W][N][16];
    const ActBlock *a[N];
    HS_UNROLL
    for (int n = 0; n < N; n++) {
        a[n] = activation_of(rows, first_row + n) + first_block;
        HS_UNROLL
        for (int g = 0; g < W; g++) store(acc[g][n], sums.from ? load(sums.from + sums.from_stride * n + GROUP * g) : set1(0.0f));
    }
    for (int b = 0; b < blocks; b++, w++) {
        for (int i = 0; i < next.lines; i++, next.at += 64) prefetch(next.at);
        HS_UNROLL
        for (int part = 0; part < (WIDE ? 2 : 1); part++) {
            vi dot[W][N];
            HS_UNROLL
            for (int n = 0; n < N; n++) {
                HS_UNROLL
                for (int g = 0; g < W; g++) dot[g][n] = set1i(0);
            }
            HS_UNROLL
            for (int p = WIDE ? 8 * part : 0; p < (WIDE ? 8 * part + 8 : 16); p++) {
                vi pair[W];
                HS_UNROLL
                for (int g = 0; g < W; g++) pair[g] = load_bytes(w[g * BLOCKS].pairs[p]);
                HS_UNROLL
                for (int n = 0; n < N; n++) {
                    HS_UNROLL
                    for (int g = 0; g < W; g++) dot[g][n] = add_pairs(dot[g][n], pair[g], a[n]->q + 2 * p);
                }
            }
            HS_UNROLL
            for (int n = 0; n < N; n++) {
                HS_UNROLL
                for (int g = 0; g < W; g++) {
                    const vf scale = mul(load(w[g * BLOCKS].scale), set1(a[n]->d));
                    vf sum = fma(scale, to_float(dot[g][n]), load(acc[g][n]));
                    HS_UNROLL
                    for (int m = 0; m < MINS; m++) sum = fma(load(w[g * BLOCKS].min[m]), set1(sum_of<MINS>(*a[n], m)), sum);
                    store(acc[g][n], sum);
                }
            }
        }
        HS_UNROLL
        for (int n = 0; n < N; n++) a[n]++;
    }
    HS_UNROLL
    for (int n = 0; n < N; n++) {
        HS_UNROLL
        for (int g = 0; g < W; g++) {
            const vf sum = load(acc[g][n]);
            store(sums.to + sums.to_stride * n + GROUP * g, sums.bias ? add(sum, load(sums.bias + GROUP * g)) : sum);
        }
    }
}

}  // namespace hs
