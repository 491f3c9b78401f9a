#include "device.h"
#include "join_hidden.h"

KERNEL(join_hidden, 256, 4)(const float *left, int left_stride, const float *right, int right_stride, float *out, int out_stride,
                            float *states, i64 slot_floats, float *kept, int kept_stride, const int *runs, const int *lanes, int first,
                            int width) {
    join_hidden_row(left, left_stride, right, right_stride, out, out_stride, states, slot_floats, kept, kept_stride, runs, lanes, first,
                    width);
}

KERNEL(join_chained, 256, 4)(const float *left, int left_stride, const float *right, int right_stride, float *out, int out_stride,
                             const float *states, i64 slot_floats, const int *runs, const int *lanes, const int *chain, int first,
                             int width) {
    join_chained_row(left, left_stride, right, right_stride, out, out_stride, states, slot_floats, runs, lanes, chain, first, width);
}

KERNEL(join_accept, 256, 4)(const float *kept, int kept_stride, float *states, i64 slot_floats, const int *accepts, int width) {
    join_accept_row(kept, kept_stride, states, slot_floats, accepts, width);
}
