// Device code on a CPU: what device.h asks of a vendor, given by g++ and fibers.
//
// Every thread of a block is a fiber with a stack of its own; the blocks of a grid run one after another. A fiber runs until
// it waits for others: at a barrier, a shuffle, a ballot or a matrix product. Such a call is a *meeting*. A meeting of a warp
// takes place when all lanes of the warp have come, a meeting of the block when all its threads have; whoever comes last does
// the exchange for all of them, and all go on. So a barrier and a shuffle mean here exactly what they mean on a card, and what
// is undefined there is an error here, with the places and the lanes:
//
// - lanes of a warp (threads of a block, at a barrier) that meet at different places of the source, or in different kinds of
//   meeting: divergence;
// - a lane that has left the kernel while others of its warp meet, a thread that never comes to a barrier: deadlock;
// - a shuffle from a lane that is not there; block memory that a kernel wrote past its end; a 16-byte load that is not aligned;
// - lanes of a matrix product whose registers contradict each other (wmma_gfx11 holds every value twice).
//
// Block memory is filled with ones before each block, which read as NaN and as -1: what nobody wrote is seen in the result.
//
// A block holds nothing in common with another but global memory. Under ThreadSanitizer that is what the sanitizer sees: each
// thread of each block is a thread of its own, a barrier of the block orders the block, a barrier of a warp the warp, and
// shuffles order nothing (as on cards: only the barriers order memory). Under AddressSanitizer every array in block memory is
// an allocation of its own, with red zones.
//
// The runtime is simt.cpp: compiled without sanitizers even where the kernels are not, so that it is invisible to them.
// `-DWARP_LANES=32` or 64 sets the width.
#pragma once

#include <stddef.h>   // and no more: every entry file pays for what is read here

constexpr int WARP = WARP_LANES;

#define DEVICE inline

namespace simt {

// The running thread. Every lane of a warp and every warp of a block has its own; `block` is the same for all.
struct Self { int thread, lane, warp; };
struct Block { int at[3], of[3], threads; unsigned char *dynamic; };
extern Self *self;
extern Block block;

struct Place { const char *file; int line; };
// A meeting: `lanes[i]` is what lane i brought (zero where the warp has no such lane); fills in what each of them gets.
using Exchange = void (*)(void **lanes, int count);
struct Meeting { const char *kind; bool whole_block; Exchange exchange; };
void meet(const Meeting &meeting, void *brought, Place place);
[[noreturn]] void fail(Place place, const char *format, ...) __attribute__((format(printf, 2, 3)));
void *block_memory(const void *key, const char *name, size_t size, Place place);

struct Word { u32 value; int from; u32 got; };     // a shuffle
struct Vote { bool value; u64 got; };
struct Fragments { const u32 *a, *b; float *c; };

extern const Meeting BLOCK, WARPS, SHUFFLE, BALLOT, MMA_16816, MMA_1688, WMMA_GFX11, WMMA_GFX12, MFMA_16, LDMATRIX, LDMATRIX_T;

// An entry. `call` gives a function the arguments that `args` point to, as a driver's launch has them.
using Function = void (*)();
using Call = void (*)(Function, void **args);
void enter(const char *name, const char *params, const char *const *kinds, int threads, int blocks, Function function, Call call);

template <class T> struct Kind;
template <class T> struct Kind<T *> { static constexpr const char *text = "pointer"; };
template <> struct Kind<i32> { static constexpr const char *text = "i32"; };
template <> struct Kind<u32> { static constexpr const char *text = "u32"; };
template <> struct Kind<i64> { static constexpr const char *text = "i64"; };
template <> struct Kind<u64> { static constexpr const char *text = "u64"; };
template <> struct Kind<float> { static constexpr const char *text = "float"; };

template <int N> struct Named;
template <size_t...> struct Numbers {};
template <size_t N, size_t... I> struct Count : Count<N - 1, N - 1, I...> {};
template <size_t... I> struct Count<0, I...> { using Type = Numbers<I...>; };
template <int N> struct Entry {
    template <class... A> Entry(void (*function)(A...), const char *params) {
        static const char *const kinds[] = {Kind<A>::text..., nullptr};
        enter(Named<N>::name, params, kinds, Named<N>::threads, Named<N>::blocks, reinterpret_cast<Function>(function),
              [](Function each, void **args) { call<A...>(each, args, typename Count<sizeof...(A)>::Type()); });
    }
    template <class... A, size_t... I> static void call(Function function, void **args, Numbers<I...>) {
        (void)args;
        reinterpret_cast<void (*)(A...)>(function)(*static_cast<A *>(args[I])...);
    }
};

inline float float_of(u32 bits) { float value; __builtin_memcpy(&value, &bits, 4); return value; }
inline u32 bits_of(float value) { u32 bits; __builtin_memcpy(&bits, &value, 4); return bits; }

}  // namespace simt

