"""The executor from Python: deadlines, refusals, errors by ticket, publication, and operators compiled at run time."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outlast.checkpoint.handlers import Task
from outlast.core import _native
from outlast.core.errors import Fenced, OperatorFailed, Refused, TimedOut, UsageError
from outlast.core.jit import Compiler, JitCache, Library
from outlast.executor import Executor, Operator

UNIT = """
#include "outlast/dialect.h"
#include "outlast/region.h"
#include <atomic>
#include <time.h>

struct words { uint64_t v[8]; };

// v[0] counts calls; v[1] is the status to end with; the text names v[2]
OL_OPERATOR(count, words, a) {
    std::atomic_ref<uint64_t>(const_cast<words *>(a)->v[0]).fetch_add(1);
    if (a->v[1] != 0) {
        std::snprintf(environment->error, sizeof environment->error, "number %llu", (unsigned long long)a->v[2]);
        return -static_cast<int32_t>(a->v[1]);
    }
    return OL_OK;
}

// Enters (v[0] = 1) and stays until v[1] is set.
OL_OPERATOR(hold, words, a) {
    auto *w = const_cast<words *>(a);
    std::atomic_ref<uint64_t>(w->v[0]).store(1);
    while (std::atomic_ref<uint64_t>(w->v[1]).load() == 0) {
        timespec t{0, 200000};
        nanosleep(&t, nullptr);
    }
    return OL_OK;
}

// out[i] = scale * in[i]: v = {in, out, n}; rows are shared out over the parts
#ifndef SCALE
#define SCALE 2
#endif
OL_OPERATOR(scale, words, a) {
    const auto *in = reinterpret_cast<const uint64_t *>(a->v[0]);
    auto *out = reinterpret_cast<uint64_t *>(a->v[1]);
    for (uint64_t i = blockIdx.x; i < a->v[2]; i += gridDim.x)
        for (uint64_t j = threadIdx.x; j < 1; j += blockDim.x) out[i] = SCALE * in[i];
    return OL_OK;
}

OL_OPERATOR(chatter, words, a) { OL_FAIL("%0300d", 7); }

