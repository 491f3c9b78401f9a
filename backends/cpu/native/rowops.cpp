// The ops that work on rows one at a time: embedding, norm, rope and KV store, gate, selection, quantisation.
//
// Rows of every buffer are padded to 16 floats and may be read and written to the end of the padding.
#include <cmath>

#include "kernels.h"
#include "kv.h"
#include "simd.h"

namespace hs {
namespace {

constexpr int COLUMN_RUN = 512;   // columns of one item where a row is cut: a multiple of the quantisation block

ActBlock *activation_row(const hs_step &step, int row) {
    return reinterpret_cast<ActBlock *>(step.activation + static_cast<size_t>(step.width / 32) * sizeof(ActBlock) * static_cast<size_t>(row));
}

void norm_row(const hs_step &step, int row) {
    float *x = step.src + step.src_stride * row, *out = step.dst + step.dst_stride * row;
    const float *extra = step.add ? step.add + step.add_stride * row : nullptr;
    vf squares = set1(0.0f);
    for (int c = 0; c < step.width; c += 16) {
        vf v = load(x + c);
        if (extra) {
            v = add(v, load(extra + c));
            store(x + c, v);
        }
        squares = fma(v, v, squares);
    }
    // Lanes beyond the width hold zeros: buffers start as zeros and every op maps zero padding to zero padding.
    const float mean = lane_sum(squares) / static_cast<float>(step.width);
    const vf scale = set1(1.0f / std::sqrt(mean + step.eps));
    for (int c = 0; c < step.width; c += 16) store(out + c, mul(mul(load(x + c), scale), load(step.weight + c)));
    if (step.activation) quantise_blocks(out, activation_row(step, row), 0, step.width / 32);
}

void rotate_head(float *x, const float *table, int pairs, bool interleaved) {
    const float *cosine = table, *sine = table + pairs;
    for (int i = 0; i < pairs; i++) {
        float &a = x[interleaved ? 2 * i : i], &b = x[interleaved ? 2 * i + 1 : i + pairs];
        const float p = a * cosine[i] - b * sine[i], q = a * sine[i] + b * cosine[i];
        a = p;
        b = q;
    }
}

template <class Kv> void store_row(const hs_step &step, const float *k, const float *v, int slot) {
    using Elem = typename Kv::Elem;
    const int page = slot / GROUP, lane = slot % GROUP, dims = step.head_dim, wide = padded(dims);
    alignas(64) float last[16];
    for (int h = 0; h < step.kv_heads; h++) {
        const size_t block = static_cast<size_t>(page) * static_cast<size_t>(step.kv_heads) + static_cast<size_t>(h);
        Elem *kp = reinterpret_cast<Elem *>(step.k_pool) + block * static_cast<size_t>(dims) * GROUP + lane;
        Elem *vp = reinterpret_cast<Elem *>(step.v_pool) + (block * GROUP + static_cast<size_t>(lane)) * static_cast<size_t>(wide);
        const float *kh = k + h * dims, *vh = v + h * dims;
        alignas(64) Elem column[16];
        for (int c = 0; c < dims; c += 16) {
            const int count = dims - c < 16 ? dims - c : 16;
            for (int i = 0; i < 16; i++) last[i] = i < count ? kh[c + i] : 0.0f;
            Kv::put(column, load(last));
            for (int i = 0; i < count; i++) kp[static_cast<size_t>(c + i) * GROUP] = column[i];
            for (int i = 0; i < 16; i++) last[i] = i < count ? vh[c + i] : 0.0f;
            Kv::put(vp + c, load(last));
        }
    }
}

vf gate_of(int kind, vf g) {
    if (kind == HS_GATE_SILU) return div(g, add(set1(1.0f), exp_v(sub(set1(0.0f), g))));
    // 0.5 (1 + tanh z) = 1 / (1 + e^(-2z)), z = sqrt(2 / pi) (g + 0.044715 g^3)
    const vf z2 = mul(mul(g, set1(-1.5957691216057308f)), fma(mul(g, g), set1(0.044715f), set1(1.0f)));
    return div(g, add(set1(1.0f), exp_v(z2)));
}

// Rows of one chunk: all threads get several, where there are that many.
int rows_of_chunk(const Run &run, int rows) {
    const int length = rows / (run.threads * 8);
    return length > 1 ? length : 1;
}

struct Range {
    int first, last;
};

Range rows_in(const Run &run, const hs_step &step, int chunk) {
    const int rows = run.rows(step), length = rows_of_chunk(run, rows), first = chunk * length;
    return {first, first + length < rows ? first + length : rows};
}

int column_runs(const hs_step &step) { return (step.width + COLUMN_RUN - 1) / COLUMN_RUN; }

Range columns_in(const hs_step &step, int chunk) {
    const int first = chunk % column_runs(step) * COLUMN_RUN;
    return {first, first + COLUMN_RUN < step.width ? first + COLUMN_RUN : step.width};
}

}  // namespace

int row_chunks(const Run &run, const hs_step &step) {
    const int rows = run.rows(step), length = rows_of_chunk(run, rows);
    return (rows + length - 1) / length;
}

int column_chunks(const Run &run, const hs_step &step) { return run.rows(step) * column_runs(step); }

void rope_table_chunk(const Run &run, const hs_step &step, int chunk) {
    const Range rows = rows_in(run, step, chunk);
    for (int r = rows.first; r < rows.last; r++) {
        float *row = step.table + static_cast<int64_t>(2 * step.rope_pairs) * r;
        for (int i = 0; i < step.rope_pairs; i++) {
            // In double: a float32 product of a large position and a frequency loses digits that turn the head.
            const double angle = static_cast<double>(run.batch.positions[r]) * step.frequencies[i];
            row[i] = static_cast<float>(std::cos(angle) * static_cast<double>(step.scale));
            row[step.rope_pairs + i] = static_cast<float>(std::sin(angle) * static_cast<double>(step.scale));
        }
    }
}

void embed_chunk(const Run &run, const hs_step &step, int chunk) {
    const Range rows = rows_in(run, step, chunk);
    for (int r = rows.first; r < rows.last; r++) {
        float *out = step.dst + step.dst_stride * r;
        unpack_row(step.parts[0].matrix, run.batch.tokens[r], out);
        if (step.scale != 1.0f)
            for (int c = 0; c < step.width; c++) out[c] *= step.scale;
    }
}

void norm_chunk(const Run &run, const hs_step &step, int chunk) {
    const Range rows = rows_in(run, step, chunk);
    for (int r = rows.first; r < rows.last; r++) norm_row(step, r);
}

void rope_store_chunk(const Run &run, const hs_step &step, int chunk) {
    const Range rows = rows_in(run, step, chunk);
    for (int r = rows.first; r < rows.last; r++) {
        float *q = step.src + step.src_stride * r, *k = step.add + step.add_stride * r;
        const float *v = step.third + step.third_stride * r;
        if (step.rope_pairs) {
            const float *table = step.table + static_cast<int64_t>(2 * step.rope_pairs) * r;
            for (int h = 0; h < step.heads; h++) rotate_head(q + h * step.head_dim, table, step.rope_pairs, step.interleaved != 0);
            for (int h = 0; h < step.kv_heads; h++) rotate_head(k + h * step.head_dim, table, step.rope_pairs, step.interleaved != 0);
        }
        const int slot = run.batch.slots[r];
        if (step.kv_type == HS_F16) store_row<KvF16>(step, k, v, slot);
        else if (step.kv_type == HS_BF16) store_row<KvBF16>(step, k, v, slot);
        else store_row<KvF32>(step, k, v, slot);
    }
}

void select_chunk(const Run &run, const hs_step &step, int chunk) {
    const Range rows = rows_in(run, step, chunk);
    for (int r = rows.first; r < rows.last; r++) {
        const int row = run.batch.logit_rows[r];
        const float *x = step.src + step.src_stride * row, *extra = step.add ? step.add + step.add_stride * row : nullptr;
        float *out = step.dst + step.dst_stride * r;
        for (int c = 0; c < step.width; c += 16) store(out + c, extra ? add(load(x + c), load(extra + c)) : load(x + c));
    }
}

void quantise_chunk(const Run &, const hs_step &step, int chunk) {
    const int row = chunk / column_runs(step);
    const Range columns = columns_in(step, chunk);
    quantise_blocks(step.src + step.src_stride * row, activation_row(step, row), columns.first / 32, columns.last / 32);
}

void gate_chunk(const Run &, const hs_step &step, int chunk) {
    const int row = chunk / column_runs(step);
    const Range columns = columns_in(step, chunk);
    const float *gate = step.src + step.src_stride * row, *up = step.add + step.add_stride * row;
    float *out = step.dst + step.dst_stride * row;
    for (int c = columns.first; c < columns.last; c += 16) store(out + c, mul(gate_of(step.gate, load(gate + c)), load(up + c)));
    if (step.activation) quantise_blocks(out, activation_row(step, row), columns.first / 32, columns.last / 32);
}

}  // namespace hs
