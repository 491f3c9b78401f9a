#include "team.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace hs {
namespace {

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
    stopping_ = true;
    run_.fetch_add(1);
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

void Team::wait_while(const std::atomic<uint32_t> &word, uint32_t value) {
    for (int i = 0; i < spin_; i++) {
        if (word.load(std::memory_order_acquire) != value) return;
        relax();
    }
    // A waker changes the word before it looks for sleepers, a sleeper counts itself before it looks at the word: one of
    // the two sees the other.
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    changed_.wait(lock, [&] { return word.load() != value; });
    sleepers_.fetch_sub(1);
}

void Team::wake() {
    if (sleepers_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }
    changed_.notify_all();
}

void Team::barrier() {
    if (threads_ == 1) {
        next_.store(0, std::memory_order_relaxed);
        return;
    }
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
        arrived_.store(0, std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1);
        wake();
    } else {
        wait_while(phase_, phase);
    }
}

bool Team::take(int total, int count, int &first, int &last) {
    // The plain look first keeps the counter from growing without bound and the line from bouncing once all is taken.
    if (next_.load(std::memory_order_relaxed) >= total) return false;
    first = next_.fetch_add(count, std::memory_order_relaxed);
    if (first >= total) return false;
    last = first + count < total ? first + count : total;
    return true;
}

void Team::run(Job job, void *context) {
    static thread_local const Team *pinned = nullptr;
    if (!cores_.empty() && pinned != this) {
        pin(0);
        pinned = this;
    }
    job_ = job;
    context_ = context;
    if (threads_ > 1) {
        run_.fetch_add(1);
        wake();
    }
    job(context, *this, 0);
    barrier();
}

void Team::serve(int thread) {
    pin(thread);
    uint32_t seen = 0;
    for (;;) {
        wait_while(run_, seen);
        seen++;
        if (stopping_) return;
        job_(context_, *this, thread);
        barrier();
    }
}

}  // namespace hs
