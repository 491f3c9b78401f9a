// The delta rule over the rows of a prompt, 64 at a time. What it computes is what delta_recurrent computes, in another order.
//
// With G_i the sum of g over a chunk's rows up to i, S the matrix before the chunk, and rows of K, Q, V, D as k, q, v, d:
//
//     (I + A) D = diag(b) (V - diag(e^G) K S)         A_ij = b_i (k_i . k_j) e^(G_i - G_j) for j < i     (WY / UT form)
//     O = diag(e^G) Q S + B D                         B_ij = (q_i . k_j) e^(G_i - G_j) for j <= i
//     S' = e^(G_last) S + K^T diag(e^(G_last - G)) D
//
// All exponents are of numbers <= 0. A chunk's T = (I + A)^-1 diag(b) and B do not depend on S, so
//
//     delta_prepare   each chunk and value head, all at once: T, B and the decays           -> prepared
//     delta_chunks    each lane, value head and some columns: its chunks in order           -> out, M
//
// Why not row by row. The arithmetic is the same, near 65 thousand multiply-adds a row and head of 128 x 128: in single precision
// a chunked form saves none. What it saves is the chain. Row by row, a warp has one row's 330 instructions between two sums over
// its lanes that wait on each other, and one prompt has no more than one or two warps for each scheduler: some 600 cycles a row,
// most of them waiting. Here 64 rows are five products of matrices that wait on each other, each with 8 sums a thread that do not,
// and operands from block memory used two and four times (16 loads for 64 multiply-adds). Chunks of a prompt are prepared
// side by side, which fills a card whatever the number of lanes; and rows of q and k are read once for each 32 columns in pieces
// of 16 bytes instead of once for each 16 in single rows. Matrix cores are not used: their halves have 11 bits, and S is a sum
// over a whole prompt. Two halves for a number would cost three products, and on the cards that this is for be no faster.
//
// Chunks end where positions are multiples of 64, not where the prompt was cut: a prompt cut at such places, however, has the
// same bits. It differs from delta_recurrent in the last bits, so a worker that must be the same to the bit for every cut gives
// all lanes to that one (`chunk` of their runs -1), and held lanes always go there.
//
// delta_prepare. Block: 256 threads, one chunk of one head; grid (value_heads, chunks). K K^T and Q K^T by tiles of 16 columns of
// q and k, each thread 4 x 4 of both. (I + A)^-1 by halves: with the inverses of two diagonal blocks of s rows known, that of 2 s
// rows has -T22 A21 T11 between them; s = 1, 2, .. 32, two barriers each. 44 KB of block memory, so two blocks (16 warps) to a
// multiprocessor of 100 KB. Bytes: reads 64 KB, writes 33 KB that delta_chunks reads again from the second cache.
//
// delta_chunks. Block: 8 threads a column, 32 columns (16 where key_dim is 256, so that S fits); grid (ceil(value_dim / columns),
// value_heads, lanes). S stays in block memory from the first chunk to the last; 43 KB with the tiles, two blocks to a
// multiprocessor. Each thread has 4 rows x 2 columns of K S, Q S, D and O. Roofline: the FMA units, closely followed by the second
// cache. 32 columns of 128 x 128 take one million multiply-adds for 64 rows, and 144 KB for them (q, k twice, T, B, v; the blocks
// of a head share all but v), 7 a byte: at 17 tera a second that would be 2.4 TB/s. So half of the peak is what to hope for.
#pragma once

#include "delta.h"

constexpr int CHUNK = 64, TILE_KEYS = 32, TILE_STRIDE = TILE_KEYS + 4;   // 16-byte rows, and no two in the same banks
constexpr int WIDE_STRIDE = CHUNK + 4;
constexpr int PREPARED_B = CHUNK * CHUNK, PREPARED_DECAY = 2 * PREPARED_B, PREPARED_REST = PREPARED_DECAY + CHUNK;
constexpr int PREPARED = PREPARED_REST + CHUNK;   // floats of a chunk and head: T, B, e^G, e^(G_last - G)

// Loops over block memory are unrolled by two alone: enough to load ahead, and little enough that a compiler which moves all loads
// to the top does not run out of registers.
#if defined(EMULATED)
#define UNROLL_TWO
#else
#define UNROLL_TWO _Pragma("unroll 2")
#endif

// `COLS` columns of a chunk's convolved rows, from float `at` on, to block memory; zeros below the last row and from float
// `most` of the row on.
template <int COLS, int STRIDE>
DEVICE void stage_rows(float *tile, const float *rows, int stride, int count, int at, int most) {
    for (int e = thread(); e < CHUNK * COLS / 4; e += threads()) {
        const int row = e / (COLS / 4), c = 4 * (e % (COLS / 4));
        Floats4 x = {{0.0f, 0.0f, 0.0f, 0.0f}};
        if (row < count && at + c < most) x = load4(row_at(rows, row, stride) + at + c);
        store4(tile + row * STRIDE + c, x);
    }
}