OL_UNIT;
"""


class Words(ctypes.Structure):
    _fields_ = (("v", ctypes.c_uint64 * 8),)

    @property
    def address(self) -> int:
        return ctypes.addressof(self)


@pytest.fixture(scope="module")
def cache(compiler: Compiler, tmp_path_factory: pytest.TempPathFactory) -> JitCache:
    return JitCache(tmp_path_factory.mktemp("jit"), compiler=compiler)


@pytest.fixture(scope="module")
def unit(cache: JitCache) -> Path:
    return cache.compile(UNIT, name="unit")


@pytest.fixture
def library(unit: Path) -> Iterator[Library]:
    library = Library(unit)
    yield library
    library.close()


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_parts_of_a_compiled_operator_share_its_rows(library: Library, workers: int) -> None:
    with Executor(workers=workers) as executor:
        scale = executor.register("scale", library.symbol("scale"))
        for parts in (1, 2, 3, 7, 300):
            source = (ctypes.c_uint64 * 100)(*range(100))
            out = (ctypes.c_uint64 * 100)()
            words = Words((ctypes.addressof(source), ctypes.addressof(out), 100))
            tickets = [executor.submit(scale, words.address, part=p, parts=parts) for p in range(parts)]
            for ticket in tickets:
                executor.wait(ticket)
            assert list(out) == [2 * i for i in range(100)]
        assert executor.native.workers == workers


def test_one_failing_task_among_many_reports_its_own_ticket(library: Library) -> None:
    with Executor(workers=1) as executor:
        count = executor.register("count", library.symbol("count"))
        good, bad = Words(), Words((0, 77, 5))
        tickets = [executor.submit(count, (bad if i == 40 else good).address) for i in range(100)]
        for i, ticket in enumerate(tickets):
            if i != 40:
                executor.wait(ticket)
                continue
            with pytest.raises(OperatorFailed, match="status -77: number 5") as failed:
                executor.wait(ticket)
            assert failed.value.ticket == ticket
        assert (good.v[0], bad.v[0]) == (99, 1)


def test_text_of_an_error_is_bounded(library: Library) -> None:
    with Executor() as executor:
        chatter = executor.register("chatter", library.symbol("chatter"))
        with pytest.raises(OperatorFailed) as failed:
            executor.wait(executor.submit(chatter, 0))
        assert failed.value.why == "0" * 239


def test_a_failure_is_never_forgotten_into_a_success(library: Library) -> None:
    """Its place in the ring was taken again, and more failed since than are kept."""
    with Executor(capacity=4) as executor:
        count = executor.register("count", library.symbol("count"))
        bad, good = Words((0, 5, 1)), Words()
        first = executor.submit(count, bad.address)
        for _ in range(3000):
            last = executor.submit(count, bad.address)
        with pytest.raises(OperatorFailed):
            executor.wait(last)
        with pytest.raises(OperatorFailed, match="no longer known"):
            executor.wait(first)
        executor.wait(executor.submit(count, good.address))


def test_a_task_whose_dependency_failed_is_not_run(library: Library) -> None:
    with Executor(workers=1) as executor:
        count = executor.register("count", library.symbol("count"))
        bad, good = Words((0, 5, 1)), Words()
        failed = executor.submit(count, bad.address)
        after = executor.submit(count, good.address, after=failed)
        with pytest.raises(OperatorFailed, match="waits for failed"):
            executor.wait(after)
        assert good.v[0] == 0


def test_waits_and_refusals_keep_their_deadlines(library: Library) -> None:
    """One operator hangs. Nobody else may be held past the time it asked for."""
    gate, counted = Words(), Words()
    with Executor(capacity=4, workers=1) as executor:
        hold = executor.register("hold", library.symbol("hold"))
        count = executor.register("count", library.symbol("count"))
        held = executor.submit(hold, gate.address)
        wait_for(lambda: gate.v[0] == 1)
        behind = executor.submit(count, counted.address, after=held)
        try:
            for act in (
                lambda: executor.wait(held, timeout=0.05),
                lambda: executor.wait(behind, timeout=0.05),  # helping out must not get stuck in the task itself
                lambda: executor.run(ctypes.addressof(plan(count, counted, 1)), 1, timeout=0.05),
            ):
                started = time.monotonic()
                with pytest.raises(TimedOut):
                    act()
                assert time.monotonic() - started < 5.0
            started = time.monotonic()
            with pytest.raises(Refused, match="full"):  # noqa: PT012  how many fit does not matter
                for _ in range(5):
                    executor.submit(count, counted.address, timeout=0.05)
            assert 0.04 < time.monotonic() - started < 5.0
            executor.swap(hold, library.symbol("count"), timeout=0.05)
            for act in (
                lambda: executor.swap(hold, library.symbol("hold"), timeout=0.05),  # the old code is still in use
                lambda: executor.rollback(hold, timeout=0.05),
            ):
                with pytest.raises(TimedOut):
                    act()
        finally:
            gate.v[1] = 1
        executor.wait(held)


def plan(operator: Operator, words: Words, count: int, *, after: bool = False) -> ctypes.Array[Task]:
    tasks = (Task * count)()
    for i in range(count):
        tasks[i].op, tasks[i].parts = operator.index, 1
        tasks[i].after = i if after else 0
        tasks[i].arg[0] = words.address
    return tasks


def test_every_16th_plan_is_timed_and_its_time_is_that_of_operators_waiting_and_dispatch(library: Library) -> None:
    counted = Words()
    with Executor() as executor:
        count = executor.register("count", library.symbol("count"))
        tasks = plan(count, counted, 50, after=True)
        for _ in range(400):
            executor.run(ctypes.addressof(tasks), 50)
        executor.wait(executor.submit(count, counted.address))
        found = executor.plan_stats()
        assert (found.plans, found.tasks, found.wait_seconds) == (400, 20_000, 0.0)
        assert 1 <= found.timed <= 25  # less those during which another program was given the core
        assert 0 < found.operator_seconds < found.timed_seconds < 1
        assert found.dispatch_seconds == pytest.approx(found.timed_seconds - found.operator_seconds)


def test_waiting_for_another_threads_task_is_not_counted_as_dispatch(library: Library) -> None:
    gate, counted = Words(), Words()
    with Executor(workers=1) as executor:
        hold = executor.register("hold", library.symbol("hold"))
        count = executor.register("count", library.symbol("count"))
        tasks = plan(count, counted, 3, after=True)
        for _ in range(20):  # until one in which this thread keeps its core
            before = executor.plan_stats()
            for _ in range(15):
                executor.run(ctypes.addressof(tasks), 3)
            gate.v[0] = gate.v[1] = 0
            executor.submit(hold, gate.address)
            wait_for(lambda: gate.v[0] == 1)  # the worker has it, and the plan waits for it
            threading.Timer(0.05, lambda: gate.v.__setitem__(1, 1)).start()
            executor.run(ctypes.addressof(tasks), 3)
            found = executor.plan_stats()
            if found.timed > before.timed:
                break
        waited = found.wait_seconds - before.wait_seconds
        assert 0.04 < waited < found.timed_seconds - before.timed_seconds
        assert found.dispatch_seconds - before.dispatch_seconds < 0.03


def test_a_plan_that_timed_out_starts_no_further_task(library: Library) -> None:
    gate, counted = Words(), Words()
    with Executor(workers=1) as executor:
        hold = executor.register("hold", library.symbol("hold"))
        count = executor.register("count", library.symbol("count"))
        executor.submit(hold, gate.address)
        wait_for(lambda: gate.v[0] == 1)  # the worker has it
        tasks = plan(count, counted, 6, after=True)  # "after" is all tickets up to one, so also the hold
        try:
            with pytest.raises(TimedOut):
                executor.run(ctypes.addressof(tasks), 6, timeout=0.05)
        finally:
            gate.v[1] = 1
        wait_for(lambda: executor.native.completed == executor.native.tail)
        assert counted.v[0] == 1


@pytest.mark.parametrize("length", [2, 200, 257, 600, 3000])
def test_a_long_plan_that_fails_at_once_is_never_taken_for_done(library: Library, length: int) -> None:
    with Executor() as executor:
        count = executor.register("count", library.symbol("count"))
        counted, bad = Words(), Words((0, 9, 3))
        tasks = plan(count, counted, length, after=True)
        tasks[0].arg[0] = bad.address
        with pytest.raises(OperatorFailed, match="number 3"):
            executor.run(ctypes.addressof(tasks), length)
        assert counted.v[0] == 0
        tasks[0].arg[0] = counted.address
        executor.run(ctypes.addressof(tasks), length)
        assert counted.v[0] == length


def test_a_plan_with_a_wrong_order_is_refused_before_anything_runs(library: Library) -> None:
    with Executor(workers=1) as executor:
        count = executor.register("count", library.symbol("count"))
        counted = Words()
        tasks = plan(count, counted, 4)
        tasks[3].after = 4
        with pytest.raises(UsageError, match="earlier task"):
            executor.run(ctypes.addressof(tasks), 4)
        assert executor.native.tail == 0
        executor.run(0, 0)


def test_senseless_submissions_are_refused(library: Library) -> None:
    with Executor() as executor:
        count = executor.register("count", library.symbol("count"))
        words = Words()
        with pytest.raises(UsageError, match="given out"):
            executor.submit(count, words.address, after=5)  # it would wait for itself
        with pytest.raises(UsageError, match="never given out"):
            executor.wait(5)
        with pytest.raises(UsageError, match="at most 4"):
            executor.submit(count, 1, 2, 3, 4, 5)
        for part, parts in ((1, 1), (0, 0), (0, 65536), (-1, 2)):
            with pytest.raises(UsageError, match="part"):
                executor.submit(count, words.address, part=part, parts=parts)
        with pytest.raises(UsageError, match="exists"):
            executor.register("count", 1)
        for capacity in (0, 1, 3, 1000):
            with pytest.raises(UsageError, match="power of two"):
                Executor(capacity=capacity)
        executor.wait(executor.submit(count, words.address))


def test_table_is_bounded(library: Library) -> None:
    with Executor(operators=300) as executor:
        address = library.symbol("count")
        for i in range(300):
            last = executor.register(f"op{i}", address)
        with pytest.raises(Refused, match="full"):
            executor.register("one too many", address)
        counted = Words()
        executor.wait(executor.submit(last, counted.address))
        assert counted.v[0] == 1
        with pytest.raises(Refused):
            executor.swap(last, 0)


def test_code_of_another_abi_is_refused(cache: JitCache) -> None:
    path = cache.compile(
        '#include "outlast/dialect.h"\nextern "C" OL_EXPORT const uint32_t outlast_abi = 99;\n'
        'extern "C" OL_EXPORT int32_t count(const ol_task *, ol_env *) { return 0; }\n',
        name="abi",
    )
    library = Library(path)
    with Executor() as executor:
        with pytest.raises(Refused, match="ABI"):
            executor.register("count", library.symbol("count"), library=library)
        shipped = executor.register("shipped", _native.log_operators()["log_seal"])
        with pytest.raises(Refused, match="ABI"):
            executor.swap(shipped, library.symbol("count"), library=library)
        assert executor.generation(shipped) == 1
    library.close()


def test_generations_count_and_rollback_restores(cache: JitCache) -> None:
    source, out = (ctypes.c_uint64 * 1)(10), (ctypes.c_uint64 * 1)()
    words = Words((ctypes.addressof(source), ctypes.addressof(out), 1))

    def build(factor: int) -> Library:
        return Library(cache.compile(UNIT, name="unit", defines={"SCALE": factor}))

    with Executor(workers=1) as executor:
        first = build(3)
        operator = executor.register("scale", first.symbol("scale"), library=first)

        def result() -> int:
            executor.wait(executor.submit(operator, words.address))
            return int(out[0])

        assert (result(), executor.generation(operator)) == (30, 1)
        with pytest.raises(Refused, match="no earlier"):
            executor.rollback(operator)
        second = build(5)
        executor.swap(operator, second.symbol("scale"), library=second)
        assert (result(), executor.generation(operator)) == (50, 2)
        executor.rollback(operator)
        assert (result(), executor.generation(operator)) == (30, 3)
        executor.rollback(operator)
        assert (result(), executor.generation(operator)) == (50, 4)


def test_swapping_in_a_loop_unloads_what_was_replaced(cache: JitCache) -> None:
    paths = [cache.compile(UNIT, name="unit", defines={"SCALE": 100 + i}) for i in range(6)]

    def mapped() -> int:
        maps = Path("/proc/self/maps").read_text()
        return sum(str(path.parent) in maps for path in paths)

    source, out = (ctypes.c_uint64 * 1)(1), (ctypes.c_uint64 * 1)()
    words = Words((ctypes.addressof(source), ctypes.addressof(out), 1))
    before = mapped()
    assert before == 0
    with Executor(workers=2) as executor:
        library = Library(paths[0])
        operator = executor.register("scale", library.symbol("scale"), library=library)
        stop = threading.Event()

        def load() -> None:
            while not stop.is_set():
                executor.wait(executor.submit(operator, words.address))

        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for turn in range(1, 120):
                library = Library(paths[turn % 6])
                executor.swap(operator, library.symbol("scale"), library=library)
                assert mapped() <= 2  # the active side and the one before
                if turn % 7 == 0:
                    executor.rollback(operator)
                    executor.rollback(operator)
                if turn % 10 == 0:
                    executor.wait(executor.submit(operator, words.address))
                    assert out[0] in {100 + i for i in range(6)}
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert mapped() == 0


def test_two_threads_that_publish_at_once_keep_the_libraries_in_order(cache: JitCache) -> None:
    """Were they confused, code that is active would be unloaded, and the next task would crash the process."""
    paths = [cache.compile(UNIT, name="unit", defines={"SCALE": 100 + i}) for i in range(6)]
    source, out = (ctypes.c_uint64 * 1)(1), (ctypes.c_uint64 * 1)()
    words = Words((ctypes.addressof(source), ctypes.addressof(out), 1))
    with Executor(workers=1) as executor:
        library = Library(paths[0])
        operator = executor.register("scale", library.symbol("scale"), library=library)

        def publish(which: int) -> None:
            for turn in range(60):
                library = Library(paths[which + turn % 3])
                executor.swap(operator, library.symbol("scale"), library=library)
                executor.wait(executor.submit(operator, words.address))

        threads = [threading.Thread(target=publish, args=(which,)) for which in (0, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert executor.generation(operator) == 121
        assert operator.library is not None
        assert executor.native.slot(operator.index)[1 + (executor.native.slot(operator.index)[0] & 1)] == (
            operator.library.symbol("scale")
        )


def test_a_waiting_caller_runs_tasks_itself(library: Library) -> None:
    with Executor(workers=0) as executor:
        count = executor.register("count", library.symbol("count"))
        counted = Words()
        tickets = [executor.submit(count, counted.address) for _ in range(10)]
        assert counted.v[0] == 0  # nobody else is there
        executor.wait(tickets[-1])
        assert counted.v[0] == 10


def test_heartbeat_counts_tasks(library: Library) -> None:
    words = Words()
    word = ctypes.c_uint64(100)
    with Executor(workers=1) as executor:
        count = executor.register("count", library.symbol("count"))
        executor.native.set_heartbeat(ctypes.addressof(word))
        for _ in range(50):
            executor.wait(executor.submit(count, words.address))
        wait_for(lambda: word.value == 150)
        wait_for(lambda: executor.native.executed == 50)
        executor.native.set_heartbeat(0)
        executor.wait(executor.submit(count, words.address))
        assert word.value == 150


def test_closing_ends_the_workers_and_does_not_run_what_waits(library: Library) -> None:
    gate, counted = Words(), Words()
    executor = Executor(workers=2)
    hold = executor.register("hold", library.symbol("hold"))
    count = executor.register("count", library.symbol("count"))
    held = executor.submit(hold, gate.address)
    wait_for(lambda: gate.v[0] == 1)
    executor.submit(count, counted.address, after=held)  # the second worker takes it and waits
    time.sleep(0.05)
    threading.Timer(0.2, lambda: gate.v.__setitem__(1, 1)).start()
    executor.close()
    executor.close()
    gc.collect()
    assert counted.v[0] == 0


def test_many_threads_submit_and_wait(library: Library) -> None:
    with Executor(capacity=16, workers=1) as executor:
        count = executor.register("count", library.symbol("count"))
        counted = [Words() for _ in range(6)]

        def work(words: Words) -> None:
            for _ in range(300):
                executor.wait(executor.submit(count, words.address))

        threads = [threading.Thread(target=work, args=(words,)) for words in counted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [words.v[0] for words in counted] == [300] * 6


def test_statuses_of_the_log_become_its_errors() -> None:
    from outlast.core.errors import DurabilityLost
    from outlast.executor import failure

    assert isinstance(failure(_native.STATUS_FENCED, 1, "x"), Fenced)
    assert isinstance(failure(_native.STATUS_DURABILITY, 1, "x"), DurabilityLost)
    assert isinstance(failure(_native.STATUS_REFUSED, 1, "x"), Refused)
    assert isinstance(failure(-5, 1, "x"), OperatorFailed)


def test_stats_count_calls_failures_refusals_and_time_every_256th_ticket(library: Library) -> None:
    with Executor(capacity=4) as executor:
        count = executor.register("count", library.symbol("count"))
        good, bad = Words(), Words((0, 5, 1))
        for turn in range(600):
            ticket = executor.submit(count, (bad if turn % 100 == 7 else good).address)
            if turn % 100 == 7:
                with pytest.raises(OperatorFailed):
                    executor.wait(ticket)
            else:
                executor.wait(ticket)
        row, sequence = executor.stats().operators
        assert (row.name, row.calls, row.failures, row.generation, row.samples) == ("count", 600, 6, 1, 2)
        assert row.sampled_ns_median is not None
        assert 0 < row.sampled_ns_median < 1e8
        assert (sequence.name, sequence.calls, sequence.sampled_ns_median) == ("sequence", 0, None)
        executor.park()
        for _ in range(4):
            executor.submit(count, good.address)
        for _ in range(3):
            with pytest.raises(Refused):
                executor.submit(count, good.address, timeout=0.0)
        stats = executor.stats()
        assert (stats.depth, stats.capacity, stats.completed, stats.refused) == (4, 4, 600, 3)
        assert (stats.workers, stats.present, stats.parked) == (0, 0, "asked")


@pytest.mark.parametrize(
    "use",
    [
        lambda executor, operator: executor.submit(operator, 0),
        lambda executor, operator: executor.wait(1),
        lambda executor, operator: executor.swap(operator, 8),
        lambda executor, operator: executor.rollback(operator),
        lambda executor, operator: executor.register("later", 8),
        lambda executor, operator: executor.park(),
        lambda executor, operator: executor.resume(),
        lambda executor, operator: executor.stats(),
        lambda executor, operator: executor.api,
    ],
)
def test_a_closed_executor_says_that_it_is_closed(
    library: Library, use: Callable[[Executor, Operator], object]
) -> None:
    executor = Executor()
    operator = executor.register("count", library.symbol("count"))
    executor.close()
    executor.close()
    with pytest.raises(UsageError, match="is closed"):
        use(executor, operator)


def test_an_executor_without_such_an_attribute_raises_as_any_object() -> None:
    with Executor() as executor:
        assert not hasattr(executor, "no_such_thing")


@pytest.mark.parametrize(
    "use",
    [
        lambda executor, operator: executor.submit(operator, -1),
        lambda executor, operator: executor.submit(operator, 1 << 64),
        lambda executor, operator: executor.submit(operator, 0, after=-1),
        lambda executor, operator: executor.submit(operator, 0, timeout=None),
        lambda executor, operator: executor.wait(0),
        lambda executor, operator: executor.wait(-1),
        lambda executor, operator: executor.wait(None),
        lambda executor, operator: executor.register("later", -1),
        lambda executor, operator: executor.swap(operator, -1),
        lambda executor, operator: executor.run(0, 3),
        lambda executor, operator: executor.run(8, -1),
    ],
)
def test_what_is_no_address_or_ticket_is_a_usage_error(
    library: Library, use: Callable[[Executor, Operator], object]
) -> None:
    with Executor() as executor:
        operator = executor.register("count", library.symbol("count"))
        with pytest.raises(UsageError):
            use(executor, operator)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_an_executor_that_was_forked_closes_at_once() -> None:
    with Executor(workers=1) as executor:
        pid = os.fork()
        if pid == 0:  # pragma: no cover - the child
            status = 1
            try:
                executor.close()
                status = 0 if executor.closed else 2
            finally:
                os._exit(status)
        deadline = time.monotonic() + 20
        while (found := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if found[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail("the child still waits for threads that it does not have")
        assert os.waitstatus_to_exitcode(found[1]) == 0
