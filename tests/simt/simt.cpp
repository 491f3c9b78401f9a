// The runtime behind emulated.h: fibers, meetings, block memory, launches.
//
// The scheduler is a queue of threads that can run. A thread that waits gives way to the next of the queue, directly, by
// twelve instructions; who completes a meeting puts the others at the end of the queue. When the queue is empty and nobody
// can go on, nobody ever will: the block is described (who waits where, who has left) and the launch fails.
#if !(defined(__x86_64__) && defined(__linux__))
#define SIMT_UCONTEXT
#define _XOPEN_SOURCE 700   // before any header of the system
#define _DARWIN_C_SOURCE
#endif

#include "simt.h"

#include <sys/mman.h>

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16, half_t;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
struct alignas(16) Words4 { u32 x, y, z, w; };
#include "emulated.h"

#if defined(SIMT_ASAN)
extern "C" {
void __sanitizer_start_switch_fiber(void **save, const void *bottom, size_t size);
void __sanitizer_finish_switch_fiber(void *save, const void **bottom, size_t *size);
void __asan_unpoison_memory_region(const volatile void *at, size_t size);
}
#include <pthread.h>
#elif defined(SIMT_TSAN)
extern "C" {
void *__tsan_get_current_fiber();
void *__tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *token);
void __tsan_release(void *token);
}
#endif
#if defined(SIMT_UCONTEXT)
#include <ucontext.h>
#endif