// KERNEL(name, threads, blocks)(parameters) { body }: the macro ends in the name of another one, which takes the parameters.
// The two share a number.
#define KERNEL(name, threads, blocks) SIMT_KERNEL(__COUNTER__, name, threads, blocks)
#define SIMT_KERNEL(...) SIMT_NAMED(__VA_ARGS__)
#define SIMT_NAMED(n, entry, thread_count, block_count)                                                                        \
    template <> struct simt::Named<n> {                                                                                        \
        static constexpr const char *name = #entry;                                                                            \
        static constexpr int threads = thread_count, blocks = block_count;                                                     \
    };                                                                                                                         \
    SIMT_TAKES
#define SIMT_TAKES(...) SIMT_TAKEN(__VA_ARGS__)   // parameters that are a macro are what it stands for
#define SIMT_TAKEN(...) SIMT_ENTRY(__COUNTER__, (__VA_ARGS__), #__VA_ARGS__)
#define SIMT_ENTRY(...) SIMT_BODY(__VA_ARGS__)
#define SIMT_BODY(n, parameters, text)                                                                                         \
    static void simt_body_##n parameters;                                                                                      \
    static const simt::Entry<n - 1> simt_entry_##n(&simt_body_##n, text);                                                      \
    static void simt_body_##n parameters

// Where the caller stands: a default argument is evaluated there.
#define SIMT_HERE simt::Place place = {__builtin_FILE(), __builtin_LINE()}

