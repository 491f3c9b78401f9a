// NVRTC without NVIDIA, libnvrtc.so.13, or with -DROCM hiprtc: a library of the same functions whose code is for the fake
// driver. It writes the source and the headers that it was given into a folder, and nothing else is there: a header that is
// not given is not found. What compiles them is g++, against tests/simt (tests/fakes/compile.py); what comes back is a text
// that names the library:
//
//     fake cubin sm_86 32 13000
//     /…/norm-0123456789abcdef.so
//
// The file `compiler` beside this library says, a line each: Python, compile.py, a folder for what is compiled, and a word
// that changes with everything that decides a library but is not given here.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#if defined(ROCM)
#define NAME(nvrtc, hiprtc) hiprtc
#else
#define NAME(nvrtc, hiprtc) nvrtc
#endif
#define API extern "C" __attribute__((visibility("default"))) int

namespace {

enum { SUCCESS = 0, INVALID_INPUT = 3, COMPILATION = 6 };
const int ARCHES[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};
constexpr int MAJOR = NAME(13, 7), MINOR = 99;   // of no real library, whose code would be taken for ours

struct Program {
    std::string name, text, log, code;
    std::vector<std::string> names, texts;
};

std::string folder() {
    Dl_info info;
    dladdr(reinterpret_cast<void *>(&folder), &info);
    const std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/') + 1);
}

std::string line_of(std::istream &file) {
    std::string line;
    std::getline(file, line);
    return line;
}

uint64_t digest(const Program &program, const std::string &more) {   // FNV-1a, with a length before each part
    uint64_t total = 14695981039346656037u;
    const auto add = [&](const std::string &part) {
        for (const char c : std::to_string(part.size()) + ":" + part) total = (total ^ (unsigned char)c) * 1099511628211u;
    };
    add(program.name), add(program.text), add(more);
    for (size_t i = 0; i < program.names.size(); i++) add(program.names[i]), add(program.texts[i]);
    return total;
}

// Whole or not at all: others may read it.
void write(const std::string &path, const std::string &text) {
    std::ostringstream own;
    own << path << "." << getpid() << "." << pthread_self();
    std::ofstream(own.str(), std::ios::binary) << text;
    std::rename(own.str().c_str(), path.c_str());
}

std::string quoted(const std::string &word) {
    std::string all = "'";
    for (const char c : word) all += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return all + "'";
}

// The library of a program: its path, or empty with the log filled in.
std::string built(Program &program, int warp, const std::string &defines) {
    std::ifstream settings(folder() + "compiler");
    const std::string python = line_of(settings), script = line_of(settings), store = line_of(settings), word = line_of(settings);
    char name[40];
    std::snprintf(name, sizeof name, "/%016llx", (unsigned long long)digest(program, defines + " " + std::to_string(warp) + " " + word));
    const std::string place = store + name, made = place + "/made";
    std::ifstream before(made);
    std::string path = line_of(before);
    if (!path.empty() && !access(path.c_str(), R_OK)) return path;
    mkdir(store.c_str(), 0700), mkdir(place.c_str(), 0700);
    write(place + "/" + program.name, program.text);
    for (size_t i = 0; i < program.names.size(); i++) write(place + "/" + program.names[i], program.texts[i]);
    std::string command = quoted(python) + " " + quoted(script) + " " + quoted(place + "/" + program.name) + " " + std::to_string(warp);
    std::istringstream words(defines);
    for (std::string each; words >> each;) command += " " + quoted(each);
    FILE *said = popen((command + " 2>&1").c_str(), "r");
    std::string all;
    char part[4096];
    for (size_t count; said && (count = std::fread(part, 1, sizeof part, said)) > 0;) all.append(part, count);
    if (!said || pclose(said)) return program.log = all, std::string();
    path = all.substr(0, all.find('\n'));
    write(made, path + "\n");
    return path;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const char *NAME(nvrtcGetErrorString, hiprtcGetErrorString)(int status) {
    return status == COMPILATION ? NAME("NVRTC_ERROR_COMPILATION", "HIPRTC_ERROR_COMPILATION")
           : status              ? NAME("NVRTC_ERROR_INVALID_INPUT", "HIPRTC_ERROR_INVALID_INPUT")
                                 : NAME("NVRTC_SUCCESS", "HIPRTC_SUCCESS");
}
API NAME(nvrtcVersion, hiprtcVersion)(int *major, int *minor) { return *major = MAJOR, *minor = MINOR, SUCCESS; }
#if !defined(ROCM)
API nvrtcGetNumSupportedArchs(int *count) { return *count = int(sizeof ARCHES / sizeof *ARCHES), SUCCESS; }
API nvrtcGetSupportedArchs(int *numbers) { return std::memcpy(numbers, ARCHES, sizeof ARCHES), SUCCESS; }
#endif

API NAME(nvrtcCreateProgram, hiprtcCreateProgram)(Program **made, const char *text, const char *name, int count, const char **headers,
                                                  const char **names) {
    *made = new Program{name, text, "", "", {}, {}};
    for (int i = 0; i < count; i++) (*made)->names.push_back(names[i]), (*made)->texts.push_back(headers[i]);
    return SUCCESS;
}

// --gpu-architecture says for whom, -D what is restricted; other options are those of the real compilers.
API NAME(nvrtcCompileProgram, hiprtcCompileProgram)(Program *program, int count, const char **options) {
    std::string target, defines;
    for (int i = 0; i < count; i++) {
        const std::string option = options[i];
        if (!option.rfind("--gpu-architecture=", 0)) target = option.substr(19);
        if (!option.rfind("-D", 0)) defines += " " + option.substr(2);
    }
    if (target.empty()) return INVALID_INPUT;
    const bool ptx = !target.rfind("compute_", 0);
    const int warp = NAME(32, !target.rfind("gfx9", 0) ? 64 : 32);
    const std::string plain = target.substr(0, target.find(':'));
#if defined(ROCM)
    if (!plain.rfind("gfx12", 0)) defines += " TILES_WMMA12";
    if (!plain.rfind("gfx10", 0) || plain == "gfx900" || plain == "gfx906") defines += " TILES_PLAIN";
#else
    if (target == "sm_75" || target == "compute_75") defines += " TILES_MMA8";
#endif
    const std::string path = built(*program, warp, defines);
    if (path.empty()) return COMPILATION;
    program->code = std::string("fake ") + (ptx ? "ptx " : NAME("cubin ", "object ")) + target + " " + std::to_string(warp) + " " +
                    std::to_string(NAME(13000, 0)) + "\n" + path + "\n";
    return SUCCESS;
}

API NAME(nvrtcGetProgramLogSize, hiprtcGetProgramLogSize)(Program *program, size_t *size) { return *size = program->log.size() + 1, SUCCESS; }
API NAME(nvrtcGetProgramLog, hiprtcGetProgramLog)(Program *program, char *log) { return std::strcpy(log, program->log.c_str()), SUCCESS; }
API NAME(nvrtcGetCUBINSize, hiprtcGetCodeSize)(Program *program, size_t *size) { return *size = program->code.size(), SUCCESS; }
API NAME(nvrtcGetCUBIN, hiprtcGetCode)(Program *program, char *code) { return std::memcpy(code, program->code.data(), program->code.size()), SUCCESS; }
#if !defined(ROCM)
API nvrtcGetPTXSize(Program *program, size_t *size) { return *size = program->code.size(), SUCCESS; }
API nvrtcGetPTX(Program *program, char *code) { return std::memcpy(code, program->code.data(), program->code.size()), SUCCESS; }
#endif
API NAME(nvrtcDestroyProgram, hiprtcDestroyProgram)(Program **program) { return delete *program, *program = nullptr, SUCCESS; }
