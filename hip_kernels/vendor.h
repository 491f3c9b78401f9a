// The names of device.h on AMD's cards, for clang and hiprtc. No header of ROCm and no device library is wanted: all below
// are the compiler's own. Every arch from gfx900 on; what a card lacks, the compiler says (`__has_builtin`), and then plain
// arithmetic stands in.
//
// The lanes of a wave: what the compiler builds for, 64 on GCN and CDNA (gfx9), 32 on RDNA (gfx10 and later).
#pragma once

#if defined(WARP_LANES)
constexpr int WARP = WARP_LANES;
#elif defined(__GFX9__)
constexpr int WARP = 64;
#else
constexpr int WARP = 32;
#endif

// SIMD units of a compute unit, which share its blocks, and waves that one of them holds.
#if defined(__GFX9__)
constexpr int SIMDS = 4, WAVES_OF_A_SIMD = 8;
#else
constexpr int SIMDS = 2, WAVES_OF_A_SIMD = 16;
#endif

#define DEVICE static inline __attribute__((device, always_inline))
#define KERNEL(name, threads, blocks)                                                            \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, threads),                   \
                              amdgpu_waves_per_eu(waves_per_simd(threads, blocks)))) void name
#define SHARED(type, name, count) __attribute__((shared, aligned(16))) type name[count]
#define TABLE(type, name, count) static __attribute__((device)) const type name[count]

constexpr int waves_per_simd(int threads, int blocks) {
    int waves = ((threads + WARP - 1) / WARP * blocks + SIMDS - 1) / SIMDS;
    return waves < 1 ? 1 : waves > WAVES_OF_A_SIMD ? WAVES_OF_A_SIMD : waves;
}

extern __attribute__((shared)) Words4 block_memory_of_the_launch[];

DEVICE int thread() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE int threads() { return __builtin_amdgcn_workgroup_size_x(); }
DEVICE int lane() { return thread() % WARP; }
DEVICE int warp() { return thread() / WARP; }
DEVICE int block_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE int block_y() { return __builtin_amdgcn_workgroup_id_y(); }
DEVICE int block_z() { return __builtin_amdgcn_workgroup_id_z(); }
DEVICE int blocks_x() { return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x(); }
DEVICE int blocks_y() { return __builtin_amdgcn_grid_size_y() / __builtin_amdgcn_workgroup_size_y(); }

DEVICE u8 *dynamic_shared() { return (u8 *)block_memory_of_the_launch; }

DEVICE void block_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// The lanes of a wave go in step: the fences hold the compiler back, which may otherwise move reads over writes.
DEVICE void warp_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

DEVICE u32 float_bits(float f) { return __builtin_bit_cast(u32, f); }
DEVICE float bits_float(u32 u) { return __builtin_bit_cast(float, u); }

// ds_bpermute takes the address of a lane's word: four times its number, of the whole wave on gfx9 and in waves of 32.
DEVICE int shuffle(int v, int from) { return __builtin_amdgcn_ds_bpermute(4 * from, v); }
DEVICE int shuffle_down(int v, int by) { return shuffle(v, lane() + by < WARP ? lane() + by : lane()); }

// With a mask that is a constant after inlining one case is left: lanes of a row of 16 by DPP, which costs no trip through
// the block memory's crossbar, those of 32 by ds_swizzle, which needs no address.
template <int CONTROL> DEVICE int of_row(int v) { return __builtin_amdgcn_update_dpp(v, v, CONTROL, 0xf, 0xf, false); }

DEVICE int shuffle_xor(int v, int mask) {
    switch (mask) {
    case 1: return of_row<0xb1>(v);   // quad_perm [1, 0, 3, 2]
    case 2: return of_row<0x4e>(v);   // quad_perm [2, 3, 0, 1]
#if defined(__GFX9__)
    case 4: return __builtin_amdgcn_ds_swizzle(v, 4 << 10 | 0x1f);
    case 8: return of_row<0x128>(v);   // a row of 16 turned by 8
#else
    case 4: return of_row<0x164>(v);   // row_xmask
    case 8: return of_row<0x168>(v);
#endif
    case 16: return __builtin_amdgcn_ds_swizzle(v, 16 << 10 | 0x1f);
    default: return shuffle(v, lane() ^ mask);
    }
}

