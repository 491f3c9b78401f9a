// act(gate) * up, sixteen at a time: the kinds of backends/base.py's GatedActivation.
#pragma once

#include "hs_cpu.h"
#include "simd.h"

namespace hs {

HS_INLINE vf silu_v(vf x) { return div(x, add(set1(1.0f), exp_v(sub(set1(0.0f), x)))); }

// act(gate) * up. 0.5 (1 + tanh z) = sigmoid(2z), so gelu is a sigmoid of 2 sqrt(2 / pi) (g + 0.044715 g^3).
HS_INLINE vf gated_v(int kind, vf g, vf u) {
    const vf one = set1(1.0f);
    switch (kind) {
        case HS_GATE_GELU: {
            const vf z2 = mul(mul(g, set1(-1.5957691216057308f)), fma(mul(g, g), set1(0.044715f), one));
            return mul(div(g, add(one, exp_v(z2))), u);
        }
        case HS_GATE_SWIGLU_OAI: {
            // The limit first: of a limit and no number, min and max give the second.
            const vf x = min_v(set1(7.0f), g), y = max_v(set1(-7.0f), min_v(set1(7.0f), u));
            return mul(div(x, add(one, exp_v(mul(x, set1(-1.702f))))), add(y, one));
        }
        default: return mul(silu_v(g), u);
    }
}

}  // namespace hs
