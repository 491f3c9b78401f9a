// Floats to int16 activations: 32 columns share one scale, the largest magnitude maps to 32767.
#include "kernels.h"
#include "simd.h"

namespace hs {
namespace {

constexpr float MOST = 32767.0f;

// Below this the reciprocal of the scale overflows; such a block is nothing but rounding noise and becomes zeros.
constexpr float SMALLEST = 1e-30f;

int32_t sum_of(const int16_t *q) {
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += q[i];
    return sum;
}

}  // namespace

void quantise_blocks(const float *row, ActBlock *out, int first, int last) {
    for (int b = first; b < last; b++) {
        const vf x = load(row + 32 * b), y = load(row + 32 * b + 16);
        const float largest = lane_max(max_v(abs_v(x), abs_v(y)));
        const bool live = largest > SMALLEST;
        const float d = live ? largest / MOST : largest;
        const vf scale = set1(live ? MOST / largest : 0.0f);
        const vi low = round_to_int(mul(x, scale)), high = round_to_int(mul(y, scale));
        ActBlock &block = out[b];
        store_pairs(block.q, low);
        store_pairs(block.q + 16, high);
        block.half_sum[0] = sum_of(block.q);
        block.half_sum[1] = sum_of(block.q + 16);
        block.d = d;
        block.s = d * static_cast<float>(block.half_sum[0] + block.half_sum[1]);   // below 2^24: exact
    }
}

}  // namespace hs
