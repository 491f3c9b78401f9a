// Needs far more registers than its launch bound leaves it: what the gate must call red.
#include "device.h"

KERNEL(spills, 1024, 1)(const float *in, float *out, int steps) {
    float kept[192];
    UNROLL for (int i = 0; i < 192; i++) kept[i] = in[i * 1024 + thread()];
    for (int step = 0; step < steps; step++) {
        UNROLL for (int i = 0; i < 192; i++) kept[i] = fma_(kept[i], kept[(i * 7 + 1) % 192], in[step]);
    }
    UNROLL for (int i = 0; i < 192; i++) out[i * 1024 + thread()] = kept[i];
}
