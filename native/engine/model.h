/* Shapes of a Llama-family model and the layout of its repacked weights.
 *
 * Repacked matrix: rows are interleaved in groups of 16, so that one SIMD lane computes one row and the order of a
 * row's additions depends on the column index alone, not on the vector width.  The last group is padded with zero rows.
 *
 *   type    bytes of one group and block of columns
 *   F32     per column:      float[16]
 *   Q8_0    per 32 columns:  half scale[16], int8 q[32 columns][16 rows]                        (544 bytes)
 *   Q4_1    per 32 columns:  half scale[16], half min[16], uint32 w[4][16 rows]                 (320 bytes)
 *                            nibble i of w[c][row] is column 8 c + i
 *
 * Groups follow one another without gaps; a matrix starts at a multiple of 64 bytes.
 */
#ifndef OUTLAST_ENGINE_MODEL_H
#define OUTLAST_ENGINE_MODEL_H
#include <cstddef>
#include <cstdint>

namespace outlast::engine {

constexpr uint32_t kGroup = 16;        // rows of a group = lanes
constexpr uint32_t kBlock = 32;        // columns that share a scale
constexpr uint32_t kSegment = 256;     // positions of an attention segment; part of the numerics, see kernels.h

enum class Type : uint32_t { f32 = 0, q4_1 = 3, q8_0 = 8 };   // numbers of the GGUF format

constexpr size_t group_bytes(Type type, uint32_t columns) {
    switch (type) {
        case Type::f32: return size_t{columns} * kGroup * sizeof(float);
        case Type::q8_0: return size_t{columns} / kBlock * (2 * kGroup + kBlock * kGroup);
        case Type::q4_1: return size_t{columns} / kBlock * (4 * kGroup + kBlock * kGroup / 2);
    }
    return 0;
}

constexpr uint32_t groups_of(uint32_t rows) { return (rows + kGroup - 1) / kGroup; }
constexpr uint32_t padded(uint32_t rows) { return groups_of(rows) * kGroup; }

struct Matrix {
    const uint8_t *data = nullptr;
    Type type = Type::f32;
    uint32_t rows = 0;
    uint32_t columns = 0;
    size_t group_stride = 0;            // bytes between groups
};

struct Config {
    uint32_t layers, hidden, heads, kv_heads, head_dim, ffn, vocab, context;
    float epsilon;
    double rope_base;
};

struct Layer {
    const float *attn_norm, *ffn_norm;  // [hidden]
    Matrix q, k, v, o, gate, up, down;
};

}  // namespace outlast::engine
#endif
