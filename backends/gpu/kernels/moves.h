// What a flip does with memory: pieces of the pools into one stream and back, and a digest that sees where a byte stands.
//
//     pieces   |--a--|   |------b------|  |-c-|        anywhere; a place of 0 is zeros
//     stream   |--a--|------b------|-c-|               block 0 | block 1 | ..
//
// A block of 256 threads has one block of the stream, 16 KiB, which is also a block of the digest: what is gathered is digested
// on its way, so a packed payload costs what the copy alone costs. Which piece a byte of the stream belongs to is told by `ends`
// (i64, where each piece ends in the stream): the block finds its first and last piece by bisection, then each thread its own
// between them, mostly none or two steps, on numbers in the first cache.
//
// A thread takes 16 bytes of the stream at a time, four of them 4 KiB apart. Where they lie in one piece and both sides are
// aligned, that is one load and one store of 16 bytes, a warp's 512 bytes in a row; aligned to four bytes (channels of a window)
// four of four; else byte by byte, which is right for any length and needs no second kernel for the edges. 46 registers,
// 512 bytes of block memory: 5 blocks (40 warps), each thread with 64 bytes in flight, 80 KB a multiprocessor.
//
// Roofline: memory (or the bus, where the stream is pinned memory of the host): each byte once in, once out, all useful; `ends`
// and `places` are 16 bytes a piece, of 4 KB at a page of a head of 128 halves.
//
// The digest, as backends/digest.py has it. A stripe is 64 bytes, 8 words w of 64 bits, the last one of the stream filled up with
// zeros; stripe s of its block adds to 8 sums, with x = w ^ (KEYS[j] + s STEP),
//
//     sum[j] += low(x) * high(x) + w
//
// and a block gives sum over j of mix(sum[j] + (8 block + j + 1) GOLDEN). All is modulo 2^64, so blocks may be added to a total
// in any order (one atomic each), and a long payload in several launches, each told which block of the whole its first one is.
// The total's last step, with the whole length, is the host's (`digest_of_total`).
#pragma once

constexpr int MOVE_BLOCK = 16384, MOVE_STRIPE = 64;
constexpr u64 DIGEST_GOLDEN = 0x9e3779b97f4a7c15u, DIGEST_STEP = 0xd1342543de82ef95u;

// Keys of the words that a thread has of each stripe, 2 (thread % 4) and the next: chosen, not looked up, so they stay in registers.
struct DigestKeys { u64 key[2]; };
DEVICE DigestKeys digest_keys(int quarter) {
    if (quarter == 0) return {{0x243f6a8885a308d3u, 0x13198a2e03707344u}};
    if (quarter == 1) return {{0xa4093822299f31d0u, 0x082efa98ec4e6c89u}};
    if (quarter == 2) return {{0x452821e638d01377u, 0xbe5466cf34e90c6cu}};
    return {{0xc0ac29b7c97c50ddu, 0x3f84d5b5b5470917u}};
}

DEVICE u64 digest_mix(u64 x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdu;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53u;
    return x ^ (x >> 33);
}

DEVICE u64 shuffle_xor_u64(u64 v, int mask) {
    return (u64)shuffle_xor((u32)(v >> 32), mask) << 32 | shuffle_xor((u32)v, mask);
}

// 16 bytes from any address, the first `count` of them; zeros for the rest.
DEVICE Words4 load_bytes(const u8 *p, int count) {
    if (count == 16 && ((u64)p & 15) == 0) return load128(p);
    u32 w[4] = {0, 0, 0, 0};
    if (count == 16 && ((u64)p & 3) == 0) {
        UNROLL for (int i = 0; i < 4; i++) w[i] = ((const u32 *)p)[i];
    } else {
        UNROLL for (int i = 0; i < 16; i++)
            if (i < count) w[i / 4] |= (u32)p[i] << 8 * (i % 4);
    }
    return {w[0], w[1], w[2], w[3]};
}

DEVICE void store_bytes(u8 *p, const Words4 &v, int count) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    if (count == 16 && ((u64)p & 15) == 0) {
        store128(p, v);
    } else if (count == 16 && ((u64)p & 3) == 0) {
        UNROLL for (int i = 0; i < 4; i++) ((u32 *)p)[i] = w[i];
    } else {
        UNROLL for (int i = 0; i < 16; i++)
            if (i < count) p[i] = (u8)(w[i / 4] >> 8 * (i % 4));
    }
}

struct Pieces {
    u8 *const *places;
    const i64 *ends;
    int count;
};

// The first piece from `low` on that ends behind byte `at` of the stream; at most `high`.
DEVICE int piece_at(const Pieces &pieces, i64 at, int low, int high) {
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (pieces.ends[middle] > at) high = middle;
        else low = middle + 1;
    }
    return low;
}

// The first `count` of 16 bytes of the stream, from byte `at` on, out of the pieces low .. high.
DEVICE Words4 gather_bytes(const Pieces &pieces, i64 at, int count, int low, int high) {
    int piece = piece_at(pieces, at, low, high);
    i64 first = piece ? pieces.ends[piece - 1] : 0, end = pieces.ends[piece];
    const u8 *place = pieces.places[piece];
    if (end - at >= count) return place ? load_bytes(place + (at - first), count) : Words4{0, 0, 0, 0};
    u32 w[4] = {0, 0, 0, 0};
    UNROLL for (int i = 0; i < 16; i++) {
        if (i >= count) continue;
        while (at + i >= end) first = end, end = pieces.ends[++piece], place = pieces.places[piece];
        if (place) w[i / 4] |= (u32)place[at + i - first] << 8 * (i % 4);
    }
    return {w[0], w[1], w[2], w[3]};
}

