// File layout -> R16 (layout.h), and one row back to floats for the embedding.
#include <array>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "layout.h"
#include "simd.h"

namespace hs {
namespace {

uint32_t word_at(const uint8_t *p) {
    uint32_t v;
    std::memcpy(&v, p, 4);
    return v;
}

void put_word(uint8_t *vector, int row, uint32_t value) { std::memcpy(vector + 4 * row, &value, 4); }
void put_half(uint8_t *vector, int row, const uint8_t *half) { std::memcpy(vector + 2 * row, half, 2); }

float half_at(const uint8_t *p) {
    alignas(32) uint16_t h[16] = {};
    alignas(64) float f[16];
    std::memcpy(h, p, 2);
    store(f, load_f16(h));
    return f[0];
}

// Bits 4t + c of a byte (t = 0, 1) go to bit t of byte c: one step of turning 32 high bits in column order into the order
// of word vectors.
constexpr std::array<uint32_t, 256> spread_table() {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; byte++)
        for (uint32_t t = 0; t < 2; t++)
            for (uint32_t c = 0; c < 4; c++)
                if (byte >> (4 * t + c) & 1u) table[byte] |= 1u << (8 * c + t);
    return table;
}
constexpr std::array<uint32_t, 256> SPREAD = spread_table();

uint32_t spread_high_bits(uint32_t bits) {
    uint32_t out = 0;
    for (uint32_t k = 0; k < 4; k++) out |= SPREAD[bits >> (8 * k) & 0xffu] << (2 * k);
    return out;
}

void pack_simple(int type, const uint8_t *src, uint8_t *dst, int row) {
    const bool has_min = type == HS_Q4_1 || type == HS_Q5_1, five = type == HS_Q5_0 || type == HS_Q5_1;
    put_half(dst, row, src);
    src += 2, dst += 32;
    if (has_min) {
        put_half(dst, row, src);
        src += 2, dst += 32;
    }
    if (five) {
        put_word(dst, row, spread_high_bits(word_at(src)));
        src += 4, dst += 64;
    }
    for (int i = 0; i < 4; i++) put_word(dst + 64 * i, row, word_at(src + 4 * i));
}

void pack_q8_0(const uint8_t *src, uint8_t *dst, int row) {
    put_half(dst, row, src);
    for (int i = 0; i < 8; i++) put_word(dst + 32 + 64 * i, row, word_at(src + 2 + 4 * i));
}

// Q4_K and Q5_K keep the nibbles of two sub-blocks in one byte; here each sub-block gets its own 16 bytes.
void pack_k(int type, const uint8_t *src, uint8_t *dst, int row) {
    const uint8_t *qh = src + 16, *qs = type == HS_Q5_K ? src + 48 : src + 16;
    put_half(dst, row, src);
    put_half(dst + 32, row, src + 2);
    for (int t = 0; t < 3; t++) put_word(dst + 64 + 64 * t, row, word_at(src + 4 + 4 * t));
    uint8_t *out = dst + 256;
    for (int s = 0; s < 8; s++) {
        if (type == HS_Q5_K) {
            uint32_t high = 0;
            for (int j = 0; j < 8; j++) high |= ((word_at(qh + 4 * j) >> s) & 0x01010101u) << j;
            put_word(out, row, high);
            out += 64;
        }
        const int shift = 4 * (s & 1);
        for (int i = 0; i < 4; i++) {
            const uint8_t *p = qs + 32 * (s / 2) + 4 * i;
            const uint32_t low = word_at(p) >> shift & 0x0f0f0f0fu, high = word_at(p + 16) >> shift & 0x0f0f0f0fu;
            put_word(out + 64 * i, row, low | high << 4);
        }
        out += 256;
    }
}

void pack_q6_k(const uint8_t *src, uint8_t *dst, int row) {
    const uint8_t *ql = src, *qh = src + 128;
    put_half(dst, row, src + 208);
    for (int t = 0; t < 4; t++) put_word(dst + 32 + 64 * t, row, word_at(src + 192 + 4 * t));
    uint8_t *out = dst + 288;
    for (int s = 0; s < 8; s++, out += 384) {
        const int h = s / 4, k = s % 4, shift = 4 * (k >> 1);
        for (int i = 0; i < 4; i++) {
            const uint8_t *p = ql + 64 * h + 32 * (k & 1) + 4 * i;
            const uint32_t low = word_at(p) >> shift & 0x0f0f0f0fu, high = word_at(p + 16) >> shift & 0x0f0f0f0fu;
            put_word(out + 64 * i, row, low | high << 4);
        }
        for (int half = 0; half < 2; half++) {
            uint32_t bits = 0;
            for (int i = 0; i < 4; i++)
                bits |= (word_at(qh + 32 * h + 16 * half + 4 * i) >> (2 * k) & 0x03030303u) << (2 * i);
            put_word(out + 256 + 64 * half, row, bits);
        }
    }
}

void pack_coded(const uint8_t *src, uint8_t *dst, int row, int head) {
    if (head == 1) dst[row] = src[0];
    else put_half(dst, row, src);
    for (int i = 0; i < 4; i++) put_word(dst + 16 * head + 64 * i, row, word_at(src + head + 4 * i));
}

void pack_iq4_xs(const uint8_t *src, uint8_t *dst, int row) {
    put_half(dst, row, src);
    put_half(dst + 32, row, src + 2);
    put_word(dst + 64, row, word_at(src + 4));
    for (int s = 0; s < 8; s++)
        for (int i = 0; i < 4; i++) put_word(dst + 128 + 256 * s + 64 * i, row, word_at(src + 8 + 16 * s + 4 * i));
}

// Bits 2k and 2k + 1 of four words of 16 columns, as pairs (layout.h).
uint32_t pair_word(const uint8_t *qs, int k) {
    uint32_t bits = 0;
    for (int i = 0; i < 4; i++) bits |= (word_at(qs + 4 * i) >> (2 * k) & 0x03030303u) << (2 * i);
    return bits;
}

void pack_q2_k(const uint8_t *src, uint8_t *dst, int row) {
    put_half(dst, row, src + 80);
    put_half(dst + 32, row, src + 82);
    for (int t = 0; t < 4; t++) put_word(dst + 64 + 64 * t, row, word_at(src + 4 * t));
    for (int s = 0; s < 8; s++)
        for (int half = 0; half < 2; half++)
            put_word(dst + 320 + 128 * s + 64 * half, row, pair_word(src + 16 + 32 * (s / 4) + 16 * half, s % 4));
}

void pack_q3_k(const uint8_t *src, uint8_t *dst, int row) {
    put_half(dst, row, src + 108);
    for (int t = 0; t < 3; t++) put_word(dst + 32 + 64 * t, row, word_at(src + 96 + 4 * t));
    for (int s = 0; s < 8; s++) {
        uint8_t *out = dst + 224 + 192 * s;
        for (int half = 0; half < 2; half++) put_word(out + 64 * half, row, pair_word(src + 32 + 32 * (s / 4) + 16 * half, s % 4));
        uint32_t high = 0;
        for (int j = 0; j < 8; j++) high |= ((word_at(src + 4 * j) >> s) & 0x01010101u) << j;
        put_word(out + 128, row, high);
    }
}

void pack_float(int size, int cols, const uint8_t *src, uint8_t *dst, int row) {
    if (size == 4)
        for (int c = 0; c < cols; c++) std::memcpy(dst + 64 * c + 4 * row, src + 4 * c, 4);
    else
        for (int c = 0; c < cols; c++) std::memcpy(dst + 32 * c + 2 * row, src + 2 * c, 2);
}

// ---- one row back to floats: reads lane `row` of the group's blocks

uint32_t nibble(const uint8_t *vectors, int row, int col) {
    const uint8_t byte = vectors[64 * (col % 16 / 4) + 4 * row + col % 4];
    return col < 16 ? byte & 15u : byte >> 4;
}
uint32_t high_bit(const uint8_t *vector, int row, int col) { return vector[4 * row + col % 4] >> (col / 4) & 1u; }

void unpack_simple(int type, const uint8_t *block, int row, float *out) {
    const bool has_min = type == HS_Q4_1 || type == HS_Q5_1, five = type == HS_Q5_0 || type == HS_Q5_1;
    const float d = half_at(block + 2 * row), m = has_min ? half_at(block + 32 + 2 * row) : 0.0f;
    const int offset = type == HS_Q4_0 ? 8 : type == HS_Q5_0 ? 16 : 0;
    const uint8_t *high = block + (has_min ? 64 : 32), *low = high + (five ? 64 : 0);
    for (int e = 0; e < 32; e++) {
        const uint32_t q = nibble(low, row, e) | (five ? high_bit(high, row, e) << 4 : 0u);
        out[e] = d * static_cast<float>(static_cast<int>(q) - offset) + m;
    }
}

void unpack_q8_0(const uint8_t *block, int row, float *out) {
    const float d = half_at(block + 2 * row);
    for (int e = 0; e < 32; e++)
        out[e] = d * static_cast<float>(static_cast<int8_t>(block[32 + 64 * (e / 4) + 4 * row + e % 4]));
}

void unpack_k(int type, const uint8_t *block, int row, float *out) {
    const bool five = type == HS_Q5_K;
    const float d = half_at(block + 2 * row), dmin = half_at(block + 32 + 2 * row);
    uint8_t S[12];
    for (int t = 0; t < 3; t++) std::memcpy(S + 4 * t, block + 64 + 64 * t + 4 * row, 4);
    const uint8_t *sub = block + 256;
    for (int s = 0; s < 8; s++, sub += five ? 320 : 256) {
        const int scale = s < 4 ? S[s] & 63 : (S[s + 4] & 15) | (S[s - 4] >> 6) << 4;
        const int min = s < 4 ? S[s + 4] & 63 : S[s + 4] >> 4 | (S[s] >> 6) << 4;
        const float ds = d * static_cast<float>(scale), ms = dmin * static_cast<float>(min);
        for (int e = 0; e < 32; e++) {
            const uint32_t q = five ? nibble(sub + 64, row, e) | high_bit(sub, row, e) << 4 : nibble(sub, row, e);
            out[32 * s + e] = ds * static_cast<float>(q) - ms;
        }
    }
}

void unpack_q6_k(const uint8_t *block, int row, float *out) {
    const float d = half_at(block + 2 * row);
    for (int e = 0; e < 256; e++) {
        const int s = e / 32, c = e % 32, group = e / 16;
        const uint8_t *sub = block + 288 + 384 * s;
        const uint32_t high = sub[256 + 64 * (c / 16) + 4 * row + c % 4] >> (2 * (c % 16 / 4)) & 3u;
        const int q = static_cast<int>(nibble(sub, row, c) | high << 4) - 32;
        const int scale = static_cast<int8_t>(block[32 + 64 * (group / 4) + 4 * row + group % 4]);
        out[e] = d * static_cast<float>(scale) * static_cast<float>(q);
    }
}

void unpack_coded(const uint8_t *vectors, const int8_t (&table)[16], float scale, int row, float *out) {
    for (int e = 0; e < 32; e++) out[e] = scale * static_cast<float>(table[nibble(vectors, row, e)]);
}

void unpack_iq4_xs(const uint8_t *block, int row, float *out) {
    const float d = half_at(block + 2 * row);
    uint32_t high = block[32 + 2 * row] | static_cast<uint32_t>(block[33 + 2 * row]) << 8, low = word_at(block + 64 + 4 * row);
    for (int s = 0; s < 8; s++, low >>= 4, high >>= 2) {
        const int scale = static_cast<int>((low & 15u) | (high & 3u) << 4) - 32;
        unpack_coded(block + 128 + 256 * s, IQ4_TABLE, d * static_cast<float>(scale), row, out + 32 * s);
    }
}

uint32_t pair_of(const uint8_t *vectors, int row, int col) {
    return vectors[64 * (col / 16) + 4 * row + col % 4] >> (2 * (col % 16 / 4)) & 3u;
}

void unpack_q2_k(const uint8_t *block, int row, float *out) {
    const float d = half_at(block + 2 * row), dmin = half_at(block + 32 + 2 * row);
    for (int e = 0; e < 256; e++) {
        const int group = e / 16;
        const uint32_t scale = block[64 + 64 * (group / 4) + 4 * row + group % 4], q = pair_of(block + 320 + 128 * (e / 32), row, e % 32);
        out[e] = d * static_cast<float>(scale & 15u) * static_cast<float>(q) - dmin * static_cast<float>(scale >> 4);
    }
}

void unpack_q3_k(const uint8_t *block, int row, float *out) {
    const float d = half_at(block + 2 * row);
    uint8_t S[12];
    for (int t = 0; t < 3; t++) std::memcpy(S + 4 * t, block + 32 + 64 * t + 4 * row, 4);
    for (int e = 0; e < 256; e++) {
        const int i = e / 16;
        const int scale = ((i < 8 ? S[i] & 15 : S[i - 8] >> 4) | (S[8 + i % 4] >> (2 * (i / 4)) & 3) << 4) - 32;
        const uint8_t *sub_block = block + 224 + 192 * (e / 32);
        const uint32_t q = pair_of(sub_block, row, e % 32) | high_bit(sub_block + 128, row, e % 32) << 2;
        out[e] = d * static_cast<float>(scale) * static_cast<float>(static_cast<int>(q) - 4);
    }
}

template <class Load> void unpack_float(const uint8_t *data, size_t size, int cols, int row, float *out, Load load_one) {
    alignas(64) float f[16];
    for (int c = 0; c < cols; c++) {
        store(f, load_one(data + size * GROUP * static_cast<size_t>(c)));
        out[c] = f[row];
    }
}

}  // namespace

