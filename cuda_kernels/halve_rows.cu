#include "device.h"
#include "halve_rows.h"

KERNEL(halve_rows, 256, 4)(half_t *out, float *scales, const float *src, i32 cols, i32 src_stride, i32 pitch) {
    halve_row(out, scales, src, cols, src_stride, pitch);
}
