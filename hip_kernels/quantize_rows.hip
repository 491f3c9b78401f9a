#include "device.h"
#include "quantize_rows.h"

KERNEL(quantize_rows, 256, 4)
(const float *src, i32 src_stride, i8 *hi, i8 *lo, float *scale, float *sum, i32 width) {
    quantize_rows(src, src_stride, Quantised{hi, lo, scale, sum, width});
}