namespace simt {

Self *self;
Block block;

namespace {

#if defined(SIMT_ASAN) || defined(SIMT_TSAN)
constexpr size_t STACK = 256 << 10, GAP = 0;
#else
constexpr size_t STACK = 128 << 10, GAP = 64;   // GAP: before and behind every array in block memory, looked at afterwards
#endif
[[maybe_unused]] constexpr size_t GUARD = 16 << 10;
[[maybe_unused]] constexpr int SLOTS = 512;
constexpr int MOST_THREADS = 1024;

struct Fiber {
    Self me;
    const Meeting *waits;   // null: runs or can run
    void *brought;
    Place place;
    bool left;
    char *stack;
    size_t stack_size;
#if defined(SIMT_UCONTEXT)
    ucontext_t context;
#else
    void *sp;
#endif
    void *fake;             // AddressSanitizer's
    void *tsan;
};

struct Array {
    const void *key;
    const char *name;
    size_t size;
    u8 *at;                 // behind the first gap
    Place place;
};

Fiber scheduler, fibers[MOST_THREADS], *current;
int ready[MOST_THREADS], first_ready, ready_count;
int left_of_block, waiting_of_block, waiting_of_warp[MOST_THREADS / 32];
[[maybe_unused]] int next_slot;
int block_meetings, warp_meetings[MOST_THREADS / 32];
bool backwards_;
std::vector<Array> arrays;
std::vector<u8 *> old_memory;      // of earlier blocks, until the launch ends
[[maybe_unused]] u8 *tokens;     // ThreadSanitizer's names of the beginning and of barriers: two of the block, two of each warp
const simt_entry *entry;
void **arguments;
std::mutex one_launch;
thread_local std::string error;
thread_local size_t memory_used;

std::vector<simt_entry> &entries() {
    static std::vector<simt_entry> all;
    return all;
}

#if !defined(SIMT_UCONTEXT)
extern "C" void simt_switch(void **save, void *load);
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, .-simt_switch
)");
#endif

// Gives the processor to another fiber; returns when somebody gives it back.
void go(Fiber *to, bool for_ever = false) {
    Fiber *from = current;
    current = to, self = &to->me;
    (void)for_ever;
#if defined(SIMT_ASAN)
    __sanitizer_start_switch_fiber(for_ever ? nullptr : &from->fake, to->stack, to->stack_size);
#elif defined(SIMT_TSAN)
    __tsan_switch_to_fiber(to->tsan, 1);
#endif
#if defined(SIMT_UCONTEXT)
    swapcontext(&from->context, &to->context);
#else
    simt_switch(&from->sp, to->sp);
#endif
#if defined(SIMT_ASAN)
    __sanitizer_finish_switch_fiber(from->fake, nullptr, nullptr);
#endif
}

void make_ready(int thread) { ready[(first_ready + ready_count++) % MOST_THREADS] = thread; }

const char *base(const char *path) {
    const char *slash = std::strrchr(path, '/');
    return slash ? slash + 1 : path;
}

std::string text(const char *format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char *format, ...) {
    char line[1024];
    va_list list;
    va_start(list, format);
    std::vsnprintf(line, sizeof line, format, list);
    va_end(list);
    return line;
}

std::string where() {
    return text("%s, block (%d, %d, %d) of (%d, %d, %d), warps of %d", entry->name, block.at[0], block.at[1], block.at[2],
                block.of[0], block.of[1], block.of[2], WARP);
}

bool same(const Fiber &a, const Fiber &b) {
    return a.waits == b.waits && a.left == b.left &&
           (!a.waits || (a.place.line == b.place.line && !std::strcmp(a.place.file, b.place.file)));
}

// Every thread of the block waits or has left, and nothing can go on: who is where, neighbours in one line.
std::string stuck() {
    bool divergence = false;
    std::string lines;
    for (int begin = 0, end; begin < block.threads; begin = end) {
        const Fiber &first = fibers[begin];
        for (end = begin; end < block.threads && same(first, fibers[end]); end++) {
            if (end % WARP == 0 && end > begin && begin % WARP) break;
            bool whole = end + WARP <= block.threads;
            for (int i = end; whole && i < end + WARP; i++) whole = same(first, fibers[i]);
            if (end % WARP == 0 && end > begin && !whole) break;
        }
        const bool warps = begin % WARP == 0 && (end % WARP == 0 || end == block.threads);
        divergence |= !warps || !same(first, fibers[0]);
        const int from = warps ? begin / WARP : begin % WARP, to = (end - 1) % WARP, last = warps ? (end - 1) / WARP : to;
        lines += warps ? "\n  " : text("\n  warp %d, ", begin / WARP);
        lines += text(from == last ? "%s %d: " : "%ss %d-%d: ", warps ? "warp" : "lane", from, last);
        lines += first.left ? "have left the kernel" : text("wait in %s at %s:%d", first.waits->kind, base(first.place.file),
                                                            first.place.line);
    }
    return (divergence && !left_of_block ? "divergence: not all are at the same place in " : "deadlock in ") + where() + lines;
}

void stop(std::string told) {
    error = std::move(told);
    go(&scheduler, true);
    std::abort();
}

void next() {
    if (!ready_count) stop(stuck());
    Fiber *to = &fibers[ready[first_ready]];
    first_ready = (first_ready + 1) % MOST_THREADS, ready_count--;
    go(to, current->left);
}

void run() {
#if defined(SIMT_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#elif defined(SIMT_TSAN)
    __tsan_acquire(tokens);
#endif
    entry->call(entry->function, arguments);
    current->left = true;
    left_of_block++;
#if defined(SIMT_TSAN)
    __tsan_release(&one_launch);
#endif
    if (left_of_block == block.threads) go(&scheduler, true);
    next();
    std::abort();
}

void prepare(Fiber *fiber, int thread) {
    fiber->me = {thread, thread % WARP, thread / WARP};
    fiber->waits = nullptr, fiber->left = false;
#if defined(SIMT_ASAN)
    __asan_unpoison_memory_region(fiber->stack, STACK);
#endif
#if defined(SIMT_UCONTEXT)
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack, fiber->context.uc_stack.ss_size = STACK;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, run, 0);
#else
    void **top = reinterpret_cast<void **>(fiber->stack + STACK) - 1;
    *top = nullptr;                     // nobody to return to; eight bytes off sixteen, as after a call
    *--top = reinterpret_cast<void *>(run);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber->sp = top;
#endif
}

