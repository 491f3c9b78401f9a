// Matrix products of a warp on tensor cores: C += A B, sixteen by sixteen by sixteen, halves in and single precision out.
//
//     TileA a; TileB b; TileC c;              fragments: what of the tiles a lane holds in registers
//     tile_zero(c)
//     tile_load_a(a, at, stride)              A[row][k] at at[row * stride + k]
//     tile_load_b(b, at, stride)              B[k][col] at at[col * stride + k]: its lines are columns of C
//     tile_load_bt(b, at, stride)             B[k][col] at at[k * stride + col]
//     tile_multiply(c, a, b)
//     tile_each(c, [&](int row, int col, float &value) { ... })      the values of C that this lane has, each once in the warp
//
// `at` is block memory, halves; every line of it begins at a multiple of 16 bytes, so strides are multiples of 8 halves. All
// lanes of the warp call each of these together. The same names stand in hip_kernels/tiles.h; which lane holds what differs
// between cards and is nobody's business outside of these two files.
//
// Strides. All loads take runs of 16 bytes, eight lines at once. Block memory has 32 banks of 4 bytes, eight groups of 16
// bytes: eight lines meet no bank twice if their stride is an odd number of such groups. `tile_stride(k)` gives the smallest
// such stride for lines of k halves.
//
// Fragments here (g = lane / 4, t = lane % 4), as PTX has them for mma.m16n8k16:
//
//     A   pair[0] (row g, k 2t 2t+1)   pair[1] (row g+8, same k)   pair[2] (row g, k + 8)   pair[3] (row g+8, k + 8)
//     B   pair[0] (k 2t 2t+1, col g)   pair[1] (k + 8, col g)      pair[2], pair[3] the same of col g+8
//     C   value[0] (row g, col 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)     value[1] the same of col + 8
//
// One `ldmatrix.x4` fills A, one fills B. sm_75 multiplies in steps of 8 k (m16n8k8), whose fragments are halves of these.
#pragma once

// Which layout. Emulated code is told (-DTILES_MMA8 and so on), or gets that of most cards.
#if !defined(TILES_MMA16) && !defined(TILES_MMA8) && !defined(TILES_PLAIN)
#if defined(EMULATED)
#define TILES_MMA16
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750
#define TILES_PLAIN
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define TILES_MMA8
#else
#define TILES_MMA16
#endif
#endif

DEVICE constexpr int tile_stride(int k) { return (k + 7) / 8 % 2 ? (k + 7) / 8 * 8 : (k + 7) / 8 * 8 + 8; }

#if defined(TILES_PLAIN)
#include "tiles_plain.h"
#else

struct TileA { u32 pair[4]; };
struct TileB { u32 pair[4]; };
struct TileC { float value[2][4]; };

// Four 8 x 8 matrices of halves. Lanes 8i .. 8i+7 say where the lines of matrix i are; a lane gets of each the pair t of line
// g, or `transposed` elements g of the lines 2t and 2t+1.
template <bool transposed> DEVICE void load_matrices(u32 (&pair)[4], const half_t *line) {
#if defined(EMULATED)
    transposed ? ldmatrix_t(pair, line) : ldmatrix(pair, line);
#else
    const u32 at = (u32)__cvta_generic_to_shared(line);
    if (transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(pair[0]), "=r"(pair[1]), "=r"(pair[2]), "=r"(pair[3]) : "r"(at) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(pair[0]), "=r"(pair[1]), "=r"(pair[2]), "=r"(pair[3]) : "r"(at) : "memory");
    }
#endif
}

// Half of C, 16 x 8, += A times half of B
DEVICE void multiply_half(float (&c)[4], const u32 (&a)[4], const u32 *b) {
#if defined(EMULATED) && defined(TILES_MMA16)
    mma_16816(c, a, reinterpret_cast<const u32 (&)[2]>(b[0]));
#elif defined(EMULATED)
    for (int k = 0; k < 2; k++) {
        mma_1688(c, reinterpret_cast<const u32 (&)[2]>(a[2 * k]), reinterpret_cast<const u32 (&)[1]>(b[k]));
    }
#elif defined(TILES_MMA16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    UNROLL for (int k = 0; k < 2; k++) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
    }
#endif
}

DEVICE void tile_zero(TileC &c) { UNROLL for (int i = 0; i < 8; i++) c.value[i / 4][i % 4] = 0.0f; }

DEVICE void tile_load_a(TileA &a, const half_t *at, int stride) {
    load_matrices<false>(a.pair, at + lane() % 16 * stride + lane() / 16 * 8);
}

DEVICE void tile_load_b(TileB &b, const half_t *at, int stride) {
    load_matrices<false>(b.pair, at + (lane() % 8 + lane() / 16 * 8) * stride + lane() / 8 % 2 * 8);
}

DEVICE void tile_load_bt(TileB &b, const half_t *at, int stride) {
    load_matrices<true>(b.pair, at + lane() % 16 * stride + lane() / 16 * 8);
}

DEVICE void tile_multiply(TileC &c, const TileA &a, const TileB &b) {
    multiply_half(c.value[0], a.pair, b.pair);
    multiply_half(c.value[1], a.pair, b.pair + 2);
}

template <class F> DEVICE void tile_each(TileC &c, F f) {
    UNROLL for (int i = 0; i < 8; i++) f(lane() / 4 + i / 2 % 2 * 8, lane() % 4 * 2 + i % 2 + i / 4 * 8, c.value[i / 4][i % 4]);
}

#endif
