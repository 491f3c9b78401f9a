// A pool of threads that does the stages of a job together.
//
// A job is a sequence of stages, a stage a number of chunks that may be done in any order by any thread. There is no
// barrier at which threads must arrive: the chunks of a stage are dealt out as one run for each thread, which takes them from
// the front and, when its own are gone, those of others from the back; whoever finishes the last chunk of a stage opens the
// next, and the caller returns when the last stage is done. So a thread that the system has put aside holds up the others by
// no more than the chunk in its hands: on a busy machine a barrier per op would cost a time slice each, and on a quiet one
// it would cost a round trip between cores. A stage of one chunk is done on the spot by whoever opens it.
//
// A thread without work spins for a bounded time, then sleeps on a condition variable; an idle team costs nothing. While it
// spins it fetches into its cache what the job says it will read next (`Ahead`): for a decode, which waits for nothing but memory,
// the small stages between two linear layers are time to read in.
// Which thread takes which chunk never changes a result.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hs {

// Bytes that a thread will read soon. They are fetched, never looked at, so they may be gone by then.
struct Ahead {
    const uint8_t *at = nullptr;
    size_t bytes = 0;
};

// Chunks are dealt out evenly: those of thread t are [dealt(chunks, t, threads), dealt(chunks, t + 1, threads)).
constexpr int dealt(int chunks, int thread, int threads) {
    return static_cast<int>(static_cast<int64_t>(chunks) * thread / threads);
}

class Job {
  public:
    // Opens the next stage that has chunks and returns their number, 0 after the last. Never called while a chunk runs.
    virtual int next_stage() = 0;
    // Does one chunk of the open stage.
    virtual void run_chunk(int chunk) = 0;
    // What a thread that is through with the open stage will read in a later one. Called while that stage is open.
    virtual Ahead ahead(int) const { return {}; }

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

    // Which thread of its team runs this: 0 of one that is in no team, which is where `run` is called from.
    static int current();

    // Does all stages of `job` and returns. The calling thread is one of the team. One run at a time.
    void run(Job &job);

  private:
    // A thread's untaken chunks, in units: number of the stage (32 bits), first, end (16 bits each). Taking fails if the
    // stage is no longer that one.
    struct alignas(64) Share {
        std::atomic<uint64_t> word{0};
    };

    // What a thread fetches while it waits.
    struct Fetch {
        const uint8_t *base = nullptr, *at = nullptr, *end = nullptr;
        void aim(const Ahead &ahead);
        void step(int lines);
    };

    static constexpr uint64_t DONE = 1;

    void serve(int thread);
    bool work(int thread, uint64_t word, Fetch &fetch);
    bool take(int from, uint32_t stage, bool front, int &unit);
    void do_unit(int unit);
    void open_next();
    void wait_for_change(uint64_t word, Fetch &fetch);
    void wake();
    void pin(int thread) const;
    void stop();

    const int threads_;
    const std::vector<int> cores_;
    const int spin_;

    // Number of the stage in the high half, in the low half 0, or DONE. Everything below may be read and written only while
    // holding a chunk of the open stage that is not yet in `finished_`, or while no stage is open.
    alignas(64) std::atomic<uint64_t> stage_{DONE};
    alignas(64) std::atomic<int> finished_{0};   // units
    Job *job_ = nullptr;
    int chunks_ = 0, unit_ = 1, units_ = 0;
    std::unique_ptr<Share[]> shares_;

    alignas(64) std::atomic<bool> stopping_{false};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::thread> workers_;
};

}  // namespace hs

// What hs_host.h calls a team.
struct hs_team {
    hs::Team team;
};
