// What a block of threads does for products with many rows: out = x W^T for ROWS rows of x and OUTS rows of W.
//
// x is halves (halve_rows.h: a row times a power of two, lines padded with zeros to MANY_PAD), W a packed or a float matrix.
// In steps of K columns the block copies its part of x into block memory, unpacks its part of W into halves beside it, each
// weight once, and multiplies the two on matrix cores into registers, in single precision. While it multiplies, the loads of
// the next step are under way into registers: x as it is, W still packed.
//
// Two shapes.
//
//     r128   128 rows x 128 outputs, K = 64, 256 threads        from 65 rows on
//     r32     32 rows x  32 outputs, K = 128, 128 threads       up to 64 rows, and experts with few rows each
//
// r128 is for the multipliers. A GeForce of sm_86 does 256 multiply-adds a cycle and multiprocessor with sums in single
// precision: 128 x 128 x 64 take 4096 cycles (half as many on an A10 or A40). In these, block memory at 128 bytes a cycle
// gives each warp and 16 columns four fragments of A and two of B, 3 KiB: 8 warps x 4 x 24 = 768 cycles, and 256 more for
// the stores: a quarter of what is there. Unpacking is 8192 weights at 4 to 6 instructions, near 300 of the 4096 issue
// cycles of each scheduler, while the matrix cores work for other warps. From L2 come 16 KiB of x and 4.6 KiB of W (4.5
// bits): 5 bytes a cycle, of some 13. 64 sums, 16 words of x, a packed group and 12 words of fragments fit in 128 registers,
// so two blocks are on a multiprocessor (38 KiB of block memory each), and one multiplies while the other waits at a barrier.
// What is lost are barriers, the first step, and the tail of the grid: 70 to 80 % of the peak is what this aims at. A larger
// block would leave one of them to a multiprocessor; a smaller one reads x and W from L2 as fast as L2 gives them.
//
// r32 is for bandwidth. At 21 rows and 4.5 bits a weight such a card multiplies for as long as it reads W. Blocks of 64
// outputs would be fewer than multiprocessors for matrices of 4096; these are twice as many, with 128 groups of 18 bytes
// each under way, and five fit side by side (18 KiB, 102 registers). At the cores' full rate they take three quarters of
// block memory's bandwidth. From 65 rows on they would read W three times; there r128 is ahead though it is half empty.
//
// AMD. RDNA 3 does 256 multiply-adds a cycle and compute unit too, but on its vector units: unpacking, 384 cycles, comes on
// top of the 4096. With waves of 64 (CDNA) four warps share the block, 64 x 64 each, 64 sums a lane as well. Cards without
// matrix cores multiply with dot2 or fma (tiles_plain.h), at the rate of their vector units less the unpacking.
//
// Block memory has no bank conflicts when fragments are loaded: lines are tile_stride(K) apart, an odd number of groups of
// 16 bytes, so eight lines' fragments lie in all 32 banks. x is stored with the eight lanes of a phase in one line; W as
// `line_of` and `group_of` say: four lines and two groups side by side in a phase, at 16-byte groups line + 4 group, which
// are all different modulo 8.
//
// All sums run over k in steps of 16 in order, in both shapes. So a row's result is the same bits in each, whatever other
// rows there are.
#pragma once

#include "quants.h"

constexpr int MANY_PAD = 128;   // halves: lines of x are padded to a multiple

template <int ROWS_, int OUTS_, int K_, int THREADS_, int BLOCKS_> struct ManyShape {
    static constexpr int ROWS = ROWS_, OUTS = OUTS_, K = K_, THREADS = THREADS_, BLOCKS = BLOCKS_;
    static constexpr int STRIDE = tile_stride(K), LINES = ROWS + OUTS;
    // Warps as a grid, two over the rows; tiles of each
    static constexpr int OUT_WARPS = THREADS / WARP / 2, ROW_TILES = ROWS / 32, OUT_TILES = OUTS / 16 / OUT_WARPS;
    // Groups of weights in a line's K, and words of 16 bytes of x that a thread copies
    static constexpr int GROUPS = K / GROUP, COPIES = ROWS * K / 8 / THREADS;
    static_assert(OUTS * GROUPS == THREADS, "each thread unpacks one group in a step");
};
// Blocks of a multiprocessor, which set how many registers a thread may have: what its block memory holds, or fewer where
// the fragments of cards without matrix cores need the registers.
#if defined(__GFX9__)
using ManyR128 = ManyShape<128, 128, 64, 256, 1>;
using ManyR32 = ManyShape<32, 32, 128, 128, 1>;
#elif defined(__AMDGCN__)
using ManyR128 = ManyShape<128, 128, 64, 256, 1>;
using ManyR32 = ManyShape<32, 32, 128, 128, 3>;
#elif defined(TILES_MMA8)
using ManyR128 = ManyShape<128, 128, 64, 256, 1>;
using ManyR32 = ManyShape<32, 32, 128, 128, 3>;
#else
using ManyR128 = ManyShape<128, 128, 64, 256, 2>;
using ManyR32 = ManyShape<32, 32, 128, 128, 5>;
#endif

