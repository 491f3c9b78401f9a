#include "device.h"
#include "rows.h"

#define GATED_ACTIVATION(name, kind)                                                                                            \
    KERNEL(gated_activation_##name, 256, 4)(const float *gate, int gate_stride, const float *up, int up_stride, float *out,      \
                                            int out_stride, i8 *hi, i8 *lo, float *scale, float *sum, int width) {              \
        gated_activation<kind>(gate, gate_stride, up, up_stride, out, out_stride, {hi, lo, scale, sum, width});                 \
    }
GATED_ACTIVATION(silu, SILU)
GATED_ACTIVATION(gelu, GELU)
GATED_ACTIVATION(swiglu_oai, SWIGLU_OAI)

KERNEL(add_gated, 256, 4)(const float *src, int src_stride, float *into, int into_stride, const float *gate, int gate_stride, int width) {
    add_gated_row(src, src_stride, into, into_stride, gate, gate_stride, width);
}

KERNEL(scale, 256, 4)(float *src, int stride, const float *weight, int width) { scale_row(src, stride, weight, width); }

KERNEL(softcap, 256, 4)(float *src, int stride, float cap, int width) { softcap_row(src, stride, cap, width); }

KERNEL(zero, 256, 4)(float *out, int stride, int width) { zero_row(out, stride, width); }

KERNEL(select_rows, 256, 4)(const float *src, int src_stride, const float *add, int add_stride, const int *rows, float *out,
                            int out_stride, int width) {
    select_row(src, src_stride, add, add_stride, rows, out, out_stride, width);
}
