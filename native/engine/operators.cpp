// The operators of a step (step.h). Task arguments: arg[0] = address of the Step, arg[1] = layer.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "repack.h"
#include "step.h"

namespace outlast::engine {

void Memory::Free::operator()(void *p) const { std::free(p); }

void Memory::reserve(size_t bytes) {
    if (bytes <= size_) return;
    bytes = (bytes + 63) / 64 * 64;
    void *p = std::aligned_alloc(64, bytes);
    if (p == nullptr) throw std::bad_alloc();
    std::memset(p, 0, bytes);
    memory_.reset(p);
    size_ = bytes;
}

void Rows::reserve(size_t tokens, size_t ld, Compute mode) {
    ld_ = ld;
    mode_ = mode;
    const size_t blocks = tokens * ld / kBlock;
    x_.reserve(tokens * ld);
    sums_.reserve(blocks);
    q_.reserve(blocks * kBlock * size_t(mode));
    scales_.reserve(blocks);
    totals_.reserve(2 * blocks);
}

void Rows::prepare(const Kernels &kernels, size_t token, uint32_t column, uint32_t n) const {
    const size_t block = (token * ld_ + column) / kBlock;
    kernels.prepare(mode_, row(token) + column, n,
                    {sums_.data() + block, q_.data() + block * kBlock * size_t(mode_), scales_.data() + block,
                     totals_.data() + 2 * block});
}

namespace {

struct Share {
    uint32_t first, last;
};

Share share(uint32_t n, const ol_task *task) {
    return {uint32_t(uint64_t{n} * task->part / task->parts), uint32_t(uint64_t{n} * (task->part + 1u) / task->parts)};
}

Step &step_of(const ol_task *task) { return *reinterpret_cast<Step *>(task->arg[0]); }

// The part of `range` (in groups, over several matrices in a row) that falls on the matrix starting at `start`.
Share cut(Share range, uint32_t start, uint32_t groups) {
    const uint32_t end = start + groups;
    const uint32_t first = range.first < start ? start : range.first > end ? end : range.first;
    const uint32_t last = range.last < start ? start : range.last > end ? end : range.last;
    return {first - start, last - start};
}

size_t partial_floats(const Step &s) { return kPartialHeader + s.model->config.head_dim; }

// Norms of `n` tokens of the residual stream (those listed in `which`, or the first n), in the part's own memory: each
// part computes them again, which costs less than another barrier.
Activations normed(const Step &s, PartScratch &mine, const uint32_t *which, uint32_t n, const float *weight) {
    const Config &c = s.model->config;
    for (uint32_t i = 0; i < n; ++i) {
        const float *x = s.x.data() + size_t{which == nullptr ? i : which[i]} * c.hidden;
        s.kernels->rms_norm(x, weight, c.epsilon, c.hidden, mine.x.row(i));
        mine.x.prepare(*s.kernels, i, 0, c.hidden);
    }
    return mine.x.all();
}

int32_t begin(const ol_task *task, ol_env *) {
    Step &s = step_of(task);
    const Share mine = share(uint32_t(s.tokens.size()), task);
    for (uint32_t t = mine.first; t < mine.last; ++t) {
        const Token &token = s.tokens[t];
        read_row(s.model->embedding, token.id, s.x.data() + t * s.model->config.hidden);
        const Entry &e = s.entries[token.entry];
        const uint32_t index = t - e.first;
        if (index >= e.recheck) continue;
        uint8_t *to = s.saved.data() + size_t{e.saved + index} * s.geometry.pieces * s.geometry.row_bytes;
        for (uint32_t piece = 0; piece < s.geometry.pieces; ++piece, to += s.geometry.row_bytes)
            std::memcpy(to, s.row(*e.sequence, token.position, piece), s.geometry.row_bytes);
    }
    return OL_OK;
}

// Rotates the interleaved pairs of rows [first, last) of a token; pair i of each head turns by angle i.
void rotate(float *rows, uint32_t first, uint32_t last, uint32_t head_dim, const float *angles) {
    for (uint32_t r = first; r < last; r += 2) {
        const float *a = angles + r % head_dim;
        const float x = rows[r], y = rows[r + 1];
        rows[r] = x * a[0] - y * a[1];
        rows[r + 1] = x * a[1] + y * a[0];
    }
}

int32_t qkv(const ol_task *task, ol_env *) {
    Step &s = step_of(task);
    const Config &c = s.model->config;
    const uint32_t layer = uint32_t(task->arg[1]), n = uint32_t(s.tokens.size());
    const Layer &l = s.model->layers[layer];
    const Activations x = normed(s, s.parts[task->part], nullptr, n, l.attn_norm);
    const uint32_t q_groups = groups_of(l.q.rows), kv_groups = groups_of(l.k.rows);
    const Share range = share(q_groups + 2 * kv_groups, task);
    const auto multiply = [&](const Matrix &m, Share part, float *y, const float *bias) {
        if (part.first >= part.last) return;
        const size_t at = size_t{part.first} * kGroup, count = (part.last - part.first) * size_t{kGroup};
        if (bias != nullptr)
            for (uint32_t t = 0; t < n; ++t) std::memcpy(y + t * s.qkv_width + at, bias + at, count * sizeof(float));
        s.kernels->matmul(s.compute, m, part.first, part.last, x, n, y, s.qkv_width, bias != nullptr);
    };
    const Share q = cut(range, 0, q_groups), k = cut(range, q_groups, kv_groups),
                v = cut(range, q_groups + kv_groups, kv_groups);
    float *q_rows = s.qkv.data(), *k_rows = q_rows + s.q_rows, *v_rows = k_rows + s.kv_rows;
    multiply(l.q, q, q_rows, l.q_bias);
    multiply(l.k, k, k_rows, l.k_bias);
    multiply(l.v, v, v_rows, l.v_bias);
    for (uint32_t t = 0; t < n; ++t) {
        const Token &token = s.tokens[t];
        const Sequence &sequence = *s.entries[token.entry].sequence;
        const float *angles = s.angles.data() + size_t{t} * c.head_dim;
        rotate(q_rows + t * s.qkv_width, q.first * kGroup, q.last * kGroup, c.head_dim, angles);
        if (k.first < k.last) {
            float *rows = k_rows + t * s.qkv_width;
            rotate(rows, k.first * kGroup, k.last * kGroup, c.head_dim, angles);
            std::memcpy(s.row(sequence, token.position, 2 * layer) + k.first * kGroup * sizeof(float),
                        rows + k.first * kGroup, (k.last - k.first) * kGroup * sizeof(float));
        }
        if (v.first < v.last)
            std::memcpy(s.row(sequence, token.position, 2 * layer + 1) + v.first * kGroup * sizeof(float),
                        v_rows + t * s.qkv_width + v.first * kGroup, (v.last - v.first) * kGroup * sizeof(float));
    }
    return OL_OK;
}

// Units in a fixed order: KV head, token, segment. A part runs the units whose first position, counted over all units,
// falls into its share of the positions; so parts get about equal work without a table.
int32_t attend(const ol_task *task, ol_env *) {
    Step &s = step_of(task);
    const Config &c = s.model->config;
    const uint32_t layer = uint32_t(task->arg[1]), per_kv = c.heads / c.kv_heads;
    const size_t size = partial_floats(s);
    const uint64_t total = s.attend_cost * c.kv_heads;
    const uint64_t from = total * task->part / task->parts, to = total * (task->part + 1u) / task->parts;
    uint64_t cost = 0;
    for (uint32_t h = 0; h < c.kv_heads; ++h) {
        for (uint32_t t = 0; t < s.tokens.size(); ++t) {
            const Token &token = s.tokens[t];
            const uint32_t end = token.position + 1, first_segment = token.first / kSegment;
            if (cost >= to) return OL_OK;
            if (cost + (end - token.first) <= from) {
                cost += end - token.first;
                continue;
            }
            const Sequence &sequence = *s.entries[token.entry].sequence;
            uint8_t *base = s.pool + size_t{h} * c.head_dim * sizeof(float);
            Attend a{};
            a.q = s.qkv.data() + t * s.qkv_width + size_t{h} * per_kv * c.head_dim;
            a.heads = per_kv;
            a.head_dim = c.head_dim;
            a.k = base + 2 * layer * s.geometry.piece_stride;
            a.v = base + (2 * layer + 1) * s.geometry.piece_stride;
            a.table = sequence.table.data();
            a.block_tokens = s.geometry.block_tokens;
            a.block_bytes = s.geometry.block_bytes;
            a.row_bytes = s.geometry.row_bytes;
            a.scale = 1.0f / __builtin_sqrtf(float(c.head_dim));
            a.out_stride = size;
            const auto place = [&](uint32_t segment) {
                return s.partials.data() + (size_t{token.partial + segment - first_segment} * c.heads + size_t{h} * per_kv) * size;
            };
            // Segments lie on a fixed grid of positions; a window cuts the first one short.
            const auto take = [&](uint32_t segment) {
                a.first = std::max(segment * kSegment, token.first);
                a.count = std::min((segment + 1) * kSegment, end) - a.first;
            };
            if (s.split_segments) {
                for (uint32_t segment = first_segment; segment * kSegment < end; ++segment) {
                    take(segment);
                    const bool here = cost >= from && cost < to;
                    cost += a.count;
                    if (!here) continue;
                    a.out = place(segment);
                    s.kernels->attend(a);
                }
                continue;
            }
            const bool here = cost >= from;
            cost += end - token.first;
            if (!here) continue;
            float *state = place(first_segment), *next = s.parts[task->part].partial.data();
            for (uint32_t segment = first_segment; segment * kSegment < end; ++segment) {
                take(segment);
                a.out = segment == first_segment ? state : next;
                s.kernels->attend(a);
                if (segment > first_segment)
                    for (uint32_t i = 0; i < per_kv; ++i) s.kernels->merge(state + i * size, next + i * size, c.head_dim);
            }
        }
    }
    return OL_OK;
}

int32_t output(const ol_task *task, ol_env *) {
    Step &s = step_of(task);
    const Config &c = s.model->config;
    const Layer &l = s.model->layers[task->arg[1]];
    const uint32_t n = uint32_t(s.tokens.size());
    PartScratch &mine = s.parts[task->part];
    const size_t size = partial_floats(s);
    for (uint32_t t = 0; t < n; ++t) {
        const Token &token = s.tokens[t];
        float *x = mine.x.row(t);
        for (uint32_t h = 0; h < c.heads; ++h) {
            // The partials are shared between parts: merge in a copy.
            const float *first = s.partials.data() + (size_t{token.partial} * c.heads + h) * size;
            if (token.segments == 1) {
                s.kernels->finish(first, c.head_dim, x + h * c.head_dim);
                continue;
            }
            float *state = mine.partial.data();
            std::memcpy(state, first, size * sizeof(float));
            for (uint32_t i = 1; i < token.segments; ++i)
                s.kernels->merge(state, first + size_t{i} * c.heads * size, c.head_dim);
            s.kernels->finish(state, c.head_dim, x + h * c.head_dim);
        }
        mine.x.prepare(*s.kernels, t, 0, l.o.columns);
    }
    const Share rows = share(groups_of(l.o.rows), task);
    s.kernels->matmul(s.compute, l.o, rows.first, rows.last, mine.x.all(), n, s.x.data(), c.hidden, true);
    return OL_OK;
}

int32_t gate_up(const ol_task *task, ol_env *) {
    Step &s = step_of(task);
    const Config &c = s.model->config;
    const Layer &l = s.model->layers[task->arg[1]];
    const uint32_t n = uint32_t(s.tokens.size());
    const Activations x = normed(s, s.parts[task->part], nullptr, n, l.ffn_norm);
    // Shares of whole blocks of 32 rows, so that each part can prepare its own blocks for the next product.
    const Share blocks = share(c.ffn / kBlock, task);
    const uint32_t first = blocks.first * kBlock, last = blocks.last * kBlock;
    s.kernels->matmul(s.compute, l.gate, first / kGroup, last / kGroup, x, n, s.gate.row(0), s.ffn_width, false);
    s.kernels->matmul(s.compute, l.up, first / kGroup, last / kGroup, x, n, s.up.data(), s.ffn_width, false);
    for (uint32_t t = 0; t < n; ++t) {
        s.kernels->silu_mul(s.gate.row(t) + first, s.up.data() + t * s.ffn_width + first, last - first);
        s.gate.prepare(*s.kernels, t, first, last - first);
    }
    return OL_OK;
}

int32_t down(const ol_task *task, ol_env *) {
    Step &s = step_of(task);
    const Layer &l = s.model->layers[task->arg[1]];
    const Share rows = share(groups_of(l.down.rows), task);
    s.kernels->matmul(s.compute, l.down, rows.first, rows.last, s.gate.all(), uint32_t(s.tokens.size()), s.x.data(),
                      s.model->config.hidden, true);
    return OL_OK;
}

int32_t head(const ol_task *task, ol_env *) {
    Step &s = step_of(task);
    const Config &c = s.model->config;
    const uint32_t n = uint32_t(s.sampling.size());
    const Activations x = normed(s, s.parts[task->part], s.sampling.data(), n, s.model->output_norm);
    const Share rows = share(groups_of(c.vocab), task);
    s.kernels->matmul(s.compute, s.model->head, rows.first, rows.last, x, n, s.logits.data(), s.vocab_width, false);
    return OL_OK;
}

int32_t verify(const ol_task *task, ol_env *) {
    Step &s = step_of(task);
    const Share mine = share(uint32_t(s.entries.size()), task);
    const size_t bytes = s.geometry.row_bytes;
    for (uint32_t i = mine.first; i < mine.last; ++i) {
        Entry &e = s.entries[i];
        const auto for_rows = [&](auto visit) {
            uint8_t *saved = s.saved.data() + size_t{e.saved} * s.geometry.pieces * bytes;
            for (uint32_t r = 0; r < e.recheck; ++r)
                for (uint32_t piece = 0; piece < s.geometry.pieces; ++piece, saved += bytes)
                    visit(s.row(*e.sequence, s.tokens[e.first + r].position, piece), saved);
        };
        bool same = true;
        for_rows([&](uint8_t *now, uint8_t *before) { same = same && std::memcmp(now, before, bytes) == 0; });
        e.verified = same;
        if (!same) for_rows([&](uint8_t *now, uint8_t *before) { std::memcpy(now, before, bytes); });
    }
    return OL_OK;
}

// Tokens as if they stood in the output already, for the penalties of the tokens behind them; taken back at the end.
class Assumed {
  public:
    explicit Assumed(Sequence &s) : s_(s) {}
    ~Assumed() {
        for (size_t i = changed_.size(); i-- > 0;)
            if (changed_[i].second) s_.counts.erase(changed_[i].first);
            else --s_.counts[changed_[i].first];
    }
    Assumed(const Assumed &) = delete;
    Assumed &operator=(const Assumed &) = delete;
    void add(uint32_t token) {
        if (!s_.params.counts_tokens()) return;
        changed_.reserve(changed_.size() + 1);
        const auto [at, fresh] = s_.counts.try_emplace(token, 0u);
        ++at->second;
        changed_.emplace_back(token, fresh);
    }

