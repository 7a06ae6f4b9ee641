/* The arithmetic, as a table of functions: one table per instruction set, all compiled from kernels.inl.
 *
 * Numerics (docs/reference/numerics.md):
 *  - Sums of floats are float32.  A sum over columns runs in column order within a lane; a sum over a vector is 16 lanes
 *    (element i goes to lane i mod 16) that are then folded 8+8, 4+4, 2+2, 1+1.
 *  - In the modes int8x2 and int8, quantized weights meet activations that are quantized in blocks of 32 columns.  The
 *    products of a block are summed as integers, exactly; one fused multiply-add per block, in order, brings them to float.
 *  - AVX2, AVX-512 and AVX-512 with VNNI use the same fused multiply-adds in the same order: equal bits.  The generic
 *    build has no fused operation: other bits, a different manifest.
 *  - A token's instruction sequence does not depend on how many tokens are computed beside it.
 *  - Attention is cut into segments of kSegment positions, counted from position 0, each with its own maximum and sum,
 *    merged one after the other in order of position.
 * No function allocates, throws, or calls a mathematical library function.
 */
#ifndef OUTLAST_ENGINE_KERNELS_H
#define OUTLAST_ENGINE_KERNELS_H
#include "model.h"

namespace outlast::engine {

constexpr uint32_t kPartialHeader = 16;     // floats before the vector of an attention partial: [0] max, [1] sum

/* One attention segment of one token and one KV head: positions first .. first + count - 1. */
struct Attend {
    const float *q;             // [heads][head_dim]: the query heads that share this KV head
    uint32_t heads, head_dim;
    const uint8_t *k, *v;       // pool address of block 0, this layer and KV head
    const uint32_t *table;      // physical block of each logical block
    uint32_t block_tokens;
    uint64_t block_bytes, row_bytes;
    uint32_t first, count;      // count <= kSegment
    float scale;
    float *out;                 // heads partials of kPartialHeader + head_dim floats
    size_t out_stride;          // floats between heads
};

/* How quantized weights are multiplied; fixed for a decoder, part of the manifest.  F32, F16 and BF16 weights meet float
 * activations in every mode.  The value is the number of int8 planes of an activation. */
enum class Compute : uint32_t { f32 = 0, int8 = 1, int8x2 = 2 };

/* Tokens that a matrix is multiplied with, [tokens][ld] each, ld a multiple of 32.
 *
 * int8: x = scale * q, |q| <= 127, scale = largest |x| of the block / 127.
 * int8x2: x = scale * (256 q[0] + q[1]), |256 q[0] + q[1]| <= 32639, scale = largest |x| / 32639: two planes, of which the
 * second has 1/256 of the first one's scale. */
struct Activations {
    const float *x;
    const float *sums;          // [tokens][ld / 32]: sum of the block, of scale * q where there are planes
    size_t ld;
    const int8_t *q;            // [tokens][ld / 32][planes][32]
    const float *scales;        // [tokens][ld / 32]
    const int32_t *totals;      // [tokens][ld / 16]: sums of 16 quantized columns
};

/* The same for writing, from some block of one token on. */
struct Quantized {
    float *sums;
    int8_t *q;
    float *scales;
    int32_t *totals;
};

constexpr uint32_t kSumChunk = 1024;        // elements whose exponentials are summed in float before double takes over

struct Kernels {
    const char *name;
    /* y[t][row] = (add ? y[t][row] : 0) + sum_k m[row][k] * x[t][k], for the rows of groups [first, last).
     * y: [tokens][ldy], padded rows. */
    void (*matmul)(Compute mode, const Matrix &m, uint32_t first, uint32_t last, const Activations &x, uint32_t tokens,
                   float *y, size_t ldy, bool add);
    /* Fills the fields of Activations besides x for n columns of one token, a multiple of 32.  A block that is not finite
     * gets a scale that is NaN. */
    void (*prepare)(Compute mode, const float *x, uint32_t n, const Quantized &to);
    /* y = x / sqrt(mean(x^2) + epsilon) * weight; n is a multiple of 16. */
    void (*rms_norm)(const float *x, const float *weight, float epsilon, uint32_t n, float *y);
    void (*attend)(const Attend &a);
    /* state := state merged with the partial of the next segment. */
    void (*merge)(float *state, const float *segment, uint32_t head_dim);
    /* out[head_dim] = the partial's vector divided by its sum. */
    void (*finish)(const float *state, uint32_t head_dim, float *out);
    /* gate := gate / (1 + exp(-gate)) * up; n is a multiple of 16. */
    void (*silu_mul)(float *gate, const float *up, uint32_t n);
    /* Largest element; n is a multiple of 16. */
    float (*max)(const float *x, uint32_t n);
    /* out[i] = exp((x[i] - shift) / temperature); sums[c] = sum of chunk c of kSumChunk elements. out may be null. */
    void (*exp_chunks)(const float *x, uint32_t n, float shift, float temperature, float *out, double *sums);
};

const Kernels &generic_kernels();
const Kernels &avx2_kernels();
const Kernels &avx512_kernels();
const Kernels &avx512vnni_kernels();

/* The best table this CPU runs, or the one named by OUTLAST_ISA. Throws std::runtime_error for an unknown name or one
 * that this CPU does not run. Decided at the first call. */
const Kernels &kernels();
/* By name; nullptr when the CPU or the build does not have it. */
const Kernels *kernels_by_name(const char *name);

}  // namespace outlast::engine
#endif
