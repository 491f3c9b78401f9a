// What device code may use: one set of names over CUDA, HIP and the emulation on a CPU.
//
// Kernels are written once, against this header. Below it lies one of three files, found by the include path:
//
//     cuda_kernels/vendor.h   nvcc and NVRTC
//     hip_kernels/vendor.h    hipcc, clang and hiprtc
//     emulated.h              g++, every thread a fiber (tests)
//
// and beside it `tiles.h`, the vendor's matrix cores. No system header is included anywhere: the compilers that a user's
// machine brings (NVRTC, hiprtc) have none.
//
// A vendor file gives
//
//     WARP                            lanes of a warp: 32, or 64 on cards whose waves are that wide. A constant.
//     DEVICE                          qualifier of functions that are inlined into kernels
//     KERNEL(name, threads, blocks)   begins an entry, parameters follow in parentheses. At most `threads` threads in a block
//                                     of one dimension, and registers such that `blocks` of them fit a multiprocessor
//     thread()  threads()             index in the block, and how many there are
//     lane()  warp()                  of the thread: thread() % WARP, thread() / WARP
//     block_x() block_y() block_z()   which block, and of how many:
//     blocks_x() blocks_y()
//     SHARED(type, name, count)       an array in block memory, declared in a kernel or a function of one. Not initialised
//     TABLE(type, name, count)        constants in global memory, for all kernels of a file: TABLE(u16, ODD, 3) = {1, 3, 5};
//     dynamic_shared()                u8 *, 16-byte aligned: the block memory that the launch asked for
//     block_barrier()                 all threads of the block arrive, and see each other's block and global memory
//     warp_barrier()                  the same for the lanes of a warp
//     shuffle(v, from)                v of lane `from` of the warp;  every lane of the warp calls it (int, u32, float)
//     shuffle_xor(v, mask)            v of lane() ^ mask
//     shuffle_down(v, by)             v of lane() + by (of the last `by` lanes: their own)
//     ballot(bool)                    u64, bit i: lane i's
//     dot4(a, b, c)                   c + the sum of four products of signed bytes of a and b (int)
//     pick16(table, codes, low, high) looks 4-bit codes up in a `Words4` of 16 bytes: bytes of `low` for the lower halves of the
//                                     bytes of `codes` (u32), of `high` for their upper ones
//     half_to_float(h)  float_to_half(f)        float_to_half rounds to nearest even
//     load128(p)  store128(p, v)      `Words4`, 16 bytes at once; p is aligned to 16
//     load_once(p)                    load128 of memory that nobody reads a second time (weights)
//     atomic_add(p, v)                float, int, u32, u64 in global or block memory; returns what was there
//     float_bits(f)  bits_float(u)
//     sqrt_, floor_, round_ (to nearest even), abs_, fma_, min_, max_        of floats, rounded once
// and UNROLL stands before a loop whose count is a constant.
//
// functions.h adds exp_, log_, tanh_, rsqrt_, pow_(x, y), sin_, cos_, the same for all: at full single precision, no
// approximate units.
//
// Every compiler is told not to join products and sums by itself (-fmad=false, -ffp-contract=off), so that variants of a
// kernel give the same bits: where a fused multiply-add is wanted, and in a hot loop it is, fma_ is written.
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef u16 half_t;   // the bits of an IEEE half

struct alignas(16) Words4 { u32 x, y, z, w; };

#if defined(EMULATED)
#include "emulated.h"
#else
#include "vendor.h"
#endif

#if defined(EMULATED)
#define UNROLL
#else
#define UNROLL _Pragma("unroll")
#endif

#include "functions.h"

constexpr int PAGE = 16;   // slots of a KV page

// The sum over the lanes of groups of `N` neighbours (N a power of two, at most WARP): every lane gets that of its group.
template <int N = WARP> DEVICE float group_sum(float v) {
    UNROLL for (int mask = N / 2; mask > 0; mask /= 2) v += shuffle_xor(v, mask);
    return v;
}

template <int N = WARP> DEVICE float group_max(float v) {
    UNROLL for (int mask = N / 2; mask > 0; mask /= 2) v = max_(v, shuffle_xor(v, mask));
    return v;
}

// The same over all threads of a block; `part` is block memory of threads() / WARP floats. Every thread calls it.
DEVICE float block_sum(float v, float *part) {
    v = group_sum(v);
    block_barrier();
    if (lane() == 0) part[warp()] = v;
    block_barrier();
    float sum = 0.0f;
    for (int i = 0; i < threads() / WARP; i++) sum += part[i];
    return sum;
}

DEVICE float block_max(float v, float *part) {
    v = group_max(v);
    block_barrier();
    if (lane() == 0) part[warp()] = v;
    block_barrier();
    float most = part[0];
    for (int i = 1; i < threads() / WARP; i++) most = max_(most, part[i]);
    return most;
}

DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

#include "tiles.h"
