/* One step: what the operators of a plan work on.
 *
 * A step computes `tokens` positions of several sequences.  The plan's levels, each a barrier (native/engine/decoder.cpp):
 *
 *   begin          embed tokens; save KV rows that will be recomputed          parts share the tokens
 *   per layer:
 *     qkv          norm, q/k/v rows, rotary positions, K and V into the pool   parts share the groups of rows
 *     attend       segments of attention                                       parts share the positions
 *     output       merge segments, o rows, add to the residual stream          parts share the groups of rows
 *     gate_up      norm, gate and up rows, silu                                parts share the blocks of rows
 *     down         down rows, add to the residual stream                       parts share the groups of rows
 *   head           final norm, logits of the tokens that sample                parts share the groups of rows
 *   verify         compare recomputed KV rows with the saved ones              parts share the sequences
 *   sample         one token per sampling sequence                             parts share the sequences
 *
 * Within a level, parts write disjoint memory and read only what earlier levels wrote.
 */
#ifndef OUTLAST_ENGINE_STEP_H
#define OUTLAST_ENGINE_STEP_H
#include <memory>
#include <vector>

#include "kernels.h"
#include "outlast/region.h"
#include "rope.h"
#include "sampler.h"

namespace outlast::engine {

struct Model {
    Config config;
    Matrix embedding, head;
    const float *output_norm;
    std::vector<Layer> layers;
    Rope rope;
};

struct Sequence {
    uint64_t key;
    uint32_t generation;
    std::vector<uint32_t> tokens;       // prompt, then generated
    uint32_t prompt_length;
    uint32_t computed;                  // positions whose KV rows are in the pool
    std::vector<uint32_t> table;        // physical blocks
    SamplerParams params;
    TokenCounts counts;
};

/* A sequence's share of a step. */
struct Entry {
    uint32_t handle;
    Sequence *sequence;
    uint32_t first;                     // first token of the step that is this sequence's
    uint32_t tokens;                    // recheck + new positions
    uint32_t recheck;                   // leading positions that were in the pool already
    uint32_t saved;                     // index of the first saved row set
    int32_t sample;                     // first row of the logits, -1: no token is sampled
    uint32_t drafts;                    // last tokens that are guesses; each has a row of the logits behind `sample`
    uint32_t accepted;                  // how many of them came true
    uint32_t emission;                  // first of its 1 + drafts emissions
    bool verified;
    bool finite;
};

struct Token {
    uint32_t id, position, entry;
    uint32_t first;                     // first position it sees
    uint32_t partial;                   // first attention partial, in units of heads * (kPartialHeader + head_dim)
    uint32_t segments;                  // partials of this token: one per segment, or one in all (merged)
};

/* Zeroed memory aligned to cache lines, that only grows. */
class Memory {
  public:
    void *data() const { return memory_.get(); }
    void reserve(size_t bytes);

  private:
    struct Free {
        void operator()(void *p) const;
    };
    std::unique_ptr<void, Free> memory_;
    size_t size_ = 0;
};

template <class T>
class Buffer {
  public:
    T *data() const { return static_cast<T *>(memory_.data()); }
    void reserve(size_t n) { memory_.reserve(n * sizeof(T)); }

  private:
    Memory memory_;
};
using Floats = Buffer<float>;

/* Activations of the tokens of a step, and room for them. */
class Rows {
  public:
    void reserve(size_t tokens, size_t ld, Compute mode);
    float *row(size_t token) const { return x_.data() + token * ld_; }
    /* Fills what belongs to `n` columns from `column` on, both multiples of 32. */
    void prepare(const Kernels &kernels, size_t token, uint32_t column, uint32_t n) const;
    Activations all() const { return {x_.data(), sums_.data(), ld_, q_.data(), scales_.data(), totals_.data()}; }

  private:
    Floats x_, sums_, scales_;
    Buffer<int8_t> q_;
    Buffer<int32_t> totals_;
    size_t ld_ = 0;
    Compute mode_ = Compute::f32;
};

struct PartScratch {
    Rows x;                             // leading dimension Step::width
    Floats partial;                     // heads of one KV head, for merging
    std::unique_ptr<SamplerScratch> sampler;
};

struct Step {
    const Kernels *kernels;
    Compute compute;
    const Model *model;
    uint8_t *pool;
    ol_kv_geometry geometry;

    std::vector<Entry> entries;
    std::vector<Token> tokens;
    std::vector<uint32_t> sampling;     // token of each row of the logits
    bool split_segments;                // few tokens: segments of one token may go to different parts
    uint64_t attend_cost;               // positions to read, over all tokens

    // leading dimensions in floats
    size_t width;                       // of PartScratch::x: hidden or q_rows, whichever is larger
    size_t qkv_width, q_rows, kv_rows, ffn_width, vocab_width;
    Floats x;                           // [tokens][hidden], the residual stream
    Floats qkv;                         // [tokens][q_rows + 2 kv_rows]
    Floats partials;                    // [partials][heads][kPartialHeader + head_dim]
    Floats up;                          // [tokens][ffn_width]
    Rows gate;                          // leading dimension ffn_width
    Floats logits;                      // [samples][vocab_width]
    Floats angles;                      // [tokens][head_dim]: cos, sin of each pair
    std::vector<uint8_t> saved;         // [rows][pieces][row_bytes]
    std::vector<PartScratch> parts;
    std::vector<ol_emission> emissions; // of entry 0, 1, ...: the sampled token, then one for each draft
    std::vector<uint32_t> emission_lengths;

    uint8_t *row(const Sequence &s, uint32_t position, uint32_t piece) const {
        return pool + s.table[position / geometry.block_tokens] * geometry.block_bytes + piece * geometry.piece_stride +
               position % geometry.block_tokens * size_t{geometry.row_bytes};
    }
};

enum Operator : uint32_t { op_begin, op_qkv, op_attend, op_output, op_gate_up, op_down, op_head, op_verify, op_sample };
constexpr uint32_t kOperators = 9;
struct OperatorEntry {
    const char *name;
    ol_op_fn function;
};
extern const OperatorEntry kOperatorTable[kOperators];

}  // namespace outlast::engine
#endif
