"""One suite for every backend of the executor: what a caller may rely on, whatever runs the tasks.

Operators are written in the dialect only, so that the same text is compiled for a CPU and for a device. On a machine
without a CUDA device the suite runs on the CPU alone and says so.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest

from outlast.core.errors import OperatorFailed, Refused, TimedOut, UsageError
from outlast.core.jit import JitError
from outlast.executor.backends.ring import structure

UNIT = """
#include "outlast/dialect.h"
#include "outlast/order.h"

struct words { uint64_t v[8]; };

// v[0] counts calls; v[1] is the status to end with; the text names v[2]
OL_OPERATOR(count, words, a) {
    if (threadIdx.x == 0) const_cast<words *>(a)->v[0] += 1;
    if (a->v[1] != 0) {
        OL_SAY("number %llu of %s", (unsigned long long)a->v[2], "many");
        return -static_cast<int32_t>(a->v[1]);
    }
    return OL_OK;
}

// Enters (v[0] = 1) and stays until v[1] is set.
OL_OPERATOR(hold, words, a) {
    if (threadIdx.x == 0) ol_release_system(const_cast<uint64_t *>(&a->v[0]), 1);
    while (ol_acquire_system(&a->v[1]) == 0) ol_pause();
    return OL_OK;
}

// v[0] = SCALE * v[1] + v[0]: tells an old body from a new one, and an order of tasks from another
#ifndef SCALE
#define SCALE 2
#endif
OL_OPERATOR(scale, words, a) {
    if (threadIdx.x == 0) const_cast<words *>(a)->v[0] = SCALE * a->v[1] + a->v[0];
    return OL_OK;
}

// v[3 + part] = parts, so that each share of a task is seen to have run once
OL_OPERATOR(shares, words, a) {
    if (threadIdx.x == 0) const_cast<words *>(a)->v[3 + blockIdx.x] += gridDim.x;
    return OL_OK;
}

// v[0] = number of elements that all threads together were given of v[1]
OL_OPERATOR(spread, words, a) {
    const ol_share w = ol_share_of(static_cast<int64_t>(a->v[1]), blockIdx, gridDim);
    auto *out = reinterpret_cast<uint64_t *>(a->v[2]);
    for (int64_t i = w.begin; i < w.end; i += w.step) out[i] += static_cast<uint64_t>(i) + 1;
    return OL_OK;
}