#if defined(SIMT_TSAN)
// The sanitizer's threads are dear (a millisecond and a megabyte), so there are only so many, each with its stack, and blocks
// take them in turn. A race is seen between blocks that follow each other, and not where they are so far apart that they share
// threads.
void make_stacks(int threads) {
    static struct { char *stack; void *thread; } slots[2 * MOST_THREADS];
    const int count = 2 * threads > SLOTS ? 2 * threads : SLOTS;
    for (int i = 0; i < threads; i++, next_slot++) {
        auto &slot = slots[next_slot % count];
        if (!slot.stack) slot.stack = static_cast<char *>(std::malloc(STACK)), slot.thread = __tsan_create_fiber(0);
        fibers[i].stack = slot.stack, fibers[i].stack_size = STACK, fibers[i].tsan = slot.thread;
    }
}
#else
// Stacks for so many threads, each with a page below it that nobody may touch.
void make_stacks(int threads) {
    static int made;
    for (; made < threads; made++) {
        void *at = mmap(nullptr, GUARD + STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED || mprotect(at, GUARD, PROT_NONE)) std::perror("simt: stacks"), std::abort();
        fibers[made].stack = static_cast<char *>(at) + GUARD, fibers[made].stack_size = STACK;
    }
}
#endif

u8 *allocate(size_t size) {
    void *at = nullptr;
    if (posix_memalign(&at, 16, size + 2 * GAP ? size + 2 * GAP : 1)) std::abort();
    std::memset(at, 0xff, size + 2 * GAP);
    return static_cast<u8 *>(at) + GAP;
}

void look_at_gaps() {
    for (const Array &array : arrays)
        for (size_t i = 0; i < GAP; i++)
            if (array.at[-1 - i64(i)] != 0xff || array.at[array.size + i] != 0xff)
                error = text("out of bounds: a write %s the %zu bytes of %s (%s:%d) in ",
                             array.at[array.size + i] != 0xff ? "behind" : "before", array.size, array.name,
                             base(array.place.file), array.place.line) + where();
}

// Block memory as a block finds it.
void renew_memory(size_t shared) {
#if defined(SIMT_TSAN)   // the blocks' memories have nothing in common
    for (const Array &array : arrays) old_memory.push_back(array.at);
    arrays.clear();
    tokens = allocate(3 + 2 * MOST_THREADS / 32);
    old_memory.push_back(tokens);
#endif
    if (arrays.empty()) arrays.push_back({&block, "dynamic_shared()", shared, allocate(shared), {"the launch", 0}});
    for (const Array &array : arrays) std::memset(array.at, 0xff, array.size);
    block.dynamic = arrays[0].at;
}

void forget_memory() {
    memory_used = 0;
    for (const Array &array : arrays) memory_used += array.size, old_memory.push_back(array.at);
    for (u8 *at : old_memory) std::free(at - GAP);
    arrays.clear(), old_memory.clear();
}

void run_block(size_t shared) {
    renew_memory(shared);
    make_stacks(block.threads);
#if defined(SIMT_TSAN)
    __tsan_release(tokens);
#endif
    left_of_block = waiting_of_block = block_meetings = first_ready = ready_count = 0;
    std::memset(waiting_of_warp, 0, sizeof waiting_of_warp);
    std::memset(warp_meetings, 0, sizeof warp_meetings);
    for (int i = 0; i < block.threads; i++) {
        const int thread = backwards_ ? block.threads - 1 - i : i;
        prepare(&fibers[thread], thread);
        make_ready(thread);
    }
    next();
    if (error.empty()) look_at_gaps();
}

int lanes_of(int warp) { return block.threads - warp * WARP < WARP ? block.threads - warp * WARP : WARP; }

void run_grid(size_t shared) {
    const int64_t count = int64_t(block.of[0]) * block.of[1] * block.of[2];
    for (int64_t i = 0; i < count && error.empty(); i++) {
        const int64_t each = backwards_ ? count - 1 - i : i;
        block.at[0] = int(each % block.of[0]);
        block.at[1] = int(each / block.of[0] % block.of[1]);
        block.at[2] = int(each / block.of[0] / block.of[1]);
        run_block(shared);
    }
}

}  // namespace

