/* From logits to a token.  Order: repetition, presence and frequency penalties, logit bias, stop tokens barred before
 * min_tokens, temperature, top_k, min_p, typical_p, top_p; each filter looks at the distribution that the earlier ones left, renormalised.  The token is the first, in
 * order of id, whose cumulative probability exceeds the position's Philox number.  Ties are broken by the lower id. */
#ifndef OUTLAST_ENGINE_SAMPLER_H
#define OUTLAST_ENGINE_SAMPLER_H
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels.h"
#include "outlast/region.h"

namespace outlast::engine {

struct SamplerParams {
    float temperature = 1.0f, top_p = 1.0f, min_p = 0.0f;
    uint32_t top_k = 0;
    uint64_t seed = 0;
    uint32_t stream = 0;
    float presence_penalty = 0.0f, frequency_penalty = 0.0f, repetition_penalty = 1.0f;
    std::vector<std::pair<uint32_t, float>> logit_bias;
    uint32_t top_logprobs = 0;
    float typical_p = 1.0f;             // locally typical sampling (Meister et al., TACL 2023); 1 = off
    uint32_t min_tokens = 0;            // no stop token before so many were generated
    std::vector<uint32_t> stop_tokens;

    bool stops(uint32_t token) const {
        for (const uint32_t t : stop_tokens)
            if (t == token) return true;
        return false;
    }
    bool counts_tokens() const {
        return presence_penalty != 0.0f || frequency_penalty != 0.0f || repetition_penalty != 1.0f;
    }
};

/* Token -> how often it was generated; tokens that stand only in the prompt have 0. */
using TokenCounts = std::unordered_map<uint32_t, uint32_t>;

/* Working memory of one worker; sized once, so that sampling does not allocate in the usual cases. */
struct SamplerScratch {
    std::vector<float> logits, weights;     // [padded vocab]
    std::vector<double> sums;               // [chunks of the vocabulary]
    std::vector<uint32_t> kept;             // token ids
    explicit SamplerScratch(uint32_t vocab);
};

/* logits: [padded(vocab)]; the padding is overwritten. `position` is that of the new token, `generated` how many were
 * generated before it. Returns false when the logits are not finite, or nothing may be chosen. */
bool sample(const Kernels &k, float *logits, uint32_t vocab, const SamplerParams &params, const TokenCounts &counts,
            uint32_t position, uint32_t generated, SamplerScratch &scratch, ol_emission *out);

}  // namespace outlast::engine
#endif
