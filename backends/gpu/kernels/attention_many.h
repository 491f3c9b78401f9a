// Attention of many queries on matrix cores: prefill, and the verification of more drafts than attention_few.h likes.
//
//     block    ROWS queries of one kv head (rows of the tile times its heads, in that order) by 32 positions at a time
//              head size      to 128   192, 256   512   latent
//              ROWS              64        64      32      32
//              threads          128       256     256     256
//     grid     (kv heads x passes over the tile's queries, 1 or parts, tiles)
//
// For each 32 positions, as in FlashAttention-2: S = Q K^T on matrix cores, halves in and single precision out; a running
// softmax over rows of S, a few threads each; O = factor O + P V on matrix cores, O in registers all along. What differs: S goes through
// block memory, because where a fragment's values lie is the vendor's business (tiles.h), and P takes its place there. That costs 16 KiB
// of block memory's traffic for 2 x 32 products of 16 x 16 x 16 for a warp: below half of what the products take on consumer cards, whose
// matrix cores do 512 operations a cycle with sums in single precision, and nothing where a second block has the multiprocessor
// meanwhile.
//
// From 512 dims on there are more warps than tiles of S: two share one, each with half of a chunk's dims, and their sums are added in
// block memory.
//
// K and V come in chunks of at most 128 dims (192: 96; latent: 192), so block memory does not grow with heads: a chunk's 16-byte
// vectors are loaded into registers while the one before is multiplied, and opened into halves on their way into block memory. On cards
// whose matrix cores want lines of k, K and V are turned round there (TURNED).
//
//     block memory   queries ROWS x (dims + 8) halves, a chunk 10 KiB (latent 15), S and P ROWS x 144 bytes: 37 KiB at 128 dims (two
//                    blocks on sm_86), 53 at 256, 48 at 512, 57 latent: within the 64 of RDNA and sm_75
//     registers      O takes 64 for each thread (latent: 96), fragments and vectors on their way 60: no spills
//     bytes          an element of K or V is loaded once for ROWS queries: 2 ROWS operations for each of f16's two bytes. An RTX 3090
//                    (71e12 operations, 2e12 bytes a second from its second cache) needs 36: matrix cores are the roof, from 64
//                    rows on with room. A tile's blocks share the second cache.
//
// Scores: each query row is scaled by a power of two so that its largest element is in [1, 2), and back in single precision, so no
// query overflows a half. Elements beyond a half's range are held at its end.
//
// Masks are applied to S. Positions outside of what the block's queries see are not read, or are zeros in V; those inside belong to the
// sequence, and where one query does not see them they count with weight zero (a V that is not finite spoils the rows of its tile).
// A block of positions that a row does not see changes none of its bits, so these do not depend on how a prompt was cut.
//
// Latent attention (MLA): one kv head whose rows are 512 latent dims and 64 that turn; values are the first 512, so there is no V. A
// chunk of K is loaded a second time, and lies for the second product as it does in the page.
#pragma once

#include "attention.h"

#if defined(TILES_MMA16) || defined(TILES_MMA8)
constexpr bool TURNED = false;   // ldmatrix turns tiles for nothing
#else
constexpr bool TURNED = true;
#endif

// Chunks of K one after the other in one piece of code: four of them side by side keep too many addresses in registers.
#if defined(EMULATED)
#define ROLLED
#else
#define ROLLED _Pragma("unroll 1")
#endif

// Without matrix cores a step of 16 k is hundreds of instructions, and fragments fill registers: one step at a time.
#if defined(TILES_PLAIN)
#define EACH_STEP ROLLED
#else
#define EACH_STEP UNROLL
#endif

constexpr int MANY_COLS = 32;                       // positions at a time
constexpr int MANY_LINE = MANY_COLS + 4;            // floats of a row of S; its P are the halves in front

template <int DIMS_> struct Head {
    static constexpr int DIMS = DIMS_, VALUES = DIMS_, CHUNKS = (DIMS_ + 127) / 128, CHUNK = DIMS_ / CHUNKS;
    static constexpr int ROWS = DIMS_ <= 256 ? 64 : 32, THREADS = DIMS_ <= 128 ? 128 : 256;
    static constexpr bool LATENT = false;
};

