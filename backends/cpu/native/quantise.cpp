// Floats to int8 activations: 32 columns share one scale, the largest magnitude maps to 127.
#include "kernels.h"
#include "simd.h"

namespace hs {
namespace {

// Below this the reciprocal of the scale overflows; such a block is nothing but rounding noise and becomes zeros.
constexpr float SMALLEST = 1e-30f;

int32_t sum16(const int8_t *q) {
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
        const vf scale = set1(live ? 127.0f / largest : 0.0f);
        ActBlock &block = out[b];
        store_low_bytes(block.q, round_to_int(mul(x, scale)));
        store_low_bytes(block.q + 16, round_to_int(mul(y, scale)));
        const int32_t low = sum16(block.q), high = sum16(block.q + 16);
        block.d = live ? largest / 127.0f : largest;
        block.s = block.d * static_cast<float>(low + high);
        block.half_sums = static_cast<int32_t>((static_cast<uint32_t>(low) & 0xffffu) | static_cast<uint32_t>(high) << 16);
        block.reserved = 0;
    }
}

}  // namespace hs
