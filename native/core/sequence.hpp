// The shipped operator `sequence`: a plan that runs as one task.  Its layout and contract stand in outlast/plan.h.
#pragma once
#include "outlast/plan.h"

#include <atomic>
#include <chrono>
#include <cstdio>

namespace outlast {

inline uint64_t steady_ns() {
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
}

template <bool timed> int32_t run_steps(ol_sequence& plan, ol_task& task, ol_env* env) {
    const auto* steps = reinterpret_cast<const ol_step*>(plan.steps);
    auto* slots = reinterpret_cast<ol_slot*>(plan.slots);
    auto* times = reinterpret_cast<uint64_t*>(plan.times);
    const uint32_t count = plan.count;
    const uint64_t entries = slots[-1].word;  // the executor keeps the table's size in the line before it
    if (timed) times[0] = steady_ns();
    for (uint32_t i = 0; i < count; ++i) {
        const ol_step step = steps[i];
        uint64_t fn = 0;
        if (step.op < entries) {
            ol_slot& slot = slots[step.op];
            // Sequentially consistent for the reason that a producer's load is: a flip that this load misses reads a
            // tail that covers the sequence's own ticket, so that the old code stays.
            const uint64_t word = std::atomic_ref<uint64_t>(slot.word).load(std::memory_order_seq_cst);
            fn = std::atomic_ref<uint64_t>(slot.fn[word & 1]).load(std::memory_order_acquire);
            task.generation = static_cast<uint32_t>(word);
        }
        if (fn == 0) {
            plan.failed = i;
            std::snprintf(env->error, sizeof env->error, "step %u of %u: no operator is registered under number %u", i, count, step.op);
            return OL_NO_OPERATOR;
        }
        task.op = step.op;
        task.arg[0] = step.args;
        const int32_t status = reinterpret_cast<ol_op_fn>(fn)(&task, env);
        if (status != OL_OK) [[unlikely]] {
            plan.failed = i;
            return status;
        }
        if (timed) times[i + 1] = steady_ns();
    }
    plan.runs += 1;
    return OL_OK;
}

inline int32_t run_sequence(const ol_task* given, ol_env* env) {
    auto* plan = reinterpret_cast<ol_sequence*>(given->arg[0]);
    if (plan == nullptr) {
        std::snprintf(env->error, sizeof env->error, "a sequence needs the address of an ol_sequence");
        return OL_FAILED;
    }
    if (plan->slots == 0 || (plan->steps == 0 && plan->count != 0)) {
        std::snprintf(env->error, sizeof env->error, "a sequence needs the address of its %s",
                      plan->slots == 0 ? "operator table (ol_executor.slots)" : "steps");
        return OL_FAILED;
    }
    ol_task task{};
    task.seq = given->seq;
    task.parts = 1;
    return plan->times == 0 ? run_steps<false>(*plan, task, env) : run_steps<true>(*plan, task, env);
}

}  // namespace outlast