void repack_group(int type, int rows, int cols, const uint8_t *src, uint8_t *dst, int group) {
    const int blocks = cols / block_cols(type), first = group * GROUP, last = first + GROUP < rows ? first + GROUP : rows;
    const size_t row_bytes = static_cast<size_t>(blocks) * static_cast<size_t>(file_block_bytes(type));
    uint8_t *out = dst + group_bytes(type, cols) * static_cast<size_t>(group);
    for (int r = first; r < last; r++) {
        const uint8_t *in = src + row_bytes * static_cast<size_t>(r);
        const int lane = r - first;
        if (is_float(type)) {
            pack_float(file_block_bytes(type), cols, in, out, lane);
            continue;
        }
        for (int b = 0; b < blocks; b++) {
            const uint8_t *s = in + static_cast<size_t>(b) * static_cast<size_t>(file_block_bytes(type));
            uint8_t *d = out + static_cast<size_t>(b) * group_block_bytes(type);
            switch (type) {
                case HS_Q8_0: pack_q8_0(s, d, lane); break;
                case HS_Q4_K: case HS_Q5_K: pack_k(type, s, d, lane); break;
                case HS_Q6_K: pack_q6_k(s, d, lane); break;
                case HS_IQ4_NL: pack_coded(s, d, lane, 2); break;
                case HS_MXFP4: pack_coded(s, d, lane, 1); break;
                case HS_IQ4_XS: pack_iq4_xs(s, d, lane); break;
                case HS_Q2_K: pack_q2_k(s, d, lane); break;
                case HS_Q3_K: pack_q3_k(s, d, lane); break;
                default: pack_simple(type, s, d, lane); break;
            }
        }
    }
}

