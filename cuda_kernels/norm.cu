#include "device.h"
#include "norm.h"

KERNEL(norm_rows, 256, 2)(float *src, int src_stride, const float *add, int add_stride, const float *weight, float *out, int out_stride,
                     i8 *hi, i8 *lo, float *scale, float *sum, int width, float eps) {
    const int row = block_x();
    norm_block({row_at(src, row, src_stride), out ? row_at(out, row, out_stride) : out, add ? row_at(add, row, add_stride) : add, weight,
                width, eps},
               {hi, lo, scale, sum, width});
}
