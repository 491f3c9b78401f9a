// A pool of threads that walk one program together.
//
// The caller is thread 0. Within a run, threads share the items of a step by taking runs of them from one counter, and
// meet at a barrier after the step. Waiting spins for a bounded time, then sleeps on a condition variable: a team with
// more threads than free cores still moves on, and an idle one costs nothing. Which thread takes which item never
// changes a result.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace hs {

class Team {
  public:
    using Job = void (*)(void *context, Team &team, int thread);

    // Throws std::system_error where a thread cannot be started.
    Team(int threads, std::vector<int> cores, int spin);
    ~Team();
    Team(const Team &) = delete;
    Team &operator=(const Team &) = delete;

    int threads() const { return threads_; }

    // Runs `job` on every thread and returns when all are done. One run at a time.
    void run(Job job, void *context);

    // Waits for all threads; the last one to arrive resets the item counter.
    void barrier();

    // Takes up to `count` items of `total`; false when none are left. Between two barriers all threads must ask for the same total.
    bool take(int total, int count, int &first, int &last);

  private:
    void serve(int thread);
    void wait_while(const std::atomic<uint32_t> &word, uint32_t value);
    void wake();
    void pin(int thread) const;
    void stop();

    const int threads_;
    const std::vector<int> cores_;
    const int spin_;
    Job job_ = nullptr;
    void *context_ = nullptr;
    bool stopping_ = false;
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<uint32_t> run_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::thread> workers_;
};

}  // namespace hs
