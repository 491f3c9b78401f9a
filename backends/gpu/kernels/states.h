// Copies of state slots, in the order that they are asked for.
//
// A slot is all recurrent layers of a sequence, one behind the other, so a copy is one run of memory. Pairs (source, target) may
// depend on those before them (a swap goes through a third slot). Blocks have no order, but a byte depends on the bytes at the
// same place of other slots alone: each thread takes 16 bytes of the slot through all pairs, and what it wrote it reads.
//
// Block: 256 threads, 16 bytes each; grid ceil(slot bytes / 4096). 20 registers, no block memory. Roofline: memory, a slot read
// and a slot written a pair, all useful; 48 delta nets of 32 heads 128 x 128 are 100 MB a slot, so one pair fills the card.
#pragma once

DEVICE void copy_state_pairs(u8 *states, i64 slot_bytes, const int *pairs, int count) {
    const i64 at = 16 * ((i64)block_x() * threads() + thread());
    if (at >= slot_bytes) return;
    for (int i = 0; i < count; i++) {
        const i64 source = pairs[2 * i], target = pairs[2 * i + 1];
        if (source != target) store128(states + target * slot_bytes + at, load128(states + source * slot_bytes + at));
    }
}