void enter(const char *name, const char *params, const char *const *kinds, int threads, int blocks, Function function, Call call) {
    entries().push_back({name, params, kinds, threads, blocks, function, call});
}

void fail(Place place, const char *format, ...) {
    char line[512];
    va_list list;
    va_start(list, format);
    std::vsnprintf(line, sizeof line, format, list);
    va_end(list);
    stop(text("%s at %s:%d by thread %d (warp %d, lane %d) of ", line, base(place.file), place.line, self->thread, self->warp,
              self->lane) + where());
    std::abort();
}

void meet(const Meeting &meeting, void *brought, Place place) {
    Fiber *me = current;
    const int warp = me->me.warp;
    me->waits = &meeting, me->brought = brought, me->place = place;
    const int begin = meeting.whole_block ? 0 : warp * WARP;
    const int count = meeting.whole_block ? block.threads : lanes_of(warp);
    waiting_of_warp[warp]++, waiting_of_block++;
#if defined(SIMT_TSAN)
    u8 *token = meeting.whole_block ? tokens + 1 + block_meetings % 2 : tokens + 3 + 2 * warp + warp_meetings[warp] % 2;
    const bool orders = &meeting == &BLOCK || &meeting == &WARPS;
    if (orders) __tsan_release(token);
#endif
    bool complete = (meeting.whole_block ? waiting_of_block : waiting_of_warp[warp]) == count;
    for (int i = begin; complete && i < begin + count; i++) complete = same(*me, fibers[i]);
    if (complete) {
        if (meeting.exchange) {
            void *lanes[WARP];
            for (int i = 0; i < WARP; i++) lanes[i] = i < count ? fibers[begin + i].brought : nullptr;
            meeting.exchange(lanes, count);
        }
        for (int i = 0; i < count; i++) {
            const int thread = backwards_ ? begin + count - 1 - i : begin + i;
            fibers[thread].waits = nullptr;
            if (thread != me->me.thread) make_ready(thread);
        }
        waiting_of_block -= count;
        if (meeting.whole_block) std::memset(waiting_of_warp, 0, sizeof waiting_of_warp), block_meetings++;
        else waiting_of_warp[warp] = 0, warp_meetings[warp] += &meeting == &WARPS;
    } else {
        next();
    }
#if defined(SIMT_TSAN)
    if (orders) __tsan_acquire(token);
#endif
}

void *block_memory(const void *key, const char *name, size_t size, Place place) {
    for (const Array &array : arrays)
        if (array.key == key) {
#if defined(SIMT_TSAN)
            __tsan_acquire(array.at - GAP);
#endif
            return array.at;
        }
#if defined(SIMT_TSAN)   // the scheduler allocates, so that this is no write of one thread of the block
    __tsan_switch_to_fiber(scheduler.tsan, 1);
#endif
    arrays.push_back({key, name, size, allocate(size), place});
#if defined(SIMT_TSAN)
    __tsan_release(arrays.back().at);
    __tsan_switch_to_fiber(current->tsan, 1);
    __tsan_acquire(arrays.back().at);
#endif
    return arrays.back().at;
}

// ---- exchanges

static void exchange_words(void **lanes, int count) {
    for (int i = 0; i < count; i++) {
        Word *word = static_cast<Word *>(lanes[i]);
        if (word->from >= count)
            fail(fibers[self->warp * WARP + i].place, "shuffle from lane %d of a warp that has %d", word->from, count);
        word->got = static_cast<Word *>(lanes[word->from])->value;
    }
}

static void exchange_votes(void **lanes, int count) {
    u64 all = 0;
    for (int i = 0; i < count; i++) all |= u64(static_cast<Vote *>(lanes[i])->value) << i;
    for (int i = 0; i < count; i++) static_cast<Vote *>(lanes[i])->got = all;
}

static float half(u32 word, int which) {
    const u32 h = word >> 16 * which & 0xffff, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                       : exponent     ? float_of((exponent + 112) << 23 | fraction << 13)
                                      : float(fraction) * 0x1p-24f;
    return h & 0x8000 ? -size : size;
}

