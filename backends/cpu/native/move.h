// Pieces of memory into one stream and back, and the stream's digest (move.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "hs_cpu.h"
#include "team.h"

namespace hs {

// HS_OK, or HS_E_SHAPE before anything was copied. `digest` is of what was packed.
int32_t move_pieces(Team &team, bool pack, const hs_pieces &pieces, uint8_t *stream, uint64_t *digest);
uint64_t digest_of(Team &team, const uint8_t *at, size_t bytes);

}  // namespace hs
