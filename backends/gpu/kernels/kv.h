// Element types of the KV pool on a card: the bytes are the CPU's (backends/cpu/native/kv.h), so that a flip carries them as they
// are. What is here: where 16 bytes of a page lie, what they are as floats, and the codes of floats that are stored.
//
// One layer's pool, kv head by kv head, page by page (16 slots):
//
//     K  [dims][16 slots]              V  [16 slots][dims, padded to 16]
//     q8_0 (32 dims of a slot share a scale, a half):
//     K  [dims / 32] x (scales [16 slots] | [32 dims][16 slots])
//     V  [dims / 32][16 slots] scales | [16 slots][dims]
//
// A *vector* is 16 bytes, what a lane loads at once: SIZE elements. Of K it is one dim of SIZE slots, of V one slot's SIZE dims.
// A page of K or V is read front to back by lanes side by side, so every sector that is moved is used whole. The whole page of one
// head is a run of memory (4 KiB of f16 at 128 dims).
#pragma once

#include "device.h"

constexpr int KV_BLOCK = 32;   // dims that share a scale in q8_0

struct KvF32 { typedef float Code; static constexpr int BYTES = 4, SIZE = 4; };
struct KvF16 { typedef u16 Code; static constexpr int BYTES = 2, SIZE = 8; };
struct KvBF16 { typedef u16 Code; static constexpr int BYTES = 2, SIZE = 8; };
struct KvF8 { typedef u8 Code; static constexpr int BYTES = 1, SIZE = 16; };
struct KvQ8 { typedef i8 Code; static constexpr int BYTES = 1, SIZE = 16, SCALES = 2 * PAGE, K_BLOCK = SCALES + KV_BLOCK * PAGE; };

// ------------------------------------------------------------------------------------------------------ where things lie

// Bytes that one kv head has of a page of K, and of V.
template <class Kv> DEVICE constexpr int k_page_bytes(Kv, int dims) { return dims * PAGE * Kv::BYTES; }
template <class Kv> DEVICE constexpr int v_page_bytes(Kv, int dims) { return (dims + 15) / 16 * 16 * PAGE * Kv::BYTES; }
DEVICE constexpr int k_page_bytes(KvQ8, int dims) { return dims / KV_BLOCK * KvQ8::K_BLOCK; }
DEVICE constexpr int v_page_bytes(KvQ8, int dims) { return dims / KV_BLOCK * KvQ8::K_BLOCK; }

// Byte of an element in that part of a page.
template <class Kv> DEVICE int k_at(Kv, int, int dim, int slot) { return (dim * PAGE + slot) * Kv::BYTES; }
template <class Kv> DEVICE int v_at(Kv, int dims, int dim, int slot) { return (slot * ((dims + 15) / 16 * 16) + dim) * Kv::BYTES; }
DEVICE int k_at(KvQ8, int, int dim, int slot) { return dim / KV_BLOCK * KvQ8::K_BLOCK + KvQ8::SCALES + dim % KV_BLOCK * PAGE + slot; }
DEVICE int v_at(KvQ8, int dims, int dim, int slot) { return dims / KV_BLOCK * KvQ8::SCALES + slot * dims + dim; }
DEVICE int k_scale_at(int dim, int slot) { return dim / KV_BLOCK * KvQ8::K_BLOCK + 2 * slot; }
DEVICE int v_scale_at(int dim, int slot) { return dim / KV_BLOCK * KvQ8::SCALES + 2 * slot; }

// A page's part of one kv head. A head's run of the pool has `pool_pages` pages.
DEVICE u8 *head_page(u8 *pool, int head, int page, int pool_pages, int bytes) { return pool + ((i64)head * pool_pages + page) * bytes; }
DEVICE const u8 *head_page(const u8 *pool, int head, int page, int pool_pages, int bytes) {
    return pool + ((i64)head * pool_pages + page) * bytes;
}

// ------------------------------------------------------------------------------------------------------ codes and floats