DEVICE u32 shuffle(u32 v, int from) { return (u32)shuffle((int)v, from); }
DEVICE u32 shuffle_xor(u32 v, int mask) { return (u32)shuffle_xor((int)v, mask); }
DEVICE u32 shuffle_down(u32 v, int by) { return (u32)shuffle_down((int)v, by); }
DEVICE float shuffle(float v, int from) { return bits_float(shuffle(float_bits(v), from)); }
DEVICE float shuffle_xor(float v, int mask) { return bits_float(shuffle_xor(float_bits(v), mask)); }
DEVICE float shuffle_down(float v, int by) { return bits_float(shuffle_down(float_bits(v), by)); }

DEVICE u64 ballot(bool v) {
    if constexpr (WARP == 64)
        return __builtin_amdgcn_ballot_w64(v);
    else
        return __builtin_amdgcn_ballot_w32(v);
}

DEVICE int dot4(int a, int b, int c) {
#if __has_builtin(__builtin_amdgcn_sdot4)
    return __builtin_amdgcn_sdot4(a, b, c, false);   // gfx906 ... gfx10.3
#elif __has_builtin(__builtin_amdgcn_sudot4)
    return __builtin_amdgcn_sudot4(true, a, true, b, c, false);   // gfx11 and later
#else
    for (int i = 0; i < 4; i++) c += (int)(i8)(a >> 8 * i) * (int)(i8)(b >> 8 * i);   // gfx900, gfx1010
    return c;
#endif
}

// A permutation picks four of eight bytes by the low three bits of the bytes of a word, those of its second operand first.
DEVICE u32 pick_bytes(Words4 table, u32 codes) {
    const u32 index = codes & 0x07070707u;
    const u32 below = __builtin_amdgcn_perm(table.y, table.x, index), above = __builtin_amdgcn_perm(table.w, table.z, index);
    return __builtin_amdgcn_perm(above, below, 0x03020100u | (codes & 0x08080808u) >> 1);
}

DEVICE void pick16(Words4 table, u32 codes, u32 &low, u32 &high) {
    low = pick_bytes(table, codes & 0x0f0f0f0fu);
    high = pick_bytes(table, codes >> 4 & 0x0f0f0f0fu);
}

DEVICE float half_to_float(half_t h) { return (float)__builtin_bit_cast(_Float16, h); }
DEVICE half_t float_to_half(float f) { return __builtin_bit_cast(half_t, (_Float16)f); }

typedef u32 Vector4 __attribute__((ext_vector_type(4)));
typedef const __attribute__((address_space(1))) Vector4 *Global4;

DEVICE Words4 load128(const void *p) {
    const Vector4 v = *(const Vector4 *)p;
    return {v.x, v.y, v.z, v.w};
}

DEVICE void store128(void *p, Words4 v) { *(Vector4 *)p = Vector4{v.x, v.y, v.z, v.w}; }

// Past the caches, which then keep what is read again: activations and scales.
DEVICE Words4 load_once(const void *p) {
    const Vector4 v = __builtin_nontemporal_load((Global4)p);
    return {v.x, v.y, v.z, v.w};
}

template <class T> DEVICE T atomic_add(T *p, T v) {
    return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

DEVICE float sqrt_(float x) { return __builtin_sqrtf(x); }
DEVICE float floor_(float x) { return __builtin_floorf(x); }
DEVICE float round_(float x) { return __builtin_rintf(x); }
DEVICE float abs_(float x) { return __builtin_fabsf(x); }
DEVICE float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float min_(float a, float b) { return __builtin_fminf(a, b); }
DEVICE float max_(float a, float b) { return __builtin_fmaxf(a, b); }
