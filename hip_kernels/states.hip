#include "device.h"
#include "states.h"

KERNEL(copy_states, 256, 4)(u8 *states, i64 slot_bytes, const int *pairs, int count) { copy_state_pairs(states, slot_bytes, pairs, count); }
