// The exported functions that need no more than a team: which ABI this is, teams, and moves of memory.
#include <new>
#include <system_error>
#include <utility>
#include <vector>

#include "hs_collective.h"
#include "hs_host.h"
#include "move.h"
#include "team.h"

#define HS_API extern "C" __attribute__((visibility("default")))

HS_API int32_t hs_host_version(void) { return HS_HOST_VERSION; }

HS_API void hs_host_sizes(int32_t out[8]) {
    out[0] = sizeof(hs_pieces);
    out[1] = sizeof(hs_stamp);
    out[2] = sizeof(hs_exchange);
    out[3] = sizeof(hs_mail);
    out[4] = sizeof(hs_channel);
    out[5] = sizeof(hs_act_part);
    out[6] = sizeof(hs_act);
    out[7] = sizeof(hs_merge);
}

HS_API int32_t hs_pack(hs_team *team, const hs_pieces *pieces, uint8_t *stream, uint64_t *digest) {
    return hs::move_pieces(team->team, hs::Way::PACK, *pieces, stream, digest);
}

HS_API int32_t hs_fill(hs_team *team, const hs_pieces *pieces, uint8_t *stream, uint64_t *digest) {
    return hs::move_pieces(team->team, hs::Way::FILL, *pieces, stream, digest);
}

HS_API int32_t hs_unpack(hs_team *team, const hs_pieces *pieces, const uint8_t *stream) {
    return hs::move_pieces(team->team, hs::Way::UNPACK, *pieces, const_cast<uint8_t *>(stream), nullptr);
}

HS_API uint64_t hs_digest(hs_team *team, const uint8_t *at, size_t bytes) { return hs::digest_of(team->team, at, bytes); }

HS_API hs_team *hs_team_create(int32_t threads, const int32_t *cores, int32_t core_count, int32_t spin, int32_t *error) {
    *error = HS_OK;
    try {
        std::vector<int> pinned(cores, cores + (cores ? core_count : 0));
        return new hs_team{{threads > 1 ? threads : 1, std::move(pinned), spin > 0 ? spin : 0}};
    } catch (const std::system_error &) {
        *error = HS_E_THREAD;
    } catch (const std::bad_alloc &) {
        *error = HS_E_THREAD;
    }
    return nullptr;
}

HS_API void hs_team_destroy(hs_team *team) { delete team; }
