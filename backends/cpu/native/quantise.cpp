// Floats to int8 activations, in two planes: 32 columns share a scale in each, the largest magnitude maps to 127, and
// the second plane holds the rest that rounding left.
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

// The sum of one plane; its integers go to `block`.
HS_INLINE int32_t store_plane(ActBlock &block, vi low, vi high) {
    store_low_bytes(block.q, low);
    store_low_bytes(block.q + 16, high);
    const int32_t low_sum = sum16(block.q), high_sum = sum16(block.q + 16);
    block.half_sums =
        static_cast<int32_t>((static_cast<uint32_t>(low_sum) & 0xffffu) | static_cast<uint32_t>(high_sum) << 16);
    block.reserved = 0;
    return low_sum + high_sum;
}

HS_INLINE vi rest_of(vf scaled, vi q) { return round_to_int(mul(sub(scaled, to_float(q)), set1(PLANE_STEP))); }

}  // namespace

void quantise_blocks(const float *row, ActBlock *out, int first, int last) {
    for (int b = first; b < last; b++) {
        const vf x = load(row + 32 * b), y = load(row + 32 * b + 16);
        const float largest = lane_max(max_v(abs_v(x), abs_v(y)));
        const bool live = largest > SMALLEST;
        const vf scale = set1(live ? 127.0f / largest : 0.0f);
        const vf low = mul(x, scale), high = mul(y, scale);
        const vi low_q = round_to_int(low), high_q = round_to_int(high);
        const float d = live ? largest / 127.0f : largest;
        ActBlock *const planes = out + PLANES * b;
        const int32_t sum = store_plane(planes[0], low_q, high_q);
        const int32_t rest = store_plane(planes[1], rest_of(low, low_q), rest_of(high, high_q));
        planes[0].d = planes[1].d = d;
        planes[0].s = planes[1].s = d * (static_cast<float>(sum) + static_cast<float>(rest) / PLANE_STEP);
    }
}

}  // namespace hs
