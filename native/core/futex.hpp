// Sleeping on a 32-bit word (futex(2)), private to the process.
#pragma once
#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace outlast {

inline void cpu_relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Returns when the word differs from `seen`, was woken, or `microseconds` have passed.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, uint64_t microseconds) {
    timespec t{static_cast<time_t>(microseconds / 1000000), static_cast<long>(microseconds % 1000000 * 1000)};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, &t, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Something that happens, for threads that first spin and then sleep.  See "sleepers, signal" in task.h.
class Event {
  public:
    // Call after publishing, with a seq_cst store, what the sleepers look for.
    void notify() {
        if (sleepers_.load(std::memory_order_seq_cst) != 0) {
            signal_.fetch_add(1, std::memory_order_seq_cst);
            futex_wake_all(signal_);
        }
    }

    // Sleeps until notify() or for at most `microseconds`, unless `ready()` is true on the last look.
    template <class Ready> void sleep(uint64_t microseconds, Ready ready) {
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        uint32_t seen = signal_.load(std::memory_order_seq_cst);
        if (!ready()) futex_wait(signal_, seen, microseconds);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }

  private:
    alignas(64) std::atomic<uint32_t> signal_{0};
    std::atomic<uint32_t> sleepers_{0};
};

}  // namespace outlast
