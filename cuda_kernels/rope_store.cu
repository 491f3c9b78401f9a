#include "rope_store.h"

#define ENTRY(type)                                                                                                          \
    KERNEL(rope_store_##type, ROPE_THREADS, 4)                                                                               \
    (float *q, float *k, const float *v, u8 *k_pool, u8 *v_pool, const int *positions, const int *slots, const u64 *turns,   \
     const float *q_norm, const float *k_norm, i32 heads, i32 kv_heads, i32 dims, i32 q_step, i32 q_stride, i32 k_stride,    \
     i32 v_stride, i32 pool_pages, i32 pairs, i32 interleaved, i32 v_norm, i32 turn_first, i32 norm_dims, float eps, float magnitude) {                     \
        rope_store<Kv_##type>({q, k, v, k_pool, v_pool, positions, slots, turns, q_norm, k_norm, heads, kv_heads, dims,      \
                               q_step, q_stride, k_stride, v_stride, pool_pages, pairs, interleaved, v_norm, turn_first, norm_dims, eps, magnitude}); \
    }
EACH_KV(ENTRY)