#define SHARED(type, name, count)                                                                                              \
    static char simt_key_##name;                                                                                     \
    type(&name)[count] = *static_cast<type(*)[count]>(                                                                         \
        simt::block_memory(&simt_key_##name, #name, sizeof(type[count]), {__FILE__, __LINE__}))
#define TABLE(type, name, count) static const type name[count]

inline int thread() { return simt::self->thread; }
inline int threads() { return simt::block.threads; }
inline int lane() { return simt::self->lane; }
inline int warp() { return simt::self->warp; }
inline int block_x() { return simt::block.at[0]; }
inline int block_y() { return simt::block.at[1]; }
inline int block_z() { return simt::block.at[2]; }
inline int blocks_x() { return simt::block.of[0]; }
inline int blocks_y() { return simt::block.of[1]; }
inline u8 *dynamic_shared() { return simt::block.dynamic; }

inline void block_barrier(SIMT_HERE) { simt::meet(simt::BLOCK, nullptr, place); }
inline void warp_barrier(SIMT_HERE) { simt::meet(simt::WARPS, nullptr, place); }

inline u32 shuffle(u32 v, int from, SIMT_HERE) {
    if (from < 0 || from >= WARP) simt::fail(place, "shuffle from lane %d of %d", from, WARP);
    simt::Word word = {v, from, 0};
    simt::meet(simt::SHUFFLE, &word, place);
    return word.got;
}
inline int shuffle(int v, int from, SIMT_HERE) { return int(shuffle(u32(v), from, place)); }
inline float shuffle(float v, int from, SIMT_HERE) { return simt::float_of(shuffle(simt::bits_of(v), from, place)); }
template <class T> inline T shuffle_xor(T v, int mask, SIMT_HERE) { return shuffle(v, lane() ^ mask, place); }
template <class T> inline T shuffle_down(T v, int by, SIMT_HERE) {
    return shuffle(v, lane() + by < WARP ? lane() + by : lane(), place);
}
inline u64 ballot(bool v, SIMT_HERE) {
    simt::Vote vote = {v, 0};
    simt::meet(simt::BALLOT, &vote, place);
    return vote.got;
}

inline int dot4(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) c += int(i8(a >> i)) * int(i8(b >> i));
    return c;
}

inline void pick16(Words4 table, u32 codes, u32 &low, u32 &high) {
    const u32 words[4] = {table.x, table.y, table.z, table.w};
    low = high = 0;
    for (int i = 0; i < 32; i += 8) {
        const u32 first = codes >> i & 15, second = codes >> (i + 4) & 15;
        low |= (words[first / 4] >> first % 4 * 8 & 255) << i;
        high |= (words[second / 4] >> second % 4 * 8 & 255) << i;
    }
}

inline u32 float_bits(float f) { return simt::bits_of(f); }
inline float bits_float(u32 u) { return simt::float_of(u); }

inline float half_to_float(half_t h) {
    const u32 sign = u32(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
    if (exponent == 31) return simt::float_of(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) return simt::float_of(sign | simt::bits_of(float(fraction) * 0x1p-24f));
    return simt::float_of(sign | (exponent + 112) << 23 | fraction << 13);
}
inline half_t float_to_half(float f) {
    const u32 bits = simt::bits_of(f), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return half_t(sign | 0x7e00 | (size >> 13 & 0x3ff));
    if (size >= 0x477ff000) return half_t(sign | 0x7c00);   // rounds up to 65536
    if (size < 0x38800000) {                                // below the least normal half: adding 0.5 rounds at 2^-24
        const float rounded = simt::float_of(size) + 0.5f;
        return half_t(sign | (simt::bits_of(rounded) - 0x3f000000));
    }
    return half_t(sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13));
}

inline void simt_aligned(const void *p, simt::Place place) {
    if (reinterpret_cast<size_t>(p) % 16) simt::fail(place, "16 bytes at an address that is no multiple of 16");
}
inline Words4 load128(const void *p, SIMT_HERE) { simt_aligned(p, place); return *static_cast<const Words4 *>(p); }
inline Words4 load_once(const void *p, SIMT_HERE) { simt_aligned(p, place); return *static_cast<const Words4 *>(p); }
inline void store128(void *p, const Words4 &v, SIMT_HERE) { simt_aligned(p, place); *static_cast<Words4 *>(p) = v; }

inline int atomic_add(int *p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline u32 atomic_add(u32 *p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline u64 atomic_add(u64 *p, u64 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline float atomic_add(float *p, float v) {
    u32 *bits = reinterpret_cast<u32 *>(p), was = __atomic_load_n(bits, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(bits, &was, simt::bits_of(simt::float_of(was) + v), false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {}
    return simt::float_of(was);
}

inline float sqrt_(float x) { return __builtin_sqrtf(x); }
inline float floor_(float x) { return __builtin_floorf(x); }
inline float round_(float x) { return __builtin_nearbyintf(x); }
inline float abs_(float x) { return __builtin_fabsf(x); }
inline float fma_(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline float min_(float x, float y) { return __builtin_fminf(x, y); }
inline float max_(float x, float y) { return __builtin_fmaxf(x, y); }

// Matrix cores, by the register layouts that the vendors document. Each is a meeting of the whole warp: c += a b, halves in
// pairs (the lower half of a word first), products and sums of a value in double and rounded once.
//
//     mma_16816    NVIDIA from sm_80: mma.sync.m16n8k16.row.col.f32.f16.f16.f32        32 lanes
//     mma_1688     NVIDIA sm_75:      mma.sync.m16n8k8.row.col.f32.f16.f16.f32         32 lanes
//     wmma_gfx11   AMD RDNA 3:        v_wmma_f32_16x16x16_f16 (every half held twice)   32 lanes
//     wmma_gfx12   AMD RDNA 4:        v_wmma_f32_16x16x16_f16                           32 lanes
//     mfma_16      AMD CDNA:          v_mfma_f32_16x16x16_f16                           64 lanes
//     ldmatrix     NVIDIA:            ldmatrix.sync.m8n8.x4.shared.b16, ldmatrix_t with .trans; `row`: this lane's row of 8
inline void mma_16816(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2], SIMT_HERE) {
    simt::Fragments all = {a, b, c};
    simt::meet(simt::MMA_16816, &all, place);
}
inline void mma_1688(float (&c)[4], const u32 (&a)[2], const u32 (&b)[1], SIMT_HERE) {
    simt::Fragments all = {a, b, c};
    simt::meet(simt::MMA_1688, &all, place);
}
inline void wmma_gfx11(float (&c)[8], const u32 (&a)[8], const u32 (&b)[8], SIMT_HERE) {
    simt::Fragments all = {a, b, c};
    simt::meet(simt::WMMA_GFX11, &all, place);
}
inline void wmma_gfx12(float (&c)[8], const u32 (&a)[4], const u32 (&b)[4], SIMT_HERE) {
    simt::Fragments all = {a, b, c};
    simt::meet(simt::WMMA_GFX12, &all, place);
}
inline void mfma_16(float (&c)[4], const u32 (&a)[2], const u32 (&b)[2], SIMT_HERE) {
    simt::Fragments all = {a, b, c};
    simt::meet(simt::MFMA_16, &all, place);
}
inline void simt_rows(u32 (&r)[4], const half_t *row, const simt::Meeting &meeting, simt::Place place) {
    simt_aligned(row, place);
    const Words4 mine = *reinterpret_cast<const Words4 *>(row);
    u32 got[4];
    simt::Fragments all = {&mine.x, nullptr, reinterpret_cast<float *>(got)};
    simt::meet(meeting, &all, place);
    __builtin_memcpy(r, got, sizeof got);
}
inline void ldmatrix(u32 (&r)[4], const half_t *row, SIMT_HERE) { simt_rows(r, row, simt::LDMATRIX, place); }
inline void ldmatrix_t(u32 (&r)[4], const half_t *row, SIMT_HERE) { simt_rows(r, row, simt::LDMATRIX_T, place); }
