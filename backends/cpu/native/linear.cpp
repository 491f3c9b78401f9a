// Linear layers: y = W x + bias for a few rows or many, weights packed (packed.h) or float.
//
// A chunk is a run of groups of 16 weight rows. All batch rows pass over it before the next one, so its weights come from
// memory once; decode is bound by exactly that, and `prefetch` keeps the loads PREFETCH bytes ahead of the arithmetic. The
// columns of a row are never split among threads.
#include <climits>
#include <utility>

#include "packed.h"

namespace hs {
namespace {

constexpr size_t CHUNK_BYTES = 128 * 1024;   // weights of a chunk: they must stay in L2 while the batch rows pass
constexpr int CHUNKS_PER_THREAD = 6;         // so many at least, where the matrix has them: threads do not run evenly
constexpr int ROWS_AHEAD = 4;                // batch rows up to which a waiting thread fetches weights
constexpr size_t BYTES_AHEAD = 64 * 1024;    // so many at most
constexpr int ROWS_OF_BLOCK = 96, GROUPS_OF_BLOCK = 16;   // batch rows and groups whose sums are kept aside: 96 KiB
constexpr int ROWS_IN_L1 = 32;               // batch rows up to which groups are the outer loop: weights then come in order

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
        for (int n = 0; n < N; n++) store(out + stride * n + GROUP * g, bias ? add(acc[g][n], load(bias + GROUP * g)) : acc[g][n]);
    }
}

using FewFunction = void (*)(const uint8_t *, int, const Rows &, int, const float *, float *, int64_t);
using UnpackFunction = void (*)(const uint8_t *, int, int, Unpacked *);
using MultiplyFunction = void (*)(const Unpacked *, int, const Rows &, int, int, const Sums &, Next);

// The functions of a type. few[n - 1] takes n batch rows, `wide` four groups of one batch row (float types). many[w - 1][n - 1]
// takes w groups and n batch rows, unpacked before; float types have none.
struct Functions {
    const FewFunction *few;
    int few_most;
    FewFunction wide;
    int many_from;   // batch rows
    UnpackFunction unpack;
    const MultiplyFunction *many[LINEAR_GROUPS];
};

template <class Format, int... N> const FewFunction *few_table(std::integer_sequence<int, N...>) {
    static constexpr FewFunction TABLE[] = {&few<Format, N + 1>...};
    return TABLE;
}
template <int W, int MINS, bool WIDE, int... N> const MultiplyFunction *many_table(std::integer_sequence<int, N...>) {
    static constexpr MultiplyFunction TABLE[] = {&multiply<W, N + 1, MINS, WIDE>...};
    return TABLE;
}
template <class Elem, int... N> const FewFunction *float_table(std::integer_sequence<int, N...>) {
    static constexpr FewFunction TABLE[] = {&float_tile<Elem, N + 1, 1>...};
    return TABLE;
}

template <class Format> Functions packed() {
    constexpr auto sizes = std::make_integer_sequence<int, LINEAR_ROWS>();
    Functions functions = {few_table<Format>(std::make_integer_sequence<int, FEW>()), FEW, nullptr, Format::MANY_FROM, &unpack_slice<Format>, {}};
    functions.many[0] = many_table<1, Format::MINS, Format::WIDE>(sizes);
    if (LINEAR_GROUPS == 2) functions.many[LINEAR_GROUPS - 1] = many_table<LINEAR_GROUPS, Format::MINS, Format::WIDE>(sizes);
    return functions;
}
template <class Elem> Functions floats() {
    return {float_table<Elem>(std::make_integer_sequence<int, LINEAR_ROWS>()), LINEAR_ROWS, &float_tile<Elem, 1, 4>, INT_MAX, nullptr, {}};
}

Functions functions_of(int type) {
    switch (type) {
        case HS_F32: return floats<AsF32>();
        case HS_F16: return floats<AsF16>();
        case HS_BF16: return floats<AsBF16>();
        case HS_Q4_0: return packed<Simple<4, false>>();
        case HS_Q4_1: return packed<Simple<4, true>>();
        case HS_Q5_0: return packed<Simple<5, false>>();
        case HS_Q5_1: return packed<Simple<5, true>>();
        case HS_Q8_0: return packed<Q8>();
        case HS_IQ4_NL: return packed<Iq4Nl>();
        case HS_MXFP4: return packed<Mxfp4>();
        case HS_Q2_K: return packed<Q2K>();
        case HS_Q3_K: return packed<Q3K>();
        case HS_IQ4_XS: return packed<Iq4Xs>();
        case HS_Q4_K: return packed<KScaled<4>>();
        case HS_Q5_K: return packed<KScaled<5>>();
        default: return packed<Q6K>();
    }
}

// Batch rows cut into as few tiles as there can be, of sizes as even as there can be.
struct Tiling {
    int tiles, size, larger;   // the first `larger` tiles have one row more than `size`
    Tiling(int rows, int most) : tiles((rows + most - 1) / most), size(rows / tiles), larger(rows % tiles) {}
    int rows_of(int tile) const { return tile < larger ? size + 1 : size; }
};

// Where groups [first, last) of a linear layer are read from and written to.
struct Target {
    const hs_matrix &matrix;
    const float *bias;
    float *dst;
    int64_t stride;
    const float *bias_of(int group) const { return bias ? bias + GROUP * group : nullptr; }
    float *at(int row, int group) const { return dst + stride * row + GROUP * group; }
};