constexpr int SQUARE = CHUNK + 1;   // row of a square matrix in block memory

// (I + A)^-1 from A, strictly below the diagonal, both [64][65]; `half` is scratch of 1024.
DEVICE void invert_unit_lower(const float *a, float *t, float *half) {
    for (int e = thread(); e < CHUNK * CHUNK; e += threads())
        t[e / CHUNK * SQUARE + e % CHUNK] = e / CHUNK == e % CHUNK ? 1.0f : 0.0f;
    for (int s = 1; s < CHUNK; s *= 2) {
        block_barrier();
        for (int e = thread(); e < CHUNK / 2 * s; e += threads()) {
            const int base = e / (s * s) * 2 * s, i = e / s % s, j = e % s;
            float sum = 0.0f;
            for (int m = j; m < s; m++) sum = fma_(a[(base + s + i) * SQUARE + base + m], t[(base + m) * SQUARE + base + j], sum);
            half[e] = sum;
        }
        block_barrier();
        for (int e = thread(); e < CHUNK / 2 * s; e += threads()) {
            const int base = e / (s * s) * 2 * s, i = e / s % s, j = e % s;
            float sum = 0.0f;
            for (int m = 0; m <= i; m++) sum = fma_(t[(base + s + i) * SQUARE + base + s + m], half[e - i * s + m * s], sum);
            t[(base + s + i) * SQUARE + base + j] = -sum;
        }
    }
    block_barrier();
}

DEVICE void delta_prepare_chunk(const DeltaShape &d, const float *convolved, int stride, const int *chunks, float *prepared) {
    constexpr int KEYS = 16, STRIDE = KEYS + 4;
    SHARED(float, a, CHUNK * SQUARE);
    SHARED(float, t, CHUNK * SQUARE);
    SHARED(float, tiles, 2 * CHUNK * STRIDE);
    SHARED(float, gates, 3 * CHUNK);   // b, g, the sum of g
    float *k_tile = tiles, *q_tile = tiles + CHUNK * STRIDE, *b = gates, *sums = gates + 2 * CHUNK;
    const Words4 one = load128(chunks + 4 * block_y());
    const int head = block_x(), count = (int)one.z, key_pad = pad16(d.key_dim), at = delta_key_head(d, head) * key_pad;
    const float *rows = row_at(convolved, (int)one.y, stride);
    float *out = prepared + (i64)PREPARED * (d.value_heads * block_y() + head);

    const int i0 = thread() / 16, j0 = thread() % 16;   // this thread's: rows i0 + 16 r, columns j0 + 16 c
    float kk[4][4] = {}, qk[4][4] = {};
    if (thread() < CHUNK) {
        const float *gate = row_at(rows, thread(), stride) + delta_gates_at(d) + head;
        gates[thread()] = thread() < count ? gate[0] : 0.0f;
        gates[CHUNK + thread()] = thread() < count ? gate[2 * d.value_heads] : 0.0f;
    }
    for (int key = 0; key < key_pad; key += KEYS) {
        block_barrier();
        stage_rows<KEYS, STRIDE>(q_tile, rows + at, stride, count, key, key_pad);
        stage_rows<KEYS, STRIDE>(k_tile, rows + at + delta_keys_at(d), stride, count, key, key_pad);
        block_barrier();
        UNROLL_TWO for (int part = 0; part < KEYS; part += 4) {
            Floats4 left[4];
            UNROLL for (int c = 0; c < 4; c++) left[c] = load4(k_tile + (j0 + 16 * c) * STRIDE + part);
            UNROLL for (int r = 0; r < 4; r++) {
                const Floats4 k = load4(k_tile + (i0 + 16 * r) * STRIDE + part), q = load4(q_tile + (i0 + 16 * r) * STRIDE + part);
                UNROLL for (int c = 0; c <= r; c++)   // what lies above the diagonal is not wanted
                    UNROLL for (int j = 0; j < 4; j++) {
                        kk[r][c] = fma_(k.v[j], left[c].v[j], kk[r][c]);
                        qk[r][c] = fma_(q.v[j], left[c].v[j], qk[r][c]);
                    }
            }
        }
    }
    if (thread() < CHUNK) {
        float sum = 0.0f;
        for (int i = 0; i <= thread(); i++) sum += gates[CHUNK + i];
        sums[thread()] = sum;
    }
    block_barrier();
    UNROLL for (int r = 0; r < 4; r++)
        UNROLL for (int c = 0; c < 4; c++) {
            const int i = i0 + 16 * r, j = j0 + 16 * c;
            const float decay = j <= i ? exp_(sums[i] - sums[j]) : 0.0f;
            a[i * SQUARE + j] = j < i ? b[i] * kk[r][c] * decay : 0.0f;
            out[PREPARED_B + i * CHUNK + j] = j <= i ? qk[r][c] * decay : 0.0f;
        }
    if (thread() < CHUNK) {
        out[PREPARED_DECAY + thread()] = exp_(sums[thread()]);
        out[PREPARED_REST + thread()] = exp_(sums[CHUNK - 1] - sums[thread()]);
    }
    block_barrier();
    invert_unit_lower(a, t, tiles);
    for (int e = thread(); e < CHUNK * CHUNK; e += threads()) out[e] = t[e / CHUNK * SQUARE + e % CHUNK] * b[e % CHUNK];
}