// Element i of the halves that a lane holds.
static float held(const u32 *words, int i) { return half(words[i / 2], i % 2); }

// c += a b for tiles in plain order, from and to whatever lanes hold them.
template <int ROWS, int COLS, int DEPTH, class A, class B, class C> static void multiply(A a, B b, C c) {
    float values_a[ROWS][DEPTH], values_b[DEPTH][COLS];
    a([&](int row, int k, float value) { values_a[row][k] = value; });
    b([&](int k, int col, float value) { values_b[k][col] = value; });
    c([&](int row, int col, float &value) {
        double sum = value;
        for (int k = 0; k < DEPTH; k++) sum += double(values_a[row][k]) * values_b[k][col];
        value = float(sum);
    });
}

static Fragments &of(void **lanes, int lane) { return *static_cast<Fragments *>(lanes[lane]); }

static void whole(const char *what, int count, int lanes) {
    if (count != lanes) fail(current->place, "%s takes a warp of %d lanes, not %d", what, lanes, count);
}

// PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type"; DEPTH 8: of mma.m16n8k8.
template <int DEPTH> static void exchange_mma(void **lanes, int count) {
    whole("mma.sync", count, 32);
    multiply<16, 8, DEPTH>(
        [&](auto put) {
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < DEPTH / 2; i++)
                    put(lane / 4 + (i / 2 % 2 ? 8 : 0), lane % 4 * 2 + i % 2 + (i >= 4 ? 8 : 0), held(of(lanes, lane).a, i));
        },
        [&](auto put) {
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < DEPTH / 4; i++)
                    put(lane % 4 * 2 + i % 2 + (i >= 2 ? 8 : 0), lane / 4, held(of(lanes, lane).b, i));
        },
        [&](auto each) {
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < 4; i++) each(lane / 4 + (i >= 2 ? 8 : 0), lane % 4 * 2 + i % 2, of(lanes, lane).c[i]);
        });
}

// RDNA 3 ISA, 7.9: lane l holds row (column) l % 16 of A (B), all 16 of them, lanes 16-31 again the same; value i of C in
// lane l is of row 2 i + l / 16, column l % 16.
static void exchange_wmma_gfx11(void **lanes, int count) {
    whole("WMMA", count, 32);
    for (int lane = 0; lane < 16; lane++)
        if (std::memcmp(of(lanes, lane).a, of(lanes, lane + 16).a, 32) || std::memcmp(of(lanes, lane).b, of(lanes, lane + 16).b, 32))
            fail(current->place, "WMMA of gfx11: lanes %d and %d must hold the same halves", lane, lane + 16);
    multiply<16, 16, 16>(
        [&](auto put) {
            for (int i = 0; i < 256; i++) put(i / 16, i % 16, held(of(lanes, i / 16).a, i % 16));
        },
        [&](auto put) {
            for (int i = 0; i < 256; i++) put(i % 16, i / 16, held(of(lanes, i / 16).b, i % 16));
        },
        [&](auto each) {
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < 8; i++) each(2 * i + lane / 16, lane % 16, of(lanes, lane).c[i]);
        });
}

// A half of the depth in each group of 16 lanes: lane l holds values GROUP * (l / 16) .. of row (column) l % 16, and of C
// rows HELD * (l / 16) .. of column l % 16. RDNA 4 ISA, 7.9 (2 groups of 8); CDNA 3 ISA, MFMA 16x16x16 (4 groups of 4).
template <int LANES> static void exchange_groups(void **lanes, int count) {
    constexpr int HELD = 256 / LANES;
    whole(LANES == 32 ? "WMMA" : "MFMA", count, LANES);
    multiply<16, 16, 16>(
        [&](auto put) {
            for (int lane = 0; lane < LANES; lane++)
                for (int i = 0; i < HELD; i++) put(lane % 16, HELD * (lane / 16) + i, held(of(lanes, lane).a, i));
        },
        [&](auto put) {
            for (int lane = 0; lane < LANES; lane++)
                for (int i = 0; i < HELD; i++) put(HELD * (lane / 16) + i, lane % 16, held(of(lanes, lane).b, i));
        },
        [&](auto each) {
            for (int lane = 0; lane < LANES; lane++)
                for (int i = 0; i < HELD; i++) each(HELD * (lane / 16) + i, lane % 16, of(lanes, lane).c[i]);
        });
}