struct LatentHead {
    static constexpr int DIMS = 576, VALUES = 512, CHUNKS = 3, CHUNK = 192, ROWS = 32, THREADS = 256;
    static constexpr bool LATENT = true;
};

template <class Kv, class H> struct Many {
    static constexpr int WARPS = H::THREADS / WARP;
    static constexpr int ROW_TILES = H::ROWS / 16, COL_TILES = MANY_COLS / 16;
    static constexpr int SCORE_TILES = (ROW_TILES * COL_TILES + WARPS - 1) / WARPS;   // of a warp
    // Where warps are more than tiles of S, two share one: each has half of a chunk's dims.
    static constexpr int HALVES = WARPS > ROW_TILES * COL_TILES ? 2 : 1;
    // In the second product a warp has 32 rows and every SPREAD-th tile of dims.
    static constexpr int SPREAD = WARPS / (H::ROWS / 32);
    static constexpr int VALUE_CHUNKS = (H::VALUES + H::CHUNK - 1) / H::CHUNK, VALUE_TILES = (H::CHUNK / 16 + SPREAD - 1) / SPREAD;
    static constexpr int QUERY_LINE = tile_stride(H::DIMS), DIM_LINE = tile_stride(H::CHUNK), COL_LINE = tile_stride(MANY_COLS);
    static constexpr int CHUNK_HALVES = H::CHUNK * COL_LINE > MANY_COLS * DIM_LINE ? H::CHUNK * COL_LINE : MANY_COLS * DIM_LINE;
    static constexpr int SHARERS = H::THREADS / H::ROWS, SHARE = MANY_COLS / SHARERS;   // threads of a row of S, columns of each
    static constexpr int VECTORS = (H::CHUNK * MANY_COLS / Kv::SIZE + H::THREADS - 1) / H::THREADS;   // of a chunk, for each thread
    const Attention &a;
    const int *table;
    int kv_head, first, last;                                // positions that any query sees, of this part
    half_t *queries, *chunk, *weights;
    float *scores, *factors, *scales;                        // [ROWS][MANY_LINE], [ROWS], [ROWS]
    i64 *outs;                                               // [ROWS]: where a query's result goes; -1: there is none
    int *gates;                                              // [ROWS]: where its gate lies
};

// Bytes of block memory: `shared` of its launches.
template <class Kv, class H> DEVICE constexpr int many_bytes() {
    typedef Many<Kv, H> F;
    return 2 * H::ROWS * F::QUERY_LINE + 2 * F::CHUNK_HALVES + 4 * H::ROWS * MANY_LINE + H::ROWS * (4 + 4 + 8 + 4);
}

// ----------------------------------------------------------------------------------------------- vectors on their way

DEVICE half_t held_half(float x) { return float_to_half(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x); }

template <class Vector> DEVICE void open_halves(const Vector &v, KvF16, u32 (&pairs)[4]) {
    UNROLL for (int i = 0; i < 4; i++) pairs[i] = word_at(v.raw, i);
}

template <class Vector, class Kv> DEVICE void open_halves(const Vector &v, Kv, u32 (&pairs)[Kv::SIZE / 2]) {
    float x[Kv::SIZE];
    open(v, x);
    UNROLL for (int i = 0; i < Kv::SIZE / 2; i++)
        pairs[i] = held_half(x[2 * i] * factor_of(Kv())) | (u32)held_half(x[2 * i + 1] * factor_of(Kv())) << 16;
}

// Halves side by side, or `stride` apart.
template <int N> DEVICE void put_run(half_t *to, const u32 (&pairs)[N]) {
    if constexpr (N == 2) {
        *(u32 *)to = pairs[0];
        *(u32 *)(to + 2) = pairs[1];
    } else {
        UNROLL for (int i = 0; i < N; i += 4) store128(to + 2 * i, {pairs[i], pairs[i + 1], pairs[i + 2], pairs[i + 3]});
    }
}

template <int N> DEVICE void put_apart(half_t *to, int stride, const u32 (&pairs)[N]) {
    UNROLL for (int i = 0; i < N; i++) {
        to[2 * i * stride] = (half_t)pairs[i];
        to[(2 * i + 1) * stride] = (half_t)(pairs[i] >> 16);
    }
}

// x, of which nothing is known ahead: AMD's compiler else keeps each vector's place in a page, in a chunk and in block memory in
// registers all along, dozens of them, where to work them out again is a few instructions for 16 bytes.
DEVICE int anew(int x) {
#if defined(__AMDGCN__)
    asm volatile("" : "+v"(x));
#endif
    return x;
}

