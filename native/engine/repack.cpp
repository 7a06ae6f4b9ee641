#include "repack.h"

#include <cstring>

#include "half.h"

namespace outlast::engine {

namespace {

// Bytes of a block as the GGUF stores it.
constexpr size_t kSourceQ40 = 18;   // half scale, 16 bytes: column i in the low, i + 16 in the high nibble; minus 8
constexpr size_t kSourceQ41 = 20;   // half scale, half min, 16 bytes as above
constexpr size_t kSourceQ80 = 34;   // half scale, int8[32]
constexpr size_t kSourceQ4K = 144;  // half scale, half min, 12 bytes of scales and mins, 128 bytes of nibbles
constexpr size_t kSourceQ6K = 210;  // 128 bytes of low nibbles, 64 of upper two bits, int8 scales[16], half scale

float half_at(const uint8_t *p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return half_to_float(h);
}

float bf16_at(const uint8_t *p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    const uint32_t bits = uint32_t{h} << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// One row's 32 columns between plain unsigned values (of up to 4, 8 or 6 bits) and the interleaved pieces of model.h.
void put_nibbles(const uint8_t *q, uint32_t lane, uint8_t *to) {
    uint32_t words[8];                                  // four columns each; the machine is little-endian, as the file
    std::memcpy(words, q, sizeof words);
    for (uint32_t c = 0; c < 4; ++c) {
        const uint32_t both = words[2 * c] | words[2 * c + 1] << 4;
        std::memcpy(to + (c * kGroup + lane) * 4, &both, 4);
    }
}
void get_nibbles(const uint8_t *from, uint32_t lane, uint8_t *q) {
    for (uint32_t c = 0; c < 4; ++c)
        for (uint32_t j = 0; j < 4; ++j) {
            const uint8_t both = from[(c * kGroup + lane) * 4 + j];
            q[8 * c + j] = both & 15;
            q[8 * c + 4 + j] = both >> 4;
        }
}
void put_bytes(const uint8_t *q, uint32_t lane, uint8_t *to) {
    for (uint32_t c = 0; c < 8; ++c) std::memcpy(to + (c * kGroup + lane) * 4, q + 4 * c, 4);
}
void get_bytes(const uint8_t *from, uint32_t lane, uint8_t *q) {
    for (uint32_t c = 0; c < 8; ++c) std::memcpy(q + 4 * c, from + (c * kGroup + lane) * 4, 4);
}
void put_crumbs(const uint8_t *q, uint32_t lane, uint8_t *to) {
    for (uint32_t h = 0; h < 2; ++h)
        for (uint32_t j = 0; j < 4; ++j) {
            uint32_t byte = 0;
            for (uint32_t i = 0; i < 4; ++i) byte |= uint32_t(q[16 * h + 4 * i + j] >> 4) << 2 * i;
            to[(h * kGroup + lane) * 4 + j] = uint8_t(byte);
        }
}
void add_crumbs(const uint8_t *from, uint32_t lane, uint8_t *q) {
    for (uint32_t k = 0; k < kBlock; ++k)
        q[k] |= uint8_t((from[(k / 16 * kGroup + lane) * 4 + k % 4] >> k % 16 / 4 * 2 & 3) << 4);
}

// The nibbles of Q4_0 and Q4_1 in the order of the columns.
void halves_of_bytes(const uint8_t *from, uint8_t *q) {
    for (uint32_t i = 0; i < 16; ++i) {
        q[i] = from[i] & 15;
        q[16 + i] = from[i] >> 4;
    }
}

// Six-bit scale and min of sub-block j of Q4_K: 0-3 in the low bits of bytes j and j + 4; 4-7 as nibbles of byte
// j + 4, with the upper two bits on top of bytes j - 4 and j.
void six_bits(const uint8_t *s, uint32_t j, uint8_t *scale, uint8_t *least) {
    if (j < 4) {
        *scale = s[j] & 63;
        *least = s[j + 4] & 63;
    } else {
        *scale = uint8_t((s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
        *least = uint8_t((s[j + 4] >> 4) | (s[j] >> 6) << 4);
    }
}

void super_q4_k(const uint8_t *from, uint32_t lane, uint8_t *to) {
    std::memcpy(to + 2 * lane, from, 2);
    std::memcpy(to + kHalves + 2 * lane, from + 2, 2);
    for (uint32_t j = 0; j < 8; ++j) {
        six_bits(from + 4, j, to + 2 * kHalves + j * kGroup + lane, to + 2 * kHalves + (8 + j) * kGroup + lane);
        // 64 columns share 32 bytes: the first 32 in the low nibbles.
        const uint8_t *bytes = from + 16 + j / 2 * 32;
        uint8_t q[kBlock];
        for (uint32_t k = 0; k < kBlock; ++k) q[k] = j % 2 ? bytes[k] >> 4 : bytes[k] & 15;
        put_nibbles(q, lane, to + kHeadQ4K + j * kNibbles);
    }
}

void super_q6_k(const uint8_t *from, uint32_t lane, uint8_t *to) {
    std::memcpy(to + 2 * lane, from + 208, 2);
    for (uint32_t s = 0; s < 16; ++s) to[2 * kHalves + s * kGroup + lane] = from[192 + s];
    for (uint32_t j = 0; j < 8; ++j) {
        // 128 columns share 64 bytes of nibbles and 32 bytes of upper bits: columns 0-31 and 64-95 are the low and high
        // nibbles of the first 32 bytes, 32-63 and 96-127 of the second; upper bits 2 i of byte l belong to 32 i + l.
        const uint32_t part = j / 4, i = j % 4;
        const uint8_t *low = from + part * 64 + i % 2 * 32, *high = from + 128 + part * 32;
        uint8_t q[kBlock];
        for (uint32_t k = 0; k < kBlock; ++k) q[k] = i < 2 ? low[k] & 15 : low[k] >> 4;
        uint8_t *block = to + kHeadQ6K + j * (kNibbles + kCrumbs);
        put_nibbles(q, lane, block);
        for (uint32_t k = 0; k < kBlock; ++k) q[k] = uint8_t((high[k] >> 2 * i & 3) << 4);
        put_crumbs(q, lane, block + kNibbles);
    }
}

// Row `from` of the file into lane `lane` of a group.
void row_into(Type type, const uint8_t *from, uint32_t columns, uint32_t lane, uint8_t *group) {
    uint8_t q[kBlock];
    const uint32_t blocks = columns / kBlock;
    switch (type) {
        case Type::f32:
            for (uint32_t k = 0; k < columns; ++k) std::memcpy(group + (size_t{k} * kGroup + lane) * 4, from + 4 * k, 4);
            break;
        case Type::f16:
        case Type::bf16:
            for (uint32_t k = 0; k < columns; ++k) std::memcpy(group + (size_t{k} * kGroup + lane) * 2, from + 2 * k, 2);
            break;
        case Type::q4_0:
            for (uint32_t b = 0; b < blocks; ++b, from += kSourceQ40) {
                const Place p = place_pairs(b, kNibbles);
                std::memcpy(group + p.scales + 2 * lane, from, 2);
                halves_of_bytes(from + 2, q);
                put_nibbles(q, lane, group + p.data);
            }
            break;
        case Type::q4_1:
            for (uint32_t b = 0; b < blocks; ++b, from += kSourceQ41) {
                const Place p = place_q4_1(b);
                std::memcpy(group + p.scales + 2 * lane, from, 2);
                std::memcpy(group + p.scales + kHalves + 2 * lane, from + 2, 2);
                halves_of_bytes(from + 4, q);
                put_nibbles(q, lane, group + p.data);
            }
            break;
        case Type::q8_0:
            for (uint32_t b = 0; b < blocks; ++b, from += kSourceQ80) {
                const Place p = place_pairs(b, kBytes);
                std::memcpy(group + p.scales + 2 * lane, from, 2);
                for (uint32_t k = 0; k < kBlock; ++k) q[k] = from[2 + k] ^ 128;
                put_bytes(q, lane, group + p.data);
            }
            break;
        case Type::q4_k:
            for (uint32_t s = 0; s < blocks / 8; ++s) super_q4_k(from + s * kSourceQ4K, lane, group + s * kSuperQ4K);
            break;
        case Type::q6_k:
            for (uint32_t s = 0; s < blocks / 8; ++s) super_q6_k(from + s * kSourceQ6K, lane, group + s * kSuperQ6K);
            break;
    }
}

}  // namespace

size_t source_row_bytes(Type type, uint32_t columns) {
    if (columns % columns_of(type)) return 0;
    const size_t blocks = columns / columns_of(type);
    switch (type) {
        case Type::f32: return size_t{columns} * 4;
        case Type::f16:
        case Type::bf16: return size_t{columns} * 2;
        case Type::q4_0: return blocks * kSourceQ40;
        case Type::q4_1: return blocks * kSourceQ41;
        case Type::q8_0: return blocks * kSourceQ80;
        case Type::q4_k: return blocks * kSourceQ4K;
        case Type::q6_k: return blocks * kSourceQ6K;
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
        for (uint32_t lane = 0; lane < lanes; ++lane)
            row_into(type, from + (size_t{g} * kGroup + lane) * row_bytes, columns, lane, group);
    }
}

void read_row(const Matrix &m, uint32_t row, float *out) {
    const uint32_t lane = row % kGroup, blocks = m.columns / kBlock;
    const uint8_t *group = m.data + row / kGroup * m.group_stride;
    uint8_t q[kBlock];
    switch (m.type) {
        case Type::f32:
            for (uint32_t k = 0; k < m.columns; ++k) std::memcpy(out + k, group + (size_t{k} * kGroup + lane) * 4, 4);
            break;
        case Type::f16:
            for (uint32_t k = 0; k < m.columns; ++k) out[k] = half_at(group + (size_t{k} * kGroup + lane) * 2);
            break;
        case Type::bf16:
            for (uint32_t k = 0; k < m.columns; ++k) out[k] = bf16_at(group + (size_t{k} * kGroup + lane) * 2);
            break;
        case Type::q4_0:
            for (uint32_t b = 0; b < blocks; ++b) {
                const Place p = place_pairs(b, kNibbles);
                const float scale = half_at(group + p.scales + 2 * lane);
                get_nibbles(group + p.data, lane, q);
                for (uint32_t k = 0; k < kBlock; ++k) out[b * kBlock + k] = scale * float(int(q[k]) - 8);
            }
            break;
        case Type::q4_1:
            for (uint32_t b = 0; b < blocks; ++b) {
                const Place p = place_q4_1(b);
                const float scale = half_at(group + p.scales + 2 * lane);
                const float least = half_at(group + p.scales + kHalves + 2 * lane);
                get_nibbles(group + p.data, lane, q);
                for (uint32_t k = 0; k < kBlock; ++k) out[b * kBlock + k] = scale * float(q[k]) + least;
            }
            break;
        case Type::q8_0:
            for (uint32_t b = 0; b < blocks; ++b) {
                const Place p = place_pairs(b, kBytes);
                const float scale = half_at(group + p.scales + 2 * lane);
                get_bytes(group + p.data, lane, q);
                for (uint32_t k = 0; k < kBlock; ++k) out[b * kBlock + k] = scale * float(int(q[k]) - 128);
            }
            break;
        case Type::q4_k:
            for (uint32_t b = 0; b < blocks; ++b) {
                const Place p = place_q4_k(b);
                const uint8_t *head = group + p.scales, *sub = head + 2 * kHalves + b % 8 * kGroup + lane;
                const float scale = half_at(head + 2 * lane) * float(*sub);
                const float least = half_at(head + kHalves + 2 * lane) * float(sub[8 * kGroup]);
                get_nibbles(group + p.data, lane, q);
                for (uint32_t k = 0; k < kBlock; ++k) out[b * kBlock + k] = scale * float(q[k]) - least;
            }
            break;
        case Type::q6_k:
            for (uint32_t b = 0; b < blocks; ++b) {
                const Place p = place_q6_k(b);
                const uint8_t *head = group + p.scales, *sub = head + 2 * kHalves + b % 8 * 2 * kGroup + lane;
                get_nibbles(group + p.data, lane, q);
                add_crumbs(group + p.data + kNibbles, lane, q);
                for (uint32_t k = 0; k < kBlock; ++k) {
                    const float scale = half_at(head + 2 * lane) * float(int8_t(sub[k / 16 * kGroup]));
                    out[b * kBlock + k] = scale * float(int(q[k]) - 32);
                }
            }
            break;
    }
}

}  // namespace outlast::engine
