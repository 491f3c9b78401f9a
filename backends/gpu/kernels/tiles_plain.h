// Products of 16 x 16 x 16 tiles without matrix cores, for cards that have none (gfx9 before gfx908, gfx10).
//
// The interface is that of cuda_kernels/tiles.h. The lanes of a warp lie on the tile C as a grid of 8 rows by WARP / 8
// columns; a lane sums 2 rows by 128 / WARP columns of it. Its fragments are those rows of A and columns of B whole, all 16
// k of them, so a caller that multiplies one A with several Bs reads A once: with 2 x 4 tiles for a warp and 32 lanes, 16 k
// cost 40 loads of 16 bytes for 512 x 2 products, and the multipliers are the limit, not block memory. Two products at a
// time go to `dot2` where the card has it (gfx906, gfx1030 ...: v_dot2_f32_f16, sums in single precision), else to fma on
// halves made floats.
#pragma once

constexpr int PLAIN_ROWS = 2, PLAIN_COLS = 256 / WARP / PLAIN_ROWS, PLAIN_GRID = 16 / PLAIN_COLS;

struct TileA { u32 pair[PLAIN_ROWS][8]; };
struct TileB { u32 pair[PLAIN_COLS][8]; };
struct TileC { float value[PLAIN_ROWS][PLAIN_COLS]; };

DEVICE void plain_line(u32 (&pair)[8], const half_t *at) {
    const Words4 low = load128(at), high = load128(at + 8);
    pair[0] = low.x; pair[1] = low.y; pair[2] = low.z; pair[3] = low.w;
    pair[4] = high.x; pair[5] = high.y; pair[6] = high.z; pair[7] = high.w;
}

DEVICE void tile_zero(TileC &c) {
    UNROLL for (int i = 0; i < PLAIN_ROWS; i++) {
        UNROLL for (int j = 0; j < PLAIN_COLS; j++) c.value[i][j] = 0.0f;
    }
}

// Rows lane / PLAIN_GRID and that + 8, columns lane % PLAIN_GRID and every PLAIN_GRID-th from there: lanes that read at once
// lie in lines side by side.
DEVICE void tile_load_a(TileA &a, const half_t *at, int stride) {
    UNROLL for (int i = 0; i < PLAIN_ROWS; i++) {
        plain_line(a.pair[i], at + (lane() / PLAIN_GRID + i * (16 / PLAIN_ROWS)) * stride);
    }
}

DEVICE void tile_load_b(TileB &b, const half_t *at, int stride) {
    UNROLL for (int j = 0; j < PLAIN_COLS; j++) plain_line(b.pair[j], at + (lane() % PLAIN_GRID + j * PLAIN_GRID) * stride);
}

DEVICE void tile_load_bt(TileB &b, const half_t *at, int stride) {
    UNROLL for (int j = 0; j < PLAIN_COLS; j++) {
        const half_t *col = at + lane() % PLAIN_GRID + j * PLAIN_GRID;
        UNROLL for (int k = 0; k < 8; k++) b.pair[j][k] = col[2 * k * stride] | (u32)col[(2 * k + 1) * stride] << 16;
    }
}

template <class F> DEVICE void tile_each(TileC &c, F f) {
    UNROLL for (int i = 0; i < PLAIN_ROWS; i++) {
        UNROLL for (int j = 0; j < PLAIN_COLS; j++) {
            f(lane() / PLAIN_GRID + i * (16 / PLAIN_ROWS), lane() % PLAIN_GRID + j * PLAIN_GRID, c.value[i][j]);
        }
    }
}

DEVICE float plain_dot2(u32 a, u32 b, float sum) {
#if defined(__AMDGCN__)
#if __has_builtin(__builtin_amdgcn_fdot2)
    typedef _Float16 Pair __attribute__((ext_vector_type(2)));
    return __builtin_amdgcn_fdot2(__builtin_bit_cast(Pair, a), __builtin_bit_cast(Pair, b), sum, false);
#define PLAIN_DOT2
#endif
#endif
#if !defined(PLAIN_DOT2)
    sum = fma_(half_to_float((half_t)(a & 0xffff)), half_to_float((half_t)(b & 0xffff)), sum);
    return fma_(half_to_float((half_t)(a >> 16)), half_to_float((half_t)(b >> 16)), sum);
#endif
}

DEVICE void tile_multiply(TileC &c, const TileA &a, const TileB &b) {
    UNROLL for (int k = 0; k < 8; k++) {
        UNROLL for (int i = 0; i < PLAIN_ROWS; i++) {
            UNROLL for (int j = 0; j < PLAIN_COLS; j++) c.value[i][j] = plain_dot2(a.pair[i][k], b.pair[j][k], c.value[i][j]);
        }
    }
}