// The products of a chunk, before the next one: they need nothing of memory, and AMD's compiler else puts them off behind barriers, with
// the fragments of several chunks waiting in registers.
DEVICE void settle(TileC &c) {
#if defined(__AMDGCN__)
    tile_each(c, [](int, int, float &value) { asm volatile("" : "+v"(value)); });
#else
    (void)c;
#endif
}

template <class Kv, class H> DEVICE int page_of(const Many<Kv, H> &f, int position) {
    const int page = position / PAGE;
    return page >= f.first / PAGE && page <= f.last / PAGE ? f.table[page] : -1;
}

// The vectors of chunk `c` of K, 32 positions from `begin` on: those of one thread, in the order in which a page has them.
template <class Kv, class H> DEVICE void load_keys(const Many<Kv, H> &f, Keys<Kv> (&k)[Many<Kv, H>::VECTORS], int begin, int c) {
    constexpr int OF_DIM = PAGE / Kv::SIZE, OF_PAGE = H::CHUNK * OF_DIM;
    const int me = anew(thread());
    UNROLL for (int i = 0; i < Many<Kv, H>::VECTORS; i++) {
        const int at = me + i * H::THREADS, page = at < 2 * OF_PAGE ? page_of(f, begin + at / OF_PAGE * PAGE) : -1;
        clear(k[i]);
        if (page >= 0)
            fetch(k[i], head_page(f.a.k_pool, f.kv_head, page, f.a.pool_pages, k_page_bytes(Kv(), H::DIMS)), H::DIMS,
                  c * H::CHUNK + at % OF_PAGE / OF_DIM, at % OF_DIM * Kv::SIZE);
    }
}

// ... into block memory: [dim][position], or turned round.
template <class Kv, class H, bool TURN> DEVICE void store_keys(const Many<Kv, H> &f, const Keys<Kv> (&k)[Many<Kv, H>::VECTORS]) {
    typedef Many<Kv, H> F;
    constexpr int OF_DIM = PAGE / Kv::SIZE, OF_PAGE = H::CHUNK * OF_DIM;
    const int me = anew(thread());
    UNROLL for (int i = 0; i < F::VECTORS; i++) {
        const int at = me + i * H::THREADS;
        if (at >= 2 * OF_PAGE) continue;
        const int dim = at % OF_PAGE / OF_DIM, col = at / OF_PAGE * PAGE + at % OF_DIM * Kv::SIZE;
        u32 pairs[Kv::SIZE / 2];
        open_halves(k[i], Kv(), pairs);
        if (TURN)
            put_apart(f.chunk + col * F::DIM_LINE + dim, F::DIM_LINE, pairs);
        else
            put_run(f.chunk + dim * F::COL_LINE + col, pairs);
    }
}

template <class Kv, class H> DEVICE void load_values(const Many<Kv, H> &f, Values<Kv> (&v)[Many<Kv, H>::VECTORS], int begin, int c) {
    constexpr int OF_SLOT = H::CHUNK / Kv::SIZE;
    const int me = anew(thread());
    UNROLL for (int i = 0; i < Many<Kv, H>::VECTORS; i++) {
        const int at = me + i * H::THREADS, position = begin + at / OF_SLOT;
        const int page = at < MANY_COLS * OF_SLOT && position >= f.first && position <= f.last ? f.table[position / PAGE] : -1;
        clear(v[i]);
        if (page >= 0)
            fetch(v[i], head_page(f.a.v_pool, f.kv_head, page, f.a.pool_pages, v_page_bytes(Kv(), H::DIMS)), H::DIMS,
                  c * H::CHUNK + at % OF_SLOT * Kv::SIZE, position % PAGE);
    }
}

template <class Kv, class H> DEVICE void store_values(const Many<Kv, H> &f, const Values<Kv> (&v)[Many<Kv, H>::VECTORS]) {
    typedef Many<Kv, H> F;
    constexpr int OF_SLOT = H::CHUNK / Kv::SIZE;
    const int me = anew(thread());
    UNROLL for (int i = 0; i < F::VECTORS; i++) {
        const int at = me + i * H::THREADS;
        if (at >= MANY_COLS * OF_SLOT) continue;
        const int col = at / OF_SLOT, dim = at % OF_SLOT * Kv::SIZE;
        u32 pairs[Kv::SIZE / 2];
        open_halves(v[i], Kv(), pairs);
        if (TURNED)
            put_apart(f.chunk + dim * F::COL_LINE + col, F::COL_LINE, pairs);
        else
            put_run(f.chunk + col * F::DIM_LINE + dim, pairs);
    }
}

