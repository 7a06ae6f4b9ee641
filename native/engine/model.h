/* Shapes of a Llama-family model and the layout of its repacked weights.
 *
 * Repacked matrix: rows are interleaved in groups of 16, so that one SIMD lane computes one row and the order of a
 * row's additions depends on the column index alone, not on the vector width.  The last group is padded with zero rows.
 * The weights keep the size that their quantization has in the file, or nearly so (bits per weight below).
 *
 *   type           bits    bytes of one group
 *   F32            32      per column: float[16]
 *   F16, BF16      16      per column: half[16], bfloat16[16]
 *   Q4_1            5      per 32 columns: half scale[16], half min[16], nibbles
 *   Q4_0            4.5    per 64 columns: half scale[2][16], nibbles of 32 columns, nibbles of 32 columns
 *   Q8_0            8.5    per 64 columns: half scale[2][16], bytes of 32 columns, bytes of 32 columns
 *   Q4_K            4.625  per 256 columns: half scale[16], half min[16], uint8 scales[8][16], uint8 mins[8][16],
 *                          nibbles of 8 x 32 columns
 *   Q6_K            6.625  per 256 columns: half scale[16], 32 bytes unused, int8 scales[16][16],
 *                          8 x 32 columns: nibbles, then crumbs
 *
 *   nibbles        uint8 [4][16 rows][4]: byte j of [c][row] holds column 8 c + j in its low bits, 8 c + 4 + j in its high
 *   bytes          uint8 [8][16 rows][4]: byte j of [c][row] is column 4 c + j, plus 128
 *   crumbs         uint8 [2][16 rows][4]: bits 2 i, 2 i + 1 of byte j of [h][row] are the upper two bits of column
 *                  16 h + 4 i + j
 *
 * So four neighbouring columns of a row share a 32-bit lane, as integer dot products want them.  With an odd number of
 * blocks of 32, the last 64 columns of Q4_0 and Q8_0 end after their first block.  Groups follow one another without
 * gaps; a matrix starts at a multiple of 64 bytes, and so do its groups and the pieces above.
 */
#ifndef OUTLAST_ENGINE_MODEL_H
#define OUTLAST_ENGINE_MODEL_H
#include <cstddef>
#include <cstdint>

namespace outlast::engine {

constexpr uint32_t kGroup = 16;        // rows of a group = lanes
constexpr uint32_t kBlock = 32;        // columns that share a scale
constexpr uint32_t kSuper = 256;       // columns of a block of blocks in the K types
constexpr uint32_t kSegment = 256;     // positions of an attention segment; part of the numerics, see kernels.h

enum class Type : uint32_t { f32 = 0, f16 = 1, q4_0 = 2, q4_1 = 3, q8_0 = 8, q4_k = 12, q6_k = 14, bf16 = 30 };  // as in GGUF

/* Whether `type` is one of the above. */
constexpr bool known_type(uint32_t type) {
    return type <= 3 || type == 8 || type == 12 || type == 14 || type == 30;
}

constexpr size_t kNibbles = kBlock * kGroup / 2;    // bytes
constexpr size_t kBytes = kBlock * kGroup;
constexpr size_t kCrumbs = kBlock * kGroup / 4;
constexpr size_t kHalves = 2 * kGroup;              // one half per row

/* Where block b of 32 columns of a group lies, and its scales. */
struct Place {
    size_t scales, data;
};
constexpr Place place_q4_1(uint32_t b) { return {b * (2 * kHalves + kNibbles), b * (2 * kHalves + kNibbles) + 2 * kHalves}; }
constexpr Place place_pairs(uint32_t b, size_t data) {
    const size_t pair = b / 2 * (2 * kHalves + 2 * data);
    return {pair + b % 2 * kHalves, pair + 2 * kHalves + b % 2 * data};
}
constexpr size_t kHeadQ4K = 2 * kHalves + 2 * 8 * kGroup, kSuperQ4K = kHeadQ4K + 8 * kNibbles;
constexpr size_t kHeadQ6K = 2 * kHalves + 16 * kGroup, kSuperQ6K = kHeadQ6K + 8 * (kNibbles + kCrumbs);
constexpr Place place_q4_k(uint32_t b) { return {b / 8 * kSuperQ4K, b / 8 * kSuperQ4K + kHeadQ4K + b % 8 * kNibbles}; }
constexpr Place place_q6_k(uint32_t b) {
    return {b / 8 * kSuperQ6K, b / 8 * kSuperQ6K + kHeadQ6K + b % 8 * (kNibbles + kCrumbs)};
}

/* Columns must be a multiple of this. */
constexpr uint32_t columns_of(Type type) { return type == Type::q4_k || type == Type::q6_k ? kSuper : kBlock; }

constexpr size_t group_bytes(Type type, uint32_t columns) {
    const uint32_t blocks = columns / kBlock, pairs = (blocks + 1) / 2;
    switch (type) {
        case Type::f32: return size_t{columns} * kGroup * 4;
        case Type::f16:
        case Type::bf16: return size_t{columns} * kGroup * 2;
        case Type::q4_0: return pairs * 2 * kHalves + blocks * kNibbles;
        case Type::q4_1: return blocks * (2 * kHalves + kNibbles);
        case Type::q8_0: return pairs * 2 * kHalves + blocks * kBytes;
        case Type::q4_k: return blocks / 8 * kSuperQ4K;
        case Type::q6_k: return blocks / 8 * kSuperQ6K;
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

/* How the rotary angles were stretched for a context longer than the first training's; see rope.h. */
struct RopeScaling {
    enum Kind : uint32_t { none, linear, yarn };
    uint32_t kind = none;
    double factor = 1;                  // >= 1
    double original_context = 0;        // yarn: positions of the first training
    double beta_fast = 32, beta_slow = 1;
};

struct Config {
    uint32_t layers, hidden, heads, kv_heads, head_dim, ffn, vocab, context;
    float epsilon;
    double rope_base;
    uint32_t window = 0;                // a position sees this many positions, itself included; 0: all before it
    RopeScaling scaling = {};
};

struct Layer {
    const float *attn_norm, *ffn_norm;  // [hidden]
    const float *q_bias, *k_bias, *v_bias;   // [rows of q, k, v], or null
    Matrix q, k, v, o, gate, up, down;
};

}  // namespace outlast::engine
#endif
