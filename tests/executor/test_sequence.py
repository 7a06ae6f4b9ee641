"""A plan that runs as one task, and the executor as other native modules call it (native/include/outlast/plan.h)."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from outlast.core import layout
from outlast.core.errors import OperatorFailed
from outlast.core.jit import Compiler, JitCache, Library
from outlast.executor import Executor

UNIT = """
#include "outlast/dialect.h"
#include <atomic>
#include <time.h>
struct words { uint64_t v[4]; };

// v[0] counts runs, v[1] is the status to end with, v[2] keeps what the task said of itself
OL_OPERATOR(note, words, a) {
    auto *w = const_cast<words *>(a);
    w->v[0] += 1;
    w->v[2] = gridDim.x;
    if (w->v[1] != 0) {
        std::snprintf(environment->error, sizeof environment->error, "run %d", (int)w->v[0]);
        return -static_cast<int32_t>(w->v[1]);
    }
    return OL_OK;
}
OL_OPERATOR(hold, words, a) {  // enters (v[0] = 1) and stays until v[1] is set
    auto *w = const_cast<words *>(a);
    std::atomic_ref<uint64_t>(w->v[0]).store(1);
    while (std::atomic_ref<uint64_t>(w->v[1]).load() == 0) {
        timespec t{0, 200000};
        nanosleep(&t, nullptr);
    }
    return OL_OK;
}
#ifndef VERSION
#define VERSION 1
#endif
OL_OPERATOR(version, words, a) {
    const_cast<words *>(a)->v[0] = VERSION;
    return OL_OK;
}
OL_UNIT;
"""

RUN_ONE = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_double, ctypes.c_char_p, ctypes.c_uint64
)


@pytest.fixture(scope="module")
def cache(compiler: Compiler, tmp_path_factory: pytest.TempPathFactory) -> JitCache:
    return JitCache(tmp_path_factory.mktemp("jit"), compiler=compiler)


@pytest.fixture(scope="module")
def library(cache: JitCache) -> Iterator[Library]:
    library = Library(cache.compile(UNIT, name="sequence"))
    yield library
    library.close()


class Api:
    """What a native module sees of an executor."""

    def __init__(self, executor: Executor) -> None:
        size = layout.sizeof("ol_executor")
        words = (ctypes.c_char * size).from_address(executor.api)
        self.fields = np.frombuffer(words, dtype=layout.dtype("ol_executor"))[0]
        self._run_one = RUN_ONE(int(self.fields["run_one"]))

    def run_one(self, op: int, argument: int, *, after: int = 0, timeout: float = 10.0) -> tuple[int, str]:
        task = np.zeros(1, dtype=layout.dtype("ol_task"))
        task["op"], task["parts"], task["after"] = op, 1, after
        task["arg"][0, 0] = argument
        text = ctypes.create_string_buffer(240)
        status = self._run_one(int(self.fields["self"]), task.ctypes.data, timeout, text, 240)
        return status, text.value.decode()


class Plan:
    """An ol_sequence over (operator index, argument address) pairs."""

    def __init__(self, api: Api, steps: list[tuple[int, int]], *, timed: bool = False) -> None:
        self.steps = np.zeros(max(1, len(steps)), dtype=layout.dtype("ol_step"))
        for i, (op, argument) in enumerate(steps):
            self.steps[i] = (op, i, argument)
        self.times = np.zeros(len(steps) + 1, dtype=np.uint64)
        self.head = np.zeros(1, dtype=layout.dtype("ol_sequence"))
        self.head["steps"], self.head["count"] = self.steps.ctypes.data, len(steps)
        self.head["slots"] = api.fields["slots"]
        self.head["times"] = self.times.ctypes.data if timed else 0

    @property
    def address(self) -> int:
        return int(self.head.ctypes.data)

    def __getitem__(self, name: str) -> Any:
        return int(self.head[name][0])


def words(*values: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array([*values, *(0,) * (4 - len(values))], dtype=np.uint64)


@pytest.mark.parametrize("workers", [0, 1])
def test_steps_run_in_order_each_once(library: Library, workers: int) -> None:
    with Executor(workers=workers) as executor:
        api = Api(executor)
        assert api.fields["workers"] == workers
        note = executor.register("note", library.symbol("note")).index
        cells = [words() for _ in range(5)]
        plan = Plan(api, [(note, c.ctypes.data) for c in cells], timed=True)
        for run in range(1, 4):
            assert api.run_one(int(api.fields["sequence"]), plan.address) == (0, "")
            assert [int(c[0]) for c in cells] == [run] * 5
            assert plan["runs"] == run
        assert [int(c[2]) for c in cells] == [1] * 5  # one part
        assert all(np.diff(plan.times.astype(np.int64)) >= 0)
        assert plan.times[0] > 0
        assert api.run_one(int(api.fields["sequence"]), Plan(api, []).address) == (0, "")
        # One task each, whatever the number of steps; the steps are counted by whoever made the plan.
        by_name = {row.name: row.calls for row in executor.stats().operators}
        assert by_name == {"note": 0, "sequence": 4}
        remove = executor.count_with(lambda: {note: 5 * plan["runs"]})
        assert {row.name: row.calls for row in executor.stats().operators}["note"] == 15
        remove()
        assert {row.name: row.calls for row in executor.stats().operators}["note"] == 0


def test_a_failing_step_ends_the_sequence_and_is_named(library: Library) -> None:
    with Executor() as executor:
        api = Api(executor)
        sequence = int(api.fields["sequence"])
        note = executor.register("note", library.symbol("note")).index
        good, bad, never = words(), words(0, 5), words()
        plan = Plan(api, [(note, good.ctypes.data), (note, bad.ctypes.data), (note, never.ctypes.data)])
        assert api.run_one(sequence, plan.address) == (-5, "run 1")
        assert (plan["failed"], plan["runs"], never[0]) == (1, 0, 0)
        for unknown in (99, sequence + 1, 2**32 - 1):
            plan = Plan(api, [(note, good.ctypes.data), (unknown, 0)])
            status, text = api.run_one(sequence, plan.address)
            assert status == layout.constants()["OL_NO_OPERATOR"]
            assert "step 1 of 2" in text
            assert str(unknown) in text
        status, text = api.run_one(sequence, 0)
        assert (status, "address" in text) == (-1, True)
        status, text = api.run_one(2**32 - 1, 0)
        assert status == layout.constants()["OL_NO_OPERATOR"]
        # A failed call is a ticket like any other.
        with pytest.raises(OperatorFailed):
            executor.wait(executor.native.tail)


def test_a_sequence_sees_new_code_between_two_steps_and_old_code_stays_meanwhile(cache: JitCache) -> None:
    libraries = [Library(cache.compile(UNIT, name="sequence", defines={"VERSION": v})) for v in (1, 2, 3)]
    with Executor(workers=1) as executor:
        api = Api(executor)
        hold = executor.register("hold", libraries[0].symbol("hold")).index
        version = executor.register("version", libraries[0].symbol("version"))
        before, gate, behind = words(), words(), words()
        steps = [(version.index, before.ctypes.data), (hold, gate.ctypes.data), (version.index, behind.ctypes.data)]
        plan = Plan(api, steps)
        ticket = executor.native.submit(executor.native.sequence, plan.address, 0, 0, 0, 0, 0, 1, 1.0)
        deadline = time.monotonic() + 10
        while gate[0] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        executor.swap(version, libraries[1].symbol("version"))
        # The side of version 1 must not be overwritten while the sequence may still look at it.
        assert executor.native.swap(version.index, libraries[2].symbol("version"), 1, 0.05) == 0
        assert not executor.native.quiescent(version.index)
        gate[1] = 1
        executor.wait(ticket)
        assert (int(before[0]), int(behind[0])) == (1, 2)
        executor.swap(version, libraries[2].symbol("version"))
    for library in libraries:
        library.close()


def test_calls_from_many_threads_beside_submissions(library: Library) -> None:
    with Executor(capacity=4, workers=1) as executor:
        api = Api(executor)
        note = executor.register("note", library.symbol("note"))
        cells = [words() for _ in range(6)]
        failed: list[object] = []

        def call(cell: Any) -> None:
            ended = {api.run_one(note.index, cell.ctypes.data) for _ in range(300)}
            failed.extend(ended - {(0, "")})

        def submit(cell: Any) -> None:
            for _ in range(300):
                executor.wait(executor.submit(note, cell.ctypes.data))

        threads = [threading.Thread(target=call if i % 2 else submit, args=(c,)) for i, c in enumerate(cells)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert [int(c[0]) for c in cells] == [300] * 6
        assert executor.stats().depth == 0


def test_a_call_to_a_parked_executor_times_out_and_runs_after_resume(library: Library) -> None:
    with Executor(workers=1) as executor:
        api = Api(executor)
        note = executor.register("note", library.symbol("note")).index
        cell = words()
        executor.park()
        assert api.run_one(note, cell.ctypes.data, timeout=0.05)[0] == 1
        assert cell[0] == 0
        executor.resume()
        executor.wait(executor.native.tail)
        assert cell[0] == 1


@pytest.mark.parametrize(("member", "named"), [("slots", "operator table"), ("steps", "steps")])
def test_a_sequence_without_its_addresses_fails_and_says_which(library: Library, member: str, named: str) -> None:
    with Executor() as executor:
        api = Api(executor)
        plan = Plan(api, [(0, 0)])
        plan.head[member] = 0
        status, text = api.run_one(int(api.fields["sequence"]), plan.address)
        assert status != 0
        assert named in text