// Values of latent rows: K as it lies. What no query sees is zero.
template <class Kv, class H> DEVICE void store_latent(const Many<Kv, H> &f, const Keys<Kv> (&k)[Many<Kv, H>::VECTORS], int begin) {
    typedef Many<Kv, H> F;
    constexpr int OF_DIM = PAGE / Kv::SIZE, OF_PAGE = H::CHUNK * OF_DIM;
    const int me = anew(thread());
    UNROLL for (int i = 0; i < F::VECTORS; i++) {
        const int at = me + i * H::THREADS;
        if (at >= 2 * OF_PAGE) continue;
        const int dim = at % OF_PAGE / OF_DIM, col = at / OF_PAGE * PAGE + at % OF_DIM * Kv::SIZE;
        u32 pairs[Kv::SIZE / 2];
        open_halves(k[i], Kv(), pairs);
        UNROLL for (int j = 0; j < Kv::SIZE; j++) {
            const int position = begin + col + j;
            if (position < f.first || position > f.last) pairs[j / 2] &= j % 2 ? 0xffffu : 0xffff0000u;
        }
        put_run(f.chunk + dim * F::COL_LINE + col, pairs);
    }
}

// ----------------------------------------------------------------------------------------------------------- products

// A warp's tiles of S, those of one warp in the same rows where warps suffice; and its half of the dims.
template <class Kv, class H> DEVICE int score_tile(int i) {
    typedef Many<Kv, H> F;
    return F::HALVES == 2 ? warp() % (F::ROW_TILES * F::COL_TILES) : warp() + i * F::WARPS;
}
template <class Kv, class H> DEVICE int score_half() {
    typedef Many<Kv, H> F;
    return F::HALVES == 2 ? warp() / (F::ROW_TILES * F::COL_TILES) : 0;
}

// s += chunk `c` of Q times that of K.
template <class Kv, class H> DEVICE void multiply_scores(const Many<Kv, H> &f, TileC (&s)[Many<Kv, H>::SCORE_TILES], int c) {
    typedef Many<Kv, H> F;
    const int from = score_half<Kv, H>() * (H::CHUNK / 2);
    EACH_STEP for (int at = 0; at < H::CHUNK / F::HALVES; at += 16) {
        const int k = from + at;
        TileA q;
        UNROLL for (int i = 0; i < F::SCORE_TILES; i++) {
            const int tile = score_tile<Kv, H>(i), row = tile % F::ROW_TILES * 16, col = tile / F::ROW_TILES * 16;
            if (tile >= F::ROW_TILES * F::COL_TILES) continue;
            TileB keys;
            if (i == 0 || F::WARPS % F::ROW_TILES) tile_load_a(q, f.queries + row * F::QUERY_LINE + c * H::CHUNK + k, F::QUERY_LINE);
            if (TURNED)
                tile_load_b(keys, f.chunk + col * F::DIM_LINE + k, F::DIM_LINE);
            else
                tile_load_bt(keys, f.chunk + k * F::COL_LINE + col, F::COL_LINE);
            tile_multiply(s[i], q, keys);
        }
    }
    UNROLL for (int i = 0; i < F::SCORE_TILES; i++) settle(s[i]);
}

template <class Kv, class H> DEVICE void write_scores(const Many<Kv, H> &f, TileC (&s)[Many<Kv, H>::SCORE_TILES]) {
    typedef Many<Kv, H> F;
    UNROLL for (int half = 0; half < F::HALVES; half++) {
        if (half) block_barrier();
        UNROLL for (int i = 0; i < F::SCORE_TILES; i++) {
            const int tile = score_tile<Kv, H>(i);
            if (tile >= F::ROW_TILES * F::COL_TILES || half != score_half<Kv, H>()) continue;
            float *to = f.scores + anew(tile % F::ROW_TILES * 16 * MANY_LINE + tile / F::ROW_TILES * 16);
            tile_each(s[i], [&](int row, int col, float &value) {
                to[row * MANY_LINE + col] = half ? to[row * MANY_LINE + col] + value : value;
            });
        }
    }
}