// A thread's 4 rows i0 + 16 r and 2 columns of a product of [64][keys] and [keys][COLS].
struct Part { float v[4][2]; };

// += left rows (row stride TILE_STRIDE, 32 columns) times 32 rows of `right`. Rows below `FROM` groups of 16 are passed over.
template <int COLS, int FROM = 0> DEVICE void multiply_part(Part &sum, const float *left, const float *right, int i0, int column) {
    UNROLL_TWO for (int key = 0; key < TILE_KEYS; key += 4) {
        float x[4][2];
        UNROLL for (int j = 0; j < 4; j++)
            UNROLL for (int c = 0; c < 2; c++) x[j][c] = right[(key + j) * COLS + column + c];
        UNROLL for (int r = FROM; r < 4; r++) {
            const Floats4 y = load4(left + (i0 + 16 * r) * TILE_STRIDE + key);
            UNROLL for (int j = 0; j < 4; j++)
                UNROLL for (int c = 0; c < 2; c++) sum.v[r][c] = fma_(y.v[j], x[j][c], sum.v[r][c]);
        }
    }
}

// += the lower triangle at `square` [64][64] times `right` [64][COLS], staged in two tiles of 32 columns.
template <int COLS> DEVICE void multiply_lower(Part &sum, const float *square, float *tiles, const float *right, int i0, int column) {
    block_barrier();
    stage_rows<TILE_KEYS, TILE_STRIDE>(tiles, square, CHUNK, CHUNK, 0, CHUNK);
    stage_rows<TILE_KEYS, TILE_STRIDE>(tiles + CHUNK * TILE_STRIDE, square, CHUNK, CHUNK, TILE_KEYS, CHUNK);
    block_barrier();
    multiply_part<COLS>(sum, tiles, right, i0, column);
    multiply_part<COLS, 2>(sum, tiles + CHUNK * TILE_STRIDE, right + TILE_KEYS * COLS, i0, column);
}

// S of `COLS` columns from `column` on, between block memory [KEYS][COLS] and the slot's matrix of this head.
template <int KEYS, int COLS> DEVICE void load_matrix(const DeltaShape &d, float *s, const float *matrix, int column, bool anew) {
    for (int e = thread(); e < KEYS * COLS / 4; e += threads()) {
        const int key = e / (COLS / 4), c = 4 * (e % (COLS / 4)), block = (column + c) / 16;
        Floats4 x = {{0.0f, 0.0f, 0.0f, 0.0f}};
        if (!anew && key < d.key_dim && 16 * block < d.value_dim) x = load4(matrix + ((i64)block * d.key_dim + key) * 16 + c % 16);
        store4(s + key * COLS + c, x);
    }
}
template <int KEYS, int COLS> DEVICE void store_matrix(const DeltaShape &d, const float *s, float *matrix, int column) {
    for (int e = thread(); e < KEYS * COLS / 4; e += threads()) {
        const int key = e / (COLS / 4), c = 4 * (e % (COLS / 4)), block = (column + c) / 16;
        if (key < d.key_dim && 16 * block < d.value_dim)
            store4(matrix + ((i64)block * d.key_dim + key) * 16 + c % 16, load4(s + key * COLS + c));
    }
}

