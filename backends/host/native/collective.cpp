// Exchanges between ranks over shared memory (backends/acts.py draws it): sums and gathers through a mailbox for each rank,
// messages through a channel for each route.
//
// Every rank counts the pieces that it has posted. Piece number n of all ranks belongs together; it lies in half n mod 2 of
// its owner's mailbox. A rank posts its own, then takes those of all ranks in the order of the ranks, so a sum is
// ((p0 + p1) + p2) + ... on each of them, whoever came first. Nobody has to say that a piece was read: a rank posts n + 2 only
// after it had all pieces n + 1, and whoever posted n + 1 is done with reading n. One round trip between cores for a sum.
//
// Waiting: a look, then spinning for a bounded time, then sleeping in the kernel until the deadline of the call (a futex; where
// there is none, naps). Whoever publishes a count looks for sleepers after it, a sleeper counts itself before it looks at the
// count: one of the two sees the other. A sleeper that was killed stays counted, which costs its peers a system call each.
#include "hs_collective.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <ctime>

#if defined(__linux__)
#include <climits>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define HS_API extern "C" __attribute__((visibility("default")))

namespace hs {
namespace acts {
namespace {

constexpr int64_t LINE = 64;
constexpr int64_t SECOND = 1000000000;
constexpr int LOOKS = 32;  // between two readings of the clock
#if !defined(__linux__)
constexpr int64_t NAP = 50000;
#endif

struct Line {
    std::atomic<uint32_t> count;
    std::atomic<uint32_t> sleepers;
};

static_assert(sizeof(hs_stamp) == LINE, "a stamp is one line");
static_assert(sizeof(std::atomic<uint32_t>) == 4 && ATOMIC_INT_LOCK_FREE == 2, "a count is a word that the kernel can watch");

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * SECOND + time.tv_nsec;
}

bool reached(uint32_t count, uint32_t target) { return static_cast<int32_t>(count - target) >= 0; }

void publish(Line &line, uint32_t count) {
    line.count.store(count);
    if (line.sleepers.load() == 0) return;
#if defined(__linux__)
    syscall(SYS_futex, &line.count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

void sleep_while(Line &line, uint32_t seen, int64_t longest) {
#if defined(__linux__)
    const timespec time{static_cast<time_t>(longest / SECOND), static_cast<long>(longest % SECOND)};
    syscall(SYS_futex, &line.count, FUTEX_WAIT, seen, &time, nullptr, 0);
#else
    (void)line;
    (void)seen;
    const timespec time{0, static_cast<long>(std::min(longest, NAP))};
    nanosleep(&time, nullptr);
#endif
}

bool spin(const Line &line, uint32_t target, int64_t until) {
    do {
        for (int i = 0; i < LOOKS; i++) {
            if (reached(line.count.load(std::memory_order_acquire), target)) return true;
            relax();
        }
    } while (now() < until);
    return false;
}

bool sleep(Line &line, uint32_t target, int64_t deadline) {
    line.sleepers.fetch_add(1);
    bool there = false;
    for (;;) {
        // The clock before the count: a rank that was itself stopped past its deadline still sees who has come.
        const int64_t left = deadline - now();
        const uint32_t seen = line.count.load();
        there = reached(seen, target);
        if (there || left <= 0) break;
        sleep_while(line, seen, left);
    }
    line.sleepers.fetch_sub(1);
    return there;
}

bool await(Line &line, uint32_t target, hs_exchange &x, int64_t deadline) {
    if (reached(line.count.load(std::memory_order_acquire), target)) return true;
    const int64_t start = now();
    bool there = x.spin_ns > 0 && spin(line, target, std::min(deadline, start + x.spin_ns));
    const int64_t between = now();
    x.spun_ns += between - start;
    if (there) return true;
    there = sleep(line, target, deadline);
    x.slept_ns += now() - between;
    return there;
}

// A matrix [rows, width] with space between its rows. Elements are counted along the rows.
struct Matrix {
    float *data;
    int64_t stride;
    int64_t width;

    // Calls f(address, count) for the runs of elements [begin, end) that lie together.
    template <class F> void runs(int64_t begin, int64_t end, F f) const {
        while (begin < end) {
            const int64_t column = begin % width, count = std::min(end - begin, width - column);
            f(data + begin / width * stride + column, count);
            begin += count;
        }
    }
    void get(float *dst, int64_t begin, int64_t end) const {
        runs(begin, end, [&](const float *place, int64_t count) {
            std::memcpy(dst, place, static_cast<size_t>(count) * sizeof(float));
            dst += count;
        });
    }
};

// Matrices [rows, width] side by side, as one of all their widths.
class Beside {
  public:
    void add(float *data, int64_t stride, int64_t width) {
        if (width == 0) return;
        matrices_[count_++] = {data, stride, width};
        width_ += width;
    }
    int64_t width() const { return width_; }

    void put(const float *src, int64_t begin, int64_t end) const {
        runs(begin, end, [&](float *place, int64_t count) {
            std::memcpy(place, src, static_cast<size_t>(count) * sizeof(float));
            src += count;
        });
    }
    void get(float *dst, int64_t begin, int64_t end) const {
        runs(begin, end, [&](const float *place, int64_t count) {
            std::memcpy(dst, place, static_cast<size_t>(count) * sizeof(float));
            dst += count;
        });
    }

  private:
    template <class F> void runs(int64_t begin, int64_t end, F f) const {
        while (begin < end) {
            const int64_t row = begin / width_;
            int64_t column = begin % width_;
            int i = 0;
            while (column >= matrices_[i].width) column -= matrices_[i++].width;
            const int64_t count = std::min(end - begin, matrices_[i].width - column);
            f(matrices_[i].data + row * matrices_[i].stride + column, count);
            begin += count;
        }
    }

    Matrix matrices_[HS_ACT_PARTS_MOST] = {};
    int count_ = 0;
    int64_t width_ = 0;
};

bool parts_are_sound(const hs_act_part *parts, int32_t count) {
    if (count < 0 || count > HS_ACT_PARTS_MOST) return false;
    int64_t all = 0;
    for (int i = 0; i < count; i++) {
        if (parts[i].width < 0) return false;
        all += parts[i].width;
    }
    return all <= INT32_MAX;
}

// What a rank gives; only read.
Beside given(const hs_act_part *parts, int32_t count) {
    Beside all;
    for (int i = 0; i < count; i++) all.add(const_cast<float *>(parts[i].src), parts[i].src_stride, parts[i].width);
    return all;
}

struct Slot {
    hs_stamp *stamp;
    float *data;
};

Slot slot_at(uint8_t *at) { return {reinterpret_cast<hs_stamp *>(at), reinterpret_cast<float *>(at + LINE)}; }

bool same_stamp(const hs_stamp &wanted, const Slot &slot, int32_t peer, hs_exchange &x) {
    if (std::memcmp(&wanted, slot.stamp, sizeof wanted) == 0) return true;
    x.peer = peer;
    x.wanted = wanted;
    x.found = *slot.stamp;
    return false;
}

// One sum or gather, piece by piece.
class Round {
  public:
    Round(hs_mail &mail, hs_exchange &x, int32_t kind) : mail_(mail), x_(x), deadline_(now() + x.timeout_ns) {
        x.stamp.kind = kind;
        x.peer = -1;
        x.calls++;
    }

    int64_t piece_floats() const { return mail_.piece_bytes / static_cast<int64_t>(sizeof(float)); }
    // One at least: the stamps of an exchange without elements are compared as well.
    int64_t pieces(int64_t floats) const { return std::max<int64_t>(1, (floats + piece_floats() - 1) / piece_floats()); }

    Slot slot(int rank) const {
        return slot_at(mailbox(rank) + LINE + ((mail_.posted + 1) & 1) * (LINE + mail_.piece_bytes));
    }

    // Elements [begin, end) of this rank's matrix are piece number `piece`.
    template <class M> void post(const M &own, int64_t begin, int64_t end, int64_t piece) {
        x_.stamp.piece = static_cast<int32_t>(piece);
        const Slot mine = slot(mail_.rank);
        own.get(mine.data, begin, end);
        *mine.stamp = x_.stamp;
        x_.bytes += (end - begin) * static_cast<int64_t>(sizeof(float));
        publish(line(mail_.rank), mail_.posted + 1);
    }

    // Waits for a rank's piece, whose matrix is to be `width` wide.
    int32_t take(int rank, int32_t width) {
        if (rank == mail_.rank) return HS_OK;
        hs_stamp wanted = x_.stamp;
        wanted.width = width;
        if (!await(line(rank), mail_.posted + 1, x_, deadline_)) {
            x_.peer = rank;
            x_.wanted = wanted;
            return HS_E_LATE;
        }
        if (!same_stamp(wanted, slot(rank), rank, x_)) return HS_E_STAMP;
        return HS_OK;
    }

    void next() { mail_.posted++; }

  private:
    uint8_t *mailbox(int rank) const { return mail_.memory + rank * (LINE + 2 * (LINE + mail_.piece_bytes)); }
    Line &line(int rank) const { return *reinterpret_cast<Line *>(mailbox(rank)); }

    hs_mail &mail_;
    hs_exchange &x_;
    const int64_t deadline_;
};

bool sound(const hs_exchange &x, int64_t stride) {
    return x.stamp.rows >= 0 && x.stamp.width >= 0 && stride >= x.stamp.width && x.timeout_ns >= 0 && x.spin_ns >= 0;
}

// Takes all ranks' pieces and writes their sum over elements [begin, end).
int32_t add_pieces(Round &round, const hs_mail &mail, const Matrix &into, int64_t begin, int64_t end) {
    for (int rank = 0; rank < mail.ranks; rank++) {
        const int32_t code = round.take(rank, static_cast<int32_t>(into.width));
        if (code != HS_OK) return code;
        if (rank == 0) continue;
        const float *first = round.slot(0).data, *part = round.slot(rank).data;
        into.runs(begin, end, [&](float *dst, int64_t count) {
            const float *left = rank == 1 ? first : dst;
            for (int64_t i = 0; i < count; i++) dst[i] = left[i] + part[i];
            first += count;
            part += count;
        });
    }
    return HS_OK;
}

Line &sent_line(const hs_channel &channel) { return *reinterpret_cast<Line *>(channel.memory); }
Line &taken_line(const hs_channel &channel) { return *reinterpret_cast<Line *>(channel.memory + LINE); }

Slot message(const hs_channel &channel) {
    const int64_t place = channel.count % static_cast<uint32_t>(channel.depth);
    return slot_at(channel.memory + 2 * LINE + place * (LINE + channel.message_bytes));
}

int64_t message_floats(const hs_exchange &x) { return int64_t{x.stamp.rows} * x.stamp.width; }

bool message_fits(const hs_channel &channel, hs_exchange &x, const Beside &rows) {
    x.stamp.kind = HS_ACT_MESSAGE;
    x.stamp.piece = 0;
    x.stamp.width = static_cast<int32_t>(rows.width());
    return sound(x, x.stamp.width) && message_floats(x) <= channel.message_bytes / static_cast<int64_t>(sizeof(float));
}

// Own heads of one row from the partial attentions of all ranks: `partial(rank)` is a rank's row.
template <class F> void merge_row(const hs_merge &m, int ranks, int64_t row, F partial) {
    for (int head = 0; head < m.own; head++) {
        const int64_t whole = m.first + head, lse = int64_t{m.heads} * m.head_dim + whole;
        float *out = m.out + row * m.out_stride + int64_t{head} * m.head_dim;
        float most = m.sinks ? m.sinks[head] : -INFINITY;
        for (int rank = 0; rank < ranks; rank++) most = std::max(most, partial(rank)[lse]);
        std::fill(out, out + m.head_dim, 0.0f);
        if (most == -INFINITY) continue;  // no row anywhere
        float all = m.sinks ? std::exp(m.sinks[head] - most) : 0.0f;
        for (int rank = 0; rank < ranks; rank++) all += std::exp(partial(rank)[lse] - most);
        for (int rank = 0; rank < ranks; rank++) {
            const float share = std::exp(partial(rank)[lse] - most) / all;
            if (share == 0.0f) continue;
            const float *part = partial(rank) + whole * m.head_dim;
            for (int d = 0; d < m.head_dim; d++) out[d] += share * part[d];
        }
        if (!m.gate) continue;
        const float *gate = m.gate + row * m.gate_stride + int64_t{head} * 2 * m.head_dim + m.head_dim;
        for (int d = 0; d < m.head_dim; d++) out[d] /= 1.0f + std::exp(-gate[d]);
    }
}

bool merge_is_sound(const hs_merge &m) {
    return m.heads > 0 && m.head_dim > 0 && m.first >= 0 && m.own >= 0 && m.first <= m.heads - m.own &&
           int64_t{m.heads} * (m.head_dim + 1) <= INT32_MAX;
}

}  // namespace

HS_API int32_t hs_sum(hs_mail *mail, hs_exchange *exchange, float *buffer, int64_t stride) {
    if (!sound(*exchange, stride)) return HS_E_SHAPE;
    if (mail->ranks == 1) return HS_OK;
    const Matrix matrix{buffer, stride, exchange->stamp.width};
    const int64_t floats = message_floats(*exchange);
    Round round(*mail, *exchange, HS_ACT_SUM);
    for (int64_t piece = 0; piece < round.pieces(floats); piece++) {
        const int64_t begin = piece * round.piece_floats(), end = std::min(floats, begin + round.piece_floats());
        round.post(matrix, begin, end, piece);
        const int32_t code = add_pieces(round, *mail, matrix, begin, end);
        if (code != HS_OK) return code;
        round.next();
    }
    return HS_OK;
}

HS_API int32_t hs_gather(hs_mail *mail, hs_exchange *exchange, const hs_act_part *parts, int32_t part_count, int32_t target) {
    if (!parts_are_sound(parts, part_count) || target >= mail->ranks) return HS_E_SHAPE;
    const int64_t rows = exchange->stamp.rows;
    int64_t widest = 0;
    for (int rank = 0; rank < mail->ranks; rank++) {
        int64_t all = 0;
        for (int i = 0; i < part_count; i++) {
            if (parts[i].widths[rank] < 0) return HS_E_SHAPE;
            all += parts[i].widths[rank];
        }
        if (all > INT32_MAX) return HS_E_SHAPE;
        widest = std::max(widest, all);
    }
    const bool wanted = target < 0 || target == mail->rank;
    for (int i = 0; i < part_count; i++) {
        int64_t total = 0;
        for (int rank = 0; rank < mail->ranks; rank++) total += parts[i].widths[rank];
        if (parts[i].width != parts[i].widths[mail->rank] || parts[i].src_stride < parts[i].width || (wanted && parts[i].out_stride < total))
            return HS_E_SHAPE;
    }
    // Where what rank `rank` gives goes to.
    const auto taken = [&](int rank) {
        Beside all;
        for (int i = 0; i < part_count; i++) {
            int64_t before = 0;
            for (int r = 0; r < rank; r++) before += parts[i].widths[r];
            all.add(parts[i].out + before, parts[i].out_stride, parts[i].widths[rank]);
        }
        return all;
    };
    const Beside own = given(parts, part_count);
    exchange->stamp.width = static_cast<int32_t>(own.width());
    if (!sound(*exchange, exchange->stamp.width)) return HS_E_SHAPE;
    if (mail->ranks == 1) {
        for (int i = 0; i < part_count; i++)
            for (int64_t row = 0; row < rows; row++)
                std::memmove(parts[i].out + row * parts[i].out_stride, parts[i].src + row * parts[i].src_stride,
                             static_cast<size_t>(parts[i].width) * sizeof(float));
        return HS_OK;
    }
    Round round(*mail, *exchange, HS_ACT_GATHER);
    for (int64_t piece = 0; piece < round.pieces(rows * widest); piece++) {
        const int64_t first = piece * round.piece_floats(), last = first + round.piece_floats();
        round.post(own, std::min(first, rows * own.width()), std::min(last, rows * own.width()), piece);
        for (int rank = 0; rank < mail->ranks; rank++) {
            const Beside place = taken(rank);
            const int32_t code = round.take(rank, static_cast<int32_t>(place.width()));
            if (code != HS_OK) return code;
            if (wanted) place.put(round.slot(rank).data, std::min(first, rows * place.width()), std::min(last, rows * place.width()));
        }
        round.next();
    }
    return HS_OK;
}

HS_API int32_t hs_merge_heads(hs_mail *mail, hs_exchange *exchange, const hs_merge *merge) {
    if (!merge_is_sound(*merge)) return HS_E_SHAPE;
    const hs_merge &m = *merge;
    const int64_t width = int64_t{m.heads} * (m.head_dim + 1), rows = exchange->stamp.rows;
    exchange->stamp.width = static_cast<int32_t>(width);
    if (!sound(*exchange, m.src_stride)) return HS_E_SHAPE;
    if (mail->ranks == 1) {
        for (int64_t row = 0; row < rows; row++) merge_row(m, 1, row, [&](int) { return m.src + row * m.src_stride; });
        return HS_OK;
    }
    Round round(*mail, *exchange, HS_ACT_MERGE);
    const int64_t at_once = round.piece_floats() / width;
    if (at_once < 1) return HS_E_SHAPE;
    const Matrix own{const_cast<float *>(m.src), m.src_stride, width};  // only read
    for (int64_t first = 0, piece = 0; piece == 0 || first < rows; first += at_once, piece++) {
        const int64_t last = std::min(rows, first + at_once);
        round.post(own, first * width, last * width, piece);
        for (int rank = 0; rank < mail->ranks; rank++) {
            const int32_t code = round.take(rank, static_cast<int32_t>(width));
            if (code != HS_OK) return code;
        }
        for (int64_t row = first; row < last; row++)
            merge_row(m, mail->ranks, row, [&](int rank) { return round.slot(rank).data + (row - first) * width; });
        round.next();
    }
    return HS_OK;
}

HS_API int32_t hs_credit(const hs_channel *channel) {
    const uint32_t taken = taken_line(*channel).count.load(std::memory_order_acquire);
    return channel->depth - static_cast<int32_t>(channel->count - taken);
}

HS_API int32_t hs_send(hs_channel *channel, hs_exchange *exchange, const hs_act_part *parts, int32_t part_count) {
    if (!parts_are_sound(parts, part_count)) return HS_E_SHAPE;
    const Beside rows = given(parts, part_count);
    if (!message_fits(*channel, *exchange, rows)) return HS_E_SHAPE;
    if (hs_credit(channel) < 1) return HS_E_CREDIT;
    const int64_t floats = message_floats(*exchange);
    const Slot slot = message(*channel);
    rows.get(slot.data, 0, floats);
    *slot.stamp = exchange->stamp;
    exchange->calls++;
    exchange->bytes += floats * static_cast<int64_t>(sizeof(float));
    publish(sent_line(*channel), ++channel->count);
    return HS_OK;
}

HS_API int32_t hs_receive(hs_channel *channel, hs_exchange *exchange, const hs_act_part *parts, int32_t part_count) {
    if (!parts_are_sound(parts, part_count)) return HS_E_SHAPE;
    Beside rows;
    for (int i = 0; i < part_count; i++) rows.add(parts[i].out, parts[i].out_stride, parts[i].width);
    if (!message_fits(*channel, *exchange, rows)) return HS_E_SHAPE;
    exchange->calls++;
    if (!await(sent_line(*channel), channel->count + 1, *exchange, now() + exchange->timeout_ns)) {
        exchange->peer = channel->peer;
        exchange->wanted = exchange->stamp;
        return HS_E_LATE;
    }
    const Slot slot = message(*channel);
    if (!same_stamp(exchange->stamp, slot, channel->peer, *exchange)) return HS_E_STAMP;
    const int64_t floats = message_floats(*exchange);
    rows.put(slot.data, 0, floats);
    exchange->bytes += floats * static_cast<int64_t>(sizeof(float));
    taken_line(*channel).count.store(++channel->count, std::memory_order_release);
    return HS_OK;
}

}  // namespace acts
}  // namespace hs