template <class Kv, class H> using Outs = TileC[Many<Kv, H>::VALUE_CHUNKS][2][Many<Kv, H>::VALUE_TILES];

// Where the lanes of a warp are in the second product: its 32 rows, and its tile of dims of a chunk, -1 where there is none.
template <class Kv, class H> DEVICE int first_row_of_warp() { return warp() / Many<Kv, H>::SPREAD * 32; }
template <class Kv, class H> DEVICE int value_tile(int c, int i) {
    const int tile = warp() % Many<Kv, H>::SPREAD + i * Many<Kv, H>::SPREAD;
    return tile < H::CHUNK / 16 && c * H::CHUNK + tile * 16 < H::VALUES ? tile : -1;
}

// o += P times chunk `c` of V.
template <class Kv, class H> DEVICE void multiply_values(const Many<Kv, H> &f, TileC (&o)[2][Many<Kv, H>::VALUE_TILES], int c) {
    typedef Many<Kv, H> F;
    EACH_STEP for (int k = 0; k < MANY_COLS; k += 16) {
        TileA p[2];
        UNROLL for (int j = 0; j < 2; j++)
            tile_load_a(p[j], f.weights + (anew(first_row_of_warp<Kv, H>()) + 16 * j) * 2 * MANY_LINE + k, 2 * MANY_LINE);
        UNROLL for (int i = 0; i < F::VALUE_TILES; i++) {
            const int tile = value_tile<Kv, H>(c, i);
            if (tile < 0) continue;
            TileB v;
            if (TURNED || H::LATENT)
                tile_load_b(v, f.chunk + tile * 16 * F::COL_LINE + k, F::COL_LINE);
            else
                tile_load_bt(v, f.chunk + k * F::DIM_LINE + tile * 16, F::DIM_LINE);
            tile_multiply(o[0][i], p[0], v);
            tile_multiply(o[1][i], p[1], v);
        }
    }
    UNROLL for (int i = 0; i < 2 * F::VALUE_TILES; i++) settle(o[i % 2][i / 2]);
}

// What was summed before, where a larger score has come: seldom, after the first positions.
template <class Kv, class H> DEVICE void rescale(const Many<Kv, H> &f, Outs<Kv, H> &o) {
    typedef Many<Kv, H> F;
    const float *factors = f.factors + anew(first_row_of_warp<Kv, H>());
    if (!ballot(factors[lane() % 32] != 1.0f)) return;
    UNROLL for (int c = 0; c < F::VALUE_CHUNKS; c++) {
        UNROLL for (int j = 0; j < 2; j++) {
            UNROLL for (int i = 0; i < F::VALUE_TILES; i++)
                tile_each(o[c][j][i], [&](int row, int, float &value) { value *= factors[16 * j + row]; });
        }
    }
}

// ------------------------------------------------------------------------------------------------------------ softmax

// Of a row of S, the same in the threads that share it but for `sum`, which is that of the thread's own columns.
struct RowState { float top, sum; int first, last; };

template <class Kv, class H> DEVICE void weigh(const Many<Kv, H> &f, RowState &m, int begin) {
    typedef Many<Kv, H> F;
    const int me = anew(thread()), row = me / F::SHARERS, from = me % F::SHARERS * F::SHARE;
    const float *line = f.scores + row * MANY_LINE + from, scale = f.scales[row];
    const bool first_page = page_of(f, begin) >= 0, second_page = page_of(f, begin + PAGE) >= 0;
    float s[F::SHARE], top = m.top;
    UNROLL for (int i = 0; i < F::SHARE; i++) {
        if (i % 4 == 0) {
            const Words4 four = load128(line + i);
            UNROLL for (int j = 0; j < 4; j++) s[i + j] = bits_float(word_at(four, j));
        }
        const int position = begin + from + i;
        const bool seen = position >= m.first && position <= m.last && (from + i < PAGE ? first_page : second_page);
        s[i] = seen ? capped(s[i] * scale, f.a.softcap) : nothing();
        top = max_(top, s[i]);
    }
    top = group_max<F::SHARERS>(top);
    const float factor = m.top == top ? 1.0f : power_below(m.top, top);
    m.top = top;
    m.sum *= factor;
    if (from == 0) f.factors[row] = factor;
    warp_barrier();   // the row is read: its memory takes the weights
    u32 pairs[F::SHARE / 2];
    UNROLL for (int i = 0; i < F::SHARE / 2; i++) {
        const half_t low = float_to_half(power_below(s[2 * i], top)), high = float_to_half(power_below(s[2 * i + 1], top));
        m.sum += half_to_float(low) + half_to_float(high);   // what the second product sees
        pairs[i] = low | (u32)high << 16;
    }
    put_run(f.weights + row * 2 * MANY_LINE + from, pairs);
}

