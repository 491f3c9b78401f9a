// Pieces of memory into one stream and back, and the stream's digest (move.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "hs_host.h"
#include "team.h"

namespace hs {

enum class Way { PACK, FILL, UNPACK, DIGEST };

// HS_OK, or HS_E_SHAPE before anything was copied. `digest` is of what was packed, or of what lies in the stream after a fill.
int32_t move_pieces(Team &team, Way way, const hs_pieces &pieces, uint8_t *stream, uint64_t *digest);
uint64_t digest_of(Team &team, const uint8_t *at, size_t bytes);

}  // namespace hs