// What is carried from step to step. For sm_100 and newer, so for RTX 50 too, the compiler writes the first step out by
// itself and keeps, beside all else, an address for each plane of W and a count for each use of the step: r128 then does not
// fit in its 128 registers, seven kernels had 8 to 12 bytes on the stack. There it is not told how a step follows from the
// one before (`hidden_step`), so that W's addresses are computed from the step's number; what x's lines have in common is a
// step, in a register that all threads share; and experts_many keeps a number and no pointer. That is some ten instructions
// in a step of thousands of cycles. Other arches carry all of it in what they have, and would need a register or two more
// this way. The emulation of cuda_kernels runs the one form, that of hip_kernels the other.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 || defined(EMULATED) && defined(TILES_MMA16)
constexpr bool RECOMPUTE = true;
DEVICE int hidden_step(int step) {
    asm("" : "+r"(step));
    return step;
}
#else
constexpr bool RECOMPUTE = false;
DEVICE int hidden_step(int step) { return step; }
#endif

// Word `word` of 16 bytes in step `step` of a line of x that begins at word `line`; a step is WORDS.
template <int WORDS> DEVICE Words4 word_of_x(const half_t *x, u32 line, int step, int word) {
    if constexpr (RECOMPUTE) return load128(x + 8 * WORDS * (i64)step + 8 * (i64)(line + (u32)word));
    const u32 at = line + (u32)(step * WORDS + word);
    return load128(x + 8 * (i64)at);
}

// Without matrix cores a step of 16 k is hundreds of instructions: not written out several times.
#if defined(TILES_PLAIN) && !defined(EMULATED)
#define EACH_K _Pragma("unroll 1")
#else
#define EACH_K UNROLL
#endif

// ---------------------------------------------------------------------------------------------------- lines of the weights

// The rows of W and, of one row, the bits of a group of 32 as they come from memory. Past the last group a weight is 0.
template <class Q> struct Lines { Matrix<Q> packed; int groups; };
template <class Q> struct Piece { typename Q::Bits bits; bool here; };

template <class Q> DEVICE Lines<Q> lines_of(Q, const void *at, int rows, int cols) {
    return {matrix<Q>(at, rows, cols), cols / GROUP};
}
template <class Q> DEVICE void get_piece(Q, Piece<Q> &piece, const Lines<Q> &lines, i64 row, int group) {
    piece.here = group < lines.groups;
    if (piece.here) piece.bits = fetch(Q(), lines.packed, row, group);
}
DEVICE u32 half_pair(float low, float high) { return (u32)float_to_half(low) | (u32)float_to_half(high) << 16; }

// A signed byte with its top bit turned as the last of a float between 2^23 and 2^23 + 256: one instruction and a difference,
// where NVIDIA's conversion of bytes goes to a unit with an eighth of the lanes.
DEVICE float turned_byte(u32 turned, int i) { return bits_float(0x4b000000u | (turned >> 8 * i & 0xff)) - 8388736.0f; }

template <class Q> DEVICE void put_piece(Q, const Piece<Q> &piece, half_t *to) {
    if (!piece.here) {
        UNROLL for (int i = 0; i < 4; i++) store128(to + 8 * i, {0, 0, 0, 0});
        return;
    }
    Group g;
    unpack(piece.bits, g);
    UNROLL for (int eight = 0; eight < 4; eight++) {
        const int part = Q::SCALES == 2 ? eight / 2 : 0;
        u32 pairs[4];
        UNROLL for (int i = 0; i < 4; i++) {
            const u32 turned = g.words[2 * eight + i / 2] ^ 0x80808080u;
            float low = turned_byte(turned, 2 * i % 4), high = turned_byte(turned, 2 * i % 4 + 1);
            if constexpr (Q::MINS) {
                low = fma_(g.scale[part], low, g.min[part]), high = fma_(g.scale[part], high, g.min[part]);
            } else {
                low *= g.scale[part], high *= g.scale[part];
            }
            pairs[i] = half_pair(low, high);
        }
        store128(to + 8 * eight, {pairs[0], pairs[1], pairs[2], pairs[3]});
    }
}

