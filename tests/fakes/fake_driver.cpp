// A driver without a card: libcuda.so.1, or with -DROCM libamdhip64.so. One source, since the two interfaces are one
// (backends/gpu/driver/names.py); NAME(cuda, hip) gives a function its name.
//
// What is real here: memory of a card is memory that no one but the driver may touch, so that a host pointer taken for a
// device's, or the other way round, dies as on a card. Each allocation is a file in memory (memfd), mapped with nothing around
// it; virtual memory maps and unmaps such files at reserved addresses, so what is released is really gone, from this process
// and from the system. New memory is filled with 0xcb: nobody is promised zeros. Other processes open an allocation through
// /proc/PID/fd. Memory that all processes of one set of cards hold is counted in a file that they share, so that two
// processes on one card see each other's use.
//
// Work on a stream is not done when it is asked for but when somebody waits for it, as late as a card may do it: host
// memory that changes too early, memory that is unmapped too early, results that are read too early are found by tests.
// Launches run kernels by tests/simt. A kernel that touches memory that is not there ends as on a card: status 700, at the
// wait, and every call after it.
//
// Where a real driver lets something pass that is wrong all the same, this one does not: calls that a recording thread may not
// make, a context that nobody holds, host memory that goes before it is unregistered or while the card still uses it, a handle
// of an allocation that shares its block with others, flags that mean nothing.
//
// What cards there are stands in the file `cuda.cards` or `rocm.cards` beside this library (tests/fake_cards.py writes it):
//
//     driver NUMBER                    version
//     card KEY=VALUE ...               _ in a name stands for a blank
//     fail FUNCTION CODE FROM COUNT CARD   the calls FROM, FROM + 1 ... (COUNT of them, 0: all) since the line was read
//                                      fail; of this card alone, or with -1 of all
//     lose CARD CODE FROM              the FROM-th launch since then ends with this status, and so does all behind it
//     lie CARD                         copies between this card and memory of another process go wrong from here on
//     hang CARD                        such copies never end
//
// The file is read again when it changes: rules may come while a process runs.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <list>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "../simt/simt.h"

#if defined(ROCM)
#define NAME(cuda, hip) hip
constexpr char VENDOR[] = "rocm";
#else
#define NAME(cuda, hip) cuda
constexpr char VENDOR[] = "cuda";
#endif
#define API extern "C" __attribute__((visibility("default"))) int
#define TEXT extern "C" __attribute__((visibility("default"))) const char *

typedef uint64_t u64;

namespace {

enum Status {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NO_BINARY = 209, ECC = 214, PEER_UNSUPPORTED = 217, BAD_PTX = 222, INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600, ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719, REGISTERED = 712, NOT_REGISTERED = 713, NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, UNKNOWN = 999,
};
struct Word { int status; const char *cuda, *hip, *text; };
const Word WORDS[] = {
    {SUCCESS, "CUDA_SUCCESS", "hipSuccess", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "hipErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "hipErrorOutOfMemory", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "hipErrorNotInitialized", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "hipErrorNoDevice", "no device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "hipErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "hipErrorInvalidImage", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "hipErrorInvalidContext", "invalid device context"},
    {NO_BINARY, "CUDA_ERROR_NO_BINARY_FOR_GPU", "hipErrorNoBinaryForGpu", "no kernel image is available for this device"},
    {ECC, "CUDA_ERROR_ECC_UNCORRECTABLE", "hipErrorECCNotCorrectable", "uncorrectable ECC error encountered"},
    {PEER_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "hipErrorPeerAccessUnsupported", "peer access is not supported"},
    {BAD_PTX, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "hipErrorInvalidKernelFile", "the PTX was compiled with an unsupported toolchain."},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "hipErrorInvalidHandle", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "hipErrorNotFound", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "hipErrorNotReady", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "hipErrorIllegalAddress", "an illegal memory access was encountered"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "hipErrorLaunchFailure", "unspecified launch failure"},
    {REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "hipErrorHostMemoryAlreadyRegistered", "already registered"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "hipErrorHostMemoryNotRegistered", "not registered"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "hipErrorNotSupported", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "hipErrorStreamCaptureUnsupported", "not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "hipErrorStreamCaptureInvalidated", "capture was invalidated"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN", "hipErrorUnknown", "unknown error"},
};
const Word *word_of(int status) {
    for (const Word &each : WORDS)
        if (each.status == status) return &each;
    return nullptr;
}

constexpr u64 PAGE = 4096, GRANULE = 2 << 20, POISON_MOST = 32 << 20;
constexpr int CARDS = 16, PROCESSES = 256;
constexpr size_t QUEUE_MOST = 1 << 16;

// ---- cards, as the file beside the library describes them

struct Card {
    int number;   // in the file; `index` in what a process sees
    std::map<std::string, std::string> facts;
    int sticky = 0, retained = 0;   // `retained`: of its context, by this process
    const std::string &text(const char *key) const {
        static const std::string none;
        const auto found = facts.find(key);
        return found == facts.end() ? none : found->second;
    }
    int number_of(const char *key, int otherwise = 0) const {
        const std::string &value = text(key);
        return value.empty() ? otherwise : std::atoi(value.c_str());
    }
    u64 total() const { return u64(number_of("mib", 1024)) << 20; }
};
struct Rule { std::string kind, what; int code = 0, from = 1, count = 0, card = -1, seen = 0; };

std::recursive_mutex world;   // one thing at a time, of all cards
bool initialised, read_once;
int version;
std::list<Card> all_cards;
std::vector<Card *> seen;     // by the process, in its order
std::map<std::string, Rule> rules;
timespec file_time;
thread_local int current = NAME(-1, 0);

std::string folder() {
    Dl_info info;
    dladdr(reinterpret_cast<void *>(&folder), &info);
    const std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/') + 1);
}

void read_file() {
    const std::string path = folder() + VENDOR + ".cards";
    struct stat now;
    if (stat(path.c_str(), &now)) return;
    if (read_once && now.st_mtim.tv_sec == file_time.tv_sec && now.st_mtim.tv_nsec == file_time.tv_nsec) return;
    file_time = now.st_mtim;
    std::ifstream file(path);
    std::map<std::string, Rule> fresh;
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string kind, pair;
        words >> kind;
        if (kind == "driver" && !read_once) words >> version;
        if (kind == "card" && !read_once) {
            Card card;
            card.number = int(all_cards.size());
            while (words >> pair) {
                std::string value = pair.substr(pair.find('=') + 1);
                for (char &c : value)
                    if (c == '_' && !pair.rfind("name=", 0)) c = ' ';
                card.facts[pair.substr(0, pair.find('='))] = value;
            }
            all_cards.push_back(card);
        }
        if (kind == "fail" || kind == "lose" || kind == "lie" || kind == "hang") {
            Rule rule;
            rule.kind = kind;
            words >> rule.what;
            words >> rule.code >> rule.from >> rule.count;
            if (!(words >> rule.card)) rule.card = -1;
            if (rule.from < 1) rule.from = 1;
            const auto known = rules.find(line);
            fresh[line] = known == rules.end() ? rule : known->second;
        }
    }
    rules = fresh, read_once = true;
}

