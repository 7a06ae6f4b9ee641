// The task ring: bounded, several producers, several consumers, completion per ticket.
// The protocol (who writes which word, in which order) stands in outlast/task.h; this file is that protocol.
#pragma once
#include "outlast/task.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

namespace outlast {

class Ring {
  public:
    // `first` shifts the first ticket, so that tests can start just below a wrap of 32 bits.
    explicit Ring(uint32_t capacity, uint64_t first = 0) : capacity_(capacity), mask_(capacity - 1) {
        if (capacity < 2 || (capacity & mask_) != 0) throw std::invalid_argument("ring capacity must be a power of two >= 2");
        if ((first & mask_) != 0) throw std::invalid_argument("the first ticket must be a multiple of the capacity");
        tasks_ = std::make_unique<Slot[]>(capacity);
        done_ = std::make_unique<std::atomic<uint64_t>[]>(capacity);
        for (uint64_t i = 0; i < capacity; ++i) {
            tasks_[i].task.seq = first + i;
            done_[i].store((first + i < capacity ? 0 : first + i + 1 - capacity) << 1, std::memory_order_relaxed);
        }
        tail_.store(first, std::memory_order_relaxed);
        head_.store(first, std::memory_order_relaxed);
        completed_.store(first, std::memory_order_seq_cst);
    }

    // Puts a copy of `task` into the ring and returns its ticket; 0 when the ring is full.
    // `fill(task)` runs after the ticket was claimed (see ol_slot for why).
    template <class Fill> uint64_t try_submit(const ol_task& task, Fill fill) {
        uint64_t tail = tail_.load(std::memory_order_relaxed);
        for (;;) {
            const uint64_t ticket = tail + 1;
            Slot& slot = tasks_[tail & mask_];
            const uint64_t finished = done_[tail & mask_].load(std::memory_order_acquire) >> 1;
            const uint64_t seq = seq_of(slot).load(std::memory_order_acquire);
            if (seq == tail && finished + capacity_ >= ticket) {
                if (!tail_.compare_exchange_weak(tail, ticket, std::memory_order_seq_cst, std::memory_order_relaxed)) continue;
                ol_task filled = task;
                fill(filled);
                put_body(slot.task, filled);
                seq_of(slot).store(ticket, std::memory_order_seq_cst);
                return ticket;
            }
            const uint64_t now = tail_.load(std::memory_order_relaxed);
            if (now == tail) return 0;
            tail = now;
        }
    }

    // Takes the next task in ticket order; false when there is none, or when `ready(after)` is false for it.
    template <class Ready> bool try_take(ol_task& out, Ready ready) {
        uint64_t head = head_.load(std::memory_order_relaxed);
        for (;;) {
            Slot& slot = tasks_[head & mask_];
            const uint64_t seq = seq_of(slot).load(std::memory_order_acquire);
            if (seq == head + 1) {
                // If the claim succeeds nobody else took the task meanwhile, so `after` was the task's own.
                const bool go = ready(after_of(slot).load(std::memory_order_relaxed));
                if (!go) {
                    const uint64_t now = head_.load(std::memory_order_relaxed);
                    if (now == head) return false;
                    head = now;
                    continue;
                }
                if (!head_.compare_exchange_weak(head, head + 1, std::memory_order_acquire, std::memory_order_relaxed)) continue;
                std::memcpy(reinterpret_cast<char*>(&out) + sizeof out.seq, reinterpret_cast<const char*>(&slot.task) + sizeof out.seq,
                            sizeof out - sizeof out.seq);
                out.seq = head + 1;
                seq_of(slot).store(head + capacity_, std::memory_order_release);
                return true;
            }
            if (seq < head + 1) return false;
            head = head_.load(std::memory_order_relaxed);
        }
    }

    // Whether try_take would find a task now.
    template <class Ready> bool has(Ready ready) const {
        const uint64_t head = head_.load(std::memory_order_seq_cst);
        Slot& slot = tasks_[head & mask_];
        return seq_of(slot).load(std::memory_order_seq_cst) == head + 1 && ready(after_of(slot).load(std::memory_order_relaxed));
    }

    // Records how `ticket` ended.  Called once per ticket, by the worker that ran it.
    void complete(uint64_t ticket, bool failed) {
        done_[(ticket - 1) & mask_].store(ticket << 1 | (failed ? 1 : 0), std::memory_order_seq_cst);
        uint64_t c = completed_.load(std::memory_order_seq_cst);
        // Not "equal": the place may hold a later ticket already, which was claimed only because c + 1 is done.
        while (done_[c & mask_].load(std::memory_order_seq_cst) >> 1 >= c + 1) {
            if (completed_.compare_exchange_strong(c, c + 1, std::memory_order_seq_cst)) c = c + 1;
        }
    }

    // All tickets up to this one are done.
    uint64_t completed() const { return completed_.load(std::memory_order_seq_cst); }
    uint64_t tail() const { return tail_.load(std::memory_order_seq_cst); }
    uint64_t head() const { return head_.load(std::memory_order_seq_cst); }
    uint32_t capacity() const { return capacity_; }
    bool is_done(uint64_t ticket) const {
        return completed() >= ticket || done_[(ticket - 1) & mask_].load(std::memory_order_seq_cst) >> 1 >= ticket;
    }
    bool empty() const { return head() >= tail(); }

    // Whether a done ticket failed; false when a later ticket has already taken its place.
    bool status(uint64_t ticket, bool& failed) const {
        const uint64_t d = done_[(ticket - 1) & mask_].load(std::memory_order_acquire);
        failed = (d & 1) != 0;
        return d >> 1 == ticket;
    }

  private:
    struct alignas(64) Slot { ol_task task; };

    static std::atomic_ref<uint64_t> seq_of(Slot& slot) { return std::atomic_ref<uint64_t>(slot.task.seq); }
    static std::atomic_ref<uint64_t> after_of(Slot& slot) { return std::atomic_ref<uint64_t>(slot.task.after); }

    // Everything but the sequence word.  Other threads may be reading that one and, at their own risk, `after`.
    static void put_body(ol_task& to, const ol_task& from) {
        constexpr size_t first = offsetof(ol_task, op), middle = offsetof(ol_task, after), rest = middle + sizeof(uint64_t);
        std::memcpy(reinterpret_cast<char*>(&to) + first, reinterpret_cast<const char*>(&from) + first, middle - first);
        std::atomic_ref<uint64_t>(to.after).store(from.after, std::memory_order_relaxed);
        std::memcpy(reinterpret_cast<char*>(&to) + rest, reinterpret_cast<const char*>(&from) + rest, sizeof(ol_task) - rest);
    }

    const uint32_t capacity_;
    const uint64_t mask_;
    std::unique_ptr<Slot[]> tasks_;
    std::unique_ptr<std::atomic<uint64_t>[]> done_;  // ticket << 1 | failed
    alignas(128) std::atomic<uint64_t> tail_{0};
    alignas(128) std::atomic<uint64_t> head_{0};
    alignas(128) std::atomic<uint64_t> completed_{0};
};

}  // namespace outlast
