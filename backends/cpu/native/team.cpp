#include "team.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace hs {
namespace {

constexpr uint64_t STAGE = uint64_t{1} << 32;

int untaken(uint64_t word) { return static_cast<int>(word & 0x7fffffffu); }

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

}  // namespace

Team::Team(int threads, std::vector<int> cores, int spin) : threads_(threads), cores_(std::move(cores)), spin_(spin) {
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
    todo_.fetch_add(STAGE);
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

void Team::wait_for_change(uint64_t word) {
    for (int i = 0; i < spin_; i++) {
        if (todo_.load(std::memory_order_acquire) != word) return;
        relax();
    }
    // A waker changes the word before it looks for sleepers, a sleeper counts itself before it looks at the word: one of
    // the two sees the other.
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    changed_.wait(lock, [&] { return todo_.load() != word; });
    sleepers_.fetch_sub(1);
}

void Team::wake() {
    if (sleepers_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }
    changed_.notify_all();
}

void Team::open_next() {
    const int chunks = job_->next_stage();
    const uint64_t stage = (todo_.load(std::memory_order_relaxed) & ~(STAGE - 1)) + STAGE;
    chunks_ = chunks;
    finished_.store(0, std::memory_order_relaxed);
    // The last touch of a finished job: the caller may return, and start another, from this store on.
    todo_.store(stage | (chunks > 0 ? static_cast<uint64_t>(chunks) : DONE));
    // A single chunk will be done by the thread that opened the stage: waking others for it would only cost.
    if (chunks != 1) wake();
}

bool Team::work_once(uint64_t word) {
    if (!todo_.compare_exchange_weak(word, word - 1, std::memory_order_acquire, std::memory_order_relaxed)) return false;
    const int chunks = chunks_;
    job_->run_chunk(chunks - untaken(word));
    if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) open_next();
    return true;
}

void Team::run(Job &job) {
    static thread_local const Team *pinned = nullptr;
    if (!cores_.empty() && pinned != this) {
        pin(0);
        pinned = this;
    }
    job_ = &job;
    open_next();
    for (;;) {
        const uint64_t word = todo_.load(std::memory_order_acquire);
        if (untaken(word) > 0) work_once(word);
        else if (word & DONE) return;
        else wait_for_change(word);
    }
}

void Team::serve(int thread) {
    pin(thread);
    while (!stopping_.load()) {
        const uint64_t word = todo_.load(std::memory_order_acquire);
        if (untaken(word) > 0) work_once(word);
        else if (!stopping_.load()) wait_for_change(word);
    }
}

}  // namespace hs