// S = e^(G_last) S + K^T (rest D): 64 rows of S at a time, each thread 4 of them and 2 columns.
template <int KEYS, int COLS>
DEVICE void next_matrix(float *s, const float *change, const float *decays, float *tile, const float *keys, int stride, int count,
                        int key_pad, int column) {
    const int key0 = 4 * (thread() / (COLS / 2));
    const float decay = decays[CHUNK - 1];
    for (int key = 0; key < KEYS; key += CHUNK) {
        block_barrier();
        stage_rows<CHUNK, WIDE_STRIDE>(tile, keys, stride, count, key, key_pad);
        block_barrier();
        float sum[4][2] = {};
        UNROLL_TWO for (int j = 0; j < CHUNK; j++) {
            const Floats4 k = load4(tile + j * WIDE_STRIDE + key0);
            const float rest = decays[CHUNK + j];
            UNROLL for (int c = 0; c < 2; c++) {
                const float x = rest * change[j * COLS + column + c];
                UNROLL for (int r = 0; r < 4; r++) sum[r][c] = fma_(k.v[r], x, sum[r][c]);
            }
        }
        UNROLL for (int r = 0; r < 4; r++)
            UNROLL for (int c = 0; c < 2; c++) {
                float &at = s[(key + key0 + r) * COLS + column + c];
                at = fma_(decay, at, sum[r][c]);
            }
    }
}

template <int KEYS, int COLS>
DEVICE void delta_chunks_block(const DeltaShape &d, const float *convolved, int stride, float *matrices, i64 slot_floats, float *out,
                               int out_stride, const int *runs, const float *prepared) {
    SHARED(float, s, KEYS * COLS);
    SHARED(float, change, CHUNK * COLS);
    SHARED(float, tiles, 2 * CHUNK * TILE_STRIDE);
    SHARED(float, decays, 2 * CHUNK);   // e^G, e^(G_last - G)
    const LaneRun run = run_of(runs, block_z());
    if (run.rows == 0 || run.chunk < 0) return;
    const int head = block_y(), first_column = COLS * block_x(), i0 = thread() / (COLS / 2), column = 2 * (thread() % (COLS / 2));
    const int key_pad = pad16(d.key_dim), value_pad = pad16(d.value_dim), q_at = delta_key_head(d, head) * key_pad;
    const int v_at = delta_values_at(d) + head * value_pad;
    float *matrix = matrices + slot_floats * run.slot + delta_matrix_floats(d) * head;
    load_matrix<KEYS, COLS>(d, s, matrix, first_column, run.position == 0);

    int done = 0;
    for (int chunk = run.chunk; done < run.rows; chunk++) {
        const int position = run.position + done, left = run.rows - done, whole = CHUNK - position % CHUNK;
        const int count = left < whole ? left : whole;
        const float *rows = row_at(convolved, run.first + done, stride);
        const float *ready = prepared + (i64)PREPARED * (d.value_heads * chunk + head);
        block_barrier();
        for (int e = thread(); e < 2 * CHUNK; e += threads()) decays[e] = ready[PREPARED_DECAY + e];
        Part by_k = {}, read = {};
        for (int key = 0; key < key_pad; key += TILE_KEYS) {
            block_barrier();
            stage_rows<TILE_KEYS, TILE_STRIDE>(tiles, rows + q_at + delta_keys_at(d), stride, count, key, key_pad);
            stage_rows<TILE_KEYS, TILE_STRIDE>(tiles + CHUNK * TILE_STRIDE, rows + q_at, stride, count, key, key_pad);
            block_barrier();
            multiply_part<COLS>(by_k, tiles, s + key * COLS, i0, column);
            multiply_part<COLS>(read, tiles + CHUNK * TILE_STRIDE, s + key * COLS, i0, column);
        }
        UNROLL for (int r = 0; r < 4; r++)
            UNROLL for (int c = 0; c < 2; c++) {
                const int i = i0 + 16 * r, at = first_column + column + c;
                const float v = i < count && at < value_pad ? row_at(rows, i, stride)[v_at + at] : 0.0f;
                change[i * COLS + column + c] = fma_(-decays[i], by_k.v[r][c], v);
                read.v[r][c] *= decays[i];
            }
        Part solved = {};
        multiply_lower<COLS>(solved, ready, tiles, change, i0, column);
        block_barrier();
        UNROLL for (int r = 0; r < 4; r++)
            UNROLL for (int c = 0; c < 2; c++) change[(i0 + 16 * r) * COLS + column + c] = solved.v[r][c];
        multiply_lower<COLS>(read, ready + PREPARED_B, tiles, change, i0, column);
        UNROLL for (int r = 0; r < 4; r++)
            UNROLL for (int c = 0; c < 2; c++) {
                const int i = i0 + 16 * r, at = first_column + column + c;
                if (i < count && at < d.value_dim)
                    row_at(out, run.first + done + i, out_stride)[head * d.value_dim + at] = read.v[r][c];
            }
        next_matrix<KEYS, COLS>(s, change, decays, tiles, rows + q_at + delta_keys_at(d), stride, count, key_pad, column);
        done += count;
    }
    block_barrier();
    store_matrix<KEYS, COLS>(d, s, matrix, first_column);
}
