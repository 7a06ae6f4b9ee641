/* Sequences, and the plan of each step as executor tasks.  Used by one thread; the operators of a plan may run on any
 * number of threads between plan() and commit(). */
#ifndef OUTLAST_ENGINE_DECODER_H
#define OUTLAST_ENGINE_DECODER_H
#include <array>
#include <map>
#include <string>

#include "outlast/task.h"
#include "step.h"

namespace outlast::engine {

struct TensorPlace {
    std::string name;       // as in the GGUF
    uint32_t type;          // GGUF number
    uint32_t rows;          // 0: a plain vector of `columns` floats
    uint32_t columns;
    uint64_t offset;        // from the start of the weights buffer, a multiple of 64
};

struct BatchItem {
    uint32_t handle;
    uint32_t positions;     // new positions
    uint32_t recheck;       // positions before `computed` to compute again and compare
    std::vector<uint32_t> drafts;   // tokens that may come next; only with the last known position in the step
};

struct Sampled {
    uint32_t token;
    float logprob;
    std::vector<std::pair<uint32_t, float>> top;
};

struct Result {
    uint32_t handle;
    bool sampled;
    uint32_t token;
    float logprob;
    std::vector<std::pair<uint32_t, float>> top;
    bool verified;
    bool finite;
    std::vector<Sampled> more;      // tokens behind the first one that the drafts have let through
};

class Decoder {
  public:
    /* Throws std::invalid_argument when tensors are missing or do not fit the shapes, the buffer or the pool. */
    Decoder(const Config &config, const std::vector<TensorPlace> &tensors, uint64_t weights, uint64_t weights_bytes,
            uint64_t pool, const ol_kv_geometry &geometry, const Kernels &kernels, Compute compute);

    /* Slot-table index of each operator, for the tasks of later plans. */
    void bind(const std::map<std::string, uint32_t> &slots);

    uint32_t add(uint64_t key, uint32_t generation, std::vector<uint32_t> tokens, uint32_t prompt_length,
                 uint32_t computed, SamplerParams params);
    void set_table(uint32_t handle, std::vector<uint32_t> blocks);
    void remove(uint32_t handle);
    /* Forget positions from `computed` on: their KV is computed again. */
    void rewind(uint32_t handle, uint32_t computed);
    const Sequence &sequence(uint32_t handle) const;

    void plan(const std::vector<BatchItem> &batch, uint32_t parts);
    /* Tasks of the planned step, in memory that stays as it is until a plan is given up: see plan_number. */
    const std::vector<ol_task> &tasks() const { return plan_->tasks; }
    /* From 1; plans of one number have the same tasks at the same address. */
    uint64_t plan_number() const { return plan_->number; }
    uint64_t plans_built() const { return plans_built_; }
    const std::vector<ol_step_write> &writes() const { return writes_; }
    /* Runs the planned tasks in order on the calling thread, or on `threads` threads. Throws std::runtime_error with
     * the operator's text if one fails. */
    void run(uint32_t threads);
    std::vector<Result> commit();
    void abandon();
    /* After the plan ran, before commit: drafts of each item that came true. */
    std::vector<uint32_t> accepted() const;
    bool planned() const { return planned_; }
    /* Logits of the step that ran, one row per sampling sequence in batch order; valid until the next plan. */
    std::vector<std::vector<float>> logits() const;
    const Config &config() const { return model_.config; }

  private:
    /* Into how many parts each kind of level is cut, 0: there is none.  That is all in which two plans differ: what
     * their tasks work on stands in step_. */
    using Cuts = std::array<uint16_t, kOperators>;
    struct Plan {
        uint64_t number = 0;
        std::vector<ol_task> tasks;
        std::vector<uint32_t> kinds;    // operator of each task
    };
    Cuts cuts(uint32_t parts, uint32_t saved) const;
    const Plan &plan_of(const Cuts &cuts);
    void append_level(Plan &plan, Operator op, uint32_t layer, uint16_t parts) const;
    void reserve(uint32_t parts, size_t partials);

    Model model_;
    Step step_;
    std::map<uint32_t, std::unique_ptr<Sequence>> sequences_;
    uint32_t next_handle_ = 1;
    std::array<uint32_t, kOperators> slots_;
    bool planned_ = false;
    std::map<Cuts, Plan> plans_;        // a handful: one for steps of one token, a few for wider ones
    Plan none_;
    const Plan *plan_ = &none_;
    uint64_t plans_built_ = 0;
    std::vector<ol_step_write> writes_;
};

ol_kv_geometry kv_geometry(const Config &config, uint32_t block_tokens, uint32_t blocks);

}  // namespace outlast::engine
#endif
