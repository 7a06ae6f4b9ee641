#include "program.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

namespace outlast {

namespace {
constexpr size_t alignment = 64;  // a cache line, and the widest vector
}

void Program::Free::operator()(uint8_t* p) const { std::free(p); }

Program::Program(const ol_executor* executor, const std::string& block, uint64_t size, const std::vector<StepOf>& steps,
                 const std::vector<Patch>& patches, uint32_t slots)
    : executor_(executor), patches_(patches), addresses_(slots, 0) {
    if (executor->abi != OL_ABI_VERSION) throw std::invalid_argument("the executor is of another build");
    if (block.size() > size) throw std::invalid_argument("the block is larger than its size");
    size = (std::max<uint64_t>(size, 1) + alignment - 1) / alignment * alignment;
    block_.reset(static_cast<uint8_t*>(std::aligned_alloc(alignment, size)));
    if (!block_) throw std::bad_alloc();
    std::memcpy(block_.get(), block.data(), block.size());
    for (const StepOf& s : steps) {
        if (s.args >= size) throw std::invalid_argument("a step's arguments lie outside the block");
        steps_.push_back({s.op, s.level, this->block() + s.args});
        shares_.push_back(std::max(1u, std::min(s.shares, executor->workers + 1)));
        wide_ = wide_ || shares_.back() > 1;
    }
    std::stable_sort(patches_.begin(), patches_.end(), [](const Patch& a, const Patch& b) { return a.slot < b.slot; });
    first_.assign(slots + 1, 0);
    for (const Patch& p : patches_) {
        if (p.at + sizeof(uint64_t) > size || p.at % sizeof(uint64_t) != 0) throw std::invalid_argument("a patch lies outside the block");
        if (p.slot == own_block) {
            *reinterpret_cast<uint64_t*>(block_.get() + p.at) = this->block() + static_cast<uint64_t>(p.addend);
        } else if (p.slot >= slots) {
            throw std::invalid_argument("a patch names a slot that does not exist");
        } else {
            ++first_[p.slot + 1];
        }
    }
    for (uint32_t s = 0; s < slots; ++s) first_[s + 1] += first_[s];
    sequence_.slots = executor->slots;
    narrow_.resize(steps_.size());
}

int32_t Program::run(uint32_t first, uint32_t count, double timeout_s, char* text, size_t text_bytes) {
    if (count == 0) return OL_OK;
    if (lost_) throw std::logic_error("an earlier run of this plan timed out; it can not be run again");
    if (wide_) return run_wide(first, count, timeout_s, text, text_bytes);
    sequence_.steps = reinterpret_cast<uint64_t>(steps_.data() + first);
    sequence_.count = count;
    ol_task task{};
    task.op = executor_->sequence;
    task.parts = 1;
    task.arg[0] = reinterpret_cast<uint64_t>(&sequence_);
    const int32_t status = reinterpret_cast<RunOne>(executor_->run_one)(executor_->self, &task, timeout_s, text, text_bytes);
    if (status == OL_OK)
        ++runs_;
    else
        failed_ = first + sequence_.failed;
    lost_ = status == 1;
    return status;
}

int32_t Program::run_timed(uint32_t first, uint32_t count, double timeout_s, std::vector<uint64_t>& times, char* text, size_t text_bytes) {
    times.assign(count + 1, 0);
    sequence_.times = reinterpret_cast<uint64_t>(times.data());
    const bool wide = wide_;
    wide_ = false;
    const int32_t status = run(first, count, timeout_s, text, text_bytes);
    wide_ = wide;
    sequence_.times = 0;
    return status;
}

// Stretches of narrow steps are one task each, a step worth splitting is a task per share; each stage waits for the
// one before it.
int32_t Program::run_wide(uint32_t first, uint32_t count, double timeout_s, char* text, size_t text_bytes) {
    std::vector<ol_task> tasks;
    std::vector<uint32_t> step_of;
    uint64_t stage_end = 0;  // tasks of the stages before this one
    for (uint32_t i = first; i < first + count;) {
        uint32_t end = i + 1;
        ol_task task{};
        task.after = stage_end;
        task.parts = 1;
        if (shares_[i] > 1) {
            task.op = steps_[i].op;
            task.arg[0] = steps_[i].args;
            task.parts = static_cast<uint16_t>(shares_[i]);
            for (uint32_t part = 0; part < shares_[i]; ++part) {
                task.part = static_cast<uint16_t>(part);
                tasks.push_back(task);
                step_of.push_back(i);
            }
        } else {
            while (end < first + count && shares_[end] == 1) ++end;
            ol_sequence& s = narrow_[i];
            s = sequence_;
            s.steps = reinterpret_cast<uint64_t>(steps_.data() + i);
            s.count = end - i;
            s.failed = 0;
            task.op = executor_->sequence;
            task.arg[0] = reinterpret_cast<uint64_t>(&s);
            tasks.push_back(task);
            step_of.push_back(i);
        }
        stage_end = tasks.size();
        i = end;
    }
    const int32_t status = reinterpret_cast<Run>(executor_->run)(executor_->self, tasks.data(), tasks.size(), timeout_s, text, text_bytes);
    if (status == OL_OK)
        ++runs_;
    else
        failed_ = first;  // which one is in the text
    lost_ = status == 1;
    return status;
}

}  // namespace outlast
