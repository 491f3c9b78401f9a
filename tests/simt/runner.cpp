// Runs the launches of a case file and writes the memory back: for sanitizers, which want a process without Python.
//
//     runner CASE RESULT
//
// All numbers are of 8 bytes in the machine's order. A case: how many buffers, of each its address where the case was made, its
// size, 1 if its words are addresses themselves (else 0), and its bytes; how many launches, of each the length of the entry's
// name, the name, grid x y z, threads, bytes of block memory, how many arguments, and 8 bytes for each; then 1 for blocks and
// threads in descending order. Every buffer becomes an allocation of exactly its size; addresses that point into one (or right
// behind it) are moved with it. The result is the bytes of all buffers in order. Exit: 0, 3 after a fault (told on stderr), and
// 2 where the case is not one.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "simt.h"

namespace {

struct Buffer {
    uint64_t address, size;
    bool addresses;
    char *at;
};

[[noreturn]] void refuse(const std::string &why) {
    std::fprintf(stderr, "%s\n", why.c_str());
    std::exit(2);
}

struct Reader {
    FILE *file;
    void bytes(void *to, size_t size) {
        if (size && std::fread(to, 1, size, file) != size) refuse("the case file is too short");
    }
    uint64_t number() {
        uint64_t got;
        bytes(&got, sizeof got);
        return got;
    }
};

uint64_t moved(const std::vector<Buffer> &buffers, uint64_t address) {
    if (!address) return 0;
    for (const bool behind : {false, true})
        for (const Buffer &each : buffers)
            if (address >= each.address && address - each.address < each.size + behind)
                return reinterpret_cast<uint64_t>(each.at) + (address - each.address);
    char line[64];
    std::snprintf(line, sizeof line, "address %" PRIx64 " is in no buffer of the case", address);
    refuse(line);
}

std::vector<Buffer> read_buffers(Reader &in) {
    std::vector<Buffer> buffers(in.number());
    for (Buffer &each : buffers) {
        each.address = in.number(), each.size = in.number(), each.addresses = in.number();
        void *at = nullptr;
        if (posix_memalign(&at, 256, each.size ? each.size : 1)) refuse("no memory");
        each.at = static_cast<char *>(at);
        in.bytes(each.at, each.size);
    }
    for (Buffer &each : buffers)
        for (uint64_t i = 0; each.addresses && i + 8 <= each.size; i += 8) {
            uint64_t address;
            std::memcpy(&address, each.at + i, 8);
            address = moved(buffers, address);
            std::memcpy(each.at + i, &address, 8);
        }
    return buffers;
}

struct Call {
    const simt_entry *entry;
    int grid[3], threads;
    size_t shared;
    std::vector<uint64_t> args;
};

Call read_call(Reader &in, const std::vector<Buffer> &buffers) {
    Call call;
    std::string name(in.number(), ' ');
    in.bytes(&name[0], name.size());
    call.entry = simt_find(name.c_str());
    if (!call.entry) refuse("no entry " + name);
    for (int &each : call.grid) each = int(in.number());
    call.threads = int(in.number()), call.shared = in.number();
    call.args.resize(in.number());
    const char *const *kind = call.entry->kinds;
    for (uint64_t &each : call.args) {
        if (!*kind) refuse("too many arguments for " + name);
        each = in.number();
        if (!std::strcmp(*kind++, "pointer")) each = moved(buffers, each);
    }
    if (*kind) refuse("too few arguments for " + name);
    return call;
}

void launch(Call &call, bool backwards) {
    std::vector<void *> args;
    for (uint64_t &each : call.args) args.push_back(&each);
    if (!simt_launch(call.entry, call.grid, call.threads, call.shared, args.data(), backwards)) return;
    std::fprintf(stderr, "%s\n", simt_error());
    std::exit(3);
}

}  // namespace

int main(int count, char **words) {
    if (count != 3) refuse("runner CASE RESULT");
    Reader in = {std::fopen(words[1], "rb")};
    if (!in.file) refuse(std::string("cannot read ") + words[1]);
    const std::vector<Buffer> buffers = read_buffers(in);
    std::vector<Call> calls;
    for (uint64_t left = in.number(); left; left--) calls.push_back(read_call(in, buffers));
    const bool backwards = in.number();
    for (Call &each : calls) launch(each, backwards);
    FILE *out = std::fopen(words[2], "wb");
    if (!out) refuse(std::string("cannot write ") + words[2]);
    for (const Buffer &each : buffers) std::fwrite(each.at, 1, each.size, out);
    return std::fclose(out) ? 2 : 0;
}
