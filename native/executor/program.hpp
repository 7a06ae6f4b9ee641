// A plan in memory: steps, argument structs, literals and scratch in one block, with the places where addresses go.
#pragma once
#include "outlast/plan.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace outlast {

class Program {
  public:
    struct StepOf {
        uint32_t op, level, args, shares;  // args: byte offset in the block
    };
    struct Patch {
        uint32_t slot;    // what is to be pointed at; see bind()
        uint32_t at;      // byte offset of the 64-bit address in the block
        int64_t addend;   // bytes from the slot's address
    };
    static constexpr uint32_t own_block = UINT32_MAX;  // a slot: the block itself (scratch and literals)

    // `block`: initial content of the first bytes; `size`: bytes of all of it.  Throws std::invalid_argument if a step
    // or a patch lies outside.
    Program(const ol_executor* executor, const std::string& block, uint64_t size, const std::vector<StepOf>& steps,
            const std::vector<Patch>& patches, uint32_t slots);

    uint32_t slots() const { return static_cast<uint32_t>(addresses_.size()); }
    uint32_t steps() const { return static_cast<uint32_t>(steps_.size()); }
    uint64_t block() const { return reinterpret_cast<uint64_t>(block_.get()); }
    uint64_t runs() const { return runs_; }
    double estimate = 0;  // nanoseconds of one run, as planned

    // Points every patch of `slot` at `address`.
    void bind(uint32_t slot, uint64_t address) {
        if (addresses_[slot] == address) return;
        addresses_[slot] = address;
        for (uint32_t i = first_[slot]; i < first_[slot + 1]; ++i)
            *reinterpret_cast<uint64_t*>(block_.get() + patches_[i].at) = address + static_cast<uint64_t>(patches_[i].addend);
    }

    // Runs steps [first, first + count).  OL_OK, the failing step's status (then failed() and `text`), or 1 when the time
    // is over; afterwards the program can not be run again until that run has ended, since its tasks may still go on.
    int32_t run(uint32_t first, uint32_t count, double timeout_s, char* text, size_t text_bytes);
    uint32_t failed() const { return failed_; }
    // A run timed out: what it left in the ring may still touch the block, so the block is never used or freed again.
    bool lost() const { return lost_; }
    ~Program() {
        if (lost_) (void)block_.release();
    }
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    // Held by whoever binds and runs: one block serves one call at a time.
    std::mutex turn;

    // One run with a clock reading before the first step and after each (nanoseconds, steady clock).
    int32_t run_timed(uint32_t first, uint32_t count, double timeout_s, std::vector<uint64_t>& times, char* text, size_t text_bytes);

  private:
    using RunOne = int32_t (*)(uint64_t, const ol_task*, double, char*, uint64_t);
    using Run = int32_t (*)(uint64_t, const ol_task*, uint64_t, double, char*, uint64_t);
    struct Free {
        void operator()(uint8_t* p) const;
    };

    int32_t run_wide(uint32_t first, uint32_t count, double timeout_s, char* text, size_t text_bytes);

    const ol_executor* executor_;
    std::unique_ptr<uint8_t[], Free> block_;
    std::vector<ol_step> steps_;
    std::vector<uint32_t> shares_;
    bool wide_ = false;  // some step is worth splitting and there are workers for it
    std::vector<Patch> patches_;      // sorted by slot
    std::vector<uint32_t> first_;     // patches of slot s: [first_[s], first_[s + 1])
    std::vector<uint64_t> addresses_;
    ol_sequence sequence_{};
    std::vector<ol_sequence> narrow_;  // sequences of a wide run
    uint32_t failed_ = 0;
    bool lost_ = false;
    uint64_t runs_ = 0;
};

}  // namespace outlast
