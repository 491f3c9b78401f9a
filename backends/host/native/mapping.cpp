// Anonymous memory: reserved, held, given back.
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include <sys/mman.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include "hs_host.h"
#include "team.h"

#define HS_API extern "C" __attribute__((visibility("default")))

namespace hs {
namespace {

constexpr size_t HUGE_PAGE = size_t{2} << 20;

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }
constexpr size_t whole(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// For people who look at /proc/PID/maps; many kernels are built without names, and nothing here relies on them.
void name_mapping(void *address, size_t bytes, const char *name) {
#if defined(__linux__)
    constexpr int SET_VMA = 0x53564d41;  // PR_SET_VMA; its one option, PR_SET_VMA_ANON_NAME, is 0
    if (name) (void)prctl(SET_VMA, 0UL, reinterpret_cast<unsigned long>(address), bytes, reinterpret_cast<unsigned long>(name));
#else
    (void)address, (void)bytes, (void)name;
#endif
}

// Makes pages resident, a chunk at a time. The kernel does it in one call where it can (Linux 5.14); else each page is
// touched, with what it holds written back.
class Commit final : public Job {
  public:
    Commit(uint8_t *start, size_t bytes) : start_(start), bytes_(bytes), page_(page_bytes()) {}

    int next_stage() override {
        const bool first = !started_;
        started_ = true;
        return first ? static_cast<int>((bytes_ + CHUNK - 1) / CHUNK) : 0;
    }

    void run_chunk(int chunk) override {
        if (error_.load(std::memory_order_relaxed) != 0) return;
        uint8_t *at = start_ + static_cast<size_t>(chunk) * CHUNK;
        const size_t left = static_cast<size_t>(start_ + bytes_ - at), size = left < CHUNK ? left : CHUNK;
        const int error = populate(at, size);
        if (error == EINVAL)
            touch(at, size);
        else if (error != 0)
            error_.store(error, std::memory_order_relaxed);
    }

    int error() const { return error_.load(std::memory_order_relaxed); }

  private:
    static constexpr size_t CHUNK = size_t{16} << 20;

    static int populate(uint8_t *at, size_t size) {
#if defined(__linux__)
        constexpr int POPULATE_WRITE = 23;  // MADV_POPULATE_WRITE
        return madvise(at, size, POPULATE_WRITE) == 0 ? 0 : errno;
#else
        (void)at, (void)size;
        return EINVAL;
#endif
    }

    void touch(uint8_t *at, size_t size) const {
        for (size_t offset = 0; offset < size; offset += page_) {
            volatile uint8_t *byte = at + offset;
            *byte = *byte;
        }
    }

    uint8_t *const start_;
    const size_t bytes_, page_;
    std::atomic<int> error_{0};
    bool started_ = false;
};

}  // namespace
}  // namespace hs

HS_API void *hs_map(size_t bytes, int32_t huge, const char *name, int32_t *error) {
    const size_t guard = hs::page_bytes();
    if (bytes == 0 || bytes > SIZE_MAX - 3 * hs::HUGE_PAGE) {
        *error = EINVAL;
        return nullptr;
    }
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    const size_t size = hs::whole(bytes, hs::HUGE_PAGE), all = size + 2 * hs::HUGE_PAGE;
    void *raw = mmap(nullptr, all, PROT_NONE, flags, -1, 0);
    if (raw == MAP_FAILED) {
        *error = errno;
        return nullptr;
    }
    const uintptr_t start = reinterpret_cast<uintptr_t>(raw), aligned = hs::whole(start + guard, hs::HUGE_PAGE);
    const uintptr_t before = aligned - guard, after = aligned + size + guard;
    if (before > start) munmap(raw, before - start);
    if (start + all > after) munmap(reinterpret_cast<void *>(after), start + all - after);
    void *address = reinterpret_cast<void *>(aligned);
    if (mprotect(address, size, PROT_READ | PROT_WRITE) != 0) {
        *error = errno;
        munmap(reinterpret_cast<void *>(before), after - before);
        return nullptr;
    }
    hs::name_mapping(address, size, name);
#ifdef MADV_HUGEPAGE
    // Advice only: a kernel without huge pages serves small ones.
    (void)madvise(address, size, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
    (void)huge;
#endif
    *error = 0;
    return address;
}

HS_API void hs_unmap(void *address, size_t bytes) {
    const size_t guard = hs::page_bytes();
    if (address) munmap(static_cast<uint8_t *>(address) - guard, hs::whole(bytes, hs::HUGE_PAGE) + 2 * guard);
}

HS_API int32_t hs_commit(hs_team *team, void *address, size_t bytes) {
    hs::Commit job(static_cast<uint8_t *>(address), bytes);
    team->team.run(job);
    return job.error();
}

HS_API int32_t hs_release(void *address, size_t bytes) {
    return madvise(address, hs::whole(bytes, hs::page_bytes()), MADV_DONTNEED) == 0 ? 0 : errno;
}