void few_rows(const Functions &functions, const Target &to, const Rows &rows, int row_count, int first, int last) {
    const size_t step = group_step(to.matrix);
    const Tiling tiling(row_count, functions.few_most);
    for (int tile = 0, row = 0; tile < tiling.tiles; row += tiling.rows_of(tile++)) {
        const int size = tiling.rows_of(tile);
        for (int group = first, count = 1; group < last; group += count) {
            count = size == 1 && functions.wide && !to.matrix.stored_cols && last - group >= 4 ? 4 : 1;
            const FewFunction function = count == 4 ? functions.wide : functions.few[size - 1];
            function(to.matrix.data + step * static_cast<size_t>(group), to.matrix.cols, rows, row, to.bias_of(group), to.at(row, group), to.stride);
        }
    }
}

// A block of batch rows and groups. Slices of the columns are outside and groups inside, so that the activations of a slice stay
// in L2; the other way round where they are few, and weights come in order. Sums of unfinished slices lie in `partial`: rows of
// `dst` are far apart, in few sets of a cache.
void many_block(const Functions &functions, const Target &to, const Rows &rows, int first_row, int row_count, int first, int last) {
    alignas(64) float partial[ROWS_OF_BLOCK][GROUPS_OF_BLOCK * GROUP];
    constexpr int64_t PITCH = GROUPS_OF_BLOCK * GROUP;
    Unpacked slice[LINEAR_GROUPS][BLOCKS];
    const int blocks = to.matrix.cols / 32;
    const size_t step = group_step(to.matrix), block = group_bytes(to.matrix.type, to.matrix.cols) / static_cast<size_t>(blocks);
    const int slices = (blocks + BLOCKS - 1) / BLOCKS, runs = (last - first + LINEAR_GROUPS - 1) / LINEAR_GROUPS;
    const Tiling tiling(row_count, LINEAR_ROWS);
    for (int i = 0; i < slices * runs; i++) {
        const bool in_order = row_count <= ROWS_IN_L1;
        const int run = LINEAR_GROUPS * (in_order ? i / slices : i % runs), from = BLOCKS * (in_order ? i % slices : i / runs);
        const int group = first + run, count = last - group < LINEAR_GROUPS ? last - group : LINEAR_GROUPS;
        const int end = from + BLOCKS < blocks ? from + BLOCKS : blocks;
        const uint8_t *weights = to.matrix.data + step * static_cast<size_t>(group);
        for (int g = 0; g < count; g++) functions.unpack(weights + step * static_cast<size_t>(g), from, end, slice[g]);
        // Where groups come in order, what is next lies behind it or in the next group, and every tile asks for its part.
        const uint8_t *after = end < blocks ? weights + step * static_cast<size_t>(count - 1) + block * static_cast<size_t>(end)
                                            : weights + step * static_cast<size_t>(count);
        Next next{after, in_order ? 1 + static_cast<int>(block) / (64 * tiling.tiles) : 0};
        for (int tile = 0, row = 0; tile < tiling.tiles; row += tiling.rows_of(tile++)) {
            float *sums = partial[row] + GROUP * run;
            Sums at{from ? sums : nullptr, PITCH, sums, PITCH, nullptr};
            if (end == blocks) at.to = to.at(first_row + row, group), at.to_stride = to.stride, at.bias = to.bias_of(group);
            functions.many[count - 1][tiling.rows_of(tile) - 1](slice[0], end - from, rows, first_row + row, from, at, next);
            next.at += 64 * (end - from) * next.lines;
        }
    }
}

void many_rows(const Functions &functions, const Target &to, const Rows &rows, int row_count, int first, int last) {
    for (int row = 0; row < row_count; row += ROWS_OF_BLOCK) {
        const int count = row_count - row < ROWS_OF_BLOCK ? row_count - row : ROWS_OF_BLOCK;
        for (int group = first; group < last; group += GROUPS_OF_BLOCK)
            many_block(functions, to, rows, row, count, group, last - group < GROUPS_OF_BLOCK ? last : group + GROUPS_OF_BLOCK);
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
    const Functions functions = functions_of(matrix.type);
    const Target to{matrix, bias, dst, dst_stride};
    if (row_count >= functions.many_from) many_rows(functions, to, rows, row_count, first, last);
    else few_rows(functions, to, rows, row_count, first, last);
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

Ahead linear_ahead(const Run &run, const hs_step &step, int thread) {
    const int rows = run.rows(step);
    if (rows == 0 || rows > ROWS_AHEAD) return {};
    const int total = total_groups(step), length = groups_of_chunk(run, step, total), chunks = (total + length - 1) / length;
    int group = dealt(chunks, thread, run.threads) * length;
    for (int p = 0; p < step.part_count; p++) {
        const hs_matrix &matrix = step.parts[p].matrix;
        const int groups = groups_of(matrix.rows);
        if (group < groups) {
            const size_t each = group_step(matrix), left = each * static_cast<size_t>(groups - group);
            return {matrix.data + each * static_cast<size_t>(group), left < BYTES_AHEAD ? left : BYTES_AHEAD};
        }
        group -= groups;
    }
    return {};
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
