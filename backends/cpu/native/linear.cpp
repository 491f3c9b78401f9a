// Quantised and float linear layers: y = W x + bias for a few rows or many.
//
// One template, `tile<Format, N>`, computes 16 weight rows x N batch rows over all columns. The weights of a sub-block
// are unpacked once and serve N rows. For every batch row the float operations are the same and in the same order for
// each N, and the integer ones are exact, so a row's bits depend neither on N nor on what else is in the batch; the
// columns of a row are never split among threads.
//
//     acc = 0;  for each sub-block:  acc = fma(d_w * d_a, float(Σ q_w q_a), acc);  acc = fma(m_w, s_a, acc);  y = acc + bias
//
// where a weight is d_w * q_w + m_w. An offset (Q4_0's -8) is a minimum m_w = -8 d_w.
//
// A chunk is a run of groups. All batch rows pass over it before the next one, so its weights come from memory once;
// decode is bound by exactly that, and `prefetch` keeps the loads PREFETCH bytes ahead of the arithmetic.
#include "kernels.h"
#include "simd.h"

namespace hs {
namespace {

constexpr int PREFETCH = 4096;
constexpr size_t CHUNK_BYTES = 128 * 1024;   // weights of a chunk: they must stay in L2 while the batch rows pass
constexpr int CHUNKS_PER_THREAD = 6;         // so many at least, where the matrix has them: threads do not run evenly

struct Scales {
    vf d, m;
};

template <int N> using Columns = const ActBlock *const (&)[N];   // one activation block of each batch row
template <int N> using Dots = vi (&)[N];

HS_INLINE vf half_row(const uint8_t *p) { return load_f16(reinterpret_cast<const uint16_t *>(p)); }

// Bytes c0 c1 c2 c3 of every lane as two pairs of int16: c0 c2 and c1 c3.
HS_INLINE vi even_bytes(vi x) { return and_v(x, set1i(0x00ff00ff)); }
HS_INLINE vi odd_bytes(vi x) { return shr16<8>(x); }

template <int N> HS_INLINE void add_quad(vi even, vi odd, int quad, Columns<N> a, Dots<N> dot) {
    HS_UNROLL
    for (int n = 0; n < N; n++) dot[n] = add_pairs(dot[n], even, a[n]->q + 4 * quad);
    HS_UNROLL
    for (int n = 0; n < N; n++) dot[n] = add_pairs(dot[n], odd, a[n]->q + 4 * quad + 2);
}

// Adds the products of four weight vectors of nibbles (with a fifth bit from `high` where BITS is 5).
template <int BITS, int N> HS_INLINE void add_nibbles(const uint8_t *w, vi high, Columns<N> a, Dots<N> dot) {
    const vi nibbles = set1i(0x0f0f0f0f), pairs = set1i(0x000f000f), fifth = set1i(0x10101010);
    HS_UNROLL
    for (int i = 0; i < 4; i++) {
        prefetch(w + 64 * i + PREFETCH);
        const vi v = load_bytes(w + 64 * i);
        if (BITS == 4) {
            add_quad<N>(and_v(v, pairs), and_v(shr16<8>(v), pairs), i, a, dot);
            add_quad<N>(and_v(shr16<4>(v), pairs), shr16<12>(v), i + 4, a, dot);
        } else {
            const vi low = or_v(and_v(v, nibbles), and_v(shl_by(high, 4 - i), fifth));
            const vi top = or_v(and_v(shr16<4>(v), nibbles), and_v(shr_by(high, i), fifth));
            add_quad<N>(even_bytes(low), odd_bytes(low), i, a, dot);
            add_quad<N>(even_bytes(top), odd_bytes(top), i + 4, a, dot);
        }
    }
}

// A format says how many sub-blocks a block has, whether they come in halves of 16 columns with scales of their own, and
// gives scales and dot products of each. `half` is 0 where there are none.

// Q4_0, Q4_1, Q5_0, Q5_1.
template <int BITS, bool MIN> struct Simple {
    static constexpr int SUBS = 1, HALVES = 1;
    static constexpr bool OFFSET = true;
    static constexpr int HIGH_AT = MIN ? 64 : 32;
    static constexpr int LOW_AT = HIGH_AT + (BITS == 5 ? 64 : 0);
    static constexpr size_t BYTES = LOW_AT + 256;
    const uint8_t *w;
    HS_INLINE Simple open(const uint8_t *w) { return {w}; }
    HS_MEMBER Scales scales(int, int) const {
        prefetch(w + PREFETCH);
        const vf d = half_row(w);
        return {d, MIN ? half_row(w + 32) : mul(d, set1(BITS == 4 ? -8.0f : -16.0f))};
    }
    template <int N> HS_MEMBER void add_dots(int, int, Columns<N> a, Dots<N> dot) const {
        add_nibbles<BITS, N>(w + LOW_AT, BITS == 5 ? load_bytes(w + HIGH_AT) : vi{}, a, dot);
    }
};

struct Q8 {
    static constexpr int SUBS = 1, HALVES = 1;
    static constexpr bool OFFSET = false;
    static constexpr size_t BYTES = 544;
    const uint8_t *w;
    HS_INLINE Q8 open(const uint8_t *w) { return {w}; }
    HS_MEMBER Scales scales(int, int) const {
        prefetch(w + PREFETCH);
        const vf d = half_row(w);
        return {d, d};
    }
    template <int N> HS_MEMBER void add_dots(int, int, Columns<N> a, Dots<N> dot) const {
        HS_UNROLL
        for (int i = 0; i < 8; i++) {
            prefetch(w + 32 + 64 * i + PREFETCH);
            const vi v = load_bytes(w + 32 + 64 * i);
            add_quad<N>(sar16<8>(shl16<8>(v)), sar16<8>(v), i, a, dot);
        }
    }
};

// Q4_K, Q5_K. The 12 packed scale bytes become four word vectors: scales 0-3, 4-7, minima 0-3, 4-7.
template <int BITS> struct KScaled {
    static constexpr int SUBS = 8, HALVES = 1;
    static constexpr bool OFFSET = true;
    static constexpr int SUB_BYTES = BITS == 5 ? 320 : 256;
    static constexpr size_t BYTES = 256 + 8 * SUB_BYTES;
    const uint8_t *w;
    vf d, dmin;
    vi scale[2], min[2];
    HS_INLINE KScaled open(const uint8_t *w) {
        for (int i = 0; i < 4; i++) prefetch(w + 64 * i + PREFETCH);
        const vi u0 = load_bytes(w + 64), u1 = load_bytes(w + 128), u2 = load_bytes(w + 192);
        const vi six = set1i(0x3f3f3f3f), four = set1i(0x0f0f0f0f), top = set1i(0x30303030);
        return {w,
                half_row(w),
                sub(set1(0.0f), half_row(w + 32)),
                {and_v(u0, six), or_v(and_v(u2, four), and_v(shr<2>(u0), top))},
                {and_v(u1, six), or_v(and_v(shr<4>(u2), four), and_v(shr<2>(u1), top))}};
    }
    HS_MEMBER Scales scales(int s, int) const {
        const vi byte = set1i(0xff);
        const int shift = 8 * (s & 3);
        const vi sc = s < 4 ? scale[0] : scale[1], mn = s < 4 ? min[0] : min[1];
        return {mul(d, to_float(and_v(shr_by(sc, shift), byte))), mul(dmin, to_float(and_v(shr_by(mn, shift), byte)))};
    }
    template <int N> HS_MEMBER void add_dots(int s, int, Columns<N> a, Dots<N> dot) const {
        const uint8_t *sub_block = w + 256 + SUB_BYTES * s;
        if (BITS == 5) prefetch(sub_block + 256 + PREFETCH);
        add_nibbles<BITS, N>(sub_block + (BITS == 5 ? 64 : 0), BITS == 5 ? load_bytes(sub_block) : vi{}, a, dot);
    }
};

// Q6_K: a scale for each 16 columns; the offset of -32 is a minimum.
struct Q6K {
    static constexpr int SUBS = 8, HALVES = 2;
    static constexpr bool OFFSET = true;
    static constexpr size_t BYTES = 3360;
    const uint8_t *w;
    vf d;
    HS_INLINE Q6K open(const uint8_t *w) {
        for (int i = 0; i < 5; i++) prefetch(w + 64 * i + PREFETCH);
        return {w, half_row(w)};
    }
    HS_MEMBER Scales scales(int s, int half) const {
        const vi words = load_bytes(w + 32 + 64 * (s / 2));
        const vf scale = mul(d, to_float(sar<24>(shl_by(words, 24 - 16 * (s & 1) - 8 * half))));
        return {scale, mul(scale, set1(-32.0f))};
    }
    template <int N> HS_MEMBER void add_dots(int s, int half, Columns<N> a, Dots<N> dot) const {
        const uint8_t *sub_block = w + 288 + 384 * s;
        const vi nibbles = set1i(0x0f0f0f0f), top = set1i(0x30303030);
        const vi high = load_bytes(sub_block + 256 + 64 * half);
        prefetch(sub_block + 256 + 64 * half + PREFETCH);
        HS_UNROLL
        for (int i = 0; i < 4; i++) {
            if (half == 0) prefetch(sub_block + 64 * i + PREFETCH);
            const vi v = load_bytes(sub_block + 64 * i);
            const vi bits = i < 2 ? shl_by(high, 4 - 2 * i) : shr_by(high, 2 * i - 4);
            const vi q = or_v(and_v(half ? shr16<4>(v) : v, nibbles), and_v(bits, top));
            add_quad<N>(even_bytes(q), odd_bytes(q), 4 * half + i, a, dot);
        }
    }
};

// Adds the products of four weight vectors of nibbles that number entries of a table.
template <int N> HS_INLINE void add_coded(const uint8_t *w, const int8_t (&table)[16], Columns<N> a, Dots<N> dot) {
    const vi nibbles = set1i(0x0f0f0f0f);
    HS_UNROLL
    for (int i = 0; i < 4; i++) {
        prefetch(w + 64 * i + PREFETCH);
        const vi v = load_bytes(w + 64 * i);
        const vi low = look_up(table, and_v(v, nibbles)), top = look_up(table, and_v(shr16<4>(v), nibbles));
        add_quad<N>(sar16<8>(shl16<8>(low)), sar16<8>(low), i, a, dot);
        add_quad<N>(sar16<8>(shl16<8>(top)), sar16<8>(top), i + 4, a, dot);
    }
}

struct Iq4Nl {
    static constexpr int SUBS = 1, HALVES = 1;
    static constexpr bool OFFSET = false;
    static constexpr size_t BYTES = 288;
    const uint8_t *w;
    HS_INLINE Iq4Nl open(const uint8_t *w) { return {w}; }
    HS_MEMBER Scales scales(int, int) const {
        prefetch(w + PREFETCH);
        const vf d = half_row(w);
        return {d, d};
    }
    template <int N> HS_MEMBER void add_dots(int, int, Columns<N> a, Dots<N> dot) const { add_coded<N>(w + 32, IQ4_TABLE, a, dot); }
};

// Scales are exponents: e put where a float has its own is 2^(e - 127), and zero for e = 0, where 2^-128 is meant.
struct Mxfp4 {
    static constexpr int SUBS = 1, HALVES = 1;
    static constexpr bool OFFSET = false;
    static constexpr size_t BYTES = 272;
    const uint8_t *w;
    HS_INLINE Mxfp4 open(const uint8_t *w) { return {w}; }
    HS_MEMBER Scales scales(int, int) const {
        prefetch(w + PREFETCH);
        const vf d = mul(as_float(shl<23>(widen_u8(w))), set1(0.5f));
        return {d, d};
    }
    template <int N> HS_MEMBER void add_dots(int, int, Columns<N> a, Dots<N> dot) const { add_coded<N>(w + 16, MXFP4_TABLE, a, dot); }
};

struct Iq4Xs {
    static constexpr int SUBS = 8, HALVES = 1;
    static constexpr bool OFFSET = false;
    static constexpr size_t BYTES = 2176;
    const uint8_t *w;
    vf d;
    vi high, low;
    HS_INLINE Iq4Xs open(const uint8_t *w) {
        for (int i = 0; i < 2; i++) prefetch(w + 64 * i + PREFETCH);
        return {w, half_row(w), widen_u16(reinterpret_cast<const uint16_t *>(w + 32)), load_bytes(w + 64)};
    }
    HS_MEMBER Scales scales(int s, int) const {
        const vi bits = or_v(and_v(shr_by(low, 4 * s), set1i(15)), shl<4>(and_v(shr_by(high, 2 * s), set1i(3))));
        const vf scale = mul(d, to_float(sub(bits, set1i(32))));
        return {scale, scale};
    }
    template <int N> HS_MEMBER void add_dots(int s, int, Columns<N> a, Dots<N> dot) const {
        add_coded<N>(w + 128 + 256 * s, IQ4_TABLE, a, dot);
    }
};

// Q2_K: a scale and a minimum of four bits each for 16 columns.
struct Q2K {
    static constexpr int SUBS = 8, HALVES = 2;
    static constexpr bool OFFSET = true;
    static constexpr size_t BYTES = 1344;
    const uint8_t *w;
    vf d, dmin;
    HS_INLINE Q2K open(const uint8_t *w) {
        for (int i = 0; i < 5; i++) prefetch(w + 64 * i + PREFETCH);
        return {w, half_row(w), sub(set1(0.0f), half_row(w + 32))};
    }
    HS_MEMBER Scales scales(int s, int half) const {
        const vi byte = shr_by(load_bytes(w + 64 + 64 * (s / 2)), 16 * (s & 1) + 8 * half), four = set1i(15);
        return {mul(d, to_float(and_v(byte, four))), mul(dmin, to_float(and_v(shr<4>(byte), four)))};
    }
    template <int N> HS_MEMBER void add_dots(int s, int half, Columns<N> a, Dots<N> dot) const {
        const uint8_t *p = w + 320 + 128 * s + 64 * half;
        prefetch(p + PREFETCH);
        const vi v = load_bytes(p), pairs = set1i(0x00030003);
        HS_UNROLL
        for (int i = 0; i < 4; i++)
            add_quad<N>(and_v(shr_by(v, 2 * i), pairs), and_v(shr_by(v, 2 * i + 8), pairs), 4 * half + i, a, dot);
    }
};

// Q3_K: six-bit scales for 16 columns each, less 32; values of three bits, less 4.
struct Q3K {
    static constexpr int SUBS = 8, HALVES = 2;
    static constexpr bool OFFSET = true;
    static constexpr size_t BYTES = 1760;
    const uint8_t *w;
    vf d;
    vi scale[4];
    HS_INLINE Q3K open(const uint8_t *w) {
        for (int i = 0; i < 4; i++) prefetch(w + 64 * i + PREFETCH);
        const vi u0 = load_bytes(w + 32), u1 = load_bytes(w + 96), u2 = load_bytes(w + 160);
        const vi four = set1i(0x0f0f0f0f), top = set1i(0x30303030);
        return {w,
                half_row(w),
                {or_v(and_v(u0, four), and_v(shl<4>(u2), top)), or_v(and_v(u1, four), and_v(shl<2>(u2), top)),
                 or_v(and_v(shr<4>(u0), four), and_v(u2, top)), or_v(and_v(shr<4>(u1), four), and_v(shr<2>(u2), top))}};
    }
    HS_MEMBER Scales scales(int s, int half) const {
        const vi six = and_v(shr_by(scale[s / 2], 16 * (s & 1) + 8 * half), set1i(0x3f));
        const vf both = mul(d, to_float(sub(six, set1i(32))));
        return {both, mul(both, set1(-4.0f))};
    }
    template <int N> HS_MEMBER void add_dots(int s, int half, Columns<N> a, Dots<N> dot) const {
        const uint8_t *sub_block = w + 224 + 192 * s;
        prefetch(sub_block + 64 * half + PREFETCH);
        if (half == 0) prefetch(sub_block + 128 + PREFETCH);
        const vi v = load_bytes(sub_block + 64 * half), high = shr_by(load_bytes(sub_block + 128), 4 * half);
        const vi two = set1i(0x03030303), third = set1i(0x04040404);
        HS_UNROLL
        for (int i = 0; i < 4; i++) {
            const vi bits = i < 2 ? shl_by(high, 2 - i) : shr_by(high, i - 2);
            const vi q = or_v(and_v(shr_by(v, 2 * i), two), and_v(bits, third));
            add_quad<N>(even_bytes(q), odd_bytes(q), 4 * half + i, a, dot);
        }
    }
};

HS_INLINE void finish(vf acc, const float *bias, float *out) { store(out, bias ? add(acc, load(bias)) : acc); }

// N batch rows, 16 weight rows, all columns.
template <class Format, int N>
void tile(const uint8_t *w, int cols, const Rows &rows, int first_row, const float *bias, float *out, int64_t stride) {
    vf acc[N];
    const ActBlock *a[N];
    HS_UNROLL
    for (int n = 0; n < N; n++) {
        acc[n] = set1(0.0f);
        a[n] = reinterpret_cast<const ActBlock *>(rows.activation + rows.activation_stride * static_cast<size_t>(rows.at(first_row + n)));
    }
    for (int b = cols / (32 * Format::SUBS); b > 0; b--, w += Format::BYTES) {
        const Format format = Format::open(w);
        for (int s = 0; s < Format::SUBS; s++) {
            HS_UNROLL
            for (int half = 0; half < Format::HALVES; half++) {
                vi dot[N];
                HS_UNROLL
                for (int n = 0; n < N; n++) dot[n] = set1i(0);
                format.template add_dots<N>(s, half, a, dot);
                const Scales scales = format.scales(s, half);
                HS_UNROLL
                for (int n = 0; n < N; n++) {
                    acc[n] = fma(mul(scales.d, set1(a[n]->d)), to_float(dot[n]), acc[n]);
                    const float sum = Format::HALVES == 1 ? a[n]->s : a[n]->half_s[half];
                    if (Format::OFFSET) acc[n] = fma(scales.m, set1(sum), acc[n]);
                }
            }
            HS_UNROLL
            for (int n = 0; n < N; n++) a[n]++;
        }
    }
    HS_UNROLL
    for (int n = 0; n < N; n++) finish(acc[n], bias, out + stride * n);
}

struct AsF32 {
    static constexpr size_t BYTES = 64;
    HS_INLINE vf get(const uint8_t *p) { return load(reinterpret_cast<const float *>(p)); }
};
struct AsF16 {
    static constexpr size_t BYTES = 32;
    HS_INLINE vf get(const uint8_t *p) { return half_row(p); }
};
struct AsBF16 {
    static constexpr size_t BYTES = 32;
    HS_INLINE vf get(const uint8_t *p) { return load_bf16(reinterpret_cast<const uint16_t *>(p)); }
};

// Float weights, G groups at once: one accumulator per row and group is one chain of dependent additions, and a single
// batch row alone would leave the adders idle.
template <class Elem, int N, int G>
void float_tile(const uint8_t *w, int cols, const Rows &rows, int first_row, const float *bias, float *out, int64_t stride) {
    const size_t group_stride = Elem::BYTES * static_cast<size_t>(cols);
    vf acc[G][N];
    const float *x[N];
    HS_UNROLL
    for (int n = 0; n < N; n++) {
        x[n] = rows.src + rows.src_stride * rows.at(first_row + n);
        HS_UNROLL
        for (int g = 0; g < G; g++) acc[g][n] = set1(0.0f);
    }
    for (int c = 0; c < cols; c++, w += Elem::BYTES) {
        HS_UNROLL
        for (int g = 0; g < G; g++) {
            const uint8_t *p = w + group_stride * static_cast<size_t>(g);
            prefetch(p + PREFETCH);
            const vf v = Elem::get(p);
            HS_UNROLL
            for (int n = 0; n < N; n++) acc[g][n] = fma(v, set1(x[n][c]), acc[g][n]);
        }
    }
    HS_UNROLL
    for (int g = 0; g < G; g++) {
        HS_UNROLL
        for (int n = 0; n < N; n++) finish(acc[g][n], bias ? bias + GROUP * g : nullptr, out + stride * n + GROUP * g);
    }
}

using TileFunction = void (*)(const uint8_t *, int, const Rows &, int, const float *, float *, int64_t);

// Tile functions of a type by batch rows, largest first; `wide` covers four groups of one batch row (float types).
struct Tiles {
    TileFunction by_12, by_8, by_4, by_2, by_1, wide;
};

template <class Format> constexpr Tiles packed_tiles() {
    return {MAX_TILE >= 12 ? &tile<Format, MAX_TILE >= 12 ? 12 : 1> : nullptr,
            MAX_TILE >= 8 ? &tile<Format, MAX_TILE >= 8 ? 8 : 1> : nullptr,
            &tile<Format, 4>,
            &tile<Format, 2>,
            &tile<Format, 1>,
            nullptr};
}
template <class Elem> constexpr Tiles float_tiles() {
    return {MAX_TILE >= 12 ? &float_tile<Elem, MAX_TILE >= 12 ? 12 : 1, 1> : nullptr,
            MAX_TILE >= 8 ? &float_tile<Elem, MAX_TILE >= 8 ? 8 : 1, 1> : nullptr,
            &float_tile<Elem, 4, 1>,
            &float_tile<Elem, 2, 1>,
            &float_tile<Elem, 1, 1>,
            &float_tile<Elem, 1, 4>};
}

Tiles tiles_of(int type) {
    switch (type) {
        case HS_F32: return float_tiles<AsF32>();
        case HS_F16: return float_tiles<AsF16>();
        case HS_BF16: return float_tiles<AsBF16>();
        case HS_Q4_0: return packed_tiles<Simple<4, false>>();
        case HS_Q4_1: return packed_tiles<Simple<4, true>>();
        case HS_Q5_0: return packed_tiles<Simple<5, false>>();
        case HS_Q5_1: return packed_tiles<Simple<5, true>>();
        case HS_Q8_0: return packed_tiles<Q8>();
        case HS_IQ4_NL: return packed_tiles<Iq4Nl>();
        case HS_MXFP4: return packed_tiles<Mxfp4>();
        case HS_Q2_K: return packed_tiles<Q2K>();
        case HS_Q3_K: return packed_tiles<Q3K>();
        case HS_IQ4_XS: return packed_tiles<Iq4Xs>();
        case HS_Q4_K: return packed_tiles<KScaled<4>>();
        case HS_Q5_K: return packed_tiles<KScaled<5>>();
        default: return packed_tiles<Q6K>();
    }
}

// Groups of one chunk: few enough for the cache and for every thread to get its share, the same for all parts.
int groups_of_chunk(const Run &run, const hs_step &step, int total) {
    size_t bytes = 1;
    for (int p = 0; p < step.part_count; p++) {
        const size_t size = group_bytes(step.parts[p].matrix.type, step.width);
        bytes = size > bytes ? size : bytes;
    }
    const int by_cache = static_cast<int>(CHUNK_BYTES / bytes), by_balance = total / (run.threads * CHUNKS_PER_THREAD);
    const int length = by_cache < by_balance ? by_cache : by_balance;
    return length > 1 ? length : 1;
}

int total_groups(const hs_step &step) {
    int total = 0;
    for (int p = 0; p < step.part_count; p++) total += groups_of(step.parts[p].matrix.rows);
    return total;
}

}  // namespace

void linear_groups(const hs_matrix &matrix, const float *bias, float *dst, int64_t dst_stride, const Rows &rows, int row_count, int first,
                   int last) {
    const Tiles tiles = tiles_of(matrix.type);
    const size_t stride = group_bytes(matrix.type, matrix.cols);
    for (int row = 0; row < row_count;) {
        const int left = row_count - row;
        TileFunction function = tiles.by_1;
        int size = 1, wide = 1;
        if (left >= 12 && tiles.by_12) function = tiles.by_12, size = 12;
        else if (left >= 8 && tiles.by_8) function = tiles.by_8, size = 8;
        else if (left >= 4) function = tiles.by_4, size = 4;
        else if (left >= 2) function = tiles.by_2, size = 2;
        for (int group = first; group < last; group += wide) {
            wide = size == 1 && tiles.wide && last - group >= 4 ? 4 : 1;
            (wide == 4 ? tiles.wide : function)(matrix.data + stride * static_cast<size_t>(group), matrix.cols, rows, row,
                                                bias ? bias + GROUP * group : nullptr, dst + dst_stride * row + GROUP * group, dst_stride);
        }
        row += size;
    }
}

int groups_in_cache(size_t bytes) {
    const int length = static_cast<int>(CHUNK_BYTES / bytes);
    return length > 1 ? length : 1;
}

int linear_chunks(const Run &run, const hs_step &step) {
    if (run.rows(step) == 0) return 0;
    const int total = total_groups(step), length = groups_of_chunk(run, step, total);
    return (total + length - 1) / length;
}

void linear_chunk(const Run &run, const hs_step &step, int chunk) {
    const Rows inputs{step.activation, activation_bytes(step.width), step.src, step.src_stride, nullptr};
    const int total = total_groups(step), length = groups_of_chunk(run, step, total);
    const int first = chunk * length, last = first + length < total ? first + length : total;
    int base = 0;
    for (int p = 0; p < step.part_count && base < last; p++) {
        const int groups = groups_of(step.parts[p].matrix.rows);
        const int from = first > base ? first - base : 0, to = last - base < groups ? last - base : groups;
        const hs_part &part = step.parts[p];
        if (from < to) linear_groups(part.matrix, part.bias, part.dst, part.dst_stride, inputs, run.rows(step), from, to);
        base += groups;
    }
}

}  // namespace hs