// CUDA_VISIBLE_DEVICES and HIP's: numbers or UUIDs, as far as they are valid; without one, all.
std::vector<Card *> visible() {
    std::vector<Card *> found;
    for (Card &card : all_cards) found.push_back(&card);
    for (const char *variable : {NAME("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), NAME("", "HIP_VISIBLE_DEVICES")}) {
        const char *value = *variable ? std::getenv(variable) : nullptr;
        if (!value && !std::strcmp(variable, "HIP_VISIBLE_DEVICES")) value = std::getenv("CUDA_VISIBLE_DEVICES");
        if (!value) continue;
        std::vector<Card *> chosen;
        std::istringstream words(value);
        for (std::string each; std::getline(words, each, ',');) {
            Card *card = nullptr;
            char *end;
            const long number = std::strtol(each.c_str(), &end, 10);
            if (!each.empty() && !*end && number >= 0 && number < long(found.size())) card = found[size_t(number)];
            for (Card *one : found)
                if (each.size() > 4 && one->text("uuid") == each) card = one;
            if (!card) break;
            chosen.push_back(card);
        }
        found = chosen;
    }
    return found;
}

Card *card_at(int index) { return index >= 0 && index < int(seen.size()) ? seen[size_t(index)] : nullptr; }

// The status of a rule for a call of this function, and 0 without one.
int refused(const char *function) {
    read_file();
    for (auto &pair : rules) {
        Rule &rule = pair.second;
        if (rule.kind != "fail" || rule.what != function) continue;
        if (rule.card >= 0 && !(card_at(current) && card_at(current)->number == rule.card)) continue;
        rule.seen++;
        if (rule.seen >= rule.from && (!rule.count || rule.seen < rule.from + rule.count)) return rule.code;
    }
    return 0;
}

bool ruled(const char *kind, const Card *card) {
    for (auto &pair : rules)
        if (pair.second.kind == kind && std::atoi(pair.second.what.c_str()) == card->number) return true;
    return false;
}

// ---- what all processes hold of each card

struct Use { int pid; u64 bytes[CARDS]; };
Use *uses() {
    static Use *all = [] {
        const int fd = open((folder() + VENDOR + ".used").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0 || ftruncate(fd, sizeof(Use) * PROCESSES)) std::perror("fake driver"), std::abort();
        void *at = mmap(nullptr, sizeof(Use) * PROCESSES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        return static_cast<Use *>(at);
    }();
    return all;
}

Use *mine() {
    static Use *found;
    if (found && found->pid == getpid()) return found;
    for (Use *each = uses(); each < uses() + PROCESSES; each++) {
        int holder = __atomic_load_n(&each->pid, __ATOMIC_ACQUIRE);
        if (holder && holder != getpid() && !(kill(holder, 0) && errno == ESRCH)) continue;
        if (!__atomic_compare_exchange_n(&each->pid, &holder, getpid(), false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) continue;
        std::memset(each->bytes, 0, sizeof each->bytes);
        return found = each;
    }
    std::fprintf(stderr, "fake driver: too many processes\n");
    std::abort();
}

u64 used(const Card *card) {
    u64 total = 0;
    for (Use *each = uses(); each < uses() + PROCESSES; each++)
        if (each->pid && !(kill(each->pid, 0) && errno == ESRCH)) total += each->bytes[card->number];
    return total;
}
u64 free_of(const Card *card) {
    const u64 taken = used(card) + (u64(card->number_of("taken")) << 20);
    return taken < card->total() ? card->total() - taken : 0;
}

// ---- memory

struct Physical { u64 size; int fd; Card *card; int maps; bool released; };
enum Kind { ALLOCATION, MAPPING, FOREIGN };
struct Block { u64 at, size; Kind kind; Card *card; Physical *memory; bool accessible; };
std::map<u64, Block> blocks;
std::map<u64, u64> reserved, registered;

u64 rounded(u64 size, u64 to) { return (size + to - 1) / to * to; }

Physical *physical(Card *card, u64 size) {
    if (size > free_of(card)) return nullptr;
    const int fd = memfd_create("card", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, off_t(size))) {
        if (fd >= 0) close(fd);
        return nullptr;
    }
    if (size <= POISON_MOST) {
        const std::vector<char> rubbish(size_t(size < GRANULE ? size : GRANULE), char(0xcb));
        for (u64 at = 0; at < size; at += rubbish.size())
            if (pwrite(fd, rubbish.data(), size - at < rubbish.size() ? size - at : rubbish.size(), off_t(at)) < 0) std::abort();
    }
    mine()->bytes[card->number] += size;
    return new Physical{size, fd, card, 0, false};
}

void drop(Physical *memory) {
    if (!memory->released || memory->maps) return;
    if (memory->card) mine()->bytes[memory->card->number] -= memory->size;
    close(memory->fd);
    delete memory;
}

// Addresses with nothing behind them, and none of anything else's beside them.
u64 addresses(u64 size) {
    void *at = mmap(nullptr, size + 2 * GRANULE + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return 0;
    const u64 begin = reinterpret_cast<u64>(at), aligned = rounded(begin + PAGE, GRANULE), end = begin + size + 2 * GRANULE + 2 * PAGE;
    if (aligned - PAGE > begin) munmap(at, aligned - PAGE - begin);
    if (end > aligned + size + PAGE) munmap(reinterpret_cast<void *>(aligned + size + PAGE), end - (aligned + size + PAGE));
    return aligned;
}
void no_addresses(u64 at, u64 size) { munmap(reinterpret_cast<void *>(at - PAGE), size + 2 * PAGE); }

bool put(u64 at, u64 size, Kind kind, Card *card, Physical *memory, u64 offset, bool accessible) {
    void *mapped = mmap(reinterpret_cast<void *>(at), size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, off_t(offset));
    if (mapped == MAP_FAILED) return false;
    memory->maps++;
    blocks[at] = {at, size, kind, card, memory, accessible};
    return true;
}

void take(u64 at) {
    const Block block = blocks[at];
    blocks.erase(at);
    mmap(reinterpret_cast<void *>(at), block.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    block.memory->maps--;
    drop(block.memory);
}

const Block *block_of(u64 at) {
    auto next = blocks.upper_bound(at);
    if (next == blocks.begin()) return nullptr;
    const Block &block = std::prev(next)->second;
    return at < block.at + block.size ? &block : nullptr;
}

// Whether device memory lies at all these addresses.
bool holds(u64 at, u64 size) {
    while (size) {
        const Block *block = block_of(at);
        if (!block || !block->accessible) return false;
        const u64 here = block->at + block->size - at;
        if (here >= size) return true;
        at += here, size -= here;
    }
    return true;
}

void protect(int how) {
    for (const auto &pair : blocks)
        if (pair.second.accessible) mprotect(reinterpret_cast<void *>(pair.second.at), pair.second.size, how);
}

// ---- streams

struct Module {
    void *library;
    const simt_entry *(*find)(const char *);
    int (*launch)(const simt_entry *, const int *, int, size_t, void **, int);
    const char *(*error)();
};
struct Function { Module *module; const simt_entry *entry; size_t shared = 48 << 10; };
struct Event { bool done = false; std::chrono::steady_clock::time_point at; };
struct Op {
    enum { LAUNCH, COPY, FILL, EVENT } kind;
    Function *function = nullptr;
    int grid[3] = {}, threads = 0;
    size_t shared = 0;
    std::vector<u64> args = {};
    u64 target = 0, source = 0, size = 0;
    int byte = 0;
    Event *event = nullptr;
};
struct Stream { Card *card; std::vector<Op> queue, captured; bool capturing = false, spoilt = false; };
struct Graph { std::vector<Op> ops; };
std::list<Stream> streams;

sigjmp_buf way_out;
void touched_nothing(int) { siglongjmp(way_out, 1); }

bool foreign(u64 at) {
    const Block *block = block_of(at);
    return block && block->kind == FOREIGN;
}

// A launch that was left in its midst holds the emulation for ever: no library of this process launches again.
constexpr char LEFT[] = "FAKE_CARDS_LEFT_A_LAUNCH";
bool left_a_launch() {
    const char *who = std::getenv(LEFT);
    return who && std::atoi(who) == getpid();
}

int run_launch(Card *card, Op &op) {
    if (left_a_launch()) return std::fprintf(stderr, "fake card %d: no launches in a process behind one that crashed\n", card->number), LAUNCH_FAILED;
    for (auto &pair : rules) {
        Rule &rule = pair.second;
        if (rule.kind != "lose" || std::atoi(rule.what.c_str()) != card->number) continue;
        if (++rule.seen >= rule.from) return rule.code;
    }
    std::vector<void *> args(op.args.size() + 1);
    for (size_t i = 0; i < op.args.size(); i++) args[i] = &op.args[i];
    if (!op.function->module->launch(op.function->entry, op.grid, op.threads, op.shared, args.data(), 0)) return 0;
    std::fprintf(stderr, "fake card %d: %s\n", card->number, op.function->module->error());
    return LAUNCH_FAILED;
}

int run(Card *card, Op &op) {
    switch (op.kind) {
        case Op::LAUNCH: return run_launch(card, op);
        case Op::COPY:
            std::memmove(reinterpret_cast<void *>(op.target), reinterpret_cast<void *>(op.source), op.size);
            if (op.size && (foreign(op.target) || foreign(op.source)) && ruled("lie", card))
                reinterpret_cast<unsigned char *>(op.target)[op.size / 2] += 0x11;
            return 0;
        case Op::FILL: std::memset(reinterpret_cast<void *>(op.target), op.byte, op.size); return 0;
        case Op::EVENT: op.event->done = true, op.event->at = std::chrono::steady_clock::now(); return 0;
    }
    return UNKNOWN;
}

// Whether a stream has a copy that never ends.
bool hangs(const Stream &stream) {
    for (const Op &op : stream.queue)
        if (op.kind == Op::COPY && (foreign(op.target) || foreign(op.source)) && ruled("hang", stream.card)) return true;
    return false;
}

// All that was asked of a stream. An access to memory that is not there leaves the emulation wherever it was.
void finish(Stream &stream) {
    if (stream.queue.empty()) return;
    while (hangs(stream)) pause();
    struct sigaction mine_, was_segv, was_bus;
    std::memset(&mine_, 0, sizeof mine_);
    mine_.sa_handler = touched_nothing;
    sigaction(SIGSEGV, &mine_, &was_segv), sigaction(SIGBUS, &mine_, &was_bus);
    protect(PROT_READ | PROT_WRITE);
    std::vector<Op> ops;
    ops.swap(stream.queue);
    if (!sigsetjmp(way_out, 1)) {
        for (Op &op : ops)
            if (!stream.card->sticky) stream.card->sticky = run(stream.card, op);
    } else {
        std::fprintf(stderr, "fake card %d: a launch or copy touched memory that is not there\n", stream.card->number);
        setenv(LEFT, std::to_string(getpid()).c_str(), 1);
        stream.card->sticky = ILLEGAL_ADDRESS;
    }
    protect(PROT_NONE);
    sigaction(SIGSEGV, &was_segv, nullptr), sigaction(SIGBUS, &was_bus, nullptr);
}

// The stream that this thread records from.
thread_local Stream *recording = nullptr;

// A call that no thread may make while it records: it spoils the recording.
int spoilt() { return recording ? (recording->spoilt = true, CAPTURE_UNSUPPORTED) : SUCCESS; }

void finish_all(Card *card) {
    for (Stream &each : streams)
        if (each.card == card) finish(each);
}

int add(Stream *stream, const Op &op) {
    if (stream->capturing) stream->captured.push_back(op);
    else stream->queue.push_back(op);
    if (stream->queue.size() > QUEUE_MOST) finish(*stream);
    return 0;
}

// Begins each function: the lock, the rules, the card of the thread. `FREE` has no card.
#define FREE()                                                                                                                 \
    const std::lock_guard<std::recursive_mutex> alone(world);                                                                  \
    if (const int code = refused(__func__)) return code
#define CARD()                                                                                                                 \
    FREE();                                                                                                                    \
    if (!initialised) return NOT_INITIALIZED;                                                                                  \
    Card *const card = card_at(current);                                                                                       \
    if (!card) return INVALID_CONTEXT;                                                                                         \
    if (card->sticky) return card->sticky
#define UNRECORDED()                                                                                                           \
    CARD();                                                                                                                    \
    if (const int code = spoilt()) return code
#define STREAM(stream)                                                                                                         \
    CARD();                                                                                                                    \
    if (stream->card != card) return INVALID_HANDLE
#define DEVICE(index)                                                                                                          \
    FREE();                                                                                                                    \
    if (!initialised) return NOT_INITIALIZED;                                                                                  \
    Card *const card = card_at(index);                                                                                         \
    if (!card) return INVALID_DEVICE

int start() {
    read_file();
    seen = visible();
    return (initialised = !seen.empty()) ? SUCCESS : NO_DEVICE;
}

int moved(Stream *stream, u64 target, u64 source, u64 size, bool target_here, bool source_here) {
    if ((target_here && !holds(target, size)) || (source_here && !holds(source, size))) return INVALID_VALUE;
    Op op{Op::COPY};
    op.target = target, op.source = source, op.size = size;
    return add(stream, op);
}

}  // namespace

// ---- the driver and its cards

API NAME(cuInit, hipInit)(unsigned) {
    FREE();
    return start();
}
API NAME(cuDriverGetVersion, hipRuntimeGetVersion)(int *out) {
    FREE();
    read_file();
    *out = version;
    return 0;
}
#if defined(ROCM)
TEXT hipGetErrorName(int status) { return word_of(status) ? word_of(status)->hip : "hipErrorUnknown"; }
TEXT hipGetErrorString(int status) { return word_of(status) ? word_of(status)->text : "unknown error"; }
#else
API cuGetErrorName(int status, const char **out) { return *out = word_of(status) ? word_of(status)->cuda : nullptr, *out ? 0 : INVALID_VALUE; }
API cuGetErrorString(int status, const char **out) { return *out = word_of(status) ? word_of(status)->text : nullptr, *out ? 0 : INVALID_VALUE; }
#endif
API NAME(cuDeviceGetCount, hipGetDeviceCount)(int *out) {
    FREE();
    *out = int(seen.size());
    return seen.empty() ? NO_DEVICE : SUCCESS;
}
API NAME(cuDeviceGet, hipDeviceGet)(int *out, int index) {
    DEVICE(index);
    (void)card;
    *out = index;
    return 0;
}
API NAME(cuDeviceGetName, hipDeviceGetName)(char *out, int size, int index) {
    DEVICE(index);
    std::snprintf(out, size_t(size), "%s", card->text("name").c_str());
    return 0;
}
// CUDA's sixteen bytes; HIP's are the digits behind GPU-, of a chip without a number XX.
API NAME(cuDeviceGetUuid_v2, hipDeviceGetUuid)(unsigned char *out, int index) {
    DEVICE(index);
    const std::string digits = card->text("uuid").substr(4);
    std::memset(out, 0, 16);
#if defined(ROCM)
    std::memcpy(out, digits.data(), digits.size() < 16 ? digits.size() : 16);
#else
    int at = 0;
    for (size_t i = 0; i < digits.size() && at < 32; i++)
        if (digits[i] != '-') out[at / 2] = (unsigned char)(out[at / 2] << 4 | std::stoi(digits.substr(i, 1), nullptr, 16)), at++;
#endif
    return 0;
}
API NAME(cuDeviceGetPCIBusId, hipDeviceGetPCIBusId)(char *out, int size, int index) {
    DEVICE(index);
    std::snprintf(out, size_t(size), "%s", card->text("pci").c_str());
    return 0;
}
API NAME(cuDeviceGetAttribute, hipDeviceGetAttribute)(int *out, int attribute, int index) {
    DEVICE(index);
    const int arch = std::atoi(card->text("arch").c_str() + 3);
    switch (attribute) {
        case NAME(10, 87): *out = card->number_of("warp", 32); return 0;
        case NAME(16, 63): *out = card->number_of("units", 4); return 0;
        case NAME(18, 16): *out = card->number_of("integrated"); return 0;
        case NAME(102, 89): *out = card->number_of("vmm", 1); return 0;
        case NAME(75, -1): *out = arch / 10; return 0;
        case NAME(76, -2): *out = arch % 10; return 0;
    }
    return INVALID_VALUE;
}
API NAME(cuDeviceTotalMem_v2, hipDeviceTotalMem)(size_t *out, int index) {
    DEVICE(index);
    *out = card->total();
    return 0;
}
API NAME(cuDeviceCanAccessPeer, hipDeviceCanAccessPeer)(int *out, int index, int other) {
    DEVICE(index);
    if (!card_at(other)) return INVALID_DEVICE;
    *out = index != other && card->number_of("peers", 1) && card_at(other)->number_of("peers", 1);
    return 0;
}
#if defined(ROCM)
API hipSetDevice(int index) {
    DEVICE(index);
    (void)card;
    current = index;
    return 0;
}
// hipDeviceProp_tR0600: 1472 bytes, of which the name, the memory and the arch are told.
API hipGetDevicePropertiesR0600(char *out, int index) {
    DEVICE(index);
    std::memset(out, 0, 1472);
    std::snprintf(out, 256, "%s", card->text("name").c_str());
    std::snprintf(out + 1160, 256, "%s", card->text("arch").c_str());
    return 0;
}
// hipDeviceProp_t before 6.0: 792 bytes.
API hipGetDeviceProperties(char *out, int index) {
    DEVICE(index);
    std::memset(out, 0, 792);
    std::snprintf(out, 256, "%s", card->text("name").c_str());
    std::snprintf(out + 396, 256, "%s", card->text("arch").c_str());
    return 0;
}
#else
API cuDevicePrimaryCtxRetain(Card **out, int index) {
    DEVICE(index);
    *out = card, card->retained++;
    return 0;
}
API cuDevicePrimaryCtxRelease_v2(int index) {
    DEVICE(index);
    return card->retained ? (card->retained--, SUCCESS) : INVALID_CONTEXT;
}
API cuCtxSetCurrent(Card *card) {
    FREE();
    if (card && !card->retained) return INVALID_CONTEXT;
    current = -1;
    for (size_t i = 0; i < seen.size(); i++)
        if (seen[i] == card) current = int(i);
    return card && current < 0 ? INVALID_CONTEXT : SUCCESS;
}
API cuFuncSetAttribute(Function *function, int attribute, int value) {
    CARD();
    if (attribute != 8 || value < 0 || value > card->number_of("block_kib", 99) << 10) return INVALID_VALUE;
    function->shared = size_t(value);
    return 0;
}
#endif

// ---- memory

API NAME(cuMemGetInfo_v2, hipMemGetInfo)(size_t *left, size_t *total) {
    CARD();
    *left = free_of(card), *total = card->total();
    return 0;
}
API NAME(cuMemAlloc_v2, hipMalloc)(u64 *out, size_t size) {
    UNRECORDED();
    if (!size) return INVALID_VALUE;
    const u64 whole = rounded(size, PAGE);
    Physical *memory = physical(card, whole);
    if (!memory) return OUT_OF_MEMORY;
    memory->released = true;   // it goes with its mapping
    const u64 at = addresses(whole);
    if (!at || !put(at, whole, ALLOCATION, card, memory, 0, true)) return drop(memory), OUT_OF_MEMORY;
    *out = at;
    return 0;
}
API NAME(cuMemFree_v2, hipFree)(u64 at) {
    UNRECORDED();
    finish_all(card);
    const auto found = blocks.find(at);
    if (found == blocks.end() || found->second.kind != ALLOCATION) return INVALID_VALUE;
    const u64 size = found->second.size;
    take(at);
    no_addresses(at, size);
    return card->sticky;
}
// Whether host memory is mapped at all these addresses.
static bool is_there(u64 at, u64 size) {
    std::vector<unsigned char> pages(rounded(at % PAGE + size, PAGE) / PAGE);
    return !mincore(reinterpret_cast<void *>(at / PAGE * PAGE), at % PAGE + size, pages.data());
}
// Whether something that was asked for still reads or writes there.
static bool in_use(u64 at, u64 size) {
    for (const Stream &stream : streams)
        for (const Op &op : stream.queue)
            if (op.kind == Op::COPY && ((op.source < at + size && at < op.source + op.size) || (op.target < at + size && at < op.target + op.size)))
                return true;
    return false;
}
API NAME(cuMemHostRegister_v2, hipHostRegister)(u64 at, size_t size, unsigned flags) {
    UNRECORDED();
    if (!size || flags != 1) return INVALID_VALUE;   // portable: of any context
    for (const auto &pair : registered)
        if (at < pair.first + pair.second && pair.first < at + size) return REGISTERED;
    if (!is_there(at, size)) return INVALID_VALUE;
    registered[at] = size;
    return 0;
}
API NAME(cuMemHostUnregister, hipHostUnregister)(u64 at) {
    UNRECORDED();
    const auto found = registered.find(at);
    if (found == registered.end()) return NOT_REGISTERED;
    if (!is_there(at, found->second) || in_use(at, found->second)) return INVALID_VALUE;   // it waits for nobody
    registered.erase(found);
    return 0;
}

// For tests: bytes that are registered in this process.
extern "C" __attribute__((visibility("default"))) u64 fake_registered() {
    const std::lock_guard<std::recursive_mutex> alone(world);
    u64 total = 0;
    for (const auto &pair : registered) total += pair.second;
    return total;
}

// For tests: what the end of a process does for a card that it lost.
extern "C" __attribute__((visibility("default"))) void fake_end_of_process() {
    const std::lock_guard<std::recursive_mutex> alone(world);
    streams.clear(), registered.clear();
    while (!blocks.empty()) take(blocks.begin()->first);
}

struct Prop { int type, handles, where, card; void *win32; unsigned char flags[8]; };
static_assert(sizeof(Prop) == 32, "as in the vendors' headers");
struct Access { int where, card, flags; };

API NAME(cuMemGetAllocationGranularity, hipMemGetAllocationGranularity)(size_t *out, const Prop *prop, int) {
    DEVICE(prop->card);
    if (!card->number_of("vmm", 1) || prop->type != 1 || prop->where != 1) return NOT_SUPPORTED;
    *out = GRANULE;
    return 0;
}
API NAME(cuMemAddressReserve, hipMemAddressReserve)(u64 *out, size_t size, size_t align, u64, unsigned long long flags) {
    UNRECORDED();
    if (!card->number_of("vmm", 1)) return NOT_SUPPORTED;
    if (!size || size % GRANULE || align & (align - 1) || flags) return INVALID_VALUE;
    *out = addresses(size);
    if (!*out) return OUT_OF_MEMORY;
    reserved[*out] = size;
    return 0;
}
API NAME(cuMemAddressFree, hipMemAddressFree)(u64 at, size_t size) {
    UNRECORDED();
    const auto found = reserved.find(at);
    if (found == reserved.end() || found->second != size) return INVALID_VALUE;
    for (const auto &pair : blocks)
        if (pair.first < at + size && at < pair.first + pair.second.size) return INVALID_VALUE;   // something is mapped there
    no_addresses(at, size);
    reserved.erase(found);
    return 0;
}
API NAME(cuMemCreate, hipMemCreate)(Physical **out, size_t size, const Prop *prop, unsigned long long flags) {
    DEVICE(prop->card);
    if (card->sticky) return card->sticky;
    if (const int code = spoilt()) return code;
    if (!size || size % GRANULE || prop->type != 1 || prop->handles || prop->win32 || prop->where != 1 || flags) return INVALID_VALUE;
    *out = physical(card, size);
    return *out ? SUCCESS : OUT_OF_MEMORY;
}
API NAME(cuMemRelease, hipMemRelease)(Physical *memory) {
    FREE();
    memory->released = true;
    drop(memory);
    return 0;
}
API NAME(cuMemMap, hipMemMap)(u64 at, size_t size, size_t offset, Physical *memory, unsigned long long flags) {
    UNRECORDED();
    auto next = reserved.upper_bound(at);
    if (next == reserved.begin() || offset || flags || size > memory->size || size % GRANULE || at % GRANULE) return INVALID_VALUE;
    const auto range = *std::prev(next);
    if (at + size > range.first + range.second) return INVALID_VALUE;
    for (const auto &pair : blocks)
        if (pair.first < at + size && at < pair.first + pair.second.size) return INVALID_VALUE;
    return put(at, size, MAPPING, card, memory, 0, false) ? SUCCESS : OUT_OF_MEMORY;
}
API NAME(cuMemSetAccess, hipMemSetAccess)(u64 at, size_t size, const Access *access, size_t count) {
    UNRECORDED();
    const auto found = blocks.find(at);
    if (found == blocks.end() || found->second.kind != MAPPING || found->second.size != size || count != 1) return INVALID_VALUE;
    if (access->where != 1 || access->flags != 3 || card_at(access->card) != card) return INVALID_VALUE;
    found->second.accessible = true;
    return 0;
}
API NAME(cuMemUnmap, hipMemUnmap)(u64 at, size_t size) {
    UNRECORDED();
    const auto found = blocks.find(at);
    if (found == blocks.end() || found->second.kind != MAPPING || found->second.size != size) return INVALID_VALUE;
    take(at);
    return 0;
}

// ---- memory of other processes: 64 bytes

struct Handle { char magic[8]; int pid, fd; u64 size, inode; int card; char rest[28]; };
static_assert(sizeof(Handle) == 64, "as in the vendors' headers");

API NAME(cuIpcGetMemHandle, hipIpcGetMemHandle)(Handle *out, u64 at) {
    UNRECORDED();
    const auto found = blocks.find(at);
    if (found == blocks.end() || found->second.kind != ALLOCATION) return INVALID_VALUE;
    // What is smaller lies in a block with others, which a handle would show as a whole.
    if (found->second.size % GRANULE) return INVALID_VALUE;
    struct stat file;
    fstat(found->second.memory->fd, &file);
    *out = {{'f', 'a', 'k', 'e', VENDOR[0]}, getpid(), found->second.memory->fd, found->second.size, file.st_ino, card->number, {}};
    return 0;
}
API NAME(cuIpcOpenMemHandle_v2, hipIpcOpenMemHandle)(u64 *out, Handle handle, unsigned flags) {
    UNRECORDED();
    const char magic[8] = {'f', 'a', 'k', 'e', VENDOR[0]};
    if (std::memcmp(handle.magic, magic, 8) || handle.pid == getpid() || flags != 1) return INVALID_VALUE;   // a process cannot open its own
    if (handle.card != card->number && !card->number_of("peers", 1)) return PEER_UNSUPPORTED;
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat file;
    if (fd < 0 || fstat(fd, &file) || file.st_ino != handle.inode || u64(file.st_size) != handle.size) {
        if (fd >= 0) close(fd);
        return INVALID_VALUE;
    }
    const u64 at = addresses(handle.size);
    Physical *memory = new Physical{handle.size, fd, nullptr, 0, true};
    if (!at || !put(at, handle.size, FOREIGN, card, memory, 0, true)) return drop(memory), OUT_OF_MEMORY;
    *out = at;
    return 0;
}
API NAME(cuIpcCloseMemHandle, hipIpcCloseMemHandle)(u64 at) {
    UNRECORDED();
    finish_all(card);
    const auto found = blocks.find(at);
    if (found == blocks.end() || found->second.kind != FOREIGN) return INVALID_VALUE;
    const u64 size = found->second.size;
    take(at);
    no_addresses(at, size);
    return card->sticky;
}

// ---- modules: a text of the fake compilers, which names a library of emulated kernels

API NAME(cuModuleLoadDataEx, hipModuleLoadDataEx)(Module **out, const char *image, unsigned count, const int *options, void **values) {
    UNRECORDED();
    std::istringstream words(std::strncmp(image, "fake ", 5) ? "" : image);
    std::string magic, kind, arch, path;
    int warp = 0, toolkit = 0;
    words >> magic >> kind >> arch >> warp >> toolkit;
    std::getline(words, path);
    std::getline(words, path);
    if (magic != "fake") return INVALID_IMAGE;
    if (kind == "ptx" && toolkit > version) {
        for (unsigned i = 0; i + 1 < count; i++)
            if (options[i] == 5 && options[i + 1] == 6)
                std::snprintf(static_cast<char *>(values[i]), reinterpret_cast<size_t>(values[i + 1]),
                              "ptxas application ptx input, line 9; fatal   : Unsupported .version");
        return BAD_PTX;
    }
    const std::string own = card->text("arch");
    if ((kind != "ptx" && arch != own) || warp != card->number_of("warp", 32)) return NO_BINARY;
    void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) return std::fprintf(stderr, "fake card %d: %s\n", card->number, dlerror()), INVALID_IMAGE;
    Module *module = new Module{library, nullptr, nullptr, nullptr};
    module->find = reinterpret_cast<decltype(module->find)>(dlsym(library, "simt_find"));
    module->launch = reinterpret_cast<decltype(module->launch)>(dlsym(library, "simt_launch"));
    module->error = reinterpret_cast<decltype(module->error)>(dlsym(library, "simt_error"));
    *out = module;
    return 0;
}
API NAME(cuModuleUnload, hipModuleUnload)(Module *module) {
    UNRECORDED();
    for (const Stream &stream : streams)
        for (const Op &op : stream.queue)
            if (op.function && op.function->module == module) return INVALID_HANDLE;   // it waits for nobody
    dlclose(module->library);
    delete module;
    return 0;
}
API NAME(cuModuleGetFunction, hipModuleGetFunction)(Function **out, Module *module, const char *name) {
    CARD();
    const simt_entry *entry = module->find(name);
    if (!entry) return NOT_FOUND;
    *out = new Function{module, entry};
    return 0;
}
API NAME(cuLaunchKernel, hipModuleLaunchKernel)(Function *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                                                unsigned shared, Stream *stream, void **args, void **extra) {
    STREAM(stream);
    if (extra || !x || !y || !z || y > 65535 || z > 65535 || ty != 1 || tz != 1 || int(threads) > function->entry->threads) return INVALID_VALUE;
    if (NAME(x > 0x7fffffffu, u64(x) * threads > 0xffffffffu)) return INVALID_VALUE;   // HIP counts work items
    if (shared > (NAME(true, false) ? function->shared : 64 << 10)) return INVALID_VALUE;
    Op op{Op::LAUNCH};
    op.function = function, op.threads = int(threads), op.shared = shared;
    op.grid[0] = int(x), op.grid[1] = int(y), op.grid[2] = int(z);
    for (int i = 0; function->entry->kinds[i]; i++) {
        const char *kind = function->entry->kinds[i];
        u64 value = 0;
        std::memcpy(&value, args[i], !std::strcmp(kind, "pointer") || !std::strcmp(kind + 1, "64") ? 8 : 4);
        op.args.push_back(value);
    }
    return add(stream, op);
}

// ---- streams and events

API NAME(cuStreamCreate, hipStreamCreateWithFlags)(Stream **out, unsigned flags) {
    CARD();
    if (flags != 1) return INVALID_VALUE;   // one that waits for the default stream would be slow in silence
    streams.push_back({card, {}, {}, false, false});
    *out = &streams.back();
    return 0;
}
API NAME(cuStreamSynchronize, hipStreamSynchronize)(Stream *stream) {
    STREAM(stream);
    if (stream->capturing) return stream->spoilt = true, CAPTURE_UNSUPPORTED;
    finish(*stream);
    return card->sticky;
}
// A card goes on while nobody waits: who asks a second time finds its work done.
API NAME(cuStreamQuery, hipStreamQuery)(Stream *stream) {
    STREAM(stream);
    if (stream->capturing) return stream->spoilt = true, CAPTURE_UNSUPPORTED;
    if (stream->queue.empty()) return 0;
    if (!hangs(*stream)) finish(*stream);
    return card->sticky ? card->sticky : NOT_READY;
}
API NAME(cuStreamDestroy_v2, hipStreamDestroy)(Stream *stream) {
    STREAM(stream);
    if (const int code = spoilt()) return code;
    finish(*stream);
    streams.remove_if([&](const Stream &each) { return &each == stream; });
    return card->sticky;
}
API NAME(cuMemsetD8Async, hipMemsetD8Async)(u64 at, unsigned char byte, size_t size, Stream *stream) {
    STREAM(stream);
    if (!holds(at, size)) return INVALID_VALUE;
    Op op{Op::FILL};
    op.target = at, op.size = size, op.byte = byte;
    return add(stream, op);
}
API NAME(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync)(u64 target, u64 source, size_t size, Stream *stream) {
    STREAM(stream);
    return moved(stream, target, source, size, true, false);
}
API NAME(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync)(u64 target, u64 source, size_t size, Stream *stream) {
    STREAM(stream);
    return moved(stream, target, source, size, false, true);
}
API NAME(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync)(u64 target, u64 source, size_t size, Stream *stream) {
    STREAM(stream);
    return moved(stream, target, source, size, true, true);
}
API NAME(cuEventCreate, hipEventCreateWithFlags)(Event **out, unsigned) {
    CARD();
    *out = new Event;
    return 0;
}
API NAME(cuEventRecord, hipEventRecord)(Event *event, Stream *stream) {
    STREAM(stream);
    Op op{Op::EVENT};
    op.event = event, event->done = false;
    return add(stream, op);
}
API NAME(cuEventSynchronize, hipEventSynchronize)(Event *) {
    UNRECORDED();
    finish_all(card);
    return card->sticky;
}
API NAME(cuEventElapsedTime, hipEventElapsedTime)(float *out, Event *begin, Event *end) {
    CARD();
    if (!begin->done || !end->done) return NOT_READY;
    *out = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
    return 0;
}
API NAME(cuEventDestroy_v2, hipEventDestroy)(Event *event) {
    UNRECORDED();
    finish_all(card);
    delete event;
    return card->sticky;
}

// ---- graphs

API NAME(cuStreamBeginCapture_v2, hipStreamBeginCapture)(Stream *stream, int mode) {
    STREAM(stream);
    if (stream->capturing || recording || mode != 1) return INVALID_VALUE;   // calls of other threads are no business of ours
    recording = stream;
    stream->capturing = true, stream->spoilt = false, stream->captured.clear();
    return 0;
}
API NAME(cuStreamEndCapture, hipStreamEndCapture)(Stream *stream, Graph **out) {
    const bool was = stream->capturing;
    *out = nullptr, stream->capturing = false, recording = nullptr;   // it ends, whatever comes of it
    CARD();
    if (!was) return INVALID_VALUE;
    if (stream->spoilt) return CAPTURE_INVALIDATED;
    *out = new Graph{stream->captured};
    return 0;
}
#if defined(ROCM)
API hipGraphInstantiate(Graph **out, Graph *graph, void **error_node, char *, size_t) {
    CARD();
    if (error_node) *error_node = nullptr;
#else
API cuGraphInstantiateWithFlags(Graph **out, Graph *graph, unsigned long long) {
    CARD();
#endif
    *out = new Graph(*graph);
    return 0;
}
API NAME(cuGraphLaunch, hipGraphLaunch)(Graph *graph, Stream *stream) {
    STREAM(stream);
    for (const Op &op : graph->ops) add(stream, op);
    return 0;
}
API NAME(cuGraphDestroy, hipGraphDestroy)(Graph *graph) {
    FREE();
    delete graph;
    return 0;
}
API NAME(cuGraphExecDestroy, hipGraphExecDestroy)(Graph *graph) {
    FREE();
    delete graph;
    return 0;
}