// Floats: lines padded to 16 bytes with zeros. Values above 65504 become infinite.
struct FloatLines { const u8 *at; i64 line; int words; };
struct FloatPiece { Words4 words[4]; };
template <> struct Lines<f32> : FloatLines {};
template <> struct Lines<f16> : FloatLines {};
template <> struct Lines<bf16> : FloatLines {};
template <> struct Piece<f32> : FloatPiece {};
template <> struct Piece<f16> : FloatPiece {};
template <> struct Piece<bf16> : FloatPiece {};

template <class F> DEVICE Lines<F> float_lines(const void *at, int cols) {
    Lines<F> lines;
    lines.at = (const u8 *)at;
    lines.words = ceil_div(cols * F::SIZE, 16);
    lines.line = 16 * (i64)lines.words;
    return lines;
}
DEVICE Lines<f32> lines_of(f32, const void *at, int, int cols) { return float_lines<f32>(at, cols); }
DEVICE Lines<f16> lines_of(f16, const void *at, int, int cols) { return float_lines<f16>(at, cols); }
DEVICE Lines<bf16> lines_of(bf16, const void *at, int, int cols) { return float_lines<bf16>(at, cols); }

DEVICE Words4 float_word(const FloatLines &lines, i64 row, int word) {
    return word < lines.words ? load_once(lines.at + row * lines.line + 16 * word) : Words4{0, 0, 0, 0};
}
// Single precision is turned at once: 32 words would be too many to keep.
DEVICE void get_piece(f32, Piece<f32> &piece, const Lines<f32> &lines, i64 row, int group) {
    UNROLL for (int i = 0; i < 4; i++) {
        const Words4 a = float_word(lines, row, 8 * group + 2 * i), b = float_word(lines, row, 8 * group + 2 * i + 1);
        piece.words[i] = {half_pair(bits_float(a.x), bits_float(a.y)), half_pair(bits_float(a.z), bits_float(a.w)),
                          half_pair(bits_float(b.x), bits_float(b.y)), half_pair(bits_float(b.z), bits_float(b.w))};
    }
}
template <class F> DEVICE void get_halves(Piece<F> &piece, const Lines<F> &lines, i64 row, int group) {
    UNROLL for (int i = 0; i < 4; i++) piece.words[i] = float_word(lines, row, 4 * group + i);
}
DEVICE void get_piece(f16, Piece<f16> &piece, const Lines<f16> &lines, i64 row, int group) {
    get_halves(piece, lines, row, group);
}
DEVICE void get_piece(bf16, Piece<bf16> &piece, const Lines<bf16> &lines, i64 row, int group) {
    get_halves(piece, lines, row, group);
}

DEVICE void put_words(const FloatPiece &piece, half_t *to) {
    UNROLL for (int i = 0; i < 4; i++) store128(to + 8 * i, piece.words[i]);
}
DEVICE void put_piece(f32, const Piece<f32> &piece, half_t *to) { put_words(piece, to); }
DEVICE void put_piece(f16, const Piece<f16> &piece, half_t *to) { put_words(piece, to); }
DEVICE u32 from_bf16(u32 pair) { return half_pair(bits_float(pair << 16), bits_float(pair & 0xffff0000u)); }
DEVICE void put_piece(bf16, const Piece<bf16> &piece, half_t *to) {
    UNROLL for (int i = 0; i < 4; i++) {
        const Words4 w = piece.words[i];
        store128(to + 8 * i, {from_bf16(w.x), from_bf16(w.y), from_bf16(w.z), from_bf16(w.w)});
    }
}

// ------------------------------------------------------------------------------------------------------------- the product

// Which line and which of its groups a thread unpacks: lanes 0 and 1 two groups, lanes 0, 2, 4, 6 four lines.
template <class S> DEVICE int group_of() { return S::GROUPS == 2 ? thread() % 2 : thread() % 2 + thread() / 8 % 2 * 2; }
template <class S> DEVICE int line_of() { return S::GROUPS == 2 ? thread() / 2 : thread() / 2 % 4 + thread() / 16 * 4; }

