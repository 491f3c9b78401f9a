// A pool of threads that does the stages of a job together.
//
// A job is a sequence of stages, a stage a number of chunks that may be done in any order by any thread. There is no
// barrier at which threads must arrive: one word says which stage is open and how many of its chunks are untaken, whoever
// finishes the last chunk of a stage opens the next, and the caller returns when the last stage is done. So a thread that
// the system has put aside between two chunks holds up nobody: on a busy machine a barrier per op would cost a time slice
// each, and on a quiet one it would cost a round trip between cores.
//
// A thread without work spins for a bounded time, then sleeps on a condition variable; an idle team costs nothing.
// Which thread takes which chunk never changes a result.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace hs {

class Job {
  public:
    // Opens the next stage that has chunks and returns their number, 0 after the last. Never called while a chunk runs.
    virtual int next_stage() = 0;
    // Does one chunk of the open stage.
    virtual void run_chunk(int chunk) = 0;

  protected:
    ~Job() = default;
};

class Team {
  public:
    // Throws std::system_error where a thread cannot be started.
    Team(int threads, std::vector<int> cores, int spin);
    ~Team();
    Team(const Team &) = delete;
    Team &operator=(const Team &) = delete;

    int threads() const { return threads_; }

    // Does all stages of `job` and returns. The calling thread is one of the team. One run at a time.
    void run(Job &job);

  private:
    static constexpr uint64_t DONE = uint64_t{1} << 31;

    void serve(int thread);
    bool work_once(uint64_t word);
    void open_next();
    void wait_for_change(uint64_t word);
    void wake();
    void pin(int thread) const;
    void stop();

    const int threads_;
    const std::vector<int> cores_;
    const int spin_;

    // Stage number in the high half, in the low half untaken chunks, or DONE. A chunk is taken by counting down, which
    // fails if the stage is no longer that one; everything below may be read and written only while holding a chunk of the open
    // stage, or while no stage is open.
    alignas(64) std::atomic<uint64_t> todo_{DONE};
    std::atomic<int> finished_{0};
    Job *job_ = nullptr;
    int chunks_ = 0;

    alignas(64) std::atomic<bool> stopping_{false};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::thread> workers_;
};

}  // namespace hs
