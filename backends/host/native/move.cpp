// What a flip does with memory: pieces of it into one stream and back, and a digest that sees where a byte stands.
//
//     pieces   |--a--|   |------b------|  |-c-|        anywhere; a place of null is zeros
//     stream   |--a--|------b------|-c-|               chunk 0 | chunk 1 | ...
//
// A stream is cut into chunks, each done by one thread. Stores of a pack go around the caches (a copy of gigabytes would otherwise
// read every line that it overwrites: a third of the traffic), and what is stored is digested on its way, in registers: a packed
// stream with its digest costs what the copy alone costs, and the digest is of what was to be stored.
//
// A fill is for streams that stay where they are written and have to be right there. It stores through the cache and takes its digest
// from what it loads back from the stream, one block behind the copy: of what lies there, wherever the copy went wrong. That third of
// the traffic is what a second reading of all of it would cost, and the rest of that reading is saved.
//
// Only a digest of its own reads memory again; it takes four blocks at a time, since one stream of reads leaves half of the bandwidth
// unused.
//
// The digest. A block is 16 KiB of the stream, a stripe 64 bytes of it as 8 words w of 64 bits, the last one filled up with zeros.
// Stripe s adds to its block's 8 sums, with x = w ^ (KEYS[j] + s * STEP):
//
//     sum[j] += low(x) * high(x) + w           32 bits by 32 bits
//
// A block gives the sum over j of mix(sum[j] + (8 * block + j + 1) * GOLDEN), all blocks together mix(their sum ^ bytes * STEP). Two
// words or blocks that change places change it, and no thread or chunk does. backends/digest.py is the same in NumPy.
// It finds faults, not forgers.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "hs_host.h"
#include "move.h"
#include "team.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hs {
namespace {

constexpr int WORDS = 8;
constexpr size_t STRIPE = 8 * WORDS, BLOCK = HS_DIGEST_BLOCK;
constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15u, STEP = 0xd1342543de82ef95u;
alignas(64) constexpr uint64_t KEYS[WORDS] = {0x243f6a8885a308d3u, 0x13198a2e03707344u, 0xa4093822299f31d0u, 0x082efa98ec4e6c89u,
                                              0x452821e638d01377u, 0xbe5466cf34e90c6cu, 0xc0ac29b7c97c50ddu, 0x3f84d5b5b5470917u};

uint64_t mixed(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdu;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53u;
    return x ^ (x >> 33);
}

#if defined(__AVX2__)
using Lane = __m256i;
inline Lane lane_at(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
inline void keep(void *p, Lane x) { _mm256_storeu_si256(static_cast<__m256i *>(p), x); }
inline void send(void *p, Lane x) { _mm256_stream_si256(static_cast<__m256i *>(p), x); }
inline Lane all_of(uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
inline Lane plus(Lane a, Lane b) { return _mm256_add_epi64(a, b); }
inline Lane term(Lane w, Lane key) {
    const Lane x = _mm256_xor_si256(w, key);
    return _mm256_add_epi64(_mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)), w);
}
inline void drain() { _mm_sfence(); }
#elif defined(__SSE2__)
using Lane = __m128i;
inline Lane lane_at(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
inline void keep(void *p, Lane x) { _mm_storeu_si128(static_cast<__m128i *>(p), x); }
inline void send(void *p, Lane x) { _mm_stream_si128(static_cast<__m128i *>(p), x); }
inline Lane all_of(uint64_t x) { return _mm_set1_epi64x(static_cast<long long>(x)); }
inline Lane plus(Lane a, Lane b) { return _mm_add_epi64(a, b); }
inline Lane term(Lane w, Lane key) {
    const Lane x = _mm_xor_si128(w, key);
    return _mm_add_epi64(_mm_mul_epu32(x, _mm_srli_epi64(x, 32)), w);
}
inline void drain() { _mm_sfence(); }
#else
using Lane = uint64_t;
inline Lane lane_at(const void *p) {
    uint64_t x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void keep(void *p, Lane x) { std::memcpy(p, &x, sizeof x); }
inline void send(void *p, Lane x) { keep(p, x); }
inline Lane all_of(uint64_t x) { return x; }
inline Lane plus(Lane a, Lane b) { return a + b; }
inline Lane term(Lane w, Lane key) {
    const Lane x = w ^ key;
    return (x & 0xffffffffu) * (x >> 32) + w;
}
inline void drain() {}
#endif
constexpr size_t LANE = sizeof(Lane);
constexpr int LANES = static_cast<int>(STRIPE / LANE);
constexpr size_t AHEAD = 4096;   // bytes that a copy fetches ahead of what it loads

struct Keys {
    Lane at[LANES];
    Keys() {
        for (int i = 0; i < LANES; i++) at[i] = lane_at(reinterpret_cast<const uint8_t *>(KEYS) + LANE * static_cast<size_t>(i));
    }
    void step() {
        for (int i = 0; i < LANES; i++) at[i] = plus(at[i], all_of(STEP));
    }
};

struct Sums {
    Lane at[LANES];
    Sums() {
        for (int i = 0; i < LANES; i++) at[i] = all_of(0);
    }
    void add(int i, Lane word, const Keys &keys) { at[i] = plus(at[i], term(word, keys.at[i])); }
    void add(const uint8_t *stripe, const Keys &keys) {
        for (int i = 0; i < LANES; i++) add(i, lane_at(stripe + LANE * static_cast<size_t>(i)), keys);
    }
    uint64_t close(uint64_t block) const {
        uint64_t words[WORDS], sum = 0;
        for (int i = 0; i < LANES; i++) keep(reinterpret_cast<uint8_t *>(words) + LANE * static_cast<size_t>(i), at[i]);
        for (uint64_t j = 0; j < WORDS; j++) sum += mixed(words[j] + (WORDS * block + j + 1) * GOLDEN);
        return sum;
    }
};

// COUNT whole blocks side by side.
template <int COUNT> uint64_t whole_blocks(const uint8_t *at, uint64_t block) {
    Sums sums[COUNT];
    Keys keys;
    for (size_t done = 0; done < BLOCK; done += STRIPE) {
        for (size_t b = 0; b < COUNT; b++) sums[b].add(at + BLOCK * b + done, keys);
        keys.step();
    }
    uint64_t sum = 0;
    for (size_t b = 0; b < COUNT; b++) sum += sums[b].close(block + b);
    return sum;
}

// The last block of a stream.
uint64_t part_of_block(const uint8_t *at, size_t bytes, uint64_t block) {
    Sums sums;
    Keys keys;
    for (size_t done = 0; done < bytes; done += STRIPE) {
        uint8_t stripe[STRIPE] = {};
        std::memcpy(stripe, at + done, std::min(STRIPE, bytes - done));
        sums.add(stripe, keys);
        keys.step();
    }
    return sums.close(block);
}

// `first` is where `at` stands in the stream: a whole number of blocks.
uint64_t blocks_of(const uint8_t *at, size_t bytes, size_t first) {
    uint64_t sum = 0;
    size_t done = 0;
    for (; done + 4 * BLOCK <= bytes; done += 4 * BLOCK) sum += whole_blocks<4>(at + done, (first + done) / BLOCK);
    for (; done + BLOCK <= bytes; done += BLOCK) sum += whole_blocks<1>(at + done, (first + done) / BLOCK);
    return done < bytes ? sum + part_of_block(at + done, bytes - done, (first + done) / BLOCK) : sum;
}

bool aligned(const uint8_t *p) { return reinterpret_cast<uintptr_t>(p) % LANE == 0; }

// What a copy fetches while it is at `done` of `bytes` from `from`: what comes AHEAD bytes later, be it in the piece that follows.
inline void fetch(const uint8_t *from, size_t done, size_t bytes, const uint8_t *following) {
    const size_t at = done + AHEAD;
    const uintptr_t next = at < bytes ? reinterpret_cast<uintptr_t>(from) + at : reinterpret_cast<uintptr_t>(following) + (at - bytes);
    __builtin_prefetch(reinterpret_cast<const uint8_t *>(next), 0, 0);
}

enum class Store { AROUND, KEPT, BEHIND };

// Whole stripes, digested on their way; BEHIND: those one block before them instead, loaded from where they were stored.
template <Store HOW>
void copy_stripes(uint8_t *to, const uint8_t *from, size_t bytes, const uint8_t *following, Sums &into, Keys &at) {
    Sums sums = into;   // in registers
    Keys keys = at;
    for (size_t done = 0; done < bytes; done += STRIPE) {
        fetch(from, done, bytes, following);
        for (int i = 0; i < LANES; i++) {
            const size_t place = done + LANE * static_cast<size_t>(i);
            const Lane word = lane_at(from + place);
            HOW == Store::AROUND ? send(to + place, word) : keep(to + place, word);
            if (HOW != Store::BEHIND) sums.add(i, word, keys);
        }
        if (HOW == Store::BEHIND) sums.add(to + done - BLOCK, keys);
        keys.step();
    }
    into = sums;
    at = keys;
}

void copy_around(uint8_t *to, const uint8_t *from, size_t bytes) {
    const size_t head = (LANE - reinterpret_cast<uintptr_t>(to) % LANE) % LANE;
    if (bytes < head + STRIPE) {
        std::memcpy(to, from, bytes);
        return;
    }
    std::memcpy(to, from, head);
    size_t done = head;
    for (; done + STRIPE <= bytes; done += STRIPE) {
        __builtin_prefetch(from + done + AHEAD, 0, 0);
        Lane words[LANES];
        for (int i = 0; i < LANES; i++) words[i] = lane_at(from + done + LANE * static_cast<size_t>(i));
        for (int i = 0; i < LANES; i++) send(to + done + LANE * static_cast<size_t>(i), words[i]);
    }
    std::memcpy(to + done, from + done, bytes - done);
}

// Walks the pieces that stand in the stream from `at` on.
class Cursor {
  public:
    Cursor(const hs_pieces &pieces, size_t at) : pieces_(pieces), at_(at) {
        const int64_t *ends = pieces.ends;
        piece_ = std::upper_bound(ends, ends + pieces.count, static_cast<int64_t>(at)) - ends;
    }

    size_t left() {   // of the piece that stands here; it has some
        while (static_cast<size_t>(pieces_.ends[piece_]) == at_) piece_++;
        return static_cast<size_t>(pieces_.ends[piece_]) - at_;
    }

    uint8_t *place() const {   // null where it is zeros
        const size_t first = piece_ ? static_cast<size_t>(pieces_.ends[piece_ - 1]) : 0;
        return pieces_.places[piece_] ? pieces_.places[piece_] + (at_ - first) : nullptr;
    }

    const uint8_t *following() const {   // the place of the next piece, to fetch from: it may be anywhere
        return pieces_.places[piece_ + 1 < pieces_.count ? piece_ + 1 : piece_];
    }

    void on(size_t bytes) { at_ += bytes; }

  private:
    const hs_pieces &pieces_;
    size_t at_;
    int64_t piece_;
};

// `bytes` of a stream, at most one stripe, from the pieces to `to`.
void assemble(Cursor &cursor, uint8_t *to, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        const size_t some = std::min(cursor.left(), bytes - done);
        if (const uint8_t *from = cursor.place()) std::memcpy(to + done, from, some);
        else std::memset(to + done, 0, some);
        cursor.on(some);
        done += some;
    }
}

// One block of the stream, at most, from the pieces to `to`. Returns what it adds to the digest as block number `block`; BEHIND: what
// the block before it, which is a whole one and `block`, does.
template <Store HOW> uint64_t pack_block(Cursor &cursor, uint8_t *to, size_t bytes, uint64_t block) {
    Sums sums;
    Keys keys;
    for (size_t done = 0; done < bytes;) {
        const size_t here = cursor.left(), left = std::min(here, bytes - done) / STRIPE * STRIPE;
        if (left && cursor.place()) {
            const uint8_t *following = here > left ? cursor.place() + left : cursor.following();
            copy_stripes<HOW>(to + done, cursor.place(), left, following, sums, keys);
            cursor.on(left);
            done += left;
            continue;
        }
        uint8_t stripe[STRIPE] = {};
        const size_t some = std::min(STRIPE, bytes - done);
        assemble(cursor, stripe, some);
        std::memcpy(to + done, stripe, some);
        sums.add(HOW == Store::BEHIND ? to + done - BLOCK : stripe, keys);
        keys.step();
        done += some;
    }
    return sums.close(block);
}

// What was stored is loaded from here on, not remembered.
inline void look_again() {
#if defined(__GNUC__)
    __asm__ __volatile__("" ::: "memory");
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

class Move final : public Job {
  public:
    Move(Way way, const hs_pieces &pieces, uint8_t *stream, size_t bytes)
        : way_(way), pieces_(pieces), stream_(stream), bytes_(bytes),
          chunk_(pieces.chunk ? static_cast<size_t>(pieces.chunk) : size_t{HS_MOVE_CHUNK}) {}

    int next_stage() override {
        const bool first = !started_;
        started_ = true;
        return first ? static_cast<int>((bytes_ + chunk_ - 1) / chunk_) : 0;
    }

    void run_chunk(int chunk) override {
        const size_t first = static_cast<size_t>(chunk) * chunk_, size = std::min(chunk_, bytes_ - first);
        if (way_ == Way::UNPACK)
            unpack(first, size);
        else
            sum_.fetch_add(digested(first, size), std::memory_order_relaxed);
        if (way_ != Way::DIGEST) drain();
    }

    uint64_t digest() const { return mixed(sum_.load(std::memory_order_relaxed) ^ static_cast<uint64_t>(bytes_) * STEP); }

  private:
    uint64_t digested(size_t first, size_t bytes) const {
        if (way_ == Way::FILL) return fill(first, bytes);
        if (way_ == Way::DIGEST) return blocks_of(stream_ + first, bytes, first);
        return aligned(stream_ + first) ? pack<Store::AROUND>(first, bytes) : pack<Store::KEPT>(first, bytes);
    }

    template <Store HOW> uint64_t pack(size_t first, size_t bytes) const {
        Cursor cursor(pieces_, first);
        uint64_t sum = 0;
        for (size_t done = 0; done < bytes; done += BLOCK)
            sum += pack_block<HOW>(cursor, stream_ + first + done, std::min(BLOCK, bytes - done), (first + done) / BLOCK);
        return sum;
    }

    uint64_t fill(size_t first, size_t bytes) const {
        Cursor cursor(pieces_, first);
        uint8_t *at = stream_ + first;
        size_t read = 0;   // back, so far
        uint64_t sum = 0;
        for (size_t done = 0; done < bytes; done += BLOCK) {
            const size_t size = std::min(BLOCK, bytes - done);
            look_again();
            if (done && size == BLOCK) {
                sum += pack_block<Store::BEHIND>(cursor, at + done, size, (first + read) / BLOCK);
                read += BLOCK;
            } else {
                pack_block<Store::KEPT>(cursor, at + done, size, 0);
            }
        }
        look_again();
        return sum + blocks_of(at + read, bytes - read, first + read);
    }

    void unpack(size_t first, size_t bytes) const {
        Cursor cursor(pieces_, first);
        for (size_t done = 0; done < bytes;) {
            const size_t some = std::min(cursor.left(), bytes - done);
            copy_around(cursor.place(), stream_ + first + done, some);
            cursor.on(some);
            done += some;
        }
    }

    const Way way_;
    const hs_pieces &pieces_;
    uint8_t *stream_;
    const size_t bytes_, chunk_;
    bool started_ = false;
    std::atomic<uint64_t> sum_{0};
};

}  // namespace

int32_t move_pieces(Team &team, Way way, const hs_pieces &pieces, uint8_t *stream, uint64_t *digest) {
    const bool unpack = way == Way::UNPACK;
    int64_t before = 0;
    for (int64_t i = 0; i < pieces.count; before = pieces.ends[i++])
        if (pieces.ends[i] < before || (unpack && pieces.ends[i] > before && !pieces.places[i])) return HS_E_SHAPE;
    if (pieces.chunk < 0 || pieces.chunk % static_cast<int64_t>(BLOCK)) return HS_E_SHAPE;
    Move job(way, pieces, stream, static_cast<size_t>(before));
    team.run(job);
    if (!unpack) *digest = job.digest();
    return HS_OK;
}

uint64_t digest_of(Team &team, const uint8_t *at, size_t bytes) {
    const hs_pieces none{};
    Move job(Way::DIGEST, none, const_cast<uint8_t *>(at), bytes);
    team.run(job);
    return job.digest();
}

}  // namespace hs
