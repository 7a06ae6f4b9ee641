// The CPU executor: a ring, a slot table, worker threads, and callers that run tasks while they wait.
#pragma once
#include "futex.hpp"
#include "outlast/plan.h"
#include "ring.hpp"

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace outlast {

using Clock = std::chrono::steady_clock;

struct TaskError {
    uint64_t ticket;
    uint32_t op;
    int32_t status;
    std::string text;
};

// What is counted of one operator.  `ns` are the newest run times that were measured (every 256th ticket is).
struct OperatorCounts {
    uint64_t calls, failures, samples;
    std::vector<uint32_t> ns;
};

// Plans that were run, and of those that were timed where the time of the calling thread went, in nanoseconds: in all,
// in operators, and waiting for tasks of other threads.  The rest is dispatch.  A plan in which the thread lost its core
// does not count as timed: where it stood then would say nothing.
struct PlanCounts {
    uint64_t plans, tasks, timed, ns, operators_ns, waits_ns;
};

// Why the workers are away; see task.h.
enum class Away : uint32_t { no = 0, asked = 1, idle = 2, silent = 3 };

struct Options {
    uint64_t first_ticket = 0;
    uint32_t operators = 4096;  // places in the table; the shipped `sequence` has one of its own after them
    uint64_t idle_ns = 0;       // workers leave when nothing was submitted for so long; 0 = never
    uint64_t silence_ns = 0;    // workers leave when the host gave no sign of life for so long; 0 = never
};

class Executor {
  public:
    static constexpr uint32_t most_operators = 1u << 20;

    Executor(uint32_t capacity, uint32_t workers, const Options& options);
    Executor(uint32_t capacity, uint32_t workers, uint64_t first_ticket = 0) : Executor(capacity, workers, Options{first_ticket}) {}
    ~Executor();
    // Ends the workers; returns when the tasks that they are running have ended, or false at the deadline.  Then a
    // worker still runs a task: the executor must stay where it is for ever.  Tasks that wait for others are not run.
    bool stop(Clock::time_point deadline = Clock::time_point::max());

    // park: no task starts any more, those that run are waited for, the workers end.  With `drain` the tasks that were
    // submitted before are run first.  False at the deadline: then nothing has changed.  Submissions stay in the ring.
    bool park(bool drain, Clock::time_point deadline);
    // Starts the workers where they stopped; nothing when they are there.
    void resume();
    Away away() const { return static_cast<Away>(away_.load(std::memory_order_seq_cst)); }
    // A sign of life of the host; brings workers back that left for want of one.
    void beat();
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;

    // Slot table.  register_operator throws std::length_error when the table is full, std::invalid_argument on
    // another ABI.  swap returns the flip's ticket; it waits (assisting) until the inactive side is free, or
    // returns 0 when the deadline passes first.
    uint32_t register_operator(uint64_t fn, uint32_t abi);
    uint64_t swap(uint32_t op, uint64_t fn, uint32_t abi, Clock::time_point deadline);
    uint64_t rollback(uint32_t op, Clock::time_point deadline);
    bool quiescent(uint32_t op);  // the side that is not active can no longer be running or run
    ol_slot slot(uint32_t op);

    // Submits one task; 0 when the ring stays full until the deadline.  Throws std::invalid_argument if `after` names a
    // ticket that was not given out: it would never run.
    uint64_t submit(const ol_task& task, Clock::time_point deadline);
    // Waits until `ticket` is done, running tasks meanwhile if `assist`; false at the deadline.
    bool wait(uint64_t ticket, Clock::time_point deadline, bool assist = true);
    // Submits a plan (`after` counts tasks of the plan from 1) and waits for all of it.
    // Returns OL_OK, the first failing status with `error` filled, or 1 at the deadline.  Then tasks that were not
    // started will not be run, but one that was goes on: what the plan points to must outlive it.
    // Throws std::invalid_argument, before anything was submitted, if a task waits for itself or a later one.
    int32_t run(const ol_task* tasks, size_t count, Clock::time_point deadline, TaskError& error);

    // Puts one task into the ring and runs tasks until it is done; cheaper than submit and wait, since a task with none
    // before it is run at once, without a look at the clock and without waking anyone.  OL_OK, the task's status with
    // its text, or 1 at the deadline: the task may still run.
    int32_t run_one(const ol_task& task, double timeout_s, char* text, uint64_t text_bytes);
    // The functions of this executor for other native modules; lives as long as it does.
    const ol_executor* api() const { return &api_; }

    // Status of a done ticket.  The last 1024 failures are kept.  A ticket so old that its failure might have
    // been forgotten reads as OL_FAILED, never as OL_OK.
    int32_t status(uint64_t ticket, std::string* text = nullptr);

    void set_heartbeat(uint64_t address) { heartbeat_.store(address, std::memory_order_release); }
    uint64_t executed() const { return ring_.completed() - first_ticket_; }
    uint64_t completed() const { return ring_.completed(); }
    uint64_t tail() const { return ring_.tail(); }
    uint32_t capacity() const { return ring_.capacity(); }
    uint32_t workers() const { return static_cast<uint32_t>(workers_.size()); }
    uint32_t present();  // workers that have not left
    uint64_t head() const { return ring_.head(); }
    uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
    OperatorCounts counts(uint32_t op);
    PlanCounts plan_counts() const;

  private:
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };

    // Plans that run now, up to plan_slots at once.  Plan number = (count << plan_bits) | place in this table.
    static constexpr uint32_t plan_bits = 6, plan_slots = 1u << plan_bits;
    static constexpr uint64_t plan_runs = ~uint64_t{0};
    struct Plan {
        std::atomic<uint64_t> until{0};   // 0 = free, plan_runs = its run() goes on, else free once this ticket is passed
        std::atomic<uint32_t> failed{0};  // the plan's number once a task of it failed
        TaskError first{0, 0, 0, {}};     // its first failure; under error_mutex_
    };

    struct Worker {
        std::thread thread;
        bool gone = true;  // it will not look at the executor again; under life_mutex_
    };
    // The newest run times of one operator; all words relaxed.
    struct Samples {
        static constexpr uint32_t kept = 14;
        uint64_t count;
        uint32_t ns[kept];
    };
    static_assert(sizeof(Samples) == sizeof(ol_slot));
    // What the calling thread of a timed plan does, in nanoseconds.
    struct Timed {
        uint64_t operators = 0, waits = 0;
        uint64_t started = 0;  // when its newest operator did
    };
    static constexpr uint64_t plans_sampled = 16;  // every so many plans one is timed: 0.5 us in 160 tasks, on average
    static constexpr uint64_t sampled = 256;  // every so many tickets one is timed: two looks at the clock, 0.2 ns a task

    struct Watch;
    void worker_main(uint32_t number);
    bool may_leave(Worker& self);
    void leave_for(Away why, uint64_t seen_tail, uint64_t seen_beats);
    void relaunch();
    void start_workers();  // under life_mutex_
    bool wait_gone(std::unique_lock<std::mutex>& lock, Clock::time_point deadline);
    void announce();
    void sample(uint32_t op, uint64_t ns);
    bool take_one(ol_env& env, bool may_wait, Timed* timed = nullptr);
    ol_slot* entry(uint32_t op) { return op < operators_.load(std::memory_order_seq_cst) ? &slots_[op] : nullptr; }
    template <class Done> bool wait_for(Done done, Clock::time_point deadline, bool assist = true, Timed* timed = nullptr);
    uint32_t begin_plan(Clock::time_point deadline);
    bool dependency_failed(uint64_t ticket);
    void execute(const ol_task& task, ol_env& env, Timed* timed);
    int32_t perform(const ol_task& task, ol_env& env, const char*& text, Timed* timed = nullptr);
    void finish(const ol_task& task, int32_t status, const char* text);
    uint32_t generation_of(uint32_t op);
    void record_error(const ol_task& task, int32_t status, const char* text);
    uint64_t put(const ol_task& task);
    uint64_t flip(uint32_t op, uint64_t fn, bool keep_fn, Clock::time_point deadline);

    Ring ring_;
    const uint64_t first_ticket_;
    const uint32_t places_;   // for operators; `sequence` stands at this index
    std::unique_ptr<char, Free> memory_;
    ol_slot* slots_;          // places_ + 1 entries; the line before them holds that number, for `sequence`
    std::atomic<uint32_t> operators_{0};
    Samples* samples_;        // as many
    ol_executor api_{};
    const uint64_t idle_ns_, silence_ns_;
    std::atomic<uint64_t> beats_{0};
    std::atomic<uint64_t> refused_{0};
    std::mutex table_mutex_;  // serialises register/swap/rollback
    Event work_, done_;
    std::atomic<bool> stop_{false};
    std::atomic<uint64_t> heartbeat_{0};
    std::atomic<uint32_t> plan_counter_{0};
    std::array<Plan, plan_slots> plans_;
    std::atomic<uint64_t> plans_run_{0}, plan_tasks_{0}, plans_timed_{0}, plan_ns_{0}, operators_ns_{0}, waits_ns_{0};
    std::mutex error_mutex_;
    std::deque<TaskError> errors_;  // the newest failures
    uint64_t forgotten_ = 0;        // highest ticket whose failure left that list
    std::atomic<uint64_t> error_count_{0};
    std::atomic<uint32_t> away_{0};  // an Away; written under life_mutex_
    std::mutex life_mutex_;          // coming and going of workers
    std::mutex park_mutex_;          // one park or resume at a time
    std::condition_variable gone_;
    std::vector<Worker> workers_;
};

}  // namespace outlast
