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
        if (first >> 62 != 0) throw std::invalid_argument("the first ticket must be below 2^62");
        if ((first & mask_) != 0) throw std::invalid_argument("the first ticket must be a multiple of the capacity");
        tasks_ = std::make_unique<Slot[]>(capacity);
        done_ = std::make_unique<std::atomic<uint64_t>[]>(capacity);
        for (uint64_t i = 0; i < capacity; ++i) {
            tasks_[i].task.seq = first + i;
            done_[i].store((first + i < capacity ? 0 : first + i + 1 - capacity) << 1, std::memory_order_relaxed);
        }
        tail_.store(first, std::memory_order_relaxed);
        head_.store(first << 1, std::memory_order_relaxed);
        completed_.store(first, std::memory_order_seq_cst);
    }

    // Puts a copy of `task` into the ring and returns its ticket; 0 when the ring is full.
    // `fill(task)` runs after the ticket was claimed (see ol_slot for why).
    template <class Fill> uint64_t try_submit(const ol_task& task, Fill fill) {
        const uint64_t ticket = claim();
        if (ticket == 0) return 0;
        ol_task filled = task;
        fill(filled);
        publish(ticket, filled);
        return ticket;
    }

    // As try_submit, but if nothing stands before the task it is taken in the same breath and never written into its
    // place: then `taken` is true and `task` is what the caller has to run.
    template <class Fill> uint64_t submit_and_take(ol_task& task, Fill fill, bool& taken) {
        taken = false;
        const uint64_t ticket = claim();
        if (ticket == 0) return 0;
        fill(task);
        // Nobody else can claim the task, since its place does not read "full".  The exchange fails if an earlier task
        // is not claimed yet, or if the ring is parked.
        uint64_t head = (ticket - 1) << 1;
        if (head_.compare_exchange_strong(head, ticket << 1, std::memory_order_acquire, std::memory_order_relaxed)) {
            task.seq = ticket;
            seq_of(at(ticket)).store(ticket - 1 + capacity_, std::memory_order_release);
            taken = true;
        } else {
            publish(ticket, task);
        }
        return ticket;
    }

    // Takes the next task in ticket order; false when there is none, when `ready(after)` is false for it, or when the
    // ring is parked.
    template <class Ready> bool try_take(ol_task& out, Ready ready) {
        uint64_t word = head_.load(std::memory_order_relaxed);
        for (;;) {
            if ((word & 1) != 0) return false;
            const uint64_t head = word >> 1;
            Slot& slot = tasks_[head & mask_];
            const uint64_t seq = seq_of(slot).load(std::memory_order_acquire);
            if (seq == head + 1) {
                // If the claim succeeds nobody else took the task meanwhile, so `after` was the task's own.
                const bool go = ready(after_of(slot).load(std::memory_order_relaxed));
                if (!go) {
                    const uint64_t now = head_.load(std::memory_order_relaxed);
                    if (now == word) return false;
                    word = now;
                    continue;
                }
                if (!head_.compare_exchange_weak(word, (head + 1) << 1, std::memory_order_acquire, std::memory_order_relaxed)) continue;
                std::memcpy(reinterpret_cast<char*>(&out) + sizeof out.seq, reinterpret_cast<const char*>(&slot.task) + sizeof out.seq,
                            sizeof out - sizeof out.seq);
                out.seq = head + 1;
                seq_of(slot).store(head + capacity_, std::memory_order_release);
                return true;
            }
            if (seq < head + 1) return false;
            word = head_.load(std::memory_order_relaxed);
        }
    }

    // Whether try_take would find a task now.
    template <class Ready> bool has(Ready ready) const {
        const uint64_t word = head_.load(std::memory_order_seq_cst);
        Slot& slot = tasks_[(word >> 1) & mask_];
        return (word & 1) == 0 && seq_of(slot).load(std::memory_order_seq_cst) == (word >> 1) + 1 &&
               ready(after_of(slot).load(std::memory_order_relaxed));
    }

    // From park() to unpark() no task is claimed; submissions go on until the ring is full.  Returns the cursor: the
    // tickets up to it are claimed, and they are done once completed() has reached it.
    uint64_t park() { return head_.fetch_or(1, std::memory_order_seq_cst) >> 1; }
    void unpark() { head_.fetch_and(~uint64_t{1}, std::memory_order_seq_cst); }
    bool parked() const { return (head_.load(std::memory_order_seq_cst) & 1) != 0; }

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
    uint64_t head() const { return head_.load(std::memory_order_seq_cst) >> 1; }
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

    // The next ticket, once its place is free; 0 when the ring is full.
    uint64_t claim() {
        uint64_t tail = tail_.load(std::memory_order_relaxed);
        for (;;) {
            const uint64_t finished = done_[tail & mask_].load(std::memory_order_acquire) >> 1;
            const uint64_t seq = seq_of(tasks_[tail & mask_]).load(std::memory_order_acquire);
            if (seq == tail && finished + capacity_ >= tail + 1) {
                if (tail_.compare_exchange_weak(tail, tail + 1, std::memory_order_seq_cst, std::memory_order_relaxed)) return tail + 1;
                continue;
            }
            const uint64_t now = tail_.load(std::memory_order_relaxed);
            if (now == tail) return 0;
            tail = now;
        }
    }

    void publish(uint64_t ticket, const ol_task& task) {
        put_body(at(ticket).task, task);
        seq_of(at(ticket)).store(ticket, std::memory_order_seq_cst);
    }

    Slot& at(uint64_t ticket) { return tasks_[(ticket - 1) & mask_]; }
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
    alignas(128) std::atomic<uint64_t> head_{0};  // tickets claimed << 1 | parked
    alignas(128) std::atomic<uint64_t> completed_{0};
};

}  // namespace outlast