// --------------------------------------------------------------------------------------------------- begin and end

// Queries as halves, and what of each is needed later. `part` -1: there are no parts.
template <class Kv, class H> DEVICE void take_queries(const Many<Kv, H> &f, const Tile &tile, int first_query, int part) {
    typedef Many<Kv, H> F;
    for (int r = warp(); r < H::ROWS; r += F::WARPS) {
        const bool is = first_query + r < tile.queries;
        const Query query = query_at(f.a, tile, f.kv_head, is ? first_query + r : 0);
        const int at = query.row * f.a.q_stride + query.head * f.a.q_step;
        const float *q = f.a.q + at;
        float most = 0.0f;
        for (int d = lane(); d < H::DIMS; d += WARP) most = max_(most, is ? abs_(q[d]) : 0.0f);
        u32 exponent = float_bits(group_max(most)) >> 23;
        exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
        const float down = bits_float((254 - exponent) << 23);
        for (int d = lane(); d < H::DIMS; d += WARP) f.queries[r * F::QUERY_LINE + d] = is ? float_to_half(q[d] * down) : 0;
        if (lane()) continue;
        f.scales[r] = f.a.scale * bits_float(exponent << 23);
        f.gates[r] = at + H::VALUES;
        f.outs[r] = !is ? -1
                  : part < 0 ? (i64)query.row * f.a.out_stride + query.head * H::VALUES
                             : part_at(f.a, tile, query.row, query.head, part) * H::VALUES;
    }
}

template <class Kv, class H> DEVICE void write_outs(const Many<Kv, H> &f, Outs<Kv, H> &o, int part) {
    typedef Many<Kv, H> F;
    UNROLL for (int c = 0; c < F::VALUE_CHUNKS; c++) {
        UNROLL for (int i = 0; i < F::VALUE_TILES; i++) {
            const int tile = value_tile<Kv, H>(c, i);
            if (tile < 0) continue;
            UNROLL for (int j = 0; j < 2; j++) {
                tile_each(o[c][j][i], [&](int row, int col, float &value) {
                    const int r = first_row_of_warp<Kv, H>() + 16 * j + row, d = c * H::CHUNK + tile * 16 + col;
                    if (f.outs[r] < 0) return;
                    float *to = (part < 0 ? f.a.out : f.a.part_values) + f.outs[r] + d;
                    *to = value * f.factors[r] * (part < 0 && f.a.gated ? sigmoid(f.a.q[f.gates[r] + d]) : 1.0f);
                });
            }
        }
    }
}

// A row's result needs one more factor; its logarithm, or its part's numbers, are left here.
template <class Kv, class H> DEVICE void finish_row(const Many<Kv, H> &f, const RowState &m, const Query &query, bool is, int part) {
    typedef Many<Kv, H> F;
    const float sum = group_sum<F::SHARERS>(m.sum);
    if (thread() % F::SHARERS || !is) return;
    const int row = thread() / F::SHARERS;
    f.factors[row] = part < 0 ? normaliser(m.top, sum, f.a.sinks, query.head) : 1.0f;
    if (part >= 0) {
        float *stats = f.a.part_stats + f.outs[row] / H::VALUES * 2;
        stats[0] = m.top;
        stats[1] = sum;
    } else if (f.a.partial) {
        f.a.out[(i64)query.row * f.a.out_stride + f.a.heads * H::VALUES + query.head] = log_sum(m.top, sum);
    }
}

// The next 32 positions from `begin` on of which something is here.
template <class Kv, class H> DEVICE int next_positions(const Many<Kv, H> &f, int begin) {
    while (begin <= f.last && page_of(f, begin) < 0 && page_of(f, begin + PAGE) < 0) begin += MANY_COLS;
    return begin;
}