  private:
    Sequence &s_;
    std::vector<std::pair<uint32_t, bool>> changed_;
};

// A sequence's tokens in order: each is drawn as it would be in a step of its own, and the next only if the guess it was
// computed from came true.
void sample_entry(Step &s, Entry &e, SamplerScratch &scratch) {
    Sequence &q = *e.sequence;
    const uint32_t last = e.first + e.tokens - e.drafts - 1;    // token of the step behind which the first one is drawn
    Assumed assumed(q);
    e.accepted = 0;
    for (uint32_t i = 0; i <= e.drafts; ++i) {
        ol_emission &out = s.emissions[e.emission + i];
        const uint32_t position = s.tokens[last + i].position + 1;
        if (!sample(*s.kernels, s.logits.data() + (uint32_t(e.sample) + i) * s.vocab_width, s.model->config.vocab, q.params,
                    q.counts, position, position - q.prompt_length, scratch, &out)) {
            if (i == 0) e.finite = false;
            else --e.accepted;          // the position is computed again, and seen for what it is, in the next step
            return;
        }
        s.emission_lengths[e.emission + i] = uint32_t(offsetof(ol_emission, top) + out.tops * sizeof(ol_top));
        if (i == e.drafts || out.token != s.tokens[last + 1 + i].id || q.params.stops(out.token)) return;
        assumed.add(out.token);
        ++e.accepted;
    }
}

int32_t sample_tokens(const ol_task *task, ol_env *env) {
    Step &s = step_of(task);
    const Share mine = share(uint32_t(s.entries.size()), task);
    try {
        for (uint32_t i = mine.first; i < mine.last; ++i) {
            Entry &e = s.entries[i];
            if (e.sample >= 0 && e.verified) sample_entry(s, e, *s.parts[task->part].sampler);
        }
    } catch (const std::bad_alloc &) {
        std::strncpy(env->error, "sampling: out of memory", sizeof env->error - 1);
        return OL_FAILED;
    }
    return OL_OK;
}

}  // namespace

const OperatorEntry kOperatorTable[kOperators] = {
    {"engine.begin", begin},   {"engine.qkv", qkv},   {"engine.attend", attend},
    {"engine.output", output}, {"engine.gate_up", gate_up}, {"engine.down", down},
    {"engine.head", head},     {"engine.verify", verify},   {"engine.sample", sample_tokens},
};

}  // namespace outlast::engine
