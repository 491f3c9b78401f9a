/* What every backend uses of host memory, the first part of its C ABI: threads, mappings, moves of memory and their digest. The
 * second part is hs_collective.h: exchanges with other ranks.
 *
 * One library has these two alone (libhomeserve_host: of any CPU of its architecture, no ISA levels); the libraries of the CPU
 * backend have them beside their own (hs_cpu.h), whose programs exchange between two steps. Python reaches them by ctypes
 * (backends/host/abi.py mirrors every struct; `hs_host_sizes` lets it prove that at load).
 *
 * Memory belongs to the caller. No function throws; those that can fail return HS_OK or a negative HS_E code, or an errno where
 * they say so.
 */
#ifndef HS_HOST_H
#define HS_HOST_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HS_HOST_VERSION 1

/* Of all parts of the ABI; -1 and -3 are hs_cpu.h's. */
enum { HS_OK = 0, HS_E_SHAPE = -2, HS_E_THREAD = -4, HS_E_LATE = -5, HS_E_STAMP = -6, HS_E_CREDIT = -7 };

int32_t hs_host_version(void);
/* Sizes of hs_pieces, and of hs_stamp, hs_exchange, hs_mail, hs_channel, hs_act_part, hs_act, hs_merge of hs_collective.h, in this
 * order. */
void hs_host_sizes(int32_t out[8]);

/* A pool of threads; the thread that calls is its thread 0. `cores` (or null) pins thread i to cores[i]. `spin` bounds waiting by
 * spinning, in pause instructions; 0 sleeps at once. */
typedef struct hs_team hs_team;
hs_team *hs_team_create(int32_t threads, const int32_t *cores, int32_t core_count, int32_t spin, int32_t *error);
void hs_team_destroy(hs_team *team);

/* Anonymous zeroed memory, aligned to 2 MiB, not committed until touched; `huge` asks for huge pages. Null: errno.
 * The mapping stands alone: a page without access lies on each side, so the kernel never joins it to a neighbour and what
 * is resident of it can be read in /proc/PID/smaps by its address. `name` is given to it where the kernel takes names. */
void *hs_map(size_t bytes, int32_t huge, const char *name, int32_t *error);
void hs_unmap(void *address, size_t bytes);
/* Have the system hold every page of [address, address + bytes) now; what is there stays. 0, or an errno. */
int32_t hs_commit(hs_team *team, void *address, size_t bytes);
/* Give the pages of [address, address + bytes) of a mapping back to the system: they read as zeros from then on. 0, or an errno. */
int32_t hs_release(void *address, size_t bytes);

/* Pieces of memory that stand one behind the other in a stream: piece i is at `places[i]` and ends in the stream at ends[i], which
 * never falls. Where a stream is made of pieces, a place of null is zeros. */
typedef struct hs_pieces {
    uint8_t *const *places;
    const int64_t *ends;
    int64_t count;
    int64_t chunk; /* bytes that a thread takes at once, a multiple of HS_DIGEST_BLOCK; 0: HS_MOVE_CHUNK */
} hs_pieces;

enum { HS_DIGEST_BLOCK = 16384, HS_MOVE_CHUNK = 131072 };

/* The stream of `pieces` from them (pack), with its digest (move.cpp), or them from the stream (unpack), by all threads of the team.
 * A fill is a pack whose digest is of what is loaded from the stream behind the copy. HS_OK, or HS_E_SHAPE before anything was
 * copied. */
int32_t hs_pack(hs_team *team, const hs_pieces *pieces, uint8_t *stream, uint64_t *digest);
int32_t hs_fill(hs_team *team, const hs_pieces *pieces, uint8_t *stream, uint64_t *digest);
int32_t hs_unpack(hs_team *team, const hs_pieces *pieces, const uint8_t *stream);
uint64_t hs_digest(hs_team *team, const uint8_t *at, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