void unpack_row(const hs_matrix &matrix, int row, float *dst) {
    const int type = matrix.type, lane = row % GROUP, blocks = matrix.cols / block_cols(type);
    const uint8_t *data = matrix.data + group_step(matrix) * static_cast<size_t>(row / GROUP);
    const auto half = [](const uint8_t *p) { return reinterpret_cast<const uint16_t *>(p); };
    switch (type) {
        case HS_F32:
            unpack_float(data, 4, matrix.cols, lane, dst, [](const uint8_t *p) { return load(reinterpret_cast<const float *>(p)); });
            return;
        case HS_F16:
            unpack_float(data, 2, matrix.cols, lane, dst, [&](const uint8_t *p) { return load_f16(half(p)); });
            return;
        case HS_BF16:
            unpack_float(data, 2, matrix.cols, lane, dst, [&](const uint8_t *p) { return load_bf16(half(p)); });
            return;
        default: break;
    }
    for (int b = 0; b < blocks; b++) {
        const uint8_t *block = data + static_cast<size_t>(b) * group_block_bytes(type);
        float *out = dst + static_cast<size_t>(b) * static_cast<size_t>(block_cols(type));
        switch (type) {
            case HS_Q8_0: unpack_q8_0(block, lane, out); break;
            case HS_Q4_K: case HS_Q5_K: unpack_k(type, block, lane, out); break;
            case HS_Q6_K: unpack_q6_k(block, lane, out); break;
            case HS_IQ4_NL: unpack_coded(block + 32, IQ4_TABLE, half_at(block + 2 * lane), lane, out); break;
            case HS_MXFP4: unpack_coded(block + 16, MXFP4_TABLE, std::ldexp(1.0f, block[lane] - 128), lane, out); break;
            case HS_IQ4_XS: unpack_iq4_xs(block, lane, out); break;
            case HS_Q2_K: unpack_q2_k(block, lane, out); break;
            case HS_Q3_K: unpack_q3_k(block, lane, out); break;
            default: unpack_simple(type, block, lane, out); break;
        }
    }
}

}  // namespace hs
