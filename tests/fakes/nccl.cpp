// A libnccl.so.2 (librccl.so.1) for tests: communicators between processes of one box, over memory that rank 0 makes and the
// others open through its /proc entry, so that nothing is left behind whoever dies. Addresses are host memory that this process
// can read and write, which is what the memory of an emulated card is; a stream is a number that is only handed back.
//
// Calls are those of a communicator that does not block: they hand work to a thread of the communicator's and answer "in
// progress", and ncclCommGetAsyncError tells when it is done. Work of one communicator is done in its order. A sum is added in
// the order of the ranks. A call before the last one is done is refused, as the real library refuses it.
//
// NCCL_FAKE is a list of words, separated by commas:
//     old         version 2.13
//     hang-init   a communicator never comes about
//     fail-init   a communicator fails
//     hang-sum    a sum is never done
//     wrong-sum   one number of a sum is off by one
// NCCL_FAKE_NOTES: a file that each communicator appends the values of the variables to that the real library would read then.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#define API extern "C" __attribute__((visibility("default")))

namespace {

enum Result { SUCCESS = 0, SYSTEM = 2, ARGUMENT = 4, USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
constexpr int RANKS = 8, FLOAT32 = 7;
constexpr size_t RING = 1 << 16;

struct Id {
    char path[128];
};

struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

// Bytes from one rank to another; each count is written by one side.
struct Ring {
    std::atomic<uint64_t> written, taken;
    char bytes[RING];
};

struct Shared {
    std::atomic<int> joined;
    Ring rings[RANKS][RANKS];
};

bool said(const char *word) {
    const char *words = std::getenv("NCCL_FAKE");
    return words && ("," + std::string(words) + ",").find("," + std::string(word) + ",") != std::string::npos;
}

void note_variables() {
    const char *path = std::getenv("NCCL_FAKE_NOTES");
    if (!path) return;
    std::string line;
    for (const char *name : {"NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"}) {
        const char *value = std::getenv(name);
        line += std::string(name) + "=" + (value ? value : "unset") + " ";
    }
    line += "\n";
    const int fd = open(path, O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (fd < 0 || write(fd, line.data(), line.size()) < 0) std::perror(path);
    if (fd >= 0) close(fd);
}

// One transfer of a group: `at` is read or written until `size` bytes have gone.
struct Transfer {
    char *at;
    size_t size, done;
    Ring *ring;
    bool sends;

    bool step() {
        const uint64_t written = ring->written.load(), taken = ring->taken.load();
        const uint64_t place = sends ? written : taken, room = sends ? RING - (written - taken) : written - taken;
        const size_t count = std::min({static_cast<size_t>(room), size - done, RING - static_cast<size_t>(place % RING)});
        if (sends) {
            std::memcpy(ring->bytes + place % RING, at + done, count);
            ring->written.store(place + count);
        } else {
            std::memcpy(at + done, ring->bytes + place % RING, count);
            ring->taken.store(place + count);
        }
        done += count;
        return done == size;
    }
};

struct Comm {
    Shared *shared = nullptr;
    int rank = 0, ranks = 0;
    std::atomic<bool> ended{false};
    std::atomic<int> status{IN_PROGRESS};
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> work;
    std::thread thread;

    void ask(std::function<void()> what) {
        std::lock_guard<std::mutex> lock(mutex);
        status = IN_PROGRESS;
        work.push_back(std::move(what));
        changed.notify_one();
    }

    void run() {
        while (!ended) {
            std::function<void()> next;
            {
                std::unique_lock<std::mutex> lock(mutex);
                changed.wait_for(lock, std::chrono::milliseconds(5), [&] { return ended || !work.empty(); });
                if (ended || work.empty()) continue;
                next = work.front();
            }
            next();
            std::lock_guard<std::mutex> lock(mutex);
            work.pop_front();
            if (work.empty() && status == IN_PROGRESS && !ended) status = SUCCESS;
        }
    }

    void hang() {
        while (!ended) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }

    void exchange(std::vector<Transfer> transfers) {
        bool all = false;
        while (!all && !ended) {
            all = true;
            for (Transfer &each : transfers) all &= each.done == each.size || each.step();
            if (!all) std::this_thread::yield();
        }
    }

    void sum(float *at, size_t count) {
        if (said("hang-sum")) return hang();
        std::vector<std::vector<float>> parts(ranks, std::vector<float>(count));
        std::memcpy(parts[rank].data(), at, count * 4);
        std::vector<Transfer> transfers;
        for (int peer = 0; peer < ranks; peer++) {
            if (peer == rank) continue;
            transfers.push_back({reinterpret_cast<char *>(parts[rank].data()), count * 4, 0, &shared->rings[rank][peer], true});
            transfers.push_back({reinterpret_cast<char *>(parts[peer].data()), count * 4, 0, &shared->rings[peer][rank], false});
        }
        exchange(transfers);
        if (ended) return;
        for (size_t i = 0; i < count; i++) {
            float total = parts[0][i];
            for (int peer = 1; peer < ranks; peer++) total += parts[peer][i];
            at[i] = total;
        }
        if (said("wrong-sum") && count) at[count / 2] += 1;
    }

    void join() {
        if (said("hang-init")) return hang();
        if (said("fail-init")) {
            status = SYSTEM;
            return;
        }
        shared->joined++;
        while (shared->joined < ranks && !ended) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
};

thread_local int group_depth = 0;
thread_local std::vector<std::pair<Comm *, Transfer>> group;

int transfer(void *at, size_t count, int type, int peer, Comm *comm, void *stream, bool sends) {
    if (comm->status != SUCCESS || !stream || type != FLOAT32 || peer < 0 || peer >= comm->ranks || peer == comm->rank || !at) return ARGUMENT;
    Ring *ring = sends ? &comm->shared->rings[comm->rank][peer] : &comm->shared->rings[peer][comm->rank];
    const Transfer one{static_cast<char *>(at), count * 4, 0, ring, sends};
    if (group_depth) {
        group.push_back({comm, one});
    } else {
        comm->ask([comm, one] { comm->exchange({one}); });
    }
    return group_depth ? SUCCESS : IN_PROGRESS;
}

void end(Comm *comm) {
    {
        std::lock_guard<std::mutex> lock(comm->mutex);
        comm->ended = true;
        comm->changed.notify_one();
    }
    comm->thread.join();
    munmap(comm->shared, sizeof(Shared));
    delete comm;
}

}  // namespace

API int ncclGetVersion(int *version) {
    *version = said("old") ? 21304 : 22304;
    return SUCCESS;
}

API const char *ncclGetErrorString(int status) {
    return status == SYSTEM ? "unhandled system error" : status == ARGUMENT ? "invalid argument" : "another error";
}

// The memory stays with the process that makes the id, for as long as it lives.
API int ncclGetUniqueId(Id *id) {
    const int fd = memfd_create("nccl-fake", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, sizeof(Shared)) != 0) return SYSTEM;
    std::memset(id, 0, sizeof *id);
    std::snprintf(id->path, sizeof id->path, "/proc/%d/fd/%d", static_cast<int>(getpid()), fd);
    return SUCCESS;
}

API int ncclCommInitRankConfig(Comm **made, int ranks, Id id, int rank, Config *config) {
    if (config->magic != 0xcafebeef || config->size < 20 || config->version < 21400 || config->blocking != 0) return ARGUMENT;
    if (rank < 0 || rank >= ranks || ranks > RANKS) return ARGUMENT;
    note_variables();
    const int fd = open(id.path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return SYSTEM;
    void *memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED) return SYSTEM;
    Comm *comm = new Comm;
    comm->shared = static_cast<Shared *>(memory);
    comm->rank = rank;
    comm->ranks = ranks;
    comm->thread = std::thread([comm] { comm->run(); });
    comm->ask([comm] { comm->join(); });
    *made = comm;
    return IN_PROGRESS;
}

API int ncclCommGetAsyncError(Comm *comm, int *status) {
    *status = comm->status;
    return SUCCESS;
}

API int ncclCommAbort(Comm *comm) {
    end(comm);
    return SUCCESS;
}

API int ncclAllReduce(const void *source, void *target, size_t count, int type, int op, Comm *comm, void *stream) {
    if (comm->status != SUCCESS || !stream || source != target || type != FLOAT32 || op != 0) return ARGUMENT;
    comm->ask([=] { comm->sum(static_cast<float *>(target), count); });
    return IN_PROGRESS;
}

API int ncclGroupStart() {
    group_depth++;
    return SUCCESS;
}

API int ncclGroupEnd() {
    if (!group_depth) return USAGE;
    if (--group_depth || group.empty()) return SUCCESS;
    Comm *comm = group.front().first;
    std::vector<Transfer> transfers;
    for (auto &each : group) transfers.push_back(each.second);
    group.clear();
    comm->ask([=] { comm->exchange(transfers); });
    return IN_PROGRESS;
}

API int ncclSend(const void *at, size_t count, int type, int peer, Comm *comm, void *stream) {
    return transfer(const_cast<void *>(at), count, type, peer, comm, stream, true);
}

API int ncclRecv(void *at, size_t count, int type, int peer, Comm *comm, void *stream) {
    return transfer(at, count, type, peer, comm, stream, false);
}
