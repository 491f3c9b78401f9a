// Matrix products of a warp on AMD's matrix cores. The interface, and what strides are good, stand in cuda_kernels/tiles.h.
//
// Which lane holds what (n = lane % 16, h = lane / 16, i counts a lane's values):
//
//                          A                   B                   C
//     WMMA of gfx11        row n, all 16 k     all 16 k, col n     row 2i + h, col n     32 lanes; 16-31 hold what 0-15 hold
//     WMMA of gfx12        row n, k 8h + i     k 8h + i, col n     row 8h + i, col n     32 lanes
//     MFMA, gfx908 on      row n, k 4h + i     k 4h + i, col n     row 4h + i, col n     64 lanes
//
// So a lane's fragment is a run of one line, read 16 bytes at once (MFMA: 8). Lines in the other order (`tile_load_bt`) cost
// a read for each half: whoever can, turns B round while storing it.
//
// gfx9 before gfx908 and gfx10 have no matrix cores: tiles_plain.h. So have waves of 64 on cards whose WMMA is for 32.
#pragma once

#if !defined(TILES_WMMA11) && !defined(TILES_WMMA12) && !defined(TILES_MFMA) && !defined(TILES_PLAIN)
#if defined(EMULATED)
#if WARP_LANES == 32
#define TILES_WMMA11
#else
#define TILES_MFMA
#endif
#elif (defined(__GFX11__) || defined(__GFX12__)) && __AMDGCN_WAVEFRONT_SIZE__ == 64
#define TILES_PLAIN
#elif defined(__GFX11__)
#define TILES_WMMA11
#elif defined(__GFX12__)
#define TILES_WMMA12
#elif defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__) || \
    defined(__gfx950__)
#define TILES_MFMA
#else
#define TILES_PLAIN
#endif
#endif

DEVICE constexpr int tile_stride(int k) { return (k + 7) / 8 % 2 ? (k + 7) / 8 * 8 : (k + 7) / 8 * 8 + 8; }

#if defined(TILES_PLAIN)
#include "tiles_plain.h"
#else

// How many k of a line a lane holds, and where they begin; how many values of C, and their rows.
#if defined(TILES_WMMA11)
constexpr int TILE_K = 16, TILE_VALUES = 8;
DEVICE int tile_first_k() { return 0; }
DEVICE int tile_row(int i) { return 2 * i + lane() / 16; }
#elif defined(TILES_WMMA12)
constexpr int TILE_K = 8, TILE_VALUES = 8;
DEVICE int tile_first_k() { return lane() / 16 * 8; }
DEVICE int tile_row(int i) { return lane() / 16 * 8 + i; }
#else
constexpr int TILE_K = 4, TILE_VALUES = 4;
DEVICE int tile_first_k() { return lane() / 16 * 4; }
DEVICE int tile_row(int i) { return lane() / 16 * 4 + i; }
#endif

struct TileLine { u32 pair[TILE_K / 2]; };
struct TileA : TileLine {};
struct TileB : TileLine {};
struct TileC { float value[TILE_VALUES]; };

struct alignas(8) Words2 { u32 x, y; };

DEVICE void load_line(TileLine &line, const half_t *at) {
    at += tile_first_k();
    if constexpr (TILE_K == 4) {
        const Words2 both = *reinterpret_cast<const Words2 *>(at);
        line.pair[0] = both.x;
        line.pair[1] = both.y;
    } else {
        UNROLL for (int i = 0; i < TILE_K / 8; i++) {
            const Words4 four = load128(at + 8 * i);
            line.pair[4 * i] = four.x;
            line.pair[4 * i + 1] = four.y;
            line.pair[4 * i + 2] = four.z;
            line.pair[4 * i + 3] = four.w;
        }
    }
}

DEVICE void tile_zero(TileC &c) { UNROLL for (int i = 0; i < TILE_VALUES; i++) c.value[i] = 0.0f; }
DEVICE void tile_load_a(TileA &a, const half_t *at, int stride) { load_line(a, at + lane() % 16 * stride); }
DEVICE void tile_load_b(TileB &b, const half_t *at, int stride) { load_line(b, at + lane() % 16 * stride); }

DEVICE void tile_load_bt(TileB &b, const half_t *at, int stride) {
    at += tile_first_k() * stride + lane() % 16;
    UNROLL for (int i = 0; i < TILE_K / 2; i++) b.pair[i] = at[2 * i * stride] | (u32)at[(2 * i + 1) * stride] << 16;
}

template <class F> DEVICE void tile_each(TileC &c, F f) {
    UNROLL for (int i = 0; i < TILE_VALUES; i++) f(tile_row(i), lane() % 16, c.value[i]);
}

DEVICE void tile_multiply(TileC &c, const TileA &a, const TileB &b) {
#if defined(EMULATED) && defined(TILES_WMMA11)
    wmma_gfx11(c.value, a.pair, b.pair);
#elif defined(EMULATED) && defined(TILES_WMMA12)
    wmma_gfx12(c.value, a.pair, b.pair);
#elif defined(EMULATED)
    mfma_16(c.value, a.pair, b.pair);
#else
    typedef _Float16 Halves __attribute__((ext_vector_type(TILE_K)));
    typedef float Floats __attribute__((ext_vector_type(TILE_VALUES)));
    const Halves left = __builtin_bit_cast(Halves, a.pair), right = __builtin_bit_cast(Halves, b.pair);
    Floats sum = __builtin_bit_cast(Floats, c.value);
#if defined(TILES_WMMA11)
    sum = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(left, right, sum);
#elif defined(TILES_WMMA12)
    sum = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(left, right, sum);
#else
    sum = __builtin_amdgcn_mfma_f32_16x16x16f16(left, right, sum, 0, 0, 0);
#endif
    UNROLL for (int i = 0; i < TILE_VALUES; i++) c.value[i] = sum[i];
#endif
}

#endif
