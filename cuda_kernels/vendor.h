// The names of device.h on NVIDIA's cards, for nvcc and NVRTC. Neither header nor library is wanted: what CUDA's own half
// header would give is two instructions of PTX here. Every arch from sm_75 on.
#pragma once

constexpr int WARP = 32;

#define DEVICE static __device__ __forceinline__
#define KERNEL(name, threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks) name
#define SHARED(type, name, count) __shared__ alignas(16) type name[count]
#define TABLE(type, name, count) static __device__ const type name[count]

extern __shared__ Words4 block_memory_of_the_launch[];

DEVICE int thread() { return threadIdx.x; }
DEVICE int threads() { return blockDim.x; }
DEVICE int lane() { return threadIdx.x % WARP; }
DEVICE int warp() { return threadIdx.x / WARP; }
DEVICE int block_x() { return blockIdx.x; }
DEVICE int block_y() { return blockIdx.y; }
DEVICE int block_z() { return blockIdx.z; }
DEVICE int blocks_x() { return gridDim.x; }
DEVICE int blocks_y() { return gridDim.y; }

DEVICE u8 *dynamic_shared() { return (u8 *)block_memory_of_the_launch; }

DEVICE void block_barrier() { __syncthreads(); }
DEVICE void warp_barrier() { __syncwarp(); }

constexpr u32 WHOLE_WARP = 0xffffffffu;

template <class T> DEVICE T shuffle(T v, int from) { return __shfl_sync(WHOLE_WARP, v, from); }
template <class T> DEVICE T shuffle_xor(T v, int mask) { return __shfl_xor_sync(WHOLE_WARP, v, mask); }
template <class T> DEVICE T shuffle_down(T v, int by) { return __shfl_down_sync(WHOLE_WARP, v, by); }
// nvcc brings a function of this name, of before the lanes of a warp could part.
#define ballot ballot_of_lanes
DEVICE u64 ballot(bool v) { return __ballot_sync(WHOLE_WARP, v); }

DEVICE int dot4(int a, int b, int c) { return __dp4a(a, b, c); }

// A permutation picks four of eight bytes by the low three bits of four nibbles; the fourth bit chooses between two of them.
// So come the eight values in the order of the nibbles, two of them to each byte of `codes`, and then part.
DEVICE void pick16(Words4 table, u32 codes, u32 &low, u32 &high) {
    const u32 choose = 0x32103210u | (codes & 0x88888888u) >> 1;
    const u32 first = __byte_perm(__byte_perm(table.x, table.y, codes), __byte_perm(table.z, table.w, codes), choose);
    const u32 second = __byte_perm(__byte_perm(table.x, table.y, codes >> 16), __byte_perm(table.z, table.w, codes >> 16), choose >> 16);
    low = __byte_perm(first, second, 0x6420);
    high = __byte_perm(first, second, 0x7531);
}

DEVICE float half_to_float(half_t h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

DEVICE half_t float_to_half(float f) {
    half_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

DEVICE Words4 load128(const void *p) {
    const uint4 v = *(const uint4 *)p;
    return {v.x, v.y, v.z, v.w};
}

DEVICE void store128(void *p, Words4 v) { *(uint4 *)p = make_uint4(v.x, v.y, v.z, v.w); }

// Past the first cache, which then keeps what is read again: activations and scales. No other thread writes there.
DEVICE Words4 load_once(const void *p) {
    Words4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p));
    return v;
}

DEVICE float atomic_add(float *p, float v) { return atomicAdd(p, v); }
DEVICE int atomic_add(int *p, int v) { return atomicAdd(p, v); }
DEVICE u32 atomic_add(u32 *p, u32 v) { return atomicAdd(p, v); }
DEVICE u64 atomic_add(u64 *p, u64 v) { return atomicAdd((unsigned long long *)p, v); }

DEVICE u32 float_bits(float f) { return __float_as_uint(f); }
DEVICE float bits_float(u32 u) { return __uint_as_float(u); }

DEVICE float sqrt_(float x) { return __fsqrt_rn(x); }
DEVICE float floor_(float x) { return ::floorf(x); }
DEVICE float round_(float x) { return ::rintf(x); }
DEVICE float abs_(float x) { return ::fabsf(x); }
DEVICE float fma_(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float min_(float a, float b) { return ::fminf(a, b); }
DEVICE float max_(float a, float b) { return ::fmaxf(a, b); }
