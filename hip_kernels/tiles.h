// Matrix products of a warp without matrix cores: the same interface as with them (cuda_kernels/tiles.h says what it is), every
// value of C summed by one lane straight from block memory.
#pragma once

struct TileA { const half_t *at; int stride; };
struct TileB { const half_t *at; int step_col, step_k; };
struct TileC { float value[256 / WARP]; };

DEVICE void tile_zero(TileC &c) { UNROLL for (int i = 0; i < 256 / WARP; i++) c.value[i] = 0.0f; }
DEVICE void tile_load_a(TileA &a, const half_t *at, int stride) { a = {at, stride}; }
DEVICE void tile_load_b(TileB &b, const half_t *at, int stride) { b = {at, stride, 1}; }
DEVICE void tile_load_bt(TileB &b, const half_t *at, int stride) { b = {at, 1, stride}; }

template <class F> DEVICE void tile_each(TileC &c, F f) {
    UNROLL for (int i = 0; i < 256 / WARP; i++) f((i * WARP + lane()) / 16, (i * WARP + lane()) % 16, c.value[i]);
}

DEVICE void tile_multiply(TileC &c, const TileA &a, const TileB &b) {
    tile_each(c, [&](int row, int col, float &value) {
        for (int k = 0; k < 16; k++)
            value = fma_(half_to_float(a.at[row * a.stride + k]), half_to_float(b.at[col * b.step_col + k * b.step_k]), value);
    });
}
