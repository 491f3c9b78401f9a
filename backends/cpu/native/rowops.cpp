// The ops that work on rows one at a time: embedding, norm, head norms with rope and KV store, gates, soft cap, selection,
// quantisation.
//
// Rows of every buffer are padded to 16 floats and may be read and written to the end of the padding.
#include <cmath>

#include "activation.h"
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

// x / sqrt(mean(x^2) + eps) * weight over one head, without weights where there are none. `to` may be `from`.
void norm_head(const float *from, float *to, int dims, float eps, const float *weight) {
    alignas(64) float some[16];
    vf squares = set1(0.0f);
    int c = 0;
    for (; c + 16 <= dims; c += 16) squares = fma(load(from + c), load(from + c), squares);
    const int rest = dims - c;
    if (rest) {
        for (int i = 0; i < 16; i++) some[i] = i < rest ? from[c + i] : 0.0f;
        squares = fma(load(some), load(some), squares);
    }
    const float factor = 1.0f / std::sqrt(lane_sum(squares) / static_cast<float>(dims) + eps);
    const vf scale = set1(factor);
    for (c = 0; c + 16 <= dims; c += 16) {
        const vf x = mul(load(from + c), scale);
        store(to + c, weight ? mul(x, load(weight + c)) : x);
    }
    for (; c < dims; c++) to[c] = from[c] * factor * (weight ? weight[c] : 1.0f);
}

// One row's K and V of one kv head, at `lane` of a page's blocks kp and vp.
template <class Kv> void store_head(const hs_step &step, const float *k, const float *v, typename Kv::Elem *kp, typename Kv::Elem *vp, int lane) {
    const int dims = step.head_dim;
    alignas(64) float last[16];
    alignas(64) typename Kv::Elem column[16];
    vp += static_cast<size_t>(lane) * static_cast<size_t>(padded(dims));
    for (int c = 0; c < dims; c += 16) {
        const int count = dims - c < 16 ? dims - c : 16;
        for (int i = 0; i < 16; i++) last[i] = i < count ? k[c + i] : 0.0f;
        Kv::put(column, load(last));
        for (int i = 0; i < count; i++) kp[static_cast<size_t>(c + i) * GROUP + static_cast<size_t>(lane)] = column[i];
        for (int i = 0; i < 16; i++) last[i] = i < count ? v[c + i] : 0.0f;
        Kv::put(vp + c, load(last));
    }
}

// 32 floats as int8 times one scale, the largest magnitude / 127. Returns the scale as a half. Where one of them is no
// number, or infinite, the scale is no number: it is not hidden.
uint16_t quantise_kv_block(const float *x, int8_t *q) {
    const vf a = load(x), b = load(x + 16), most = set1(127.0f), least = set1(-127.0f);
    const float d = lane_max(max_v(abs_v(a), abs_v(b))) / 127.0f + lane_sum(mul(add(a, b), set1(0.0f)));
    const vf scale = set1(d), divisor = set1(d > 0.0f ? d : 1.0f);
    alignas(64) float steps[KV_BLOCK];
    alignas(64) uint16_t halves[16];
    store(steps, to_float(round_to_int(max_v(min_v(div(a, divisor), most), least))));
    store(steps + 16, to_float(round_to_int(max_v(min_v(div(b, divisor), most), least))));
    for (int i = 0; i < KV_BLOCK; i++) q[i] = static_cast<int8_t>(steps[i]);
    store_f16(halves, scale);
    return halves[0];
}

template <> void store_head<KvQ8>(const hs_step &step, const float *k, const float *v, uint8_t *kp, uint8_t *vp, int lane) {
    const int dims = step.head_dim;
    int8_t column[KV_BLOCK];
    uint8_t *values = vp + KvQ8::v_head(dims) + static_cast<size_t>(lane) * static_cast<size_t>(dims);
    for (int c = 0; c < dims; c += KV_BLOCK, kp += KvQ8::K_BLOCK_BYTES, vp += KvQ8::SCALES) {
        const uint16_t k_scale = quantise_kv_block(k + c, column);
        std::memcpy(kp + 2 * lane, &k_scale, 2);
        for (int i = 0; i < KV_BLOCK; i++) kp[KvQ8::SCALES + static_cast<size_t>(i * GROUP + lane)] = static_cast<uint8_t>(column[i]);
        const uint16_t v_scale = quantise_kv_block(v + c, column);
        std::memcpy(vp + 2 * lane, &v_scale, 2);
        std::memcpy(values + c, column, KV_BLOCK);
    }
}