DEVICE void scatter_bytes(const Pieces &pieces, i64 at, int count, int low, int high, const Words4 &v) {
    int piece = piece_at(pieces, at, low, high);
    i64 first = piece ? pieces.ends[piece - 1] : 0, end = pieces.ends[piece];
    u8 *place = pieces.places[piece];
    if (end - at >= count) {
        store_bytes(place + (at - first), v, count);
        return;
    }
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    UNROLL for (int i = 0; i < 16; i++) {
        if (i >= count) continue;
        while (at + i >= end) first = end, end = pieces.ends[++piece], place = pieces.places[piece];
        place[at + i - first] = (u8)(w[i / 4] >> 8 * (i % 4));
    }
}

// Adds what block `block` of a payload gives to the digest's total. `words`: this thread's 16 bytes of stripes thread / 4 + 64 i,
// of `stripes` that there are. Every thread of the block calls it.
DEVICE void digest_block(const Words4 (&words)[4], int stripes, i64 block, u64 *total) {
    SHARED(u64, parts, 256 / WARP * 8);
    const DigestKeys keys = digest_keys(thread() % 4);
    u64 sum[2] = {0, 0};
    UNROLL for (int i = 0; i < 4; i++) {
        const int stripe = thread() / 4 + 64 * i;
        const u64 both[2] = {(u64)words[i].y << 32 | words[i].x, (u64)words[i].w << 32 | words[i].z};
        UNROLL for (int j = 0; j < 2; j++) {
            const u64 x = both[j] ^ (keys.key[j] + (u64)stripe * DIGEST_STEP);
            if (stripe < stripes) sum[j] += (x & 0xffffffffu) * (x >> 32) + both[j];
        }
    }
    UNROLL for (int j = 0; j < 2; j++) {
        UNROLL for (int mask = WARP / 2; mask >= 4; mask /= 2) sum[j] += shuffle_xor_u64(sum[j], mask);
        if (lane() < 4) parts[warp() * 8 + 2 * lane() + j] = sum[j];
    }
    block_barrier();
    if (warp() != 0) return;
    const int j = lane() % 8;
    u64 whole = 0;
    for (int i = 0; i < 256 / WARP; i++) whole += parts[i * 8 + j];
    whole = digest_mix(whole + ((u64)block * 8 + j + 1) * DIGEST_GOLDEN);
    UNROLL for (int mask = 4; mask > 0; mask /= 2) whole += shuffle_xor_u64(whole, mask);
    if (thread() == 0) atomic_add(total, whole);
}

// Of this thread's i-th 16 bytes in its block of the stream: where, and how many there are.
struct StreamPart { i64 at; int count; };
DEVICE StreamPart stream_part(i64 bytes, int i) {
    const i64 at = (i64)MOVE_BLOCK * block_x() + 16 * (thread() + 256 * i), left = bytes - at;
    return {at, left >= 16 ? 16 : left > 0 ? (int)left : 0};
}

DEVICE int stripes_of_block(i64 bytes) {
    const i64 left = bytes - (i64)MOVE_BLOCK * block_x();
    return left >= MOVE_BLOCK ? MOVE_BLOCK / MOVE_STRIPE : (int)((left + MOVE_STRIPE - 1) / MOVE_STRIPE);
}

// Block: 256 threads; grid ceil(bytes / 16384). `total` null: no digest. bytes > 0. `first_block`: of the payload, the number that
// the stream's first block has.
DEVICE void gather_block(u8 *stream, i64 bytes, const Pieces &pieces, u64 *total, i64 first_block) {
    const i64 first = (i64)MOVE_BLOCK * block_x(), end = first + MOVE_BLOCK < bytes ? first + MOVE_BLOCK : bytes;
    const int low = piece_at(pieces, first, 0, pieces.count - 1), high = piece_at(pieces, end - 1, low, pieces.count - 1);
    Words4 words[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const StreamPart part = stream_part(bytes, i);
        words[i] = part.count ? gather_bytes(pieces, part.at, part.count, low, high) : Words4{0, 0, 0, 0};
    }
    UNROLL for (int i = 0; i < 4; i++) {
        const StreamPart part = stream_part(bytes, i);
        if (part.count) store_bytes(stream + part.at, words[i], part.count);
    }
    if (total) digest_block(words, stripes_of_block(bytes), first_block + block_x(), total);
}

// The other way. Every piece has a place.
DEVICE void scatter_block(const u8 *stream, i64 bytes, const Pieces &pieces) {
    const i64 first = (i64)MOVE_BLOCK * block_x(), end = first + MOVE_BLOCK < bytes ? first + MOVE_BLOCK : bytes;
    const int low = piece_at(pieces, first, 0, pieces.count - 1), high = piece_at(pieces, end - 1, low, pieces.count - 1);
    Words4 words[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const StreamPart part = stream_part(bytes, i);
        words[i] = load_bytes(stream + part.at, part.count);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        const StreamPart part = stream_part(bytes, i);
        if (part.count) scatter_bytes(pieces, part.at, part.count, low, high, words[i]);
    }
}

DEVICE void digest_stream_block(const u8 *stream, i64 bytes, u64 *total) {
    Words4 words[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const StreamPart part = stream_part(bytes, i);
        words[i] = load_bytes(stream + part.at, part.count);
    }
    digest_block(words, stripes_of_block(bytes), block_x(), total);
}
