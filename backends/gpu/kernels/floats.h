// Four floats of a row at once, whatever its width and wherever it begins; and the run of rows that a lane has in a batch.
#pragma once

struct Floats4 { float v[4]; };

DEVICE bool aligned16(const void *p) { return ((u64)p & 15) == 0; }

// The first `count` of the four floats at p, zeros for the rest. One load of 16 bytes where all four are there and aligned.
DEVICE Floats4 load4(const float *p, int count) {
    Floats4 x = {{0.0f, 0.0f, 0.0f, 0.0f}};
    if (count >= 4 && aligned16(p)) {
        const Words4 w = load128(p);
        x = {{bits_float(w.x), bits_float(w.y), bits_float(w.z), bits_float(w.w)}};
    } else {
        UNROLL for (int i = 0; i < 4; i++)
            if (i < count) x.v[i] = p[i];
    }
    return x;
}

DEVICE void store4(float *p, const Floats4 &x, int count) {
    if (count >= 4 && aligned16(p)) {
        store128(p, {float_bits(x.v[0]), float_bits(x.v[1]), float_bits(x.v[2]), float_bits(x.v[3])});
    } else {
        UNROLL for (int i = 0; i < 4; i++)
            if (i < count) p[i] = x.v[i];
    }
}

// Four floats that are there, at a multiple of 16 bytes.
DEVICE Floats4 load4(const float *p) {
    const Words4 w = load128(p);
    return {{bits_float(w.x), bits_float(w.y), bits_float(w.z), bits_float(w.w)}};
}
DEVICE void store4(float *p, const Floats4 &x) {
    store128(p, {float_bits(x.v[0]), float_bits(x.v[1]), float_bits(x.v[2]), float_bits(x.v[3])});
}

// x sigmoid(x), as one quotient. Far below zero the exponential is infinite and the quotient 0.
DEVICE float silu(float x) { return x / (1.0f + exp_(-x)); }
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exp_(-x)); }

// What a batch has of a lane, i32 [lanes][8]: its first row, how many follow (0: none), its state slot, where its rows are kept
// while its states are held (-1: they are not), the first of its chunks (-1: it goes row by row), the position of its first
// row; two numbers are free.
struct LaneRun { int first, rows, slot, place, chunk, position; };

DEVICE LaneRun run_of(const int *runs, int lane) {
    const Words4 a = load128(runs + 8 * lane), b = load128(runs + 8 * lane + 4);
    return {(int)a.x, (int)a.y, (int)a.z, (int)a.w, (int)b.x, (int)b.y};
}
