#include "device.h"
#include "experts_combine.h"

KERNEL(experts_combine, 256, 4)(const float *parts, int parts_stride, const int *places, const int *ids, const float *weights,
                                float *out, int out_stride, int used, int first, int end, int width) {
    experts_combine_row(parts, parts_stride, places, ids, weights, out, out_stride, used, first, end, width);
}
