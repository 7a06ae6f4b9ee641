// Stress of ring, slot table and plans; built with and without ThreadSanitizer by tests/core/test_ring_stress.py.
//
//     ring_stress SEED SCALE
//
// Each scenario states an invariant of outlast/task.h and ends the program with a text when it does not hold.  Operators
// write plain (not atomic) memory wherever the protocol promises an order, so that the sanitizer checks the promise.
#include "../core/executor.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <utility>

using namespace outlast;
using std::chrono::milliseconds;

namespace {

uint64_t seed_value = 1;
uint32_t scale = 1;

[[noreturn]] void broken(const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::fprintf(stderr, "seed %llu: ", static_cast<unsigned long long>(seed_value));
    std::vfprintf(stderr, format, args);
    std::fputc('\n', stderr);
    va_end(args);
    std::_Exit(1);
}

Clock::time_point in(int64_t ms) { return Clock::now() + milliseconds(ms); }
constexpr int64_t plenty = 120000;

ol_task task_of(uint32_t op, uint64_t a0 = 0, uint64_t a1 = 0, uint64_t a2 = 0, uint64_t after = 0) {
    ol_task t{};
    t.op = op;
    t.after = after;
    t.parts = 1;
    t.arg[0] = a0;
    t.arg[1] = a1;
    t.arg[2] = a2;
    return t;
}

template <class T> uint64_t address(T* p) { return reinterpret_cast<uint64_t>(p); }
uint64_t address(ol_op_fn fn) { return reinterpret_cast<uint64_t>(fn); }

// First tickets just below 2^32, so that every run crosses it; with every other seed the highest that the ring allows.
uint64_t below_wrap(uint32_t capacity) { return (uint64_t{1} << (seed_value % 2 == 0 ? 32 : 62)) - 4 * capacity; }

void settle(Executor& e) {
    if (!e.wait(e.tail(), in(plenty))) broken("the last ticket does not end");
    const auto limit = in(plenty);
    while (e.completed() != e.tail()) {  // a worker may be between its last store and the next look
        if (Clock::now() > limit)
            broken("completed stands at %llu though all %llu tickets are done", static_cast<unsigned long long>(e.completed()),
                   static_cast<unsigned long long>(e.tail()));
        std::this_thread::yield();
    }
}

// ---- every task once, status by ticket -----------------------------------------------------------------------------

int32_t count_op(const ol_task* task, ol_env* env) {
    reinterpret_cast<std::atomic<uint32_t>*>(task->arg[0])->fetch_add(1, std::memory_order_relaxed);
    if (task->arg[1] == 0) return OL_OK;
    std::snprintf(env->error, sizeof env->error, "code %llu", static_cast<unsigned long long>(task->arg[1]));
    return -static_cast<int32_t>(task->arg[1]);
}

void every_task_once(uint32_t capacity, uint32_t workers, uint32_t producers) {
    Executor e(capacity, workers, below_wrap(capacity));
    const uint32_t op = e.register_operator(address(count_op), OL_ABI_VERSION);
    const uint32_t each = 4000 * scale / producers;
    std::vector<std::atomic<uint32_t>> ran(static_cast<size_t>(producers) * each);
    std::vector<std::thread> threads;
    for (uint32_t p = 0; p < producers; ++p) {
        threads.emplace_back([&, p] {
            std::mt19937_64 rng(seed_value * 977 + p);
            for (uint32_t i = 0; i < each; ++i) {
                const size_t at = static_cast<size_t>(p) * each + i;
                const uint64_t code = rng() % 8 == 0 ? 100 + rng() % 900 : 0;
                const uint64_t ticket = e.submit(task_of(op, address(&ran[at]), code), in(plenty));
                if (ticket == 0) broken("a place in the ring never came free");
                if (code == 0 && rng() % 4 != 0) continue;
                if (!e.wait(ticket, in(plenty))) broken("a ticket does not end");
                std::string text;
                const int32_t status = e.status(ticket, &text);
                if (status == OL_FAILED && text.starts_with("how it ended is no longer known")) continue;
                if (status != -static_cast<int32_t>(code)) broken("ticket %llu of code %llu has status %d", static_cast<unsigned long long>(ticket),
                                                                  static_cast<unsigned long long>(code), status);
                if (code != 0 && text != "code " + std::to_string(code)) broken("text of another ticket: %s", text.c_str());
            }
        });
    }
    for (auto& t : threads) t.join();
    settle(e);
    for (const auto& n : ran)
        if (n.load() != 1) broken("a task ran %u times", n.load());
    if (e.executed() != uint64_t{producers} * each) broken("executed counts %llu", static_cast<unsigned long long>(e.executed()));
}

// ---- after ---------------------------------------------------------------------------------------------------------

int32_t chain_op(const ol_task* task, ol_env*) {
    auto* value = reinterpret_cast<uint64_t*>(task->arg[0]);  // plain: ordered by `after` alone
    if (*value != task->arg[1]) return OL_FAILED;
    *value = task->arg[1] + 1;
    return OL_OK;
}

void chains_run_in_order(uint32_t capacity, uint32_t workers, uint32_t producers) {
    Executor e(capacity, workers, below_wrap(capacity));
    const uint32_t op = e.register_operator(address(chain_op), OL_ABI_VERSION);
    const uint64_t each = 2000 * scale / producers;
    std::vector<std::array<uint64_t, 16>> value(producers);
    std::vector<std::thread> threads;
    for (uint32_t p = 0; p < producers; ++p) {
        threads.emplace_back([&, p] {
            uint64_t last = 0;
            for (uint64_t i = 0; i < each; ++i) {
                last = e.submit(task_of(op, address(value[p].data()), i, 0, last), in(plenty));
                if (last == 0) broken("a place in the ring never came free");
            }
            if (!e.wait(last, in(plenty))) broken("a chain does not end");
            if (value[p][0] != each) broken("a chain of %llu ends at %llu", static_cast<unsigned long long>(each),
                                            static_cast<unsigned long long>(value[p][0]));
        });
    }
    for (auto& t : threads) t.join();
    settle(e);
}

// One batch, longer than the ring, of tasks that each need the one before.
void a_chain_in_one_plan_does_not_race(uint32_t capacity, uint32_t workers) {
    Executor e(capacity, workers, below_wrap(capacity));
    const uint32_t op = e.register_operator(address(chain_op), OL_ABI_VERSION);
    std::array<uint64_t, 2> values{};
    for (uint32_t round = 0; round < scale; ++round) {
        std::vector<ol_task> tasks;
        values = {};
        for (uint64_t i = 0; i < 1500; ++i)  // two chains that run beside each other
            tasks.push_back(task_of(op, address(&values[i % 2]), i / 2, 0, i < 2 ? 0 : i - 1));
        TaskError error{0, 0, 0, ""};
        if (e.run(tasks.data(), tasks.size(), in(plenty), error) != OL_OK) broken("a task of a chain ran before the one it needs");
        if (values[0] != 750 || values[1] != 750) broken("chains end at %llu and %llu", static_cast<unsigned long long>(values[0]),
                                                         static_cast<unsigned long long>(values[1]));
    }
    settle(e);
}

// ---- swap and rollback ---------------------------------------------------------------------------------------------

constexpr size_t versions = 8;
std::array<std::atomic<bool>, versions> unloaded;
std::array<int, versions> code_memory;  // plain: "unmapping" writes it, running code reads it

template <size_t N> int32_t version_op(const ol_task* task, ol_env*) {
    int sum = code_memory[N];
    for (uint64_t i = 0; i < task->arg[1]; ++i) cpu_relax();
    if (task->arg[1] > 200) std::this_thread::yield();
    sum += code_memory[N];
    if (unloaded[N].load(std::memory_order_relaxed)) broken("version %zu runs after it was unloaded", N);
    return sum < 0 ? OL_FAILED : OL_OK;
}

template <size_t... N> std::array<ol_op_fn, versions> all_versions(std::index_sequence<N...>) { return {version_op<N>...}; }

void load(size_t n) {
    code_memory[n] = 1;
    unloaded[n].store(false);
}

void unload(size_t n) {
    unloaded[n].store(true);
    code_memory[n] = 0;
}

void old_code_may_go_once_quiescent(uint32_t capacity, uint32_t workers, uint32_t producers) {
    const auto fn = all_versions(std::make_index_sequence<versions>{});
    Executor e(capacity, workers, below_wrap(capacity));
    for (size_t i = 0; i < versions; ++i) unload(i);
    load(0);
    const uint32_t op = e.register_operator(address(fn[0]), OL_ABI_VERSION);
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (uint32_t p = 0; p < producers; ++p) {
        threads.emplace_back([&, p] {
            std::mt19937_64 rng(seed_value * 31 + p);
            while (!stop.load()) {
                const uint64_t ticket = e.submit(task_of(op, 0, rng() % 16 == 0 ? 300 + rng() % 2000 : rng() % 20), in(plenty));
                if (ticket == 0) broken("a place in the ring never came free");
                if (rng() % 8 == 0) e.wait(ticket, in(plenty));
            }
        });
    }
    std::mt19937_64 rng(seed_value);
    size_t active = 0, other = versions;  // `other`: on the inactive side, perhaps still running
    uint64_t generation = 1;
    for (uint32_t i = 0; i < 150 * scale; ++i) {
        size_t next = rng() % versions;
        while (next == active || next == other) next = (next + 1) % versions;
        load(next);
        if (e.swap(op, address(fn[next]), OL_ABI_VERSION, in(plenty)) == 0) broken("a swap timed out");
        ++generation;
        if (other != versions) unload(other);  // its side was overwritten
        other = active;
        active = next;
        const uint64_t choice = rng() % 4;
        if (choice == 0) {
            if (e.rollback(op, in(plenty)) == 0) broken("a rollback timed out");
            ++generation;
            std::swap(active, other);
        } else if (choice == 1) {
            for (int spins = 0; spins < 100000 && !e.quiescent(op); ++spins) std::this_thread::yield();
            if (e.quiescent(op)) {
                unload(other);
                load(other);
            }
        }
        const ol_slot s = e.slot(op);
        if ((s.word >> 1) != generation) broken("generation %llu after %llu publications", static_cast<unsigned long long>(s.word >> 1),
                                                static_cast<unsigned long long>(generation));
        if (s.fn[s.word & 1] != address(fn[active])) broken("another version is active than the one published last");
    }
    stop.store(true);
    for (auto& t : threads) t.join();
    settle(e);
}

// ---- refusal and deadlines -----------------------------------------------------------------------------------------

struct Gate {
    std::atomic<bool> entered{false}, open{false};
};

int32_t gate_op(const ol_task* task, ol_env*) {
    auto* gate = reinterpret_cast<Gate*>(task->arg[0]);
    gate->entered.store(true);
    while (!gate->open.load()) std::this_thread::yield();
    return OL_OK;
}

void full_ring_refuses_by_its_deadline(uint32_t capacity) {
    Executor e(capacity, 1, below_wrap(capacity));
    const uint32_t hold = e.register_operator(address(gate_op), OL_ABI_VERSION);
    const uint32_t count = e.register_operator(address(count_op), OL_ABI_VERSION);
    Gate gate;
    std::atomic<uint32_t> ran{0};
    const uint64_t held = e.submit(task_of(hold, address(&gate)), in(plenty));
    while (!gate.entered.load()) std::this_thread::yield();
    uint64_t last = held;
    for (uint32_t i = 1; i < capacity; ++i) last = e.submit(task_of(count, address(&ran), 0, 0, held), in(plenty));
    const auto started = Clock::now();
    if (e.submit(task_of(count, address(&ran)), in(30)) != 0) broken("the ring took more than its capacity");
    const auto took = Clock::now() - started;
    if (took < milliseconds(29)) broken("a full ring refused before its deadline");
    if (took > milliseconds(5000)) broken("a full ring held the caller past its deadline");
    // The caller must not take a task whose turn has not come: it would be stuck in it past its own deadline.
    const auto waiting = Clock::now();
    if (e.wait(last, in(30))) broken("a ticket is done before the one it waits for");
    if (Clock::now() - waiting > milliseconds(5000)) broken("a wait went past its deadline");
    if (ran.load() != 0) broken("a task ran before the one it waits for");
    gate.open.store(true);
    if (!e.wait(last, in(plenty))) broken("tasks behind a gate do not end");
    settle(e);
    if (ran.load() != capacity - 1) broken("%u of %u tasks ran", ran.load(), capacity - 1);
}

// A ticket that is done early says nothing about those before it.
void swap_waits_for_all_tickets_before_the_flip() {
    Executor e(8, 2);
    const uint32_t op = e.register_operator(address(gate_op), OL_ABI_VERSION);
    const uint32_t count = e.register_operator(address(count_op), OL_ABI_VERSION);
    Gate gate;
    std::atomic<uint32_t> ran{0};
    e.submit(task_of(op, address(&gate)), in(plenty));
    while (!gate.entered.load()) std::this_thread::yield();
    const uint64_t last = e.submit(task_of(count, address(&ran)), in(plenty));
    if (!e.wait(last, in(plenty))) broken("a free task does not end");
    if (e.swap(op, address(count_op), OL_ABI_VERSION, in(plenty)) == 0) broken("the first swap has nothing to wait for");
    if (e.quiescent(op)) broken("quiescent while the old code runs");
    if (e.swap(op, address(chain_op), OL_ABI_VERSION, in(50)) != 0) broken("a swap overwrote code that a task is running");
    gate.open.store(true);
    if (e.swap(op, address(chain_op), OL_ABI_VERSION, in(plenty)) == 0) broken("the second swap timed out");
    settle(e);
}

// ---- plans ---------------------------------------------------------------------------------------------------------

struct PlanState {
    uint32_t ran = 0;  // plain: the plan's tasks follow each other
};

int32_t plan_op(const ol_task* task, ol_env* env) {
    auto* state = reinterpret_cast<PlanState*>(task->arg[0]);
    state->ran += 1;
    if (task->arg[1] == 0) return OL_OK;
    std::snprintf(env->error, sizeof env->error, "plan %llu", static_cast<unsigned long long>(task->arg[2]));
    return -static_cast<int32_t>(task->arg[1]);
}

void a_failing_plan_stops_and_others_do_not(uint32_t capacity, uint32_t workers, uint32_t runners) {
    Executor e(capacity, workers, below_wrap(capacity));
    const uint32_t op = e.register_operator(address(plan_op), OL_ABI_VERSION);
    std::vector<std::thread> threads;
    for (uint32_t p = 0; p < runners; ++p) {
        threads.emplace_back([&, p] {
            std::mt19937_64 rng(seed_value * 131 + p);
            for (uint32_t round = 0; round < 30 * scale; ++round) {
                // Some are longer than the list of errors that the executor keeps.
                const size_t length = rng() % 10 == 0 ? 300 + rng() % 300 : 1 + rng() % 40;
                const size_t fails = rng() % 2 == 0 ? rng() % length : length;
                const uint64_t name = (uint64_t{p} << 32) | round;
                PlanState state;
                std::vector<ol_task> tasks;
                for (size_t i = 0; i < length; ++i)
                    tasks.push_back(task_of(op, address(&state), i == fails ? 5 : 0, name, i));
                TaskError error{0, 0, 0, ""};
                const int32_t status = e.run(tasks.data(), length, in(plenty), error);
                const int32_t expected = fails == length ? OL_OK : -5;
                if (status != expected) broken("a plan of %zu tasks of which %zu fails ends with %d", length, fails, status);
                const size_t ran = fails == length ? length : fails + 1;
                if (state.ran != ran) broken("%u tasks of a plan ran instead of %zu", state.ran, ran);
                if (fails != length && error.text != "plan " + std::to_string(name)) broken("error of another plan: %s", error.text.c_str());
            }
        });
    }
    for (auto& t : threads) t.join();
    settle(e);
}

// Fails once the gate was entered: a task of a plan that has failed would not be run any more.
int32_t fail_behind_gate_op(const ol_task* task, ol_env*) {
    while (!reinterpret_cast<Gate*>(task->arg[0])->entered.load()) std::this_thread::yield();
    return -7;
}

// A plan has failed and one of its tasks goes on, while more plans fail beside it than the executor keeps errors or has
// places for: its own error is still the one it ends with.
void a_slow_plan_keeps_its_failure() {
    Executor e(4096, 1);  // no more tasks than this may follow one that is not done
    const uint32_t hold = e.register_operator(address(gate_op), OL_ABI_VERSION);
    const uint32_t op = e.register_operator(address(plan_op), OL_ABI_VERSION);
    Gate gate;
    const uint32_t fail = e.register_operator(address(fail_behind_gate_op), OL_ABI_VERSION);
    std::thread runner([&] {
        TaskError error{0, 0, 0, ""};
        const ol_task gated[] = {task_of(hold, address(&gate)), task_of(fail, address(&gate))};
        const int32_t status = e.run(gated, 2, in(plenty), error);
        if (status != -7) broken("the slow plan ends with %d", status);
    });
    while (!gate.entered.load()) std::this_thread::yield();
    for (uint32_t i = 0; i < 1500; ++i) {
        PlanState state;
        const ol_task task = task_of(op, address(&state), 9, i);
        TaskError error{0, 0, 0, ""};
        if (e.run(&task, 1, in(plenty), error) != -9) broken("a quick plan does not fail");
    }
    gate.open.store(true);
    runner.join();
    settle(e);
}

// Dependencies that failed are seen although their places in the ring were taken again meanwhile.
void a_failed_dependency_is_seen_late(uint32_t workers) {
    Executor e(4, workers);
    const uint32_t op = e.register_operator(address(count_op), OL_ABI_VERSION);
    std::atomic<uint32_t> ran{0}, other{0};
    const uint64_t failed = e.submit(task_of(op, address(&other), 3), in(plenty));
    if (!e.wait(failed, in(plenty))) broken("a ticket does not end");
    uint64_t last = 0;
    for (int i = 0; i < 64; ++i) last = e.submit(task_of(op, address(&other)), in(plenty));
    if (!e.wait(last, in(plenty))) broken("a ticket does not end");
    const uint64_t late = e.submit(task_of(op, address(&ran), 0, 0, failed), in(plenty));
    if (!e.wait(late, in(plenty))) broken("a ticket does not end");
    if (ran.load() != 0) broken("a task ran although the one it waits for failed");
    if (e.status(late) != OL_DEPENDENCY) broken("status %d where a dependency failed", e.status(late));
    settle(e);
}

// ---- everything at once --------------------------------------------------------------------------------------------

ol_task sequence_task(Executor& e, ol_sequence& plan) { return task_of(e.api()->sequence, address(&plan)); }

using RunOne = int32_t (*)(uint64_t, const ol_task*, double, char*, uint64_t);

// Producers that submit and wait, callers that run one task or a sequence, plans, swaps, and parks, all at random.  Each
// task counts itself in a cell of its own (plain memory: its submitter reads it after the ticket is done).
struct Cell {
    uint64_t ran = 0, version = 0;
};

template <size_t N> int32_t cell_op(const ol_task* task, ol_env* env) {
    int32_t status = version_op<N>(task, env);
    auto* cell = reinterpret_cast<Cell*>(task->arg[0]);
    cell->ran += 1;
    cell->version = N;
    return status;
}

template <size_t... N> std::array<ol_op_fn, versions> cell_versions(std::index_sequence<N...>) { return {cell_op<N>...}; }

void everything_at_once(uint32_t capacity, uint32_t workers, bool leaving) {
    const auto fn = cell_versions(std::make_index_sequence<versions>{});
    Options options{below_wrap(capacity)};
    if (leaving) {
        options.idle_ns = 300000;
        options.silence_ns = 200000000;
    }
    Executor e(capacity, workers, options);
    for (size_t i = 0; i < versions; ++i) unload(i);
    load(0);
    const uint32_t op = e.register_operator(address(fn[0]), OL_ABI_VERSION);
    const auto* api = e.api();
    const auto run_one = reinterpret_cast<RunOne>(api->run_one);
    std::atomic<uint32_t> busy{0};
    std::atomic<uint64_t> submitted{0};
    std::vector<std::thread> threads;
    const auto start = [&](auto body) {
        busy.fetch_add(1);
        threads.emplace_back([&, body, p = threads.size()] {
            std::mt19937_64 rng(seed_value * 8191 + p);
            body(rng);
            busy.fetch_sub(1);
        });
    };
    const auto submitting = [&](std::mt19937_64& rng) {
        std::vector<Cell> cells(600 * scale);
        std::vector<uint64_t> tickets;
        for (Cell& cell : cells) {
            const uint64_t ticket = e.submit(task_of(op, address(&cell), rng() % 16 == 0 ? 300 : 0), in(plenty));
            if (ticket == 0) broken("a place in the ring never came free");
            tickets.push_back(ticket);
            if (rng() % 4 == 0 && !e.wait(tickets[rng() % tickets.size()], in(plenty), workers == 0 || rng() % 2 == 0))
                broken("a ticket does not end");
            if (leaving && rng() % 64 == 0) std::this_thread::sleep_for(milliseconds(1));  // workers leave meanwhile
        }
        for (uint64_t ticket : tickets) {
            if (!e.wait(ticket, in(plenty))) broken("a ticket does not end");
            if (e.status(ticket) != OL_OK) broken("a task failed");
        }
        for (const Cell& cell : cells)
            if (cell.ran != 1) broken("a task ran %llu times", static_cast<unsigned long long>(cell.ran));
        submitted.fetch_add(cells.size());
    };
    const auto calling = [&](std::mt19937_64& rng) {
        Cell cell;
        char text[240] = "";
        for (uint32_t i = 1; i <= 1500 * scale; ++i) {
            const ol_task task = task_of(op, address(&cell), rng() % 16 == 0 ? 300 : 0);
            const int32_t status = run_one(api->self, &task, 100.0, text, sizeof text);
            if (status != OL_OK) broken("a call ends with %d: %s", status, text);
            if (cell.ran != i) broken("call %u ran %llu times", i, static_cast<unsigned long long>(cell.ran));
        }
        submitted.fetch_add(1500 * scale);
    };
    const auto sequences = [&](std::mt19937_64& rng) {
        std::array<Cell, 9> cells{};
        std::vector<ol_step> steps;
        for (Cell& cell : cells) steps.push_back({op, static_cast<uint32_t>(steps.size()), address(&cell)});
        std::array<uint64_t, 10> times{};
        ol_sequence plan{address(steps.data()), static_cast<uint32_t>(steps.size()), 0, api->slots, rng() % 2 ? address(times.data()) : 0, 0};
        for (uint32_t i = 1; i <= 400 * scale; ++i) {
            const ol_task task = sequence_task(e, plan);
            if (run_one(api->self, &task, 100.0, nullptr, 0) != OL_OK) broken("a sequence fails");
            if (plan.runs != i) broken("a sequence counts %llu runs of %u", static_cast<unsigned long long>(plan.runs), i);
            for (const Cell& cell : cells)
                if (cell.ran != i) broken("a step ran %llu times in %u runs", static_cast<unsigned long long>(cell.ran), i);
        }
        submitted.fetch_add(400 * scale);
    };
    const auto plans = [&](std::mt19937_64& rng) {
        std::array<Cell, 7> cells{};
        for (uint32_t i = 1; i <= 60 * scale; ++i) {
            std::vector<ol_task> tasks;
            for (Cell& cell : cells) tasks.push_back(task_of(op, address(&cell), 0, 0, rng() % (tasks.size() + 1)));
            TaskError error{0, 0, 0, ""};
            if (e.run(tasks.data(), tasks.size(), in(plenty), error) != OL_OK) broken("a plan fails: %s", error.text.c_str());
            for (const Cell& cell : cells)
                if (cell.ran != i) broken("a task of a plan ran %llu times in %u runs", static_cast<unsigned long long>(cell.ran), i);
        }
        submitted.fetch_add(60 * scale * cells.size());
    };
    start(submitting);
    start(submitting);
    start(calling);
    start(calling);
    start(sequences);
    start(plans);
    std::thread publisher([&] {
        std::mt19937_64 rng(seed_value + 1);
        size_t active = 0, other = versions;
        while (busy.load() != 0) {
            size_t next = rng() % versions;
            while (next == active || next == other) next = (next + 1) % versions;
            load(next);
            if (e.swap(op, address(fn[next]), OL_ABI_VERSION, in(plenty)) == 0) broken("a swap timed out");
            if (other != versions) unload(other);
            other = std::exchange(active, next);
            if (rng() % 4 == 0) {
                if (e.rollback(op, in(plenty)) == 0) broken("a rollback timed out");
                std::swap(active, other);
            }
            std::this_thread::yield();
        }
    });
    std::thread parking([&] {
        std::mt19937_64 rng(seed_value + 2);
        while (busy.load() != 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(rng() % 3000));
            if (!e.park(rng() % 2 == 0, in(plenty))) broken("a park timed out");
            const uint64_t cursor = e.head();
            if (e.completed() != cursor) broken("parked at %llu with %llu done", static_cast<unsigned long long>(cursor),
                                               static_cast<unsigned long long>(e.completed()));
            if (e.present() != 0) broken("a worker stays on a parked executor");
            std::this_thread::sleep_for(std::chrono::microseconds(rng() % 1000));
            if (e.head() != cursor) broken("a task was taken from a parked executor");
            e.resume();
        }
    });
    for (auto& t : threads) t.join();
    publisher.join();
    parking.join();
    settle(e);
    if (e.executed() != submitted.load()) broken("%llu tasks done of %llu", static_cast<unsigned long long>(e.executed()),
                                                 static_cast<unsigned long long>(submitted.load()));
}

