#include "log_ops.hpp"

#include <cstdio>

namespace outlast {

namespace {

int32_t report(ol_env* env, const std::exception& e) {
    std::snprintf(env->error, sizeof env->error, "%s", e.what());
    const auto* log = dynamic_cast<const LogError*>(&e);
    if (log == nullptr) return OL_FAILED;
    switch (log->kind) {
        case LogError::Kind::fenced: return status_fenced;
        case LogError::Kind::durability: return status_durability;
        default: return status_refused;
    }
}

}  // namespace

int32_t log_seal(const ol_task* task, ol_env* env) {
    try {
        reinterpret_cast<LogWriter*>(task->arg[0])->seal(static_cast<uint32_t>(task->arg[1]));
        return OL_OK;
    } catch (const std::exception& e) {
        return report(env, e);
    }
}

int32_t log_finish(const ol_task* task, ol_env* env) {
    try {
        auto& log = *reinterpret_cast<LogWriter*>(task->arg[0]);
        const auto* writes = reinterpret_cast<const ol_step_write*>(task->arg[1]);
        for (uint64_t i = 0; i < task->arg[2]; ++i) {
            const ol_step_write& w = writes[i];
            if (w.state == 0 || w.state_length == 0) continue;
            const uint32_t length = *reinterpret_cast<const uint32_t*>(w.state_length);
            if (length == 0) continue;
            if (length > sizeof(ol_emission)) throw LogError(LogError::Kind::refused, "request state longer than ol_emission");
            log.append({OL_EMISSION, static_cast<uint32_t>(task->arg[3]), w.generation, w.key, w.state_offset, 1},
                       reinterpret_cast<const void*>(w.state), length);
        }
        log.commit();
        return OL_OK;
    } catch (const std::exception& e) {
        return report(env, e);
    }
}

StepPlan::Need StepPlan::need(const ol_step_write* writes, size_t count) const {
    Need n{0, 0};
    for (size_t i = 0; i < count; ++i) {
        const ol_step_write& w = writes[i];
        if (w.count != 0) {
            const uint32_t full = (w.first + w.count) / geometry_.block_tokens - w.first / geometry_.block_tokens;
            n.bytes += uint64_t{w.count} * token_bytes() + uint64_t{full} * 32;
            n.records += 1 + full;
        }
        if (w.state != 0) {
            n.bytes += sizeof(ol_emission);
            n.records += 1;
        }
    }
    return n;
}

void StepPlan::build(const ol_task* tasks, size_t count, const ol_step_write* writes, size_t writes_count, uint64_t number) {
    if (number != 0 && number == number_ && count == engine_tasks_) tasks_.resize(count);
    else tasks_.assign(tasks, tasks + count);
    number_ = number;
    engine_tasks_ = count;
    args_.clear();
    args_.reserve(need(writes, writes_count).records);  // addresses must not move
    const uint64_t computed = count;
    const auto add = [this](uint32_t op, uint64_t after, uint64_t a0, uint64_t a1, uint64_t a2, uint64_t a3) {
        ol_task t{};
        t.op = op;
        t.after = after;
        t.parts = 1;
        t.arg[0] = a0;
        t.arg[1] = a1;
        t.arg[2] = a2;
        t.arg[3] = a3;
        tasks_.push_back(t);
    };
    const auto log = reinterpret_cast<uint64_t>(&log_);
    const auto stage = [&](uint32_t op, uint16_t type, const ol_step_write& w, uint32_t offset, uint32_t tokens, uint32_t first, uint64_t length) {
        if (length > UINT32_MAX) throw LogError(LogError::Kind::refused, "a step writes more than 4 GiB of one sequence");
        uint32_t handle = 0;
        uint8_t* staged = log_.reserve({type, kv_region_, w.generation, w.key, offset, tokens}, static_cast<uint32_t>(length), &handle);
        args_.push_back({pool_, w.table, reinterpret_cast<uint64_t>(staged), first, tokens, geometry_});
        add(op, computed, reinterpret_cast<uint64_t>(&args_.back()), 0, 0, 0);
        add(ops_.seal, tasks_.size(), log, handle, 0, 0);
    };
    for (size_t i = 0; i < writes_count; ++i) {
        const ol_step_write& w = writes[i];
        if (w.count == 0) continue;
        stage(ops_.delta, OL_KV_ROWS, w, w.first, w.count, w.first, uint64_t{w.count} * token_bytes());
        const uint32_t bt = geometry_.block_tokens;
        for (uint32_t b = w.first / bt; b < (w.first + w.count) / bt; ++b) stage(ops_.digest, OL_KV_SEAL, w, b, bt, b * bt, 32);
    }
    add(ops_.finish, tasks_.size(), log, reinterpret_cast<uint64_t>(writes), writes_count, request_region_);
}

}  // namespace outlast
