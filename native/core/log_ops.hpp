// The log as executor operators, and the plan that joins an engine's step with its checkpoint.
#pragma once
#include "log.hpp"
#include "outlast/region.h"
#include "outlast/task.h"

#include <vector>

namespace outlast {

// Statuses of the log operators, beside OL_FAILED.
constexpr int32_t status_fenced = -16;
constexpr int32_t status_durability = -17;
constexpr int32_t status_refused = -18;

// arg: log, handle of the reservation
int32_t log_seal(const ol_task* task, ol_env* env);
// arg: log, address of ol_step_write[], their number.  Appends what was emitted, commits.
int32_t log_finish(const ol_task* task, ol_env* env);

// Task array: the engine's tasks, then a delta handler and a seal per written piece of KV, then log_finish.
// The arrays live as long as the plan, so the tasks may point into them.
class StepPlan {
  public:
    struct Operators {
        uint32_t delta, digest, seal, finish;
    };

    StepPlan(LogWriter& log, uint32_t kv_region, uint32_t request_region, uint64_t pool, const ol_kv_geometry& geometry,
             const Operators& operators)
        : log_(log), kv_region_(kv_region), request_region_(request_region), pool_(pool), geometry_(geometry), ops_(operators) {}

    struct Need {
        uint64_t bytes;
        uint32_t records;
    };
    Need need(const ol_step_write* writes, size_t count) const;
    // begin() must have been called on the log with at least need() on top of what the caller appends itself.
    // `number` names the engine's tasks: those of the number that was built last are taken as they are. 0: no name.
    void build(const ol_task* tasks, size_t count, const ol_step_write* writes, size_t writes_count, uint64_t number = 0);

    const std::vector<ol_task>& tasks() const { return tasks_; }
    uint32_t request_region() const { return request_region_; }

  private:
    uint64_t token_bytes() const { return uint64_t{geometry_.pieces} * geometry_.row_bytes; }

    LogWriter& log_;
    const uint32_t kv_region_, request_region_;
    const uint64_t pool_;
    const ol_kv_geometry geometry_;
    const Operators ops_;
    std::vector<ol_task> tasks_;
    uint64_t number_ = 0;  // of the engine's tasks at its beginning
    size_t engine_tasks_ = 0;
    std::vector<ol_kv_args> args_;
};

}  // namespace outlast
