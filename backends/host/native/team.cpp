#include "team.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace hs {
namespace {

constexpr uint64_t STAGE = uint64_t{1} << 32;
constexpr int UNITS_MOST = 65535;
constexpr int LINE = 64, LINES_AT_ONCE = 4, LINES_FIRST = 32;

uint32_t number_of(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
uint32_t first_of(uint64_t word) { return static_cast<uint32_t>(word >> 16) & 0xffffu; }
uint32_t end_of(uint64_t word) { return static_cast<uint32_t>(word) & 0xffffu; }

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

thread_local int current_thread = 0;

}  // namespace

int Team::current() { return current_thread; }

void Team::Fetch::aim(const Ahead &ahead) {
    if (ahead.at == base) return;   // what was fetched of it stays fetched
    base = at = ahead.at;
    end = ahead.at + ahead.bytes;
}

void Team::Fetch::step(int lines) {
    for (; lines > 0 && at < end; lines--, at += LINE) __builtin_prefetch(at, 0, 3);
}

Team::Team(int threads, std::vector<int> cores, int spin)
    : threads_(threads), cores_(std::move(cores)), spin_(spin), shares_(new Share[static_cast<size_t>(threads)]) {
    workers_.reserve(static_cast<size_t>(threads - 1));
    try {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { serve(i); });
    } catch (...) {
        stop();
        throw;
    }
}

Team::~Team() { stop(); }

void Team::stop() {
    stopping_.store(true);
    stage_.fetch_add(STAGE);
    wake();
    for (std::thread &worker : workers_) worker.join();
    workers_.clear();
}

void Team::pin(int thread) const {
#if defined(__linux__)
    if (static_cast<size_t>(thread) >= cores_.size()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(cores_[static_cast<size_t>(thread)]), &set);
    // A core that has gone away since the list was made costs speed, not correctness: the thread then runs anywhere.
    (void)pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
    (void)thread;
#endif
}

void Team::wait_for_change(uint64_t word, Fetch &fetch) {
    for (int i = 0; i < spin_; i++) {
        if (stage_.load(std::memory_order_acquire) != word) return;
        fetch.step(LINES_AT_ONCE);
        relax();
    }
    // A waker changes the word before it looks for sleepers, a sleeper counts itself before it looks at the word: one of
    // the two sees the other.
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    changed_.wait(lock, [&] { return stage_.load() != word; });
    sleepers_.fetch_sub(1);
}

void Team::wake() {
    if (sleepers_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }
    changed_.notify_all();
}

void Team::open_next() {
    int chunks = job_->next_stage();
    for (; chunks == 1; chunks = job_->next_stage()) job_->run_chunk(0);
    const uint64_t stage = (stage_.load(std::memory_order_relaxed) & ~(STAGE - 1)) + STAGE;
    chunks_ = chunks;
    unit_ = (chunks + UNITS_MOST - 1) / UNITS_MOST;
    units_ = unit_ > 0 ? (chunks + unit_ - 1) / unit_ : 0;
    finished_.store(0, std::memory_order_relaxed);
    if (chunks > 0) {
        for (int t = 0; t < threads_; t++) {
            const auto first = static_cast<uint64_t>(dealt(units_, t, threads_)), end = static_cast<uint64_t>(dealt(units_, t + 1, threads_));
            shares_[static_cast<size_t>(t)].word.store(stage | first << 16 | end, std::memory_order_relaxed);
        }
    }
    // The last touch of a finished job: the caller may return, and start another, from this store on.
    stage_.store(stage | (chunks > 0 ? 0 : DONE));
    wake();
}

bool Team::take(int from, uint32_t stage, bool front, int &unit) {
    std::atomic<uint64_t> &share = shares_[static_cast<size_t>(from)].word;
    uint64_t word = share.load(std::memory_order_relaxed);
    while (number_of(word) == stage && first_of(word) < end_of(word)) {
        if (share.compare_exchange_weak(word, front ? word + (uint64_t{1} << 16) : word - 1, std::memory_order_relaxed)) {
            unit = static_cast<int>(front ? first_of(word) : end_of(word) - 1);
            return true;
        }
    }
    return false;
}

void Team::do_unit(int unit) {
    const int first = unit * unit_, end = first + unit_ < chunks_ ? first + unit_ : chunks_;
    for (int chunk = first; chunk < end; chunk++) job_->run_chunk(chunk);
}

// Does what is left of an open stage. False where nothing is.
bool Team::work(int thread, uint64_t word, Fetch &fetch) {
    const uint32_t stage = number_of(word);
    int done = 0, unit = 0;
    while (take(thread, stage, true, unit)) do_unit(unit), done++;
    for (int i = 1; i < threads_; i++)
        while (take((thread + i) % threads_, stage, false, unit)) do_unit(unit), done++;
    if (done == 0) return false;
    const int all = units_;
    fetch.aim(job_->ahead(thread));
    fetch.step(LINES_FIRST);
    if (finished_.fetch_add(done, std::memory_order_acq_rel) + done == all) open_next();
    return true;
}

void Team::run(Job &job) {
    static thread_local const Team *pinned = nullptr;
    if (!cores_.empty() && pinned != this) {
        pin(0);
        pinned = this;
    }
    Fetch fetch;
    job_ = &job;
    open_next();
    for (;;) {
        const uint64_t word = stage_.load(std::memory_order_acquire);
        if (word & DONE) return;
        if (!work(0, word, fetch)) wait_for_change(word, fetch);
    }
}

void Team::serve(int thread) {
    current_thread = thread;
    pin(thread);
    Fetch fetch;
    while (!stopping_.load()) {
        const uint64_t word = stage_.load(std::memory_order_acquire);
        if ((word & DONE || !work(thread, word, fetch)) && !stopping_.load()) wait_for_change(word, fetch);
    }
}

}  // namespace hs