// PTX ISA, ldmatrix .x4: lane l brings row l % 8 of matrix l / 8; word m of lane l is columns 2 (l % 4), + 1 of row l / 4 of
// matrix m, or with .trans those rows of that column.
template <bool TRANSPOSED> static void exchange_rows(void **lanes, int count) {
    whole("ldmatrix", count, 32);
    const auto value = [&](int matrix, int row, int col) {
        return of(lanes, 8 * matrix + row).a[col / 2] >> 16 * (col % 2) & 0xffff;
    };
    for (int lane = 0; lane < 32; lane++)
        for (int m = 0; m < 4; m++) {
            const int row = lane / 4, col = lane % 4 * 2;
            const u32 low = TRANSPOSED ? value(m, col, row) : value(m, row, col);
            const u32 high = TRANSPOSED ? value(m, col + 1, row) : value(m, row, col + 1);
            const u32 both = low | high << 16;
            std::memcpy(of(lanes, lane).c + m, &both, 4);
        }
}

const Meeting BLOCK = {"block_barrier", true, nullptr}, WARPS = {"warp_barrier", false, nullptr},
              SHUFFLE = {"shuffle", false, exchange_words}, BALLOT = {"ballot", false, exchange_votes},
              MMA_16816 = {"mma_16816", false, exchange_mma<16>}, MMA_1688 = {"mma_1688", false, exchange_mma<8>},
              WMMA_GFX11 = {"wmma_gfx11", false, exchange_wmma_gfx11}, WMMA_GFX12 = {"wmma_gfx12", false, exchange_groups<32>},
              MFMA_16 = {"mfma_16", false, exchange_groups<64>}, LDMATRIX = {"ldmatrix", false, exchange_rows<false>},
              LDMATRIX_T = {"ldmatrix_t", false, exchange_rows<true>};

}  // namespace simt

int simt_warp() { return WARP; }
int simt_count() { return int(simt::entries().size()); }
const simt_entry *simt_get(int index) { return &simt::entries()[size_t(index)]; }
const simt_entry *simt_find(const char *name) {
    for (const simt_entry &each : simt::entries())
        if (!std::strcmp(each.name, name)) return &each;
    return nullptr;
}
const char *simt_error() { return simt::error.c_str(); }
size_t simt_block_memory() { return simt::memory_used; }

int simt_launch(const simt_entry *entry, const int *grid, int threads, size_t shared, void **args, int backwards) {
    using namespace simt;
    const std::lock_guard<std::mutex> alone(one_launch);
    error.clear();
    if (threads < 1 || threads > entry->threads)
        error = text("%s: a block of %d threads, where the entry says at most %d", entry->name, threads, entry->threads);
    for (int i = 0; i < 3; i++)
        if (grid[i] < 1) error = text("%s: a grid of %d blocks", entry->name, grid[i]);
    if (!error.empty()) return 1;
    simt::entry = entry, arguments = args, backwards_ = backwards;
    block = {{0, 0, 0}, {grid[0], grid[1], grid[2]}, threads, nullptr};
    current = &scheduler;
#if defined(SIMT_TSAN)
    scheduler.tsan = __tsan_get_current_fiber();
    next_slot = 0;
#elif defined(SIMT_ASAN)
    pthread_attr_t attributes;
    void *stack;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &scheduler.stack_size);
    pthread_attr_destroy(&attributes);
    scheduler.stack = static_cast<char *>(stack);
#endif
    run_grid(shared);
#if defined(SIMT_TSAN)
    __tsan_acquire(&one_launch);
#endif
    forget_memory();
    return !error.empty();
}