DEVICE u32 word_at(const Words4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// The elements of a vector as floats; of q8_0 without their scales.
DEVICE void open_vector(KvF32, const Words4 &v, float (&x)[4]) {
    UNROLL for (int i = 0; i < 4; i++) x[i] = bits_float(word_at(v, i));
}

DEVICE void open_vector(KvF16, const Words4 &v, float (&x)[8]) {
    UNROLL for (int i = 0; i < 8; i++) x[i] = half_to_float((half_t)(word_at(v, i / 2) >> 16 * (i % 2)));
}

DEVICE void open_vector(KvBF16, const Words4 &v, float (&x)[8]) {
    UNROLL for (int i = 0; i < 8; i++) x[i] = bits_float(i % 2 ? word_at(v, i / 2) & 0xffff0000u : word_at(v, i / 2) << 16);
}

// F8: sign, 4 bits of exponent (bias 7), 3 of mantissa. Shifted into a half it is 2^8 too small, exactly, and stays so: whoever
// uses it multiplies by F8_FACTOR at the end.
constexpr float F8_FACTOR = 256.0f;
DEVICE void open_vector(KvF8, const Words4 &v, float (&x)[16]) {
    UNROLL for (int i = 0; i < 8; i++) {
        const u32 two = word_at(v, i / 2) >> 16 * (i % 2), spread = (two & 0xffu) | (two & 0xff00u) << 8;
        const u32 halves = (spread & 0x00800080u) << 8 | (spread & 0x007f007fu) << 7;
        x[2 * i] = half_to_float((half_t)halves);
        x[2 * i + 1] = half_to_float((half_t)(halves >> 16));
    }
}

DEVICE void open_vector(KvQ8, const Words4 &v, float (&x)[16]) {
    UNROLL for (int i = 0; i < 16; i++) x[i] = (float)(i8)(word_at(v, i / 4) >> 8 * (i % 4));
}

// What `open_vector` gives is that much too small.
template <class Kv> DEVICE constexpr float factor_of(Kv) { return 1.0f; }
DEVICE constexpr float factor_of(KvF8) { return F8_FACTOR; }

DEVICE float code_of(KvF32, float x) { return x; }
DEVICE u16 code_of(KvF16, float x) { return float_to_half(x); }

// Round to nearest even; a NaN keeps its sign and stays a NaN.
DEVICE u16 code_of(KvBF16, float x) {
    const u32 bits = float_bits(x);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return (u16)(nan ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Round to nearest even. What is larger than 448 becomes 448; a NaN becomes the code after it, which reads as 480.
DEVICE u8 code_of(KvF8, float x) {
    const u32 bits = float_bits(x), sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return (u8)(sign | 0x7fu);
    if (size >= 0x43e00000u) return (u8)(sign | 0x7eu);
    // Below 2^-6 steps are 2^-9, the unit in the last place at 2^14: the adder rounds.
    if (size < 0x3c800000u) return (u8)(sign | (float_bits(bits_float(size) + 16384.0f) - 0x46800000u));
    return (u8)(sign | ((size + 0x7ffffu + (size >> 20 & 1u) - 0x3c000000u) >> 20));
}

// ----------------------------------------------------------------------------------------------------- vectors of a page

// A vector of K, and of V, with the scales that it takes to read it.
template <class Kv> struct Keys { Words4 raw; };
template <class Kv> struct Values { Words4 raw; };
template <> struct Keys<KvQ8> { Words4 raw, low, high; };   // scales of slots 0-7 and 8-15
template <> struct Values<KvQ8> { Words4 raw; u32 scale; };

template <class Kv> DEVICE void fetch(Keys<Kv> &k, const u8 *page, int dims, int dim, int slot) {
    k.raw = load128(page + k_at(Kv(), dims, dim, slot));
}
template <class Kv> DEVICE void fetch(Values<Kv> &v, const u8 *page, int dims, int dim, int slot) {
    v.raw = load128(page + v_at(Kv(), dims, dim, slot));
}
DEVICE void fetch(Keys<KvQ8> &k, const u8 *page, int dims, int dim, int) {
    k.raw = load128(page + k_at(KvQ8(), dims, dim, 0));
    k.low = load128(page + k_scale_at(dim, 0));
    k.high = load128(page + k_scale_at(dim, 8));
}
DEVICE void fetch(Values<KvQ8> &v, const u8 *page, int dims, int dim, int slot) {
    v.raw = load128(page + v_at(KvQ8(), dims, dim, slot));
    v.scale = *(const half_t *)(page + v_scale_at(dim, slot));
}

// Zeros.
template <class Kv> DEVICE void clear(Keys<Kv> &k) { k.raw = {0, 0, 0, 0}; }
template <class Kv> DEVICE void clear(Values<Kv> &v) { v.raw = {0, 0, 0, 0}; }
DEVICE void clear(Keys<KvQ8> &k) { k.raw = k.low = k.high = {0, 0, 0, 0}; }
DEVICE void clear(Values<KvQ8> &v) {
    v.raw = {0, 0, 0, 0};
    v.scale = 0;
}

template <class Kv> DEVICE void open(const Keys<Kv> &k, float (&x)[Kv::SIZE]) { open_vector(Kv(), k.raw, x); }
template <class Kv> DEVICE void open(const Values<Kv> &v, float (&x)[Kv::SIZE]) { open_vector(Kv(), v.raw, x); }
DEVICE void open(const Keys<KvQ8> &k, float (&x)[16]) {
    float low[8], high[8];
    open_vector(KvQ8(), k.raw, x);
    open_vector(KvF16(), k.low, low);
    open_vector(KvF16(), k.high, high);
    UNROLL for (int i = 0; i < 8; i++) {
        x[i] *= low[i];
        x[8 + i] *= high[i];
    }
}
DEVICE void open(const Values<KvQ8> &v, float (&x)[16]) {
    const float scale = half_to_float((half_t)v.scale);
    open_vector(KvQ8(), v.raw, x);
    UNROLL for (int i = 0; i < 16; i++) x[i] *= scale;
}

// The types by the names that symbols have.
typedef KvF32 Kv_f32;
typedef KvF16 Kv_f16;
typedef KvBF16 Kv_bf16;
typedef KvQ8 Kv_q8_0;
typedef KvF8 Kv_f8;

// EACH_KV(X): X(type) for all of them; EACH_KV_HEAD(X): X(type, dims) for all head sizes that attention is built for. -DQUANT=f16 or
// -DQUANT=f16_d128 leaves one.
#define KV_TYPES(X) X(f32) X(f16) X(bf16) X(q8_0) X(f8)
#define KV_HEADS_16(X, type) X(type, 16) X(type, 80)
#define KV_HEADS_32(X, type) X(type, 32) X(type, 64) X(type, 96) X(type, 128) X(type, 192) X(type, 256) X(type, 512)
#define KV_HEADS(X, type) KV_HEADS_16(X, type) KV_HEADS_32(X, type)

#if !defined(QUANT)
#define EACH_KV(X) KV_TYPES(X)
#define EACH_KV_HEAD(X) KV_HEADS(X, f32) KV_HEADS(X, f16) KV_HEADS(X, bf16) KV_HEADS_32(X, q8_0) KV_HEADS(X, f8)
#else
#define ONE_KV(X, type) X(type)
#define EACH_KV(X) ONE_KV(X, QUANT)
#define ONE_KV_HEAD(X, name) PASTED_KV_HEAD(X, name)
#define PASTED_KV_HEAD(X, name) KV_HEAD_##name(X)
#define EACH_KV_HEAD(X) ONE_KV_HEAD(X, QUANT)
#endif
#define KV_HEAD_f32_d16(X) X(f32, 16)
#define KV_HEAD_f32_d32(X) X(f32, 32)
#define KV_HEAD_f32_d64(X) X(f32, 64)
#define KV_HEAD_f32_d80(X) X(f32, 80)
#define KV_HEAD_f32_d96(X) X(f32, 96)
#define KV_HEAD_f32_d128(X) X(f32, 128)
#define KV_HEAD_f32_d192(X) X(f32, 192)
#define KV_HEAD_f32_d256(X) X(f32, 256)
#define KV_HEAD_f32_d512(X) X(f32, 512)
#define KV_HEAD_f16_d16(X) X(f16, 16)
#define KV_HEAD_f16_d32(X) X(f16, 32)
#define KV_HEAD_f16_d64(X) X(f16, 64)
#define KV_HEAD_f16_d80(X) X(f16, 80)
#define KV_HEAD_f16_d96(X) X(f16, 96)
#define KV_HEAD_f16_d128(X) X(f16, 128)
#define KV_HEAD_f16_d192(X) X(f16, 192)
#define KV_HEAD_f16_d256(X) X(f16, 256)
#define KV_HEAD_f16_d512(X) X(f16, 512)
#define KV_HEAD_bf16_d16(X) X(bf16, 16)
#define KV_HEAD_bf16_d32(X) X(bf16, 32)
#define KV_HEAD_bf16_d64(X) X(bf16, 64)
#define KV_HEAD_bf16_d80(X) X(bf16, 80)
#define KV_HEAD_bf16_d96(X) X(bf16, 96)
#define KV_HEAD_bf16_d128(X) X(bf16, 128)
#define KV_HEAD_bf16_d192(X) X(bf16, 192)
#define KV_HEAD_bf16_d256(X) X(bf16, 256)
#define KV_HEAD_bf16_d512(X) X(bf16, 512)
#define KV_HEAD_q8_0_d32(X) X(q8_0, 32)
#define KV_HEAD_q8_0_d64(X) X(q8_0, 64)
#define KV_HEAD_q8_0_d96(X) X(q8_0, 96)
#define KV_HEAD_q8_0_d128(X) X(q8_0, 128)
#define KV_HEAD_q8_0_d192(X) X(q8_0, 192)
#define KV_HEAD_q8_0_d256(X) X(q8_0, 256)
#define KV_HEAD_q8_0_d512(X) X(q8_0, 512)
#define KV_HEAD_f8_d16(X) X(f8, 16)
#define KV_HEAD_f8_d32(X) X(f8, 32)
#define KV_HEAD_f8_d64(X) X(f8, 64)
#define KV_HEAD_f8_d80(X) X(f8, 80)
#define KV_HEAD_f8_d96(X) X(f8, 96)
#define KV_HEAD_f8_d128(X) X(f8, 128)
#define KV_HEAD_f8_d192(X) X(f8, 192)
#define KV_HEAD_f8_d256(X) X(f8, 256)
#define KV_HEAD_f8_d512(X) X(f8, 512)
