// The task ring: bounded, several producers, several consumers, completion per ticket.
// The protocol (who writes which word, in which order) stands in outlast/task.h; this file is that protocol.
#pragma once
#include "outlast/task.h"

#include <atomic>
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
        done_ = std::make_unique<Done[]>(capacity);
        for (uint64_t i = 0; i < capacity; ++i) {
            tasks_[i].task.seq = first + i;
            done_[i].ticket.store(first + i < capacity ? 0 : first + i + 1 - capacity, std::memory_order_relaxed);
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
            const uint64_t finished = done_[tail & mask_].ticket.load(std::memory_order_acquire);
            const uint64_t seq = seq_of(slot).load(std::memory_order_acquire);
            if (seq == tail && finished + capacity_ >= ticket) {
                if (!tail_.compare_exchange_weak(tail, ticket, std::memory_order_seq_cst, std::memory_order_relaxed)) continue;
                ol_task filled = task;
                fill(filled);
                copy_body(slot.task, filled);
                seq_of(slot).store(ticket, std::memory_order_seq_cst);
                return ticket;
            }
            const uint64_t now = tail_.load(std::memory_order_relaxed);
            if (now == tail) return 0;
            tail = now;
        }
    }

    // Takes the next task in ticket order; false when there is none.  out.seq is the ticket.
    bool try_take(ol_task& out) {
        uint64_t head = head_.load(std::memory_order_relaxed);
        for (;;) {
            Slot& slot = tasks_[head & mask_];
            const uint64_t seq = seq_of(slot).load(std::memory_order_acquire);
            if (seq == head + 1) {
                if (!head_.compare_exchange_weak(head, head + 1, std::memory_order_acquire, std::memory_order_relaxed)) continue;
                copy_body(out, slot.task);
                out.seq = head + 1;
                seq_of(slot).store(head + capacity_, std::memory_order_release);
                return true;
            }
            if (seq < head + 1) return false;
            head = head_.load(std::memory_order_relaxed);
        }
    }

    // Records that `ticket` ended with `status`.  Called once per ticket, by the worker that ran it.
    void complete(uint64_t ticket, int32_t status) {
        Done& mine = done_[(ticket - 1) & mask_];
        mine.status.store(status, std::memory_order_relaxed);
        mine.ticket.store(ticket, std::memory_order_seq_cst);
        uint64_t c = completed_.load(std::memory_order_seq_cst);
        while (done_[c & mask_].ticket.load(std::memory_order_seq_cst) == c + 1) {
            if (completed_.compare_exchange_strong(c, c + 1, std::memory_order_seq_cst)) c = c + 1;
        }
    }

    // All tickets up to this one are done.
    uint64_t completed() const { return completed_.load(std::memory_order_seq_cst); }
    uint64_t tail() const { return tail_.load(std::memory_order_seq_cst); }
    uint64_t head() const { return head_.load(std::memory_order_seq_cst); }
    uint32_t capacity() const { return capacity_; }
    bool is_done(uint64_t ticket) const {
        return completed() >= ticket || done_[(ticket - 1) & mask_].ticket.load(std::memory_order_acquire) >= ticket;
    }
    bool empty() const { return head() >= tail(); }

    // Status of a done ticket; false when a later ticket has already taken its place.
    bool status(uint64_t ticket, int32_t& out) const {
        const Done& d = done_[(ticket - 1) & mask_];
        if (d.ticket.load(std::memory_order_acquire) != ticket) return false;
        out = d.status.load(std::memory_order_acquire);
        return d.ticket.load(std::memory_order_acquire) == ticket;
    }

  private:
    struct alignas(64) Slot { ol_task task; };
    struct Done {
        std::atomic<uint64_t> ticket{0};
        std::atomic<int32_t> status{0};
    };

    static std::atomic_ref<uint64_t> seq_of(Slot& slot) { return std::atomic_ref<uint64_t>(slot.task.seq); }

    // Everything but the sequence word, which other threads may be reading.
    static void copy_body(ol_task& to, const ol_task& from) {
        std::memcpy(reinterpret_cast<char*>(&to) + sizeof(uint64_t), reinterpret_cast<const char*>(&from) + sizeof(uint64_t),
                    sizeof(ol_task) - sizeof(uint64_t));
    }

    const uint32_t capacity_;
    const uint64_t mask_;
    std::unique_ptr<Slot[]> tasks_;
    std::unique_ptr<Done[]> done_;
    alignas(128) std::atomic<uint64_t> tail_{0};
    alignas(128) std::atomic<uint64_t> head_{0};
    alignas(128) std::atomic<uint64_t> completed_{0};
};

}  // namespace outlast