OL_UNIT;
"""


class Bench:
    """An executor with the operators of UNIT."""

    def __init__(self, backend: Any, **options: Any) -> None:
        self.backend = backend
        self.executor = backend.executor(**options)
        self.library = backend.build(self.executor, UNIT, "conformance")
        self.operators: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in self.operators:
            self.operators[name] = self.executor.register(name, self.library.symbol(name))
        return self.operators[name]

    def words(self, *values: int, count: int = 8) -> Any:
        words = self.backend.words(self.executor, count)
        for index, value in enumerate(values):
            words.v[index] = value
        return words


@pytest.fixture
def bench(backend: Any) -> Bench:
    return Bench(backend, capacity=16)


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_task_runs_once_and_its_ticket_is_done(bench: Bench) -> None:
    words = bench.words()
    tickets = [bench.executor.submit(bench.count, words.address) for _ in range(5)]
    assert tickets == list(range(tickets[0], tickets[0] + 5))
    bench.executor.wait(tickets[-1])
    for ticket in tickets:
        bench.executor.wait(ticket)
    assert words.v[0] == 5


def test_many_laps_of_the_ring_lose_no_task(bench: Bench) -> None:
    words = bench.words()
    last = 0
    for _ in range(10 * 16 + 3):
        last = bench.executor.submit(bench.count, words.address)
        if last % 16 == 0:
            bench.executor.wait(last)
    bench.executor.wait(last)
    wait_until(lambda: words.v[0] == 163)


def test_an_error_keeps_its_status_text_and_ticket(bench: Bench) -> None:
    good, bad = bench.words(), bench.words(0, 7, 41)
    before = bench.executor.submit(bench.count, good.address)
    failing = bench.executor.submit(bench.count, bad.address)
    after = bench.executor.submit(bench.count, good.address)
    bench.executor.wait(after)
    bench.executor.wait(before)
    for _ in range(2):  # it is kept, not handed out once
        with pytest.raises(OperatorFailed, match="number 41 of many") as caught:
            bench.executor.wait(failing)
        assert caught.value.ticket == failing
        assert "-7" in caught.value.what


def test_a_task_behind_a_failed_one_does_not_run(bench: Bench) -> None:
    bad, words = bench.words(0, 1, 1), bench.words()
    failing = bench.executor.submit(bench.count, bad.address)
    dependent = bench.executor.submit(bench.count, words.address, after=failing)
    with pytest.raises(OperatorFailed, match="waits for failed"):
        bench.executor.wait(dependent)
    assert words.v[0] == 0


def test_a_task_behind_a_failure_of_long_ago_does_not_run(bench: Bench) -> None:
    bad, words = bench.words(0, 1, 1), bench.words()
    failing = bench.executor.submit(bench.count, bad.address)
    good = bench.executor.submit(bench.count, words.address)
    for _ in range(40):
        bench.executor.wait(bench.executor.submit(bench.count, words.address))
    with pytest.raises(OperatorFailed, match="waits for failed"):
        bench.executor.wait(bench.executor.submit(bench.count, words.address, after=failing))
    bench.executor.wait(bench.executor.submit(bench.count, words.address, after=good))
    assert words.v[0] == 42


def test_a_chain_runs_in_its_order(bench: Bench) -> None:
    words = bench.words(1, 1)
    ticket = 0
    for _ in range(12):  # v[0] = 2 * 1 + v[0]
        ticket = bench.executor.submit(bench.scale, words.address, after=ticket)
    bench.executor.wait(ticket)
    assert words.v[0] == 25


def test_every_share_of_a_task_runs_once(bench: Bench) -> None:
    words = bench.words()
    tickets = [bench.executor.submit(bench.shares, words.address, part=part, parts=4) for part in range(4)]
    for ticket in tickets:
        bench.executor.wait(ticket)
    assert list(words.v)[3:7] == [4, 4, 4, 4]


def test_shares_cover_every_element_once(bench: Bench) -> None:
    n = 1000
    out = bench.words(count=n)
    words = bench.words(0, n, out.address)
    for part in range(3):
        bench.executor.wait(bench.executor.submit(bench.spread, words.address, part=part, parts=3))
    found = (ctypes.c_uint64 * n).from_address(out.address)
    assert list(found) == list(range(1, n + 1))


def test_a_wait_ends_at_its_deadline_and_the_task_goes_on(backend: Any) -> None:
    bench = Bench(backend, capacity=16, workers=1)
    gate, words = bench.words(), bench.words()
    held = bench.executor.submit(bench.hold, gate.address)
    wait_until(lambda: gate.v[0] == 1)
    behind = bench.executor.submit(bench.count, words.address, after=held)
    started = time.monotonic()
    with pytest.raises(TimedOut):
        bench.executor.wait(behind, timeout=0.05)
    assert 0.04 < time.monotonic() - started < 5
    gate.v[1] = 1
    bench.executor.wait(behind)
    assert words.v[0] == 1


def test_a_full_ring_refuses_at_the_deadline(backend: Any) -> None:
    bench = Bench(backend, capacity=2, workers=1)
    gate, words = bench.words(), bench.words()
    held = bench.executor.submit(bench.hold, gate.address)
    wait_until(lambda: gate.v[0] == 1)
    second = bench.executor.submit(bench.count, words.address)
    with pytest.raises(Refused, match="ring is full"):
        bench.executor.submit(bench.count, words.address, timeout=0.05)
    gate.v[1] = 1
    bench.executor.wait(held)
    bench.executor.wait(second)
    bench.executor.wait(bench.executor.submit(bench.count, words.address))
    assert words.v[0] == 2


def test_bad_requests_are_named(bench: Bench) -> None:
    with pytest.raises(UsageError, match="never given out"):
        bench.executor.wait(99)
    with pytest.raises(UsageError, match="after ticket 99"):
        bench.executor.submit(bench.count, 0, after=99)
    with pytest.raises(UsageError, match="at most 4"):
        bench.executor.submit(bench.count, 1, 2, 3, 4, 5)
    with pytest.raises(UsageError, match="part 2 of 2"):
        bench.executor.submit(bench.count, 0, part=2, parts=2)
    with pytest.raises(UsageError, match="exists"):
        bench.executor.register("count", bench.library.symbol("count"))
    with pytest.raises(Refused, match="address is 0"):
        bench.executor.register("nothing", 0)


def test_source_that_does_not_compile_names_its_line(bench: Bench) -> None:
    source = '#include "outlast/dialect.h"\nstruct words { uint64_t v[8]; };\nOL_OPERATOR(op, words, a) { retrn 0; }\n'
    with pytest.raises(JitError, match=r"broken\.\w+[:(]3") as caught:
        bench.backend.build(bench.executor, source, "broken")
    assert "retrn" in caught.value.output


def test_a_swap_is_seen_by_later_tasks_and_not_by_earlier_ones(backend: Any) -> None:
    bench = Bench(backend, capacity=16, workers=1)
    gate, words = bench.words(), bench.words(0, 1)
    newer = backend.build(bench.executor, UNIT, "conformance", SCALE=100)
    scale = bench.scale
    bench.executor.submit(bench.hold, gate.address)
    wait_until(lambda: gate.v[0] == 1)
    bench.executor.submit(scale, words.address)
    flip = bench.executor.swap(scale, newer.symbol("scale"))
    last = bench.executor.submit(scale, words.address)
    gate.v[1] = 1
    bench.executor.wait(last)
    assert words.v[0] == 102
    assert flip == last - 1
    assert bench.executor.generation(scale) == 2


def test_a_rollback_brings_the_earlier_code_back(bench: Bench) -> None:
    words = bench.words(0, 1)
    newer = bench.backend.build(bench.executor, UNIT, "conformance", SCALE=100)
    with pytest.raises(Refused, match="rolled back"):
        bench.executor.rollback(bench.scale)
    bench.executor.swap(bench.scale, newer.symbol("scale"))
    bench.executor.wait(bench.executor.submit(bench.scale, words.address))
    bench.executor.rollback(bench.scale)
    bench.executor.wait(bench.executor.submit(bench.scale, words.address))
    assert words.v[0] == 102
    assert bench.executor.generation(bench.scale) == 3


def test_a_swap_waits_for_tasks_that_may_run_the_code_it_overwrites(backend: Any) -> None:
    bench = Bench(backend, capacity=16, workers=1)
    gate = bench.words()
    bench.executor.submit(bench.hold, gate.address)
    wait_until(lambda: gate.v[0] == 1)
    again = bench.library.symbol("hold")
    bench.executor.swap(bench.hold, again)
    with pytest.raises(TimedOut):
        bench.executor.swap(bench.hold, again, timeout=0.05)
    gate.v[1] = 1
    bench.executor.swap(bench.hold, again)


def test_swaps_under_load_never_tear_a_task(bench: Bench) -> None:
    newer = bench.backend.build(bench.executor, UNIT, "conformance", SCALE=100)
    words = bench.words(0, 1)
    old, new = bench.library.symbol("scale"), newer.symbol("scale")
    bench.executor.register("scale", old)
    scale = bench.executor.operators["scale"]
    stop = threading.Event()

    def swap() -> None:
        which = 0
        while not stop.is_set():
            which ^= 1
            bench.executor.swap(scale, (old, new)[which])

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        results = []
        for _ in range(200):
            words.v[0] = 0
            bench.executor.wait(bench.executor.submit(scale, words.address))
            results.append(words.v[0])
    finally:
        stop.set()
        thread.join()
    assert set(results) <= {2, 100}


def test_a_plan_runs_in_the_order_of_its_dependencies(bench: Bench) -> None:
    words = bench.words(0, 1)
    plan = (structure("ol_task") * 40)()
    for index, task in enumerate(plan):
        task.op, task.after, task.parts = bench.scale.index, index, 1
        task.arg[0] = words.address
    bench.executor.run(ctypes.addressof(plan), 40)
    assert words.v[0] == 80


def test_a_plan_that_fails_stops_there_and_raises_its_error(bench: Bench) -> None:
    good, bad = bench.words(), bench.words(0, 3, 8)
    plan = (structure("ol_task") * 6)()
    for index, task in enumerate(plan):
        task.op, task.after, task.parts = bench.count.index, index, 1
        task.arg[0] = bad.address if index == 2 else good.address
    with pytest.raises(OperatorFailed, match="number 8"):
        bench.executor.run(ctypes.addressof(plan), 6)
    assert (good.v[0], bad.v[0]) == (2, 1)
    bad.v[1] = 0
    bench.executor.run(ctypes.addressof(plan), 6)  # nothing of the failure sticks to the next run
    assert (good.v[0], bad.v[0]) == (7, 2)


def test_a_plan_that_waits_for_itself_is_refused_before_anything_runs(bench: Bench) -> None:
    words = bench.words()
    plan = (structure("ol_task") * 2)()
    for task in plan:
        task.op, task.arg[0] = bench.count.index, words.address
    plan[1].after = 2
    with pytest.raises(UsageError, match="plan of 2"):
        bench.executor.run(ctypes.addressof(plan), 2)
    assert words.v[0] == 0


def test_parked_work_waits_and_goes_on_after_resume(bench: Bench) -> None:
    words = bench.words()
    bench.executor.wait(bench.executor.submit(bench.count, words.address))
    bench.executor.park()
    ticket = bench.executor.submit(bench.count, words.address)
    with pytest.raises(TimedOut):
        bench.executor.wait(ticket, timeout=0.05)
    assert words.v[0] == 1
    bench.executor.resume()
    bench.executor.wait(ticket)
    assert words.v[0] == 2


def test_closing_twice_is_harmless_and_a_closed_executor_says_so(bench: Bench) -> None:
    words = bench.words()
    count = bench.count
    bench.executor.wait(bench.executor.submit(count, words.address))
    bench.executor.close()
    bench.executor.close()


def test_threads_submit_at_once_and_every_task_runs(bench: Bench) -> None:
    per_thread, threads = 50, 4
    words = [bench.words() for _ in range(threads)]
    count = bench.count
    errors: list[BaseException] = []

    def work(own: Any) -> None:
        try:
            for _ in range(per_thread):
                bench.executor.wait(bench.executor.submit(count, own.address))
        except BaseException as error:  # noqa: BLE001 - the test reports it
            errors.append(error)

    running = [threading.Thread(target=work, args=(own,)) for own in words]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not errors
    assert [own.v[0] for own in words] == [per_thread] * threads
