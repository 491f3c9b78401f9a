// One entry for each function of functions.h, and for what it stands on: run under the emulation against float64.
#include "device.h"

#define OF_ONE(name)                                                        \
    KERNEL(of_##name, 64, 1)(const float *x, const float *y, float *out, int count) { \
        for (int i = thread(); i < count; i += threads()) out[i] = name##_(x[i]);     \
    }

OF_ONE(exp)
OF_ONE(log)
OF_ONE(tanh)
OF_ONE(sin)
OF_ONE(cos)
OF_ONE(rsqrt)

KERNEL(of_pow, 64, 1)(const float *x, const float *y, float *out, int count) {
    for (int i = thread(); i < count; i += threads()) out[i] = pow_(x[i], y[i]);
}
