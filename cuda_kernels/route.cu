#include "device.h"
#include "route.h"

// The largest number of experts that a symbol takes, and a lane's share of them.
#define ROUTE(most)                                                                                                             \
    KERNEL(route_##most, 128, 4)(const float *logits, int stride, const float *selection, const float *gains, int *ids,         \
                                 float *weights, int rows, int experts, int used, int func, int normalise, float scale) {       \
        route_rows<most / 32>(logits, stride, selection, gains, ids, weights, rows, experts, used, func, normalise, scale);     \
    }
ROUTE(128)
ROUTE(512)