template <class Kv, class H> DEVICE void attend_positions(const Many<Kv, H> &f, RowState &m, Outs<Kv, H> &o) {
    typedef Many<Kv, H> F;
    Keys<Kv> k[F::VECTORS];
    Values<Kv> v[F::VECTORS];
    int begin = next_positions(f, f.first / MANY_COLS * MANY_COLS);
    if (begin <= f.last) load_keys(f, k, begin, 0);
    while (begin <= f.last) {
        TileC s[F::SCORE_TILES];
        UNROLL for (int i = 0; i < F::SCORE_TILES; i++) tile_zero(s[i]);
        ROLLED for (int c = 0; c < H::CHUNKS; c++) {
            block_barrier();
            store_keys<Kv, H, TURNED>(f, k);
            if (c + 1 < H::CHUNKS)
                load_keys(f, k, begin, c + 1);
            else if constexpr (H::LATENT)
                load_keys(f, k, begin, 0);
            else
                load_values(f, v, begin, 0);
            block_barrier();
            multiply_scores(f, s, c);
        }
        write_scores(f, s);
        const int next = next_positions(f, begin + MANY_COLS);
        UNROLL for (int c = 0; c < F::VALUE_CHUNKS; c++) {
            block_barrier();
            if constexpr (H::LATENT)
                store_latent(f, k, begin);
            else
                store_values(f, v);
            if (c + 1 == F::VALUE_CHUNKS) {
                if (next <= f.last) load_keys(f, k, next, 0);
            } else if constexpr (H::LATENT) {
                load_keys(f, k, begin, c + 1);
            } else {
                load_values(f, v, begin, c + 1);
            }
            if (c == 0) weigh(f, m, begin);
            block_barrier();
            if (c == 0) rescale(f, o);
            multiply_values(f, o[c], c);
        }
        begin = next;
    }
}

template <class Kv, class H> DEVICE void attention_many(const Attention &a) {
    typedef Many<Kv, H> F;
    const Tile tile = tile_at(a, block_z());
    const int passes = blocks_x() / a.kv_heads, kv_head = block_x() / passes, first_query = block_x() % passes * H::ROWS;
    if (first_query >= tile.queries) return;
    const int last_query = first_query + H::ROWS < tile.queries ? first_query + H::ROWS - 1 : tile.queries - 1;
    int first = query_at(a, tile, kv_head, first_query).first, last = query_at(a, tile, kv_head, last_query).last, part = -1;
    if (a.part_pages) {
        const int length = a.part_pages * PAGE;
        part = query_at(a, tile, kv_head, 0).first / length + block_y();
        if (part > query_at(a, tile, kv_head, tile.queries - 1).last / length) return;
        first = first > part * length ? first : part * length;
        last = last < (part + 1) * length ? last : (part + 1) * length - 1;
    }
    half_t *queries = (half_t *)dynamic_shared(), *chunk = queries + H::ROWS * F::QUERY_LINE;
    float *scores = (float *)(chunk + F::CHUNK_HALVES);
    i64 *outs = (i64 *)(scores + H::ROWS * MANY_LINE);
    float *factors = (float *)(outs + H::ROWS);
    const F f = {a, a.tables + (i64)a.lanes[tile.row] * a.lane_pages, kv_head, first, last, queries, chunk, (half_t *)scores, scores,
                 factors, factors + H::ROWS, outs, (int *)(factors + 2 * H::ROWS)};
    take_queries(f, tile, first_query, part);

    const int own = first_query + thread() / F::SHARERS;
    const bool is = own < tile.queries;
    const Query query = query_at(a, tile, kv_head, is ? own : 0);
    RowState m = {nothing(), 0.0f, is ? query.first : 1, is ? query.last : 0};
    Outs<Kv, H> o;
    UNROLL for (int c = 0; c < F::VALUE_CHUNKS; c++) {
        UNROLL for (int j = 0; j < 2; j++) {
            UNROLL for (int i = 0; i < F::VALUE_TILES; i++) tile_zero(o[c][j][i]);
        }
    }
    block_barrier();
    attend_positions(f, m, o);
    block_barrier();
    finish_row(f, m, query, is, part);
    block_barrier();
    write_outs(f, o, part);
}
