#include "repack.h"

#include <cstring>

#include "half.h"

namespace outlast::engine {

namespace {

constexpr size_t kSourceQ41 = 20;   // half scale, half min, 16 bytes: column i in the low, i + 16 in the high nibble
constexpr size_t kSourceQ80 = 34;   // half scale, int8[32]

// The low nibbles of eight bytes as one word, first byte lowest.
uint32_t gather_nibbles(uint64_t v) {
    v &= 0x0f0f0f0f0f0f0f0full;
    v = (v | (v >> 4)) & 0x00ff00ff00ff00ffull;
    v = (v | (v >> 8)) & 0x0000ffff0000ffffull;
    return uint32_t(v | (v >> 16));
}

void block_q4_1(const uint8_t *from, uint32_t lane, uint8_t *to) {
    std::memcpy(to + 2 * lane, from, 2);
    std::memcpy(to + 2 * kGroup + 2 * lane, from + 2, 2);
    uint64_t a, b;
    std::memcpy(&a, from + 4, 8);
    std::memcpy(&b, from + 12, 8);
    const uint32_t words[4] = {gather_nibbles(a), gather_nibbles(b), gather_nibbles(a >> 4), gather_nibbles(b >> 4)};
    for (uint32_t c = 0; c < 4; ++c) std::memcpy(to + 4 * kGroup + 4 * kGroup * c + 4 * lane, &words[c], 4);
}

float half_at(const uint8_t *p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return half_to_float(h);
}

}  // namespace

size_t source_row_bytes(Type type, uint32_t columns) {
    switch (type) {
        case Type::f32: return size_t{columns} * 4;
        case Type::q4_1: return columns % kBlock ? 0 : size_t{columns} / kBlock * kSourceQ41;
        case Type::q8_0: return columns % kBlock ? 0 : size_t{columns} / kBlock * kSourceQ80;
    }
    return 0;
}

void repack(Type type, const uint8_t *from, uint32_t rows, uint32_t columns, uint8_t *to, uint32_t first,
            uint32_t last) {
    const size_t stride = group_bytes(type, columns), row_bytes = source_row_bytes(type, columns);
    for (uint32_t g = first; g < last; ++g) {
        uint8_t *group = to + g * stride;
        const uint32_t lanes = rows - g * kGroup < kGroup ? rows - g * kGroup : kGroup;
        if (lanes < kGroup) std::memset(group, 0, stride);
        const uint8_t *rows_from = from + size_t{g} * kGroup * row_bytes;
        switch (type) {
            case Type::f32:
                for (uint32_t k = 0; k < columns; ++k)
                    for (uint32_t lane = 0; lane < lanes; ++lane)
                        std::memcpy(group + (size_t{k} * kGroup + lane) * 4, rows_from + lane * row_bytes + 4 * k, 4);
                break;
            case Type::q4_1:
                for (uint32_t b = 0; b < columns / kBlock; ++b)
                    for (uint32_t lane = 0; lane < lanes; ++lane)
                        block_q4_1(rows_from + lane * row_bytes + b * kSourceQ41, lane,
                                   group + b * (4 * kGroup + kBlock * kGroup / 2));
                break;
            case Type::q8_0:
                for (uint32_t b = 0; b < columns / kBlock; ++b) {
                    uint8_t *block = group + b * (2 * kGroup + kBlock * kGroup);
                    for (uint32_t lane = 0; lane < lanes; ++lane) {
                        const uint8_t *source = rows_from + lane * row_bytes + b * kSourceQ80;
                        std::memcpy(block + 2 * lane, source, 2);
                        uint8_t *q = block + 2 * kGroup + lane;
                        for (uint32_t k = 0; k < kBlock; ++k) q[k * kGroup] = source[2 + k];
                    }
                }
                break;
        }
    }
}

void read_row(const Matrix &m, uint32_t row, float *out) {
    const uint32_t lane = row % kGroup;
    const uint8_t *group = m.data + row / kGroup * m.group_stride;
    switch (m.type) {
        case Type::f32:
            for (uint32_t k = 0; k < m.columns; ++k) std::memcpy(out + k, group + (size_t{k} * kGroup + lane) * 4, 4);
            break;
        case Type::q4_1:
            for (uint32_t b = 0; b < m.columns / kBlock; ++b, group += 4 * kGroup + kBlock * kGroup / 2) {
                const float scale = half_at(group + 2 * lane), least = half_at(group + 2 * kGroup + 2 * lane);
                for (uint32_t c = 0; c < 4; ++c) {
                    uint32_t word;
                    std::memcpy(&word, group + 4 * kGroup + 4 * kGroup * c + 4 * lane, 4);
                    for (uint32_t i = 0; i < 8; ++i)
                        out[b * kBlock + 8 * c + i] = scale * float((word >> (4 * i)) & 15) + least;
                }
            }
            break;
        case Type::q8_0:
            for (uint32_t b = 0; b < m.columns / kBlock; ++b, group += 2 * kGroup + kBlock * kGroup) {
                const float scale = half_at(group + 2 * lane);
                for (uint32_t k = 0; k < kBlock; ++k)
                    out[b * kBlock + k] = scale * float(int8_t(group[2 * kGroup + k * kGroup + lane]));
            }
            break;
    }
}

}  // namespace outlast::engine
