#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "philox.h"
#include "rope.h"

namespace outlast::engine {

namespace {

// Higher logit first, then lower id: the one order of every selection.
struct Better {
    const float *logits;
    bool operator()(uint32_t a, uint32_t b) const {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    }
};

// The best `count` ids in order. One pass with a small heap; a large count partitions an index list instead.
void best(const float *logits, uint32_t vocab, uint32_t count, std::vector<uint32_t> &out) {
    constexpr uint32_t kHeap = 256;     // above this a partition of the whole list is the cheaper way
    const Better better{logits};
    out.clear();
    if (count > kHeap) {
        out.resize(vocab);
        std::iota(out.begin(), out.end(), 0u);
        std::nth_element(out.begin(), out.begin() + (count - 1), out.end(), better);
        out.resize(count);
        std::sort(out.begin(), out.end(), better);
        return;
    }
    for (uint32_t i = 0; i < vocab; ++i) {
        if (out.size() < count) {
            out.push_back(i);
            std::push_heap(out.begin(), out.end(), better);     // front = worst of the kept
        } else if (logits[i] > logits[out.front()]) {           // an equal logit has the higher id: not better
            std::pop_heap(out.begin(), out.end(), better);
            out.back() = i;
            std::push_heap(out.begin(), out.end(), better);
        }
    }
    std::sort_heap(out.begin(), out.end(), better);
}

uint32_t first_of(const float *logits, uint32_t vocab, float value) {
    for (uint32_t i = 0; i < vocab; ++i)
        if (logits[i] == value) return i;
    return 0;
}

// Cuts `kept` (all tokens when `all`) down to the smallest set of the likeliest tokens that holds top_p of the weight.
void nucleus(const float *logits, const std::vector<float> &weights, uint32_t vocab, double total, float top_p, bool all,
             std::vector<uint32_t> &kept) {
    const double wanted = total * double(top_p);
    if (all) {
        // The nucleus is a prefix of the sorted tokens: sort only those above a bound that is low enough.
        for (float bound = 0x1p-8f;; bound *= 0x1p-8f) {
            kept.clear();
            double sum = 0;
            for (uint32_t i = 0; i < vocab; ++i)
                if (weights[i] >= bound) {
                    kept.push_back(i);
                    sum += double(weights[i]);
                }
            if (sum >= wanted || kept.size() == vocab || bound == 0.0f) break;
        }
    }
    std::sort(kept.begin(), kept.end(), Better{logits});
    double sum = 0;
    size_t n = 0;
    while (n < kept.size() && (n == 0 || sum < wanted)) sum += double(weights[kept[n++]]);
    kept.resize(n);
}

// Cuts `kept` down to the smallest set that holds typical_p of the weight, tokens first whose surprise is nearest to the
// expected one (the entropy); ties go to the lower id.
void typical(const float *logits, float most, float temperature, const std::vector<float> &weights, double total,
             float typical_p, std::vector<uint32_t> &kept) {
    std::erase_if(kept, [&](uint32_t i) { return !(weights[i] > 0.0f); });
    std::sort(kept.begin(), kept.end());
    const auto surprise = [&](uint32_t i) { return (double(most) - double(logits[i])) / double(temperature); };
    double mean = 0;                    // entropy less log(total), as surprise() is relative to the likeliest
    for (const uint32_t i : kept) mean += double(weights[i]) / total * surprise(i);
    std::vector<std::pair<double, uint32_t>> order;
    for (const uint32_t i : kept) order.emplace_back(std::fabs(surprise(i) - mean), i);
    std::sort(order.begin(), order.end());
    double sum = 0;
    kept.clear();
    for (const auto &[distance, i] : order) {
        if (!kept.empty() && sum >= total * double(typical_p)) break;
        kept.push_back(i);
        sum += double(weights[i]);
    }
}

uint32_t draw(const float *logits, uint32_t vocab, const Kernels &k, const SamplerParams &params, double u,
              SamplerScratch &s) {
    const float most = k.max(logits, padded(vocab));
    k.exp_chunks(logits, padded(vocab), most, params.temperature, s.weights.data(), s.sums.data());
    double total = 0;
    for (const double sum : s.sums) total += sum;
    const bool top_k = params.top_k > 0 && params.top_k < vocab;
    bool all = true;
    const auto weigh = [&] {
        total = 0;
        for (const uint32_t i : s.kept) total += double(s.weights[i]);
    };
    if (top_k) {
        best(logits, vocab, params.top_k, s.kept);
        all = false;
        weigh();
    }
    if (params.min_p > 0.0f) {          // relative to the likeliest token, whose weight is exp(0) = 1
        if (all) {
            s.kept.clear();
            for (uint32_t i = 0; i < vocab; ++i)
                if (s.weights[i] >= params.min_p) s.kept.push_back(i);
        } else {
            std::erase_if(s.kept, [&](uint32_t i) { return s.weights[i] < params.min_p; });
        }
        all = false;
        weigh();
    }
    if (params.typical_p < 1.0f) {
        if (all) {
            s.kept.resize(vocab);
            std::iota(s.kept.begin(), s.kept.end(), 0u);
        }
        typical(logits, most, params.temperature, s.weights, total, params.typical_p, s.kept);
        all = false;
        weigh();
    }
    if (params.top_p < 1.0f) {
        nucleus(logits, s.weights, vocab, total, params.top_p, all, s.kept);
        all = false;
        weigh();
    }
    double target = u * total;
    uint32_t last = 0;
    if (all) {
        size_t chunk = 0;
        while (chunk + 1 < s.sums.size() && target >= s.sums[chunk]) target -= s.sums[chunk++];
        const uint32_t end = std::min<uint32_t>(vocab, uint32_t(chunk + 1) * kSumChunk);
        last = first_of(logits, vocab, most);
        for (uint32_t i = uint32_t(chunk) * kSumChunk; i < end; ++i) {
            if (s.weights[i] <= 0.0f) continue;
            last = i;
            target -= double(s.weights[i]);
            if (target < 0) break;
        }
        return last;
    }
    std::sort(s.kept.begin(), s.kept.end());
    last = s.kept.front();
    for (const uint32_t i : s.kept) {
        if (s.weights[i] <= 0.0f) continue;
        last = i;
        target -= double(s.weights[i]);
        if (target < 0) break;
    }
    return last;
}

}  // namespace

SamplerScratch::SamplerScratch(uint32_t vocab)
    : logits(padded(vocab)), weights(padded(vocab)), sums((padded(vocab) + kSumChunk - 1) / kSumChunk) {
    kept.reserve(vocab);
}

bool sample(const Kernels &k, float *logits, uint32_t vocab, const SamplerParams &params, const TokenCounts &counts,
            uint32_t position, uint32_t generated, SamplerScratch &s, ol_emission *out) {
    constexpr float kNever = -std::numeric_limits<float>::infinity();
    for (uint32_t i = vocab; i < padded(vocab); ++i) logits[i] = kNever;
    const float most = k.max(logits, padded(vocab));
    k.exp_chunks(logits, padded(vocab), most, 1.0f, nullptr, s.sums.data());
    double total = 0;
    for (const double sum : s.sums) total += sum;
    if (!(total > 0) || !std::isfinite(total)) return false;

    float *changed = logits;
    const bool barred = generated < params.min_tokens && !params.stop_tokens.empty();
    if (params.counts_tokens() || !params.logit_bias.empty() || barred) {
        changed = s.logits.data();
        std::memcpy(changed, logits, padded(vocab) * sizeof(float));
        if (params.counts_tokens())
            for (const auto &[token, times] : counts) {
                if (token >= vocab) continue;
                float &l = changed[token];
                l = l > 0 ? l / params.repetition_penalty : l * params.repetition_penalty;
                if (times > 0) l -= params.presence_penalty + params.frequency_penalty * float(times);
            }
        for (const auto &[token, bias] : params.logit_bias)
            if (token < vocab) changed[token] += bias;
        if (barred)
            for (const uint32_t token : params.stop_tokens)
                if (token < vocab) changed[token] = kNever;
        if (k.max(changed, padded(vocab)) == kNever) return false;
    }
    if (params.temperature == 0.0f)
        out->token = first_of(changed, vocab, k.max(changed, padded(vocab)));
    else
        out->token = draw(changed, vocab, k, params, uniform(params.seed, params.stream, position), s);

    const double log_total = exact_log(total);
    const auto logprob = [&](uint32_t token) { return float(double(logits[token]) - double(most) - log_total); };
    out->logprob = logprob(out->token);
    out->flags = 0;
    out->tops = std::min({params.top_logprobs, uint32_t{OL_MAX_TOP}, vocab});
    if (out->tops > 0) {
        best(logits, vocab, out->tops, s.kept);
        for (uint32_t i = 0; i < out->tops; ++i) out->top[i] = {s.kept[i], logprob(s.kept[i])};
    }
    return true;
}

}  // namespace outlast::engine
