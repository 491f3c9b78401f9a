// A library with hiprtc's functions as ROCm declares them. It compiles nothing: it appends what it was given to the file
// that HIPRTC_FAKE names, and says what HIPRTC_FAKE_SAYS asks for: "error" fails with a log, "slow" takes half a second.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unistd.h>

#ifndef MAJOR
#define MAJOR 7
#endif

enum hiprtcResult { HIPRTC_SUCCESS = 0, HIPRTC_ERROR_INVALID_INPUT = 3, HIPRTC_ERROR_COMPILATION = 6 };

struct _hiprtcProgram {
    std::string name, text, log, code;
};
typedef _hiprtcProgram *hiprtcProgram;

static void note(const std::string &line) {
    const char *path = getenv("HIPRTC_FAKE");
    FILE *file = path ? fopen(path, "a") : nullptr;
    if (!file) return;
    fputs((line + "\n").c_str(), file);
    fclose(file);
}

static bool says(const char *word) {
    const char *text = getenv("HIPRTC_FAKE_SAYS");
    return text && !strcmp(text, word);
}

extern "C" {
const char *hiprtcGetErrorString(hiprtcResult result) {
    return result == HIPRTC_ERROR_COMPILATION ? "HIPRTC_ERROR_COMPILATION" : result ? "HIPRTC_ERROR_INVALID_INPUT" : "HIPRTC_SUCCESS";
}

#ifndef WITHOUT_VERSION
hiprtcResult hiprtcVersion(int *major, int *minor) {
    *major = MAJOR;
    *minor = 1;
    return HIPRTC_SUCCESS;
}
#endif

hiprtcResult hiprtcCreateProgram(hiprtcProgram *made, const char *text, const char *name, int count, const char **headers,
                                 const char **names) {
    if (says("refuse")) return HIPRTC_ERROR_INVALID_INPUT;
    *made = new _hiprtcProgram{name, text, "", ""};
    note("create " + std::string(name) + " " + std::to_string(strlen(text)));
    for (int i = 0; i < count; i++) note("header " + std::string(names[i]) + " " + std::to_string(strlen(headers[i])));
    return HIPRTC_SUCCESS;
}

hiprtcResult hiprtcCompileProgram(hiprtcProgram program, int count, const char **options) {
    std::string all;
    for (int i = 0; i < count; i++) all += std::string(" ") + options[i];
    note("compile" + all);
    if (says("slow")) usleep(500000);
    if (says("error")) {
        program->log = program->name + ":3:5: error: use of undeclared identifier 'lane'";
        return HIPRTC_ERROR_COMPILATION;
    }
    program->log = says("warn") ? "a warning" : "";
    program->code = std::string("\x7f" "ELF\0", 5) + program->name + all;
    return HIPRTC_SUCCESS;
}

// Sizes of texts count the zero at their end.
hiprtcResult hiprtcGetProgramLogSize(hiprtcProgram program, size_t *size) {
    *size = program->log.size() + 1;
    return HIPRTC_SUCCESS;
}

hiprtcResult hiprtcGetProgramLog(hiprtcProgram program, char *log) {
    memcpy(log, program->log.c_str(), program->log.size() + 1);
    return HIPRTC_SUCCESS;
}

hiprtcResult hiprtcGetCodeSize(hiprtcProgram program, size_t *size) {
    *size = program->code.size();
    return HIPRTC_SUCCESS;
}

hiprtcResult hiprtcGetCode(hiprtcProgram program, char *code) {
    memcpy(code, program->code.data(), program->code.size());
    return HIPRTC_SUCCESS;
}

hiprtcResult hiprtcDestroyProgram(hiprtcProgram *program) {
    note("destroy");
    delete *program;
    *program = nullptr;
    return HIPRTC_SUCCESS;
}
}
