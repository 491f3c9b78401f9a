// Kernels that show what the emulation does: what every lane gets from its neighbours, and, by an argument, each mistake that
// it must find. Launched by tests/kernel/test_simt.py.
#include "device.h"

// Of each thread: where it stands, and what the functions of a warp and a block give it.
KERNEL(meetings, 256, 1)(const float *in, int *who, float *sums, u32 *words, u64 *votes) {
    SHARED(float, part, 256 / 32);
    const int i = block_x() * threads() + thread();
    who[4 * i] = thread(), who[4 * i + 1] = lane(), who[4 * i + 2] = warp(), who[4 * i + 3] = block_z() * 100 + block_y();
    sums[5 * i] = group_sum(in[i]);
    sums[5 * i + 1] = group_max(in[i]);
    sums[5 * i + 2] = group_sum<8>(in[i]);
    sums[5 * i + 3] = block_sum(in[i], part);
    sums[5 * i + 4] = block_max(in[i], part);
    words[4 * i] = shuffle(u32(i), (3 * lane() + 1) % WARP);
    words[4 * i + 1] = u32(shuffle_xor(i, 5));
    words[4 * i + 2] = u32(shuffle_down(i, 3));
    words[4 * i + 3] = u32(dot4(i * 0x01030507, -i, 7));
    votes[i] = ballot(in[i] > 0);
}

KERNEL(halves, 64, 1)(const float *in, half_t *narrow, float *wide, int count) {
    for (int i = thread(); i < count; i += threads()) {
        narrow[i] = float_to_half(in[i]);
        if (i < 65536) wide[i] = half_to_float(half_t(i));
    }
}

KERNEL(count_all, 64, 1)(u64 *total, float *sum, i64 by, u32 low) {
    atomic_add(total, u64(by) + low);
    atomic_add(sum, 0.5f);
}

// Fifty barriers, each of which somebody depends on.
KERNEL(fifty_barriers, 256, 1)(int *out) {
    SHARED(int, at, 256);
    at[thread()] = thread();
    for (int i = 0; i < 25; i++) {
        block_barrier();
        const int next = at[(thread() + 1) % threads()];
        block_barrier();
        at[thread()] = next;
    }
    out[thread()] = at[thread()];
}

// A neighbour's value through block memory; `how`: 0 with a barrier, 1 without, 2 the lanes' barrier, 3 the lanes' barrier where
// the neighbour is of another warp, 4 a shuffle, which orders nothing.
KERNEL(neighbour, 128, 1)(float *out, int how) {
    SHARED(float, at, 128);
    at[thread()] = float(thread());
    if (how == 0) block_barrier();
    if (how == 2 || how == 3) warp_barrier();
    if (how == 4) out[thread()] = shuffle_xor(1.0f, 1);
    out[thread()] = at[how == 2 || how == 4 ? thread() ^ 1 : (thread() + WARP) % threads()];
}

// All blocks write one word: a race unless by an atomic.
KERNEL(blocks_meet, 32, 1)(float *out, int atomic) {
    if (thread()) return;
    if (atomic) atomic_add(out, 1.0f);
    else *out = float(block_x());
}

// Index `at` of: 0 an array in block memory, 1 the launch's block memory, 2 global memory.
KERNEL(overrun, 32, 1)(float *out, int where, int at) {
    SHARED(float, array, 24);
    float *const memory[] = {array, reinterpret_cast<float *>(dynamic_shared()), out};
    if (thread() == 0) memory[where][at] = 1.0f;
}

// What the second block finds in memory that the first has filled.
KERNEL(not_written, 32, 1)(float *out) {
    SHARED(float, array, 32);
    float *asked = reinterpret_cast<float *>(dynamic_shared());
    if (block_x() == 0) array[thread()] = asked[thread()] = 1.0f;
    block_barrier();
    out[64 * block_x() + thread()] = array[thread()];
    out[64 * block_x() + 32 + thread()] = asked[thread()];
}

// Who goes astray: 0 the lanes from 7 on meet elsewhere, 1 warp 1 does not come to a barrier, 2 lane 5 leaves before a shuffle,
// 3 the warps stand at different barriers, 4 a shuffle from a lane that is not there, 5 a load that is not aligned.
KERNEL(astray, 128, 1)(u32 *out, int how) {
    u32 v = u32(thread());
    if (how == 0) {
        if (lane() < 7) v = shuffle_xor(v, 1);
        else v = u32(ballot(true));
    }
    if (how == 1 && warp() != 1) block_barrier();
    if (how == 2) {
        if (thread() == 5) return;
        v = shuffle_xor(v, 1);
    }
    if (how == 3) {
        if (warp() == 0) block_barrier();
        else block_barrier();
    }
    if (how == 4) v = shuffle(v, WARP + int(v));
    if (how == 5) v = load128(out + 1).x;
    out[thread()] = v;
}

// One product of each tile operation: C (16 x 16) = A B from `a` (row, k) and `b` (k, col), or with `turned` (col, k).
KERNEL(tiles, 64, 1)(const half_t *a, const half_t *b, float *c, int turned) {
    constexpr int STRIDE = tile_stride(16);
    SHARED(half_t, left, 16 * STRIDE);
    SHARED(half_t, right, 16 * STRIDE);
    for (int i = thread(); i < 256; i += threads()) {
        left[i / 16 * STRIDE + i % 16] = a[i];
        right[i / 16 * STRIDE + i % 16] = b[i];
    }
    block_barrier();
    TileA tile_a;
    TileB tile_b;
    TileC tile_c;
    tile_zero(tile_c);
    tile_load_a(tile_a, left, STRIDE);
    if (turned) tile_load_b(tile_b, right, STRIDE);
    else tile_load_bt(tile_b, right, STRIDE);
    tile_multiply(tile_c, tile_a, tile_b);
    tile_each(tile_c, [&](int row, int col, float &value) { c[row * 16 + col] = value; });
}
