#include "executor.hpp"

#include "sequence.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace outlast {

namespace {
// Spins before sleeping.  A cross-core hand-over takes about 0.5 us; 2,000 pauses are some 20-40 us, long enough for
// the next task of a running plan and short enough not to starve a neighbour on a shared core.
constexpr int spins_before_sleep = 2000;
constexpr uint64_t sleep_slice_us = 50000;  // an upper bound only; sleepers are woken
constexpr uint64_t full_ring_slice_us = 1000;  // a place may come free without a completion that wakes us
constexpr size_t kept_errors = 1024;
constexpr uint32_t assisting_caller = 0;

std::atomic_ref<uint64_t> shared(uint64_t& word) { return std::atomic_ref<uint64_t>(word); }

void copy_text(const char* from, char* to, uint64_t bytes) {
    if (to == nullptr || bytes == 0) return;
    const size_t n = std::min<size_t>(std::strlen(from), bytes - 1);
    std::memcpy(to, from, n);
    to[n] = '\0';
}

Clock::time_point deadline_after(double seconds) {
    if (!(seconds >= 0 && seconds <= 1e8)) seconds = 1e8;  // also for a NaN
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// How often the kernel gave this thread's core to another one against its will.
uint64_t displacements() {
    rusage use{};
    return getrusage(RUSAGE_THREAD, &use) == 0 ? static_cast<uint64_t>(use.ru_nivcsw) : 0;
}

// ol_executor.run_one and .run
int32_t run_one_c(uint64_t self, const ol_task* task, double timeout_s, char* text, uint64_t text_bytes) {
    return reinterpret_cast<Executor*>(self)->run_one(*task, timeout_s, text, text_bytes);
}

int32_t run_c(uint64_t self, const ol_task* tasks, uint64_t count, double timeout_s, char* text, uint64_t text_bytes) {
    TaskError error{0, 0, OL_OK, {}};
    try {
        const int32_t status = reinterpret_cast<Executor*>(self)->run(tasks, count, deadline_after(timeout_s), error);
        if (status != OL_OK && status != 1) copy_text(error.text.c_str(), text, text_bytes);
        return status;
    } catch (const std::exception& e) {
        copy_text(e.what(), text, text_bytes);
        return OL_FAILED;
    }
}
}  // namespace

Executor::Executor(uint32_t capacity, uint32_t workers, const Options& options)
    : ring_(capacity, options.first_ticket), first_ticket_(options.first_ticket), places_(options.operators), idle_ns_(options.idle_ns),
      silence_ns_(options.silence_ns) {
    const uint32_t operators = options.operators;
    if (operators == 0 || operators > most_operators) throw std::invalid_argument("an operator table has 1 to 1048576 places");
    // calloc: the tables of the default size have 512 kB, of which only the pages that are used take memory.
    memory_.reset(static_cast<char*>(std::calloc(2 * (size_t{operators} + 1) + 2, sizeof(ol_slot))));
    if (!memory_) throw std::bad_alloc();
    const auto line = (reinterpret_cast<uint64_t>(memory_.get()) + sizeof(ol_slot) - 1) & ~(uint64_t{sizeof(ol_slot)} - 1);
    slots_ = reinterpret_cast<ol_slot*>(line) + 1;
    slots_[-1].word = uint64_t{operators} + 1;
    slots_[places_].fn[0] = reinterpret_cast<uint64_t>(&run_sequence);
    slots_[places_].word = uint64_t{1} << 1;
    slots_[places_].abi = OL_ABI_VERSION;
    api_ = {OL_ABI_VERSION,
            workers,
            reinterpret_cast<uint64_t>(this),
            reinterpret_cast<uint64_t>(slots_),
            places_,
            0,
            reinterpret_cast<uint64_t>(&run_one_c),
            reinterpret_cast<uint64_t>(&run_c)};
    samples_ = reinterpret_cast<Samples*>(slots_ + operators + 1);
    workers_ = std::vector<Worker>(workers);
    try {
        std::lock_guard lock(life_mutex_);
        start_workers();
    } catch (...) {
        stop();
        throw;
    }
}

Executor::~Executor() { stop(); }

void Executor::start_workers() {
    for (uint32_t i = 0; i < workers_.size(); ++i) {
        Worker& w = workers_[i];
        if (!w.gone) continue;
        if (w.thread.joinable()) w.thread.join();  // it has only its last instructions left
        w.thread = std::thread([this, i] { worker_main(i + 1); });
        w.gone = false;
    }
}

bool Executor::wait_gone(std::unique_lock<std::mutex>& lock, Clock::time_point deadline) {
    const auto all = [&] { return std::all_of(workers_.begin(), workers_.end(), [](const Worker& w) { return w.gone; }); };
    if (deadline == Clock::time_point::max()) gone_.wait(lock, all);
    else if (!gone_.wait_until(lock, deadline, all)) return false;
    for (Worker& w : workers_)
        if (w.thread.joinable()) w.thread.join();
    return true;
}

bool Executor::stop(Clock::time_point deadline) {
    std::unique_lock lock(life_mutex_);
    stop_.store(true, std::memory_order_seq_cst);
    work_.notify();
    done_.notify();
    return wait_gone(lock, deadline);
}

bool Executor::park(bool drain, Clock::time_point deadline) {
    std::unique_lock turn(park_mutex_, std::defer_lock);
    while (!turn.try_lock()) {
        if (Clock::now() >= deadline) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (ring_.parked()) return true;
    const uint64_t until = ring_.tail();
    if (drain && !wait_for([&] { return ring_.completed() >= until; }, deadline)) return false;
    const uint64_t cursor = ring_.park();
    std::unique_lock lock(life_mutex_);
    away_.store(static_cast<uint32_t>(Away::asked), std::memory_order_seq_cst);
    lock.unlock();
    work_.notify();
    const bool ended = wait_for([&] { return ring_.completed() >= cursor; }, deadline, false);
    lock.lock();
    if (ended && wait_gone(lock, deadline)) return true;
    away_.store(0, std::memory_order_seq_cst);
    start_workers();
    lock.unlock();
    ring_.unpark();
    announce();
    done_.notify();
    return false;
}

void Executor::resume() {
    std::lock_guard turn(park_mutex_);
    {
        std::lock_guard lock(life_mutex_);
        if (stop_.load()) return;
        away_.store(0, std::memory_order_seq_cst);
        start_workers();
    }
    ring_.unpark();
    work_.notify();
    done_.notify();  // callers that wait may run tasks again
}

void Executor::relaunch() {
    std::lock_guard lock(life_mutex_);
    const Away why = away();
    if (why == Away::no || why == Away::asked || stop_.load()) return;
    try {
        start_workers();
    } catch (const std::system_error&) {
        return;  // no thread to be had: who waits runs the tasks, and the next submission tries again
    }
    away_.store(0, std::memory_order_seq_cst);
}

// Tells workers about a task that was submitted; brings them back if they left by themselves.
void Executor::announce() {
    work_.notify();
    if (away_.load(std::memory_order_seq_cst) > static_cast<uint32_t>(Away::asked)) relaunch();
}

void Executor::beat() {
    beats_.fetch_add(1, std::memory_order_relaxed);
    if (away_.load(std::memory_order_seq_cst) == static_cast<uint32_t>(Away::silent)) relaunch();
}

uint32_t Executor::present() {
    std::lock_guard lock(life_mutex_);
    return static_cast<uint32_t>(std::count_if(workers_.begin(), workers_.end(), [](const Worker& w) { return !w.gone; }));
}

uint32_t Executor::register_operator(uint64_t fn, uint32_t abi) {
    if (abi != OL_ABI_VERSION) throw std::invalid_argument("operator was built for another ABI version");
    if (fn == 0) throw std::invalid_argument("operator address is 0");
    std::lock_guard lock(table_mutex_);
    const uint32_t op = operators_.load(std::memory_order_relaxed);
    if (op == places_) throw std::length_error("the operator table is full: all " + std::to_string(places_) + " places are taken");
    slots_[op].abi = abi;
    shared(slots_[op].fn[0]).store(fn, std::memory_order_relaxed);
    shared(slots_[op].word).store(uint64_t{1} << 1, std::memory_order_seq_cst);  // generation 1, side 0
    operators_.store(op + 1, std::memory_order_seq_cst);
    return op;
}

uint64_t Executor::flip(uint32_t op, uint64_t fn, bool keep_fn, Clock::time_point deadline) {
    ol_slot* found = entry(op);
    if (found == nullptr) throw std::out_of_range("no such operator");
    ol_slot& e = *found;
    // All tickets up to the last flip, not that one alone: an earlier one may still run what stands on the other side.
    const auto free = [&] { return ring_.completed() >= shared(e.flip_ticket).load(std::memory_order_seq_cst); };
    std::unique_lock lock(table_mutex_, std::defer_lock);
    do {  // wait outside the lock, which others need meanwhile
        if (lock.owns_lock()) lock.unlock();
        if (!wait_for(free, deadline)) return 0;
        lock.lock();
    } while (!free());
    const uint64_t word = shared(e.word).load(std::memory_order_relaxed);
    const uint64_t side = (word & 1) ^ 1;
    if (keep_fn) {
        if (shared(e.fn[side]).load(std::memory_order_relaxed) == 0) throw std::logic_error("there is no earlier operator to go back to");
    } else {
        shared(e.fn[side]).store(fn, std::memory_order_relaxed);
    }
    shared(e.word).store((((word >> 1) + 1) << 1) | side, std::memory_order_seq_cst);
    const uint64_t ticket = ring_.tail();
    shared(e.flip_ticket).store(ticket, std::memory_order_seq_cst);
    return ticket == 0 ? 1 : ticket;
}

uint64_t Executor::swap(uint32_t op, uint64_t fn, uint32_t abi, Clock::time_point deadline) {
    if (abi != OL_ABI_VERSION) throw std::invalid_argument("operator was built for another ABI version");
    if (fn == 0) throw std::invalid_argument("operator address is 0");
    return flip(op, fn, false, deadline);
}

uint64_t Executor::rollback(uint32_t op, Clock::time_point deadline) { return flip(op, 0, true, deadline); }

bool Executor::quiescent(uint32_t op) {
    ol_slot* e = entry(op);
    return e != nullptr && ring_.completed() >= shared(e->flip_ticket).load(std::memory_order_seq_cst);
}

ol_slot Executor::slot(uint32_t op) {
    ol_slot* e = entry(op);
    if (e == nullptr) throw std::out_of_range("no such operator");
    ol_slot out{};
    out.word = shared(e->word).load();
    out.fn[0] = shared(e->fn[0]).load();
    out.fn[1] = shared(e->fn[1]).load();
    out.flip_ticket = shared(e->flip_ticket).load();
    out.abi = e->abi;
    out.calls = shared(e->calls).load();
    return out;
}

uint32_t Executor::generation_of(uint32_t op) {
    return op <= places_ ? static_cast<uint32_t>(shared(slots_[op].word).load(std::memory_order_seq_cst)) : 0;
}

uint64_t Executor::put(const ol_task& task) {
    return ring_.try_submit(task, [this](ol_task& t) { t.generation = generation_of(t.op); });
}

int32_t Executor::run_one(const ol_task& task, double timeout_s, char* text, uint64_t text_bytes) {
    if (stop_.load(std::memory_order_relaxed)) [[unlikely]] {  // its operators may be unloaded
        copy_text("the executor is closed", text, text_bytes);
        return OL_FAILED;
    }
    ol_task own = task;
    uint64_t ticket = 0;
    bool taken = false;
    if (own.after == 0 || ring_.completed() >= own.after) {
        ticket = ring_.submit_and_take(own, [this](ol_task& t) { t.generation = generation_of(t.op); }, taken);
    }
    if (taken) [[likely]] {
        ol_env env;
        env.worker = assisting_caller;
        const char* why = "";
        const int32_t status = perform(own, env, why);
        if (status != OL_OK) [[unlikely]] copy_text(why, text, text_bytes);
        finish(own, status, why);
        return status;
    }
    // Others stand before it, the ring is full or parked, or it waits for a ticket.
    const auto deadline = deadline_after(timeout_s);
    try {
        if (ticket == 0) ticket = submit(task, deadline);
        if (ticket == 0) return 1;
        if (!wait(ticket, deadline)) {
            announce();  // nobody was told about it
            return 1;
        }
        std::string why;
        const int32_t status = this->status(ticket, &why);
        if (status != OL_OK) copy_text(why.c_str(), text, text_bytes);
        return status;
    } catch (const std::exception& e) {  // not across a table of C functions
        copy_text(e.what(), text, text_bytes);
        return OL_FAILED;
    }
}

uint64_t Executor::submit(const ol_task& task, Clock::time_point deadline) {
    if (task.after > ring_.tail()) throw std::invalid_argument("the ticket to wait for was not given out");
    ol_env env{};
    env.worker = assisting_caller;
    for (int spins = 0;; ++spins) {
        if (uint64_t ticket = put(task)) {
            announce();
            return ticket;
        }
        if (Clock::now() >= deadline) {
            refused_.fetch_add(1, std::memory_order_relaxed);
            return 0;
        }
        if (!take_one(env, false) && spins > spins_before_sleep) {
            const uint64_t seen = ring_.completed();
            done_.sleep(full_ring_slice_us, [&] { return ring_.completed() != seen; });
        }
    }
}

template <class Done> bool Executor::wait_for(Done done, Clock::time_point deadline, bool assist, Timed* timed) {
    ol_env env{};
    env.worker = assisting_caller;
    int spins = 0;
    uint64_t idle = 0;  // since when, if `timed`
    while (!done()) {
        if (assist && take_one(env, false, timed)) {
            spins = 0;
            if (idle != 0) timed->waits += timed->started - std::exchange(idle, 0);
            continue;
        }
        if (timed != nullptr && idle == 0) idle = steady_ns();
        if (++spins < spins_before_sleep) {
            cpu_relax();
            if ((spins & 63) != 0) continue;
        }
        const auto now = Clock::now();
        if (now >= deadline) return done();
        if (spins >= spins_before_sleep) {
            beat();  // a host that waits is alive
            const auto left = std::chrono::duration_cast<std::chrono::microseconds>(deadline - now).count();
            done_.sleep(std::min<uint64_t>(sleep_slice_us, static_cast<uint64_t>(left) + 1), [&] {
                return done() || (assist && ring_.has([this](uint64_t after) { return ring_.completed() >= after; }));
            });
        }
    }
    if (idle != 0) timed->waits += steady_ns() - idle;
    return true;
}

bool Executor::wait(uint64_t ticket, Clock::time_point deadline, bool assist) {
    if (ticket > ring_.tail()) throw std::out_of_range("no such ticket");
    return wait_for([&] { return ring_.is_done(ticket); }, deadline, assist);
}

uint32_t Executor::begin_plan(Clock::time_point deadline) {
    uint32_t found = 0;
    const auto take = [&] {
        const uint32_t count = plan_counter_.fetch_add(1, std::memory_order_relaxed) + 1;
        for (uint32_t i = 0; i < plan_slots; ++i) {
            const uint32_t at = (count + i) & (plan_slots - 1);
            uint64_t until = plans_[at].until.load(std::memory_order_acquire);
            if (until == plan_runs || ring_.completed() < until) continue;
            if (!plans_[at].until.compare_exchange_strong(until, plan_runs, std::memory_order_acq_rel)) continue;
            std::lock_guard lock(error_mutex_);
            plans_[at].first = {0, 0, OL_OK, {}};
            plans_[at].failed.store(0, std::memory_order_relaxed);
            found = (count << plan_bits) | at;
            if (found == 0) found = (1u << plan_bits) | at;  // 0 means "no plan"
            return true;
        }
        return false;
    };
    wait_for(take, deadline);
    return found;
}

int32_t Executor::run(const ol_task* tasks, size_t count, Clock::time_point deadline, TaskError& error) {
    if (count == 0) return OL_OK;
    for (size_t i = 0; i < count; ++i)
        if (tasks[i].after > i) throw std::invalid_argument("a task of a plan may wait only for an earlier task of it");
    std::vector<uint64_t> tickets(count, 0);
    const uint32_t number = begin_plan(deadline);
    if (number == 0) return 1;
    const bool due = plans_run_.fetch_add(1, std::memory_order_relaxed) % plans_sampled == plans_sampled - 1;
    const bool looked_at = due && count <= capacity();  // a longer one is run in part while it is handed in
    plan_tasks_.fetch_add(count, std::memory_order_relaxed);
    Timed timed;
    const uint64_t displaced = looked_at ? displacements() : 0;
    const uint64_t started = looked_at ? steady_ns() : 0;
    Plan& plan = plans_[number & (plan_slots - 1)];
    uint64_t newest = 0;
    const auto give_up = [&] {
        plan.failed.store(number, std::memory_order_seq_cst);
        plan.until.store(newest, std::memory_order_release);
        return 1;
    };
    for (size_t i = 0; i < count; ++i) {
        ol_task t = tasks[i];
        t.after = t.after == 0 ? 0 : tickets[t.after - 1];
        t.plan = number;
        uint64_t ticket = put(t);
        if (ticket == 0) {
            announce();
            ticket = submit(t, deadline);
            if (ticket == 0) return give_up();
        }
        tickets[i] = newest = ticket;
        if ((i & 31) == 0) work_.notify();
    }
    announce();
    for (size_t i = count; i-- > 0;) {  // the last first: while it is not done, this thread runs the others
        if (!wait_for([&] { return ring_.is_done(tickets[i]); }, deadline, true, looked_at ? &timed : nullptr)) return give_up();
    }
    const uint64_t ns = looked_at ? steady_ns() - started : 0;
    if (looked_at && displacements() == displaced) {
        plans_timed_.fetch_add(1, std::memory_order_relaxed);
        plan_ns_.fetch_add(ns, std::memory_order_relaxed);
        operators_ns_.fetch_add(timed.operators, std::memory_order_relaxed);
        waits_ns_.fetch_add(timed.waits, std::memory_order_relaxed);
    }
    int32_t status = OL_OK;
    if (plan.failed.load(std::memory_order_acquire) == number) {
        std::lock_guard lock(error_mutex_);
        error = plan.first;
        status = error.status;
    }
    plan.until.store(0, std::memory_order_release);
    return status;
}

int32_t Executor::status(uint64_t ticket, std::string* text) {
    bool failed = false;
    const bool known = ring_.status(ticket, failed);
    if (known && !failed) return OL_OK;
    std::lock_guard lock(error_mutex_);
    for (const TaskError& e : errors_) {
        if (e.ticket == ticket) {
            if (text != nullptr) *text = e.text;
            return e.status;
        }
    }
    if (!known && ticket > forgotten_) return OL_OK;
    if (text != nullptr) *text = "how it ended is no longer known: too many tasks have failed since";
    return OL_FAILED;
}

bool Executor::dependency_failed(uint64_t ticket) {
    bool failed = false;
    if (ring_.status(ticket, failed)) return failed;
    return error_count_.load(std::memory_order_seq_cst) != 0 && status(ticket) != OL_OK;
}

void Executor::record_error(const ol_task& task, int32_t status, const char* text) {
    std::lock_guard lock(error_mutex_);
    if (task.plan != 0) {
        Plan& plan = plans_[task.plan & (plan_slots - 1)];
        if (plan.failed.load(std::memory_order_relaxed) == task.plan) return;  // its first failure is what counts
        plan.first = {task.seq, task.op, status, text};
        plan.failed.store(task.plan, std::memory_order_release);
    }
    errors_.push_back({task.seq, task.op, status, text});
    if (errors_.size() > kept_errors) {
        forgotten_ = std::max(forgotten_, errors_.front().ticket);
        errors_.pop_front();
    }
    error_count_.fetch_add(1, std::memory_order_seq_cst);
}

void Executor::execute(const ol_task& task, ol_env& env, Timed* timed) {
    int32_t status = OL_OK;
    const char* text = "";
    if (task.after != 0) {
        int spins = 0;
        while (ring_.completed() < task.after && !stop_.load(std::memory_order_relaxed)) {
            if (++spins < spins_before_sleep) {
                cpu_relax();
            } else {
                done_.sleep(sleep_slice_us, [&] { return ring_.completed() >= task.after || stop_.load(); });
            }
        }
        if (ring_.completed() < task.after) {
            status = OL_DEPENDENCY;
            text = "the executor was stopped before the task it waits for was done";
        }
    }
    if (status == OL_OK) status = perform(task, env, text, timed);
    finish(task, status, text);
}

// Runs the operator of a task that need not wait any more.
inline int32_t Executor::perform(const ol_task& task, ol_env& env, const char*& text, Timed* timed) {
    if (task.after != 0 && dependency_failed(task.after)) {
        text = "the task it waits for failed";
        return OL_DEPENDENCY;
    }
    if (task.plan != 0 && plans_[task.plan & (plan_slots - 1)].failed.load(std::memory_order_acquire) == task.plan) {
        text = "an earlier task of its plan failed";
        return OL_DEPENDENCY;
    }
    const uint64_t fn = task.op <= places_ ? shared(slots_[task.op].fn[task.generation & 1]).load(std::memory_order_acquire) : 0;
    if (fn == 0) {
        text = "no operator is registered under this number";
        return OL_NO_OPERATOR;
    }
    env.error[0] = '\0';
    const bool sampling = task.seq % sampled == 0;
    const uint64_t started = sampling || timed != nullptr ? steady_ns() : 0;
    const int32_t status = reinterpret_cast<ol_op_fn>(fn)(&task, &env);
    if (sampling || timed != nullptr) [[unlikely]] {
        const uint64_t ns = steady_ns() - started;
        if (sampling) sample(task.op, ns);
        if (timed != nullptr) {
            timed->operators += ns;
            timed->started = started;
        }
    }
    if (status != OL_OK) [[unlikely]] {
        env.error[sizeof env.error - 1] = '\0';
        text = env.error;
        shared(slots_[task.op].failures).fetch_add(1, std::memory_order_relaxed);
    }
    shared(slots_[task.op].calls).fetch_add(1, std::memory_order_relaxed);
    return status;
}

inline void Executor::finish(const ol_task& task, int32_t status, const char* text) {
    if (status != OL_OK) record_error(task, status, text);
    if (const uint64_t beat = heartbeat_.load(std::memory_order_acquire)) {
        shared(*reinterpret_cast<uint64_t*>(beat)).fetch_add(1, std::memory_order_relaxed);
    }
    ring_.complete(task.seq, status != OL_OK);
    done_.notify();
}

bool Executor::take_one(ol_env& env, bool may_wait, Timed* timed) {
    ol_task task;
    if (!ring_.try_take(task, [&](uint64_t after) { return may_wait || ring_.completed() >= after; })) return false;
    execute(task, env, timed);
    return true;
}

void Executor::sample(uint32_t op, uint64_t ns) {
    Samples& s = samples_[op];
    const uint64_t n = shared(s.count).fetch_add(1, std::memory_order_relaxed);
    std::atomic_ref<uint32_t>(s.ns[n % Samples::kept]).store(static_cast<uint32_t>(std::min<uint64_t>(ns, UINT32_MAX)), std::memory_order_relaxed);
}

PlanCounts Executor::plan_counts() const {
    const auto read = [](const std::atomic<uint64_t>& word) { return word.load(std::memory_order_relaxed); };
    return {read(plans_run_), read(plan_tasks_), read(plans_timed_), read(plan_ns_), read(operators_ns_), read(waits_ns_)};
}

OperatorCounts Executor::counts(uint32_t op) {
    if (op != places_ && entry(op) == nullptr) throw std::out_of_range("no such operator");
    Samples& s = samples_[op];
    OperatorCounts out{shared(slots_[op].calls).load(), shared(slots_[op].failures).load(), shared(s.count).load(), {}};
    for (uint64_t i = 0; i < std::min<uint64_t>(out.samples, Samples::kept); ++i)
        out.ns.push_back(std::atomic_ref<uint32_t>(s.ns[i]).load(std::memory_order_relaxed));
    return out;
}

// What a worker has last seen move, and when.
struct Executor::Watch {
    uint64_t tail = 0, beats = 0, moved = steady_ns(), heard = moved;
};

// The last thing a worker does; false when it has to stay after all.
bool Executor::may_leave(Worker& self) {
    std::lock_guard lock(life_mutex_);
    if (away_.load() == 0 && !stop_.load()) return false;
    self.gone = true;
    gone_.notify_all();
    return true;
}

void Executor::leave_for(Away why, uint64_t seen_tail, uint64_t seen_beats) {
    {
        std::lock_guard lock(life_mutex_);
        if (away_.load() != 0 || stop_.load()) return;
        away_.store(static_cast<uint32_t>(why), std::memory_order_seq_cst);
        const bool moved = ring_.tail() != seen_tail || (why == Away::silent && beats_.load(std::memory_order_seq_cst) != seen_beats);
        if (moved) {
            away_.store(0, std::memory_order_seq_cst);
            return;
        }
    }
    work_.notify();
}

void Executor::worker_main(uint32_t number) {
    ol_env env{};
    env.worker = number;
    Watch watch;
    const auto look_around = [&](bool idle) {
        const uint64_t now = steady_ns(), tail = ring_.tail(), beats = beats_.load(std::memory_order_relaxed);
        if (tail != watch.tail || !idle) watch.moved = now;
        if (tail != watch.tail || beats != watch.beats) watch.heard = now;
        watch.tail = tail;
        watch.beats = beats;
        if (silence_ns_ != 0 && now - watch.heard >= silence_ns_) leave_for(Away::silent, tail, beats);
        else if (idle_ns_ != 0 && now - watch.moved >= idle_ns_) leave_for(Away::idle, tail, beats);
    };
    const uint64_t limit_ns = std::min(idle_ns_ != 0 ? idle_ns_ : UINT64_MAX, silence_ns_ != 0 ? silence_ns_ : UINT64_MAX);
    const uint64_t slice_us = std::clamp<uint64_t>(limit_ns / 4000, 200, sleep_slice_us);
    int spins = 0;
    for (;;) {
        if (away_.load(std::memory_order_seq_cst) != 0 || stop_.load(std::memory_order_seq_cst)) {
            if (may_leave(workers_[number - 1])) return;
            watch = Watch{};
        }
        if (take_one(env, true)) {
            spins = 0;
            if (silence_ns_ != 0) look_around(false);
        } else if (++spins < spins_before_sleep) {
            cpu_relax();
        } else {
            work_.sleep(slice_us, [&] { return !ring_.empty() || away_.load() != 0 || stop_.load(std::memory_order_seq_cst); });
            spins = 0;
            if (limit_ns != UINT64_MAX) look_around(ring_.completed() >= ring_.tail());
        }
    }
}

}  // namespace outlast
