// The C interface of a library of emulated kernels: what simt_rig.py, the runner and a fake driver call.
#pragma once

#include <cstddef>
#include <cstdint>

#define SIMT_API extern "C" __attribute__((visibility("default")))

// Entries, in the order of the source. `params` is the parameter list as written, `kinds` a word for each parameter
// (pointer, i32, u32, i64, u64, float), and a null behind them.
struct simt_entry {
    const char *name, *params, *const *kinds;
    int threads, blocks;
    void (*function)();
    void (*call)(void (*function)(), void **args);
};
SIMT_API int simt_warp();
SIMT_API int simt_count();
SIMT_API const simt_entry *simt_get(int index);
SIMT_API const simt_entry *simt_find(const char *name);   // null: there is none

// One launch, as cuLaunchKernel has it: `args[i]` points to argument i. Blocks and threads run in ascending order, or where
// `backwards` is not 0 the other way. Returns 0, or 1 after a fault, which simt_error (of this thread) tells. Launches of
// several threads take turns.
SIMT_API int simt_launch(const simt_entry *entry, const int *grid, int threads, size_t shared, void **args, int backwards);
SIMT_API const char *simt_error();
SIMT_API size_t simt_block_memory();   // bytes of block memory of the last launch of this thread, declared and asked for