template <class Kv> void store_kv(const hs_step &step, const float *k, const float *v, int head, int slot, int pool_pages) {
    using Elem = typename Kv::Elem;
    const size_t block = kv_block(head, slot / GROUP, pool_pages);
    Elem *kp = reinterpret_cast<Elem *>(step.k_pool) + block * Kv::k_elems(step.head_dim);
    Elem *vp = reinterpret_cast<Elem *>(step.v_pool) + block * Kv::v_elems(step.head_dim);
    store_head<Kv>(step, k, v, kp, vp, slot % GROUP);
}

void store_kv(const hs_step &step, const float *k, const float *v, int head, int slot, int pool_pages) {
    switch (step.kv_type) {
        case HS_F16: return store_kv<KvF16>(step, k, v, head, slot, pool_pages);
        case HS_BF16: return store_kv<KvBF16>(step, k, v, head, slot, pool_pages);
        case HS_Q8_0: return store_kv<KvQ8>(step, k, v, head, slot, pool_pages);
        case HS_F8: return store_kv<KvF8>(step, k, v, head, slot, pool_pages);
        default: return store_kv<KvF32>(step, k, v, head, slot, pool_pages);
    }
}

// One head, ready for its dot products: normalised where a weight is given, then rotated.
void turn_head(const hs_step &step, float *x, const float *weight, const float *table) {
    if (weight) norm_head(x, x, step.head_dim, step.eps, weight);
    if (table) rotate_head(x, table, step.rope_pairs, step.interleaved != 0);
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
        const int64_t row = static_cast<int64_t>(run.batch.tokens[r]) - (step.first < 0 ? 0 : step.first);
        if (row < 0 || row >= step.parts[0].matrix.rows) {  // another rank has it
            std::fill(out, out + step.width, 0.0f);
            continue;
        }
        unpack_row(step.parts[0].matrix, static_cast<int>(row), out);
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
    const int32_t *slots = run.batch.slots + static_cast<int64_t>(step.kv_group) * run.batch.rows;
    const int pool_pages = step.add ? run.pool_pages(step) : 0;
    alignas(64) float normed[MAX_HEAD_DIM];
    for (int r = rows.first; r < rows.last; r++) {
        const float *table = step.rope_pairs ? step.table + static_cast<int64_t>(2 * step.rope_pairs) * r : nullptr;
        float *q = step.src + step.src_stride * r;
        for (int h = 0; h < step.heads; h++) turn_head(step, q + static_cast<int64_t>(h) * step.q_step, step.weight, table);
        if (!step.add) continue;
        float *k = step.add + step.add_stride * r;
        const float *v = step.third + step.third_stride * r;
        for (int h = 0; h < step.kv_heads; h++, k += step.head_dim, v += step.head_dim) {
            // v first: it may be the same buffer as k, before k's norm and rotation.
            const float *value = v;
            if (step.v_norm || v == k) {
                if (step.v_norm) norm_head(v, normed, step.head_dim, step.eps, nullptr);
                else std::memcpy(normed, v, sizeof(float) * static_cast<size_t>(step.head_dim));
                value = normed;
            }
            turn_head(step, k, step.k_weight, table);
            store_kv(step, k, value, h, slots[r], pool_pages);
        }
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
    for (int c = columns.first; c < columns.last; c += 16) store(out + c, gated_v(step.gate, load(gate + c), load(up + c)));
    if (step.activation) quantise_blocks(out, activation_row(step, row), columns.first / 32, columns.last / 32);
}

void softcap_chunk(const Run &, const hs_step &step, int chunk) {
    const Range columns = columns_in(step, chunk);
    float *x = step.src + step.src_stride * (chunk / column_runs(step));
    const vf cap = set1(step.scale);
    for (int c = columns.first; c < columns.last; c += 16) store(x + c, mul(tanh_v(div(load(x + c), cap)), cap));
}

void scale_chunk(const Run &, const hs_step &step, int chunk) {
    const Range columns = columns_in(step, chunk);
    float *x = step.src + step.src_stride * (chunk / column_runs(step));
    const vf factor = set1(step.weight[0]);
    for (int c = columns.first; c < columns.last; c += 16) store(x + c, mul(load(x + c), factor));
}

void zero_chunk(const Run &, const hs_step &step, int chunk) {
    const Range columns = columns_in(step, chunk);
    float *x = step.dst + step.dst_stride * (chunk / column_runs(step));
    for (int c = columns.first; c < columns.last; c += 16) store(x + c, set1(0.0f));
}

void add_gated_chunk(const Run &, const hs_step &step, int chunk) {
    const int row = chunk / column_runs(step);
    const Range columns = columns_in(step, chunk);
    const float *x = step.src + step.src_stride * row;
    float *into = step.dst + step.dst_stride * row;
    const vf gate = step.add ? sigmoid_v(set1(step.add[step.add_stride * row])) : set1(1.0f);
    for (int c = columns.first; c < columns.last; c += 16) store(into + c, fma(gate, load(x + c), load(into + c)));
}

}  // namespace hs
