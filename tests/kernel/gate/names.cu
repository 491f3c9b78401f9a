// Every name that device.h promises, used once: compiled for every arch by the gate's tests, and never run.
#include "device.h"

KERNEL(every_name, 128, 2)(const u8 *weights, float *out, int *words, half_t *halves, int bound) {
    SHARED(float, part, 32);
    SHARED(int, kept, 128);
    kept[thread()] = words[thread()];
    block_barrier();
    const Words4 w = load_once(weights + 16 * thread()), v = load128(weights + 16 * (thread() + 128));
    int sum = dot4(w.x, v.x, dot4(w.y, v.y, dot4(w.z, v.z, dot4(w.w, v.w, kept[127 - thread()]))));
    warp_barrier();
    sum += shuffle(sum, lane() ^ 5) + shuffle_xor(sum, 16) + shuffle_xor(sum, 32) + shuffle_down(sum, 3);
    sum += (int)shuffle((u32)sum, 1) + (int)shuffle_xor((u32)sum, 2) + (int)shuffle_down((u32)sum, 1) + (int)ballot(sum > bound);
    float f = half_to_float(halves[thread()]) + block_sum(out[thread()], part) + block_max(out[thread()], part);
    f += shuffle(f, 3) + shuffle_down(f, 2) + group_sum<8>(f) + group_max<4>(f);
    f = exp_(f) + log_(f) + tanh_(f) + sin_(f) + cos_(f) + pow_(f, 3.3f) + rsqrt_(f) + sqrt_(f) + floor_(f) + round_(f);
    f = fma_(f, abs_(f), min_(f, max_(f, 1.0f)) + bits_float(float_bits(f) ^ 1u));
    halves[thread()] = float_to_half(f);
    store128(dynamic_shared() + 16 * thread(), v);
    block_barrier();
    store128(words + 4 * thread(), load128(dynamic_shared() + 16 * (127 - thread())));
    out[block_x() * block_y() + block_z() + blocks_x() * blocks_y() + threads() + warp()] = f + (float)sum;
    atomic_add(&part[0], f);
    atomic_add(out, f);
    atomic_add(words, sum);
    atomic_add((u32 *)words, (u32)sum);
    atomic_add((u64 *)words, (u64)sum);
    block_barrier();
    out[7] = part[0];
}

KERNEL(every_tile, 64, 1)(const half_t *a, const half_t *b, float *out) {
    SHARED(half_t, kept, 1024);
    for (int i = thread(); i < 512; i += threads()) {
        kept[i] = a[i];
        kept[i + 512] = b[i];
    }
    block_barrier();
    TileA left;
    TileB right;
    TileC sum;
    tile_zero(sum);
    tile_load_a(left, kept, 24);
    tile_load_b(right, kept + 512, 24);
    tile_multiply(sum, left, right);
    tile_load_bt(right, kept + 512, 24);
    tile_multiply(sum, left, right);
    tile_each(sum, [&](int row, int col, float &value) { out[row * 16 + col] = value; });
}