// Nobody helps here: a task that no worker comes back for is never run.
void workers_that_left_come_back_for_each_task() {
    Options options;
    options.idle_ns = 1;  // they leave whenever they find nothing
    Executor e(4, 2, options);
    const uint32_t op = e.register_operator(address(count_op), OL_ABI_VERSION);
    std::atomic<uint32_t> ran{0};
    std::mt19937_64 rng(seed_value);
    for (uint32_t i = 1; i <= 300 * scale; ++i) {
        const uint64_t ticket = e.submit(task_of(op, address(&ran)), in(plenty));
        if (!e.wait(ticket, in(20000), false)) broken("no worker came back for task %u", i);
        // Around the moment when a worker, having slept for 200 us, makes up its mind.
        const auto until = Clock::now() + std::chrono::microseconds(rng() % 400);
        while (Clock::now() < until) cpu_relax();
    }
    settle(e);
    if (ran.load() != 300 * scale) broken("%u tasks ran", ran.load());
}

// ---- one caller ----------------------------------------------------------------------------------------------------

void a_call_assists_with_what_stands_before_it() {
    Executor e(8, 0);
    const uint32_t op = e.register_operator(address(count_op), OL_ABI_VERSION);
    std::atomic<uint32_t> before{0}, own{0};
    const auto run_one = reinterpret_cast<RunOne>(e.api()->run_one);
    for (uint32_t ahead = 0; ahead <= 8; ++ahead) {  // at 8 the ring is full
        before.store(0);
        for (uint32_t i = 0; i < ahead; ++i) e.submit(task_of(op, address(&before)), in(plenty));
        char text[32] = "";
        const ol_task bad = task_of(op, address(&own), 7);
        if (run_one(e.api()->self, &bad, 10.0, text, sizeof text) != -7) broken("a call behind %u tasks lost its status", ahead);
        if (std::string(text) != "code 7") broken("a call behind %u tasks has the text %s", ahead, text);
        if (before.load() != ahead) broken("%u of %u tasks before it ran", before.load(), ahead);
    }
    if (own.load() != 9) broken("a call ran twice");
    ol_task late = task_of(op, address(&own), 0, 0, e.tail() + 5);
    char text[240] = "";
    if (run_one(e.api()->self, &late, 1.0, text, sizeof text) != OL_FAILED) broken("a call after a ticket that is not given out is taken");
    late.after = e.tail();  // that one failed
    if (run_one(e.api()->self, &late, 1.0, text, sizeof text) != OL_DEPENDENCY) broken("a call after a failed ticket runs");
    settle(e);
}

