#include "merge_attention.h"

KERNEL(merge_attention, 128, 8)
(float *out, const float *every, const float *sinks, const float *gates, i32 ranks, i32 heads, i32 dims, i32 first, i32 out_stride,
 i32 gate_stride) {
    merge_ranks({out, every, sinks, gates, ranks, heads, dims, first, out_stride, gate_stride});
}
