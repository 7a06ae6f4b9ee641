#include "decoder.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "rope.h"

namespace outlast::engine {

namespace {

// A level is cut into parts of at least this many multiply-adds (about 5 us): below that a barrier costs more.
constexpr uint64_t kWorkPerPart = 100'000;
// With fewer tokens than this in a step, the segments of one token are shared between parts.
constexpr size_t kSplitTokens = 16;
constexpr uint32_t kMaxParts = 256;
// Built plans that are kept. Sizes of batches and contexts give a few, as most work is either cut into all parts or not.
constexpr size_t kMaxPlans = 64;

[[noreturn]] void refuse(const std::string &text) { throw std::invalid_argument(text); }

void check_config(const Config &c) {
    if (c.layers == 0 || c.hidden == 0 || c.heads == 0 || c.kv_heads == 0 || c.head_dim == 0 || c.ffn == 0 ||
        c.vocab == 0 || c.context == 0)
        refuse("a dimension of the model is zero");
    if (c.heads % c.kv_heads) refuse("the number of heads is not a multiple of the number of KV heads");
    if (c.head_dim % 16) refuse("head dimension " + std::to_string(c.head_dim) + " is not a multiple of 16");
    if (c.hidden % kBlock || c.ffn % kBlock || size_t{c.heads} * c.head_dim % kBlock)
        refuse("hidden size, feed-forward size and heads * head dimension must be multiples of 32");
    const auto within = [](double x, double low, double high) { return x >= low && x <= high; };
    if (!(c.epsilon > 0) || !within(c.epsilon, 0, 1) || !within(c.rope_base, 1.001, 1e12) || c.context > 1u << 24)
        refuse("norm epsilon, rotary base or context out of range");
    const RopeScaling &s = c.scaling;
    if (s.kind > RopeScaling::yarn || !within(s.factor, 1, 1e6)) refuse("rotary scaling out of range");
    if (s.kind == RopeScaling::yarn && (!within(s.original_context, 1, 1u << 24) || !within(s.beta_fast, 1e-3, 1e6) ||
                                        !within(s.beta_slow, 1e-3, 1e6)))
        refuse("parameters of yarn out of range");
}

class Binder {
  public:
    Binder(const std::vector<TensorPlace> &tensors, uint64_t weights, uint64_t bytes) : weights_(weights), bytes_(bytes) {
        for (const TensorPlace &t : tensors) by_name_[t.name] = &t;
    }
    bool has(const std::string &name) const { return by_name_.count(name) > 0; }

    Matrix matrix(const std::string &name, uint32_t rows, uint32_t columns) const {
        const TensorPlace &t = find(name);
        if (t.rows != rows || t.columns != columns) refuse(name + ": unexpected shape");
        if (!known_type(t.type)) refuse(name + ": unsupported type");
        const uint32_t multiple = columns_of(Type(t.type));
        if (columns % multiple) refuse(name + ": columns are not a multiple of " + std::to_string(multiple));
        const size_t stride = group_bytes(Type(t.type), columns);
        place(t, stride * groups_of(rows));
        return {reinterpret_cast<const uint8_t *>(weights_ + t.offset), Type(t.type), rows, columns, stride};
    }
    const float *vector(const std::string &name, uint32_t n) const {
        const TensorPlace &t = find(name);
        if (t.rows != 0 || t.columns != n || t.type != uint32_t(Type::f32)) refuse(name + ": unexpected shape or type");
        place(t, size_t{n} * sizeof(float));
        return reinterpret_cast<const float *>(weights_ + t.offset);
    }

  private:
    const TensorPlace &find(const std::string &name) const {
        const auto it = by_name_.find(name);
        if (it == by_name_.end()) refuse("the weights have no tensor " + name);
        return *it->second;
    }
    void place(const TensorPlace &t, size_t size) const {
        if (t.offset % 64 || t.offset > bytes_ || size > bytes_ - t.offset) refuse(t.name + ": outside the weights buffer");
    }