void a_call_obeys_its_time_limit() {
    Executor e(4, 1);
    const uint32_t hold = e.register_operator(address(gate_op), OL_ABI_VERSION);
    const uint32_t count = e.register_operator(address(count_op), OL_ABI_VERSION);
    Gate gate;
    std::atomic<uint32_t> ran{0};
    const uint64_t held = e.submit(task_of(hold, address(&gate)), in(plenty));
    while (!gate.entered.load()) std::this_thread::yield();
    const auto run_one = reinterpret_cast<RunOne>(e.api()->run_one);
    const ol_task after = task_of(count, address(&ran), 0, 0, held);
    for (int i = 0; i < 5; ++i) {  // the fifth finds the ring full
        const auto started = Clock::now();
        if (run_one(e.api()->self, &after, 0.03, nullptr, 0) != 1) broken("a call did not time out");
        if (Clock::now() - started > milliseconds(5000)) broken("a call went past its time limit");
    }
    gate.open.store(true);
    settle(e);
    if (ran.load() != 3) broken("%u of 3 calls that timed out ran later", ran.load());
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    seed_value = std::strtoull(argv[1], nullptr, 10);
    scale = static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10));
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    const uint32_t few = 2u << (seed_value % 3);  // 2, 4 or 8 places
    std::puts("every task once");
    every_task_once(few, 3, 3);
    every_task_once(2, 2, 4);
    every_task_once(few, 0, 3);
    std::puts("chains");
    chains_run_in_order(few, 3, 2);
    chains_run_in_order(few, 0, 2);
    a_chain_in_one_plan_does_not_race(few, 3);
    a_chain_in_one_plan_does_not_race(64, 2);
    std::puts("swap");
    old_code_may_go_once_quiescent(few, 3, 2);
    swap_waits_for_all_tickets_before_the_flip();
    std::puts("refusal");
    full_ring_refuses_by_its_deadline(few);
    std::puts("plans");
    a_failing_plan_stops_and_others_do_not(few, 2, 3);
    a_failing_plan_stops_and_others_do_not(64, 0, 2);
    a_slow_plan_keeps_its_failure();
    a_failed_dependency_is_seen_late(2);
    std::puts("calls");
    a_call_assists_with_what_stands_before_it();
    a_call_obeys_its_time_limit();
    std::puts("everything");
    everything_at_once(few, 2, false);
    everything_at_once(64, 0, false);
    everything_at_once(16, 3, true);
    workers_that_left_come_back_for_each_task();
    std::puts("ok");
    return 0;
}