// The block's outputs: for each `done(row, out, value)` with row below S::ROWS and out below S::OUTS, once in the block.
// `line(row)` says which line of x row has (any readable one past the last), `first_out` the row of W that out 0 is,
// `last_out` the last that may be read; bias is of W's rows, or null. `memory`: S::LINES * S::STRIDE halves.
template <class Q, class S, class Line, class Done>
DEVICE void many_block(half_t *memory, const half_t *x, const float *scales, int pitch, const Lines<Q> &w, const float *bias,
                       i64 first_out, i64 last_out, int cols, Line line, Done done) {
    half_t *const x_part = memory, *const w_part = memory + S::ROWS * S::STRIDE;
    constexpr int WORDS = S::K / 8;   // of a line of x in a step
    const int x_line = thread() / WORDS, x_word = thread() % WORDS;
    // What is needed now and then only, so that it takes no registers: where lines of x begin, in words of 16 bytes, and what
    // becomes of the sums.
    SHARED(u32, x_lines, S::ROWS);
    SHARED(float, row_scale, S::ROWS);
    SHARED(float, out_bias, S::OUTS);
    for (int i = thread(); i < S::ROWS; i += S::THREADS) {
        const int at = line(i);
        x_lines[i] = (u32)at * (u32)(pitch / 8);
        row_scale[i] = scales[at];
    }
    for (int i = thread(); i < S::OUTS; i += S::THREADS) {
        out_bias[i] = bias && first_out + i <= last_out ? bias[first_out + i] : 0.0f;
    }
    block_barrier();
    const i64 wanted = first_out + line_of<S>(), w_row = wanted < last_out ? wanted : last_out;

    TileC c[S::ROW_TILES][S::OUT_TILES];
    UNROLL for (int i = 0; i < S::ROW_TILES; i++) {
        UNROLL for (int j = 0; j < S::OUT_TILES; j++) tile_zero(c[i][j]);
    }
    const int first_row = warp() / S::OUT_WARPS * (S::ROW_TILES * 16);
    const int first_col = warp() % S::OUT_WARPS * (S::OUT_TILES * 16);

    Words4 next_x[S::COPIES];
    Piece<Q> next_w;
    auto get = [&](int step) {
        UNROLL for (int i = 0; i < S::COPIES; i++) {
            next_x[i] = word_of_x<WORDS>(x, x_lines[x_line + i * (S::THREADS / WORDS)], step, x_word);
        }
        get_piece(Q(), next_w, w, w_row, hidden_step(step) * S::GROUPS + group_of<S>());
    };
    auto put = [&]() {
        UNROLL for (int i = 0; i < S::COPIES; i++) {
            store128(x_part + (x_line + i * (S::THREADS / WORDS)) * S::STRIDE + 8 * x_word, next_x[i]);
        }
        put_piece(Q(), next_w, w_part + line_of<S>() * S::STRIDE + group_of<S>() * GROUP);
    };

    const int steps = ceil_div(cols, S::K);
    get(0);
    for (int step = 0; step < steps; step++) {
        block_barrier();
        put();
        block_barrier();
        if (step + 1 < steps) get(step + 1);
        EACH_K for (int k = 0; k < S::K; k += 16) {
            TileB b[S::OUT_TILES];
            UNROLL for (int j = 0; j < S::OUT_TILES; j++) {
                tile_load_b(b[j], w_part + (first_col + 16 * j) * S::STRIDE + k, S::STRIDE);
            }
            UNROLL for (int i = 0; i < S::ROW_TILES; i++) {
                TileA a;
                tile_load_a(a, x_part + (first_row + 16 * i) * S::STRIDE + k, S::STRIDE);
                UNROLL for (int j = 0; j < S::OUT_TILES; j++) tile_multiply(c[i][j], a, b[j]);
            }
        }
    }
    UNROLL for (int i = 0; i < S::ROW_TILES; i++) {
        UNROLL for (int j = 0; j < S::OUT_TILES; j++) {
            tile_each(c[i][j], [&](int row, int col, float &value) {
                row += first_row + 16 * i;
                col += first_col + 16 * j;
                done(row, col, value * row_scale[row] + out_bias[col]);
            });
        }
    }
}