    uint64_t weights_, bytes_;
    std::map<std::string, const TensorPlace *> by_name_;
};

}  // namespace

ol_kv_geometry kv_geometry(const Config &c, uint32_t block_tokens, uint32_t blocks) {
    if (block_tokens == 0 || blocks == 0) refuse("a KV pool needs at least one block of one token");
    ol_kv_geometry g{};
    g.pieces = 2 * c.layers;
    g.block_tokens = block_tokens;
    g.row_bytes = c.kv_heads * c.head_dim * uint32_t(sizeof(float));
    g.blocks = blocks;
    g.piece_stride = uint64_t{block_tokens} * g.row_bytes;
    g.block_bytes = g.piece_stride * g.pieces;
    return g;
}

Decoder::Decoder(const Config &config, const std::vector<TensorPlace> &tensors, uint64_t weights, uint64_t weights_bytes,
                 uint64_t pool, const ol_kv_geometry &geometry, const Kernels &kernels, Compute compute) {
    check_config(config);
    const Config &c = model_.config = config;
    const Binder from(tensors, weights, weights_bytes);
    model_.embedding = from.matrix("token_embd.weight", c.vocab, c.hidden);
    model_.head = from.has("output.weight") ? from.matrix("output.weight", c.vocab, c.hidden) : model_.embedding;
    model_.output_norm = from.vector("output_norm.weight", c.hidden);
    const uint32_t q_rows = c.heads * c.head_dim, kv_rows = c.kv_heads * c.head_dim;
    for (uint32_t i = 0; i < c.layers; ++i) {
        const std::string p = "blk." + std::to_string(i) + ".";
        Layer l{};
        l.attn_norm = from.vector(p + "attn_norm.weight", c.hidden);
        l.ffn_norm = from.vector(p + "ffn_norm.weight", c.hidden);
        l.q = from.matrix(p + "attn_q.weight", q_rows, c.hidden);
        l.k = from.matrix(p + "attn_k.weight", kv_rows, c.hidden);
        const auto bias = [&](const char *name, uint32_t rows) {
            return from.has(p + name) ? from.vector(p + name, rows) : nullptr;
        };
        l.q_bias = bias("attn_q.bias", q_rows);
        l.k_bias = bias("attn_k.bias", kv_rows);
        l.v_bias = bias("attn_v.bias", kv_rows);
        l.v = from.matrix(p + "attn_v.weight", kv_rows, c.hidden);
        l.o = from.matrix(p + "attn_output.weight", c.hidden, q_rows);
        l.gate = from.matrix(p + "ffn_gate.weight", c.ffn, c.hidden);
        l.up = from.matrix(p + "ffn_up.weight", c.ffn, c.hidden);
        l.down = from.matrix(p + "ffn_down.weight", c.hidden, c.ffn);
        model_.layers.push_back(l);
    }
    model_.rope = make_rope(c.rope_base, c.head_dim, c.scaling,
                            from.has("rope_freqs.weight") ? from.vector("rope_freqs.weight", c.head_dim / 2) : nullptr);

    const ol_kv_geometry wanted = kv_geometry(c, std::max(1u, geometry.block_tokens), std::max(1u, geometry.blocks));
    if (geometry.block_tokens == 0 || geometry.blocks == 0 || geometry.pieces != wanted.pieces ||
        geometry.row_bytes != wanted.row_bytes || geometry.piece_stride < wanted.piece_stride ||
        geometry.block_bytes < geometry.piece_stride * geometry.pieces)
        refuse("the KV pool's geometry does not fit the model");
    if (pool == 0 || pool % sizeof(float)) refuse("the KV pool's address is null or not aligned");

    step_.kernels = &kernels;
    step_.compute = compute;
    step_.model = &model_;
    step_.pool = reinterpret_cast<uint8_t *>(pool);
    step_.geometry = geometry;
    step_.q_rows = q_rows;
    step_.kv_rows = kv_rows;
    step_.qkv_width = q_rows + 2 * kv_rows;
    step_.ffn_width = c.ffn;
    step_.vocab_width = padded(c.vocab);
    step_.width = std::max(c.hidden, q_rows);
    for (uint32_t i = 0; i < kOperators; ++i) slots_[i] = i;
}

void Decoder::bind(const std::map<std::string, uint32_t> &slots) {
    for (uint32_t i = 0; i < kOperators; ++i) {
        const auto it = slots.find(kOperatorTable[i].name);
        if (it == slots.end()) refuse(std::string("no slot given for operator ") + kOperatorTable[i].name);
        slots_[i] = it->second;
    }
    plans_.clear();
    plan_ = &none_;
}

uint32_t Decoder::add(uint64_t key, uint32_t generation, std::vector<uint32_t> tokens, uint32_t prompt_length,
                      uint32_t computed, SamplerParams params) {
    if (prompt_length == 0 || prompt_length > tokens.size()) refuse("the prompt must have between 1 and all tokens");
    if (computed >= tokens.size()) refuse("the last token's position cannot be computed already");
    if (tokens.size() > model_.config.context) refuse("more tokens than the model's context");
    for (const uint32_t t : tokens)
        if (t >= model_.config.vocab) refuse("token " + std::to_string(t) + " is not in the vocabulary");
    if (!(params.temperature >= 0) || !(params.top_p > 0) || !(params.min_p >= 0) || !(params.min_p <= 1) ||
        !(params.typical_p > 0) || !(params.repetition_penalty > 0) || params.top_logprobs > OL_MAX_TOP)
        refuse("a sampling parameter is out of range");
    auto s = std::make_unique<Sequence>();
    s->key = key;
    s->generation = generation;
    s->prompt_length = prompt_length;
    s->computed = computed;
    if (params.counts_tokens())
        for (size_t i = 0; i < tokens.size(); ++i) s->counts[tokens[i]] += i >= prompt_length;
    s->tokens = std::move(tokens);
    s->params = std::move(params);
    const uint32_t handle = next_handle_++;
    sequences_[handle] = std::move(s);
    return handle;
}

const Sequence &Decoder::sequence(uint32_t handle) const {
    const auto it = sequences_.find(handle);
    if (it == sequences_.end()) refuse("unknown sequence " + std::to_string(handle));
    return *it->second;
}

void Decoder::set_table(uint32_t handle, std::vector<uint32_t> blocks) {
    Sequence &s = const_cast<Sequence &>(sequence(handle));
    if (planned_) throw std::logic_error("a step is planned: commit or abandon it before changing a block table");
    for (const uint32_t b : blocks)
        if (b >= step_.geometry.blocks) refuse("block " + std::to_string(b) + " is not in the pool");
    s.table = std::move(blocks);
}

void Decoder::remove(uint32_t handle) {
    if (planned_)
        for (const Entry &e : step_.entries)
            if (e.handle == handle) throw std::logic_error("the sequence is part of the planned step");
    sequences_.erase(handle);
}

void Decoder::rewind(uint32_t handle, uint32_t computed) {
    Sequence &s = const_cast<Sequence &>(sequence(handle));
    if (planned_) throw std::logic_error("a step is planned: commit or abandon it before rewinding");
    if (computed > s.computed) refuse("rewind cannot go forward");
    s.computed = computed;
}

void Decoder::append_level(Plan &plan, Operator op, uint32_t layer, uint16_t parts) const {
    const uint64_t after = plan.tasks.size();
    for (uint16_t part = 0; part < parts; ++part) {
        ol_task t{};
        t.op = slots_[op];
        t.after = after;
        t.part = part;
        t.parts = parts;
        t.arg[0] = reinterpret_cast<uint64_t>(&step_);
        t.arg[1] = layer;
        plan.tasks.push_back(t);
        plan.kinds.push_back(op);
    }
}

Decoder::Cuts Decoder::cuts(uint32_t parts, uint32_t saved) const {
    const Config &c = model_.config;
    const Step &s = step_;
    const uint64_t n = s.tokens.size(), samples = s.sampling.size(), q_rows = s.q_rows, kv = s.kv_rows;
    const auto cut = [](uint64_t most, uint64_t work) {
        return uint16_t(std::min(most, std::max<uint64_t>(1, work / kWorkPerPart)));
    };
    Cuts out{};
    out[op_begin] = cut(parts, n * c.hidden * 4);
    out[op_qkv] = cut(parts, n * c.hidden * (q_rows + 2 * kv));
    out[op_attend] = cut(parts, s.attend_cost * q_rows * 2);
    out[op_output] = cut(parts, n * c.hidden * q_rows);
    out[op_gate_up] = cut(parts, n * c.hidden * c.ffn * 2);
    out[op_down] = cut(parts, n * c.hidden * c.ffn);
    if (samples > 0) out[op_head] = cut(parts, samples * c.hidden * c.vocab);
    if (saved > 0) out[op_verify] = cut(parts, uint64_t{saved} * s.geometry.pieces * s.geometry.row_bytes);
    if (samples > 0) out[op_sample] = cut(std::min<uint64_t>(parts, s.entries.size()), samples * c.vocab * 10);
    return out;
}

const Decoder::Plan &Decoder::plan_of(const Cuts &cuts) {
    const auto found = plans_.find(cuts);
    if (found != plans_.end()) return found->second;
    if (plans_.size() >= kMaxPlans) plans_.clear();
    Plan plan;
    plan.number = ++plans_built_;
    append_level(plan, op_begin, 0, cuts[op_begin]);
    for (uint32_t layer = 0; layer < model_.config.layers; ++layer)
        for (const Operator op : {op_qkv, op_attend, op_output, op_gate_up, op_down}) append_level(plan, op, layer, cuts[op]);
    for (const Operator op : {op_head, op_verify, op_sample}) append_level(plan, op, 0, cuts[op]);
    return plans_[cuts] = std::move(plan);
}

void Decoder::reserve(uint32_t parts, size_t partials) {
    const Config &c = model_.config;
    const size_t n = step_.tokens.size(), samples = step_.sampling.size(), record = kPartialHeader + c.head_dim;
    step_.x.reserve(n * c.hidden);
    step_.qkv.reserve(n * step_.qkv_width);
    step_.partials.reserve(partials * c.heads * record);
    step_.gate.reserve(n, step_.ffn_width, step_.compute);
    step_.up.reserve(n * step_.ffn_width);
    step_.logits.reserve(samples * step_.vocab_width);
    step_.angles.reserve(n * c.head_dim);
    if (step_.parts.size() < parts) step_.parts.resize(parts);
    for (PartScratch &p : step_.parts) {
        p.x.reserve(n, step_.width, step_.compute);
        p.partial.reserve(c.heads / c.kv_heads * record);
        if (!p.sampler) p.sampler = std::make_unique<SamplerScratch>(c.vocab);
    }
}

void Decoder::plan(const std::vector<BatchItem> &batch, uint32_t parts) {
    if (planned_) throw std::logic_error("a step is planned already: commit or abandon it first");
    if (batch.empty()) refuse("an empty batch");
    if (parts == 0 || parts > kMaxParts) refuse("parts must be between 1 and 256");
    const Config &c = model_.config;
    Step &s = step_;
    s.entries.clear();
    s.tokens.clear();
    s.sampling.clear();
    s.attend_cost = 0;
    uint32_t saved = 0, emissions = 0;
    for (const BatchItem &item : batch) {
        Sequence &q = const_cast<Sequence &>(sequence(item.handle));
        for (const Entry &e : s.entries)
            if (e.handle == item.handle) refuse("a sequence stands twice in the batch");
        const uint64_t end = uint64_t{q.computed} + item.positions;
        if (item.recheck > q.computed || end > q.tokens.size() || item.positions + item.recheck == 0)
            refuse("the step's positions are not positions of the sequence");
        const uint32_t drafts = uint32_t(item.drafts.size());
        if (drafts > 0 && (item.positions == 0 || end != q.tokens.size()))
            refuse("drafts stand behind the sequence's last token");
        if (end + drafts > c.context) refuse("drafts past the model's context");
        for (const uint32_t t : item.drafts)
            if (t >= c.vocab) refuse("draft " + std::to_string(t) + " is not in the vocabulary");
        if ((end + drafts - 1) / s.geometry.block_tokens >= q.table.size()) refuse("the block table is too short for the step");
        Entry e{};
        e.handle = item.handle;
        e.sequence = &q;
        e.first = uint32_t(s.tokens.size());
        e.tokens = item.recheck + item.positions + drafts;
        e.drafts = drafts;
        e.accepted = 0;
        e.emission = emissions;
        emissions += 1 + drafts;
        e.recheck = item.recheck;
        e.saved = saved;
        e.sample = -1;
        e.verified = e.finite = true;
        saved += item.recheck;
        for (uint32_t p = q.computed - item.recheck; p < end + drafts; ++p) {
            const uint32_t first = c.window != 0 && p >= c.window ? p + 1 - c.window : 0;
            const uint32_t id = p < end ? q.tokens[p] : item.drafts[p - end];
            s.tokens.push_back({id, p, uint32_t(s.entries.size()), first, 0, 0});
            s.attend_cost += p + 1 - first;
        }
        if (item.positions > 0 && end == q.tokens.size()) {
            e.sample = int32_t(s.sampling.size());
            for (uint32_t d = drafts + 1; d > 0; --d) s.sampling.push_back(uint32_t(s.tokens.size() - d));
        }
        s.entries.push_back(e);
    }
    const size_t n = s.tokens.size();
    s.split_segments = n < kSplitTokens;
    uint32_t partials = 0;
    for (Token &t : s.tokens) {
        t.segments = s.split_segments ? t.position / kSegment - t.first / kSegment + 1 : 1;
        t.partial = partials;
        partials += t.segments;
    }
    reserve(parts, partials);
    s.saved.resize(size_t{saved} * s.geometry.pieces * s.geometry.row_bytes);
    for (size_t t = 0; t < n; ++t) rope_angles(model_.rope, s.tokens[t].position, s.angles.data() + t * c.head_dim);
    s.emissions.assign(emissions, ol_emission{});
    s.emission_lengths.assign(emissions, 0);

    plan_ = &plan_of(cuts(parts, saved));
    writes_.clear();
    for (size_t i = 0; i < s.entries.size(); ++i) {
        const Entry &e = s.entries[i];
        const Sequence &q = *e.sequence;
        ol_step_write w{};
        w.key = q.key;
        w.table = reinterpret_cast<uint64_t>(q.table.data());
        w.generation = q.generation;
        w.first = q.computed;
        w.count = e.tokens - e.recheck;
        w.state_offset = uint32_t(q.tokens.size() - q.prompt_length);
        for (uint32_t d = 0; d <= e.drafts; ++d, ++w.state_offset) {
            w.state = reinterpret_cast<uint64_t>(&s.emissions[e.emission + d]);
            w.state_length = reinterpret_cast<uint64_t>(&s.emission_lengths[e.emission + d]);
            writes_.push_back(w);
            w.count = 0;                // a draft's token; its row is among those of the first
        }
    }
    planned_ = true;
}

void Decoder::run(uint32_t threads) {
    if (!planned_) throw std::logic_error("no step is planned");
    const std::vector<ol_task> &tasks = plan_->tasks;
    std::atomic<size_t> next{0}, done{0};
    std::atomic<bool> failed{false};
    std::mutex guard;
    std::string error;
    const auto work = [&] {
        ol_env env{};
        for (size_t i; (i = next.fetch_add(1)) < tasks.size();) {
            // Counting is enough: a task of a later level cannot be done before all tasks of this level's `after` are.
            for (uint32_t spins = 0; done.load(std::memory_order_acquire) < tasks[i].after; ++spins)
                if (spins > 4000) std::this_thread::yield();
            if (!failed.load(std::memory_order_relaxed) && kOperatorTable[plan_->kinds[i]].function(&tasks[i], &env) != OL_OK) {
                const std::lock_guard<std::mutex> lock(guard);
                error = env.error;
                failed = true;
            }
            done.fetch_add(1, std::memory_order_release);
        }
    };
    std::vector<std::thread> others;
    for (uint32_t i = 1; i < threads; ++i) others.emplace_back(work);
    work();
    for (std::thread &t : others) t.join();
    if (failed) throw std::runtime_error(error);
}

std::vector<Result> Decoder::commit() {
    if (!planned_) throw std::logic_error("no step is planned");
    planned_ = false;
    std::vector<Result> results;
    for (size_t i = 0; i < step_.entries.size(); ++i) {
        const Entry &e = step_.entries[i];
        Sequence &q = *e.sequence;
        Result r{e.handle, false, 0, 0.0f, {}, e.verified, e.finite, {}};
        if (e.verified && e.finite) {
            q.computed += e.tokens - e.recheck - e.drafts + e.accepted;
            for (uint32_t d = 0; d <= e.accepted && step_.emission_lengths[e.emission + d] > 0; ++d) {
                const ol_emission &out = step_.emissions[e.emission + d];
                std::vector<std::pair<uint32_t, float>> top;
                for (uint32_t k = 0; k < out.tops; ++k) top.emplace_back(out.top[k].token, out.top[k].logprob);
                q.tokens.push_back(out.token);
                if (q.params.counts_tokens()) ++q.counts[out.token];
                if (d > 0) {
                    r.more.push_back({out.token, out.logprob, std::move(top)});
                    continue;
                }
                r.sampled = true;
                r.token = out.token;
                r.logprob = out.logprob;
                r.top = std::move(top);
            }
        }
        results.push_back(std::move(r));
    }
    return results;
}

std::vector<uint32_t> Decoder::accepted() const {
    std::vector<uint32_t> out;
    for (const Entry &e : step_.entries) out.push_back(e.verified && e.finite ? e.accepted : 0);
    return out;
}

void Decoder::abandon() { planned_ = false; }

std::vector<std::vector<float>> Decoder::logits() const {
    std::vector<std::vector<float>> rows;
    for (size_t i = 0; i < step_.sampling.size(); ++i) {
        const float *row = step_.logits.data() + i * step_.vocab_width;
        rows.emplace_back(row, row + model_.config.vocab);
    }
    return rows;
}

}  // namespace outlast::engine
