"""Giving the device back and coming again: park, resume, idle workers, a silent host; time limits without assist."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from outlast.core.errors import Refused, TimedOut, UsageError
from outlast.core.jit import Compiler, JitCache, Library
from outlast.executor import Executor

UNIT = """
#include "outlast/dialect.h"
#include <atomic>
#include <time.h>
struct words { uint64_t v[4]; };
OL_OPERATOR(count, words, a) {
    std::atomic_ref<uint64_t>(const_cast<words *>(a)->v[0]).fetch_add(1);
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
OL_UNIT;
"""


class Words(ctypes.Structure):
    _fields_ = (("v", ctypes.c_uint64 * 4),)

    @property
    def address(self) -> int:
        return ctypes.addressof(self)


@pytest.fixture(scope="module")
def library(compiler: Compiler, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    cache = JitCache(tmp_path_factory.mktemp("jit"), compiler=compiler)
    library = Library(cache.compile(UNIT, name="park"))
    yield library
    library.close()


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def threads() -> int:
    """Threads of this process, as the kernel counts them."""
    with open("/proc/self/status") as status:  # noqa: PTH123 - not a path of ours
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_parked_executor_runs_nothing_and_goes_on_where_it_stopped(library: Library, workers: int) -> None:
    words = Words()
    before = threads()
    with Executor(capacity=8, workers=workers) as executor:
        count = executor.register("count", library.symbol("count"))
        for _ in range(20):
            executor.wait(executor.submit(count, words.address))
        assert threads() == before + workers
        assert executor.park() == 20
        assert (executor.parked, executor.stats().present, threads()) == ("asked", 0, before)
        tickets = [executor.submit(count, words.address) for _ in range(8)]
        with pytest.raises(Refused, match="full"):
            executor.submit(count, words.address, timeout=0.05)
        with pytest.raises(TimedOut, match="parked"):
            executor.wait(tickets[0], timeout=0.05)
        assert words.v[0] == 20
        assert (executor.native.head, executor.stats().depth) == (20, 8)
        assert executor.park() == 20  # twice is as good as once
        executor.resume()
        for ticket in tickets:
            executor.wait(ticket)
        assert (words.v[0], executor.parked, threads()) == (28, None, before + workers)


def test_park_without_drain_leaves_what_was_not_started(library: Library) -> None:
    gate, words = Words(), Words()
    with Executor(workers=1) as executor:
        hold = executor.register("hold", library.symbol("hold"))
        count = executor.register("count", library.symbol("count"))
        held = executor.submit(hold, gate.address)
        wait_for(lambda: gate.v[0] == 1)
        last = [executor.submit(count, words.address) for _ in range(5)][-1]
        threading.Timer(0.1, lambda: gate.v.__setitem__(1, 1)).start()
        assert executor.park(drain=False) == held
        assert words.v[0] == 0
        executor.resume()
        executor.wait(last)
        assert words.v[0] == 5


def test_a_park_that_can_not_end_in_time_changes_nothing(library: Library) -> None:
    gate, words = Words(), Words()
    with Executor(workers=2) as executor:
        hold = executor.register("hold", library.symbol("hold"))
        count = executor.register("count", library.symbol("count"))
        held = executor.submit(hold, gate.address)
        wait_for(lambda: gate.v[0] == 1)
        for drain in (True, False):
            with pytest.raises(TimedOut, match="goes on"):
                executor.park(drain=drain, timeout=0.05)
            assert executor.parked is None
            executor.wait(executor.submit(count, words.address), assist=False)  # the other worker is there
        gate.v[1] = 1
        executor.wait(held)
        executor.park()
        executor.resume()


def test_workers_leave_when_idle_and_the_next_submission_brings_them_back(library: Library) -> None:
    words = Words()
    before = threads()
    with Executor(workers=2, idle_park_s=0.05) as executor:
        count = executor.register("count", library.symbol("count"))
        for turn in range(1, 6):
            wait_for(lambda: executor.parked == "idle" and executor.stats().present == 0)
            wait_for(lambda: threads() == before)
            executor.wait(executor.submit(count, words.address), assist=False)  # only a worker can have run it
            assert words.v[0] == turn
            assert executor.parked is None


def test_workers_stay_while_a_task_runs_longer_than_the_idle_time(library: Library) -> None:
    gate = Words()
    with Executor(workers=2, idle_park_s=0.02) as executor:
        hold = executor.register("hold", library.symbol("hold"))
        held = executor.submit(hold, gate.address)
        wait_for(lambda: gate.v[0] == 1)
        time.sleep(0.1)
        assert executor.parked is None
        gate.v[1] = 1
        executor.wait(held, assist=False)


def test_workers_leave_a_silent_host_and_return_with_its_next_beat(library: Library) -> None:
    words = Words()
    before = threads()
    with Executor(workers=1, heartbeat_timeout_s=0.2) as executor:
        count = executor.register("count", library.symbol("count"))
        for _ in range(30):
            executor.beat()
            time.sleep(0.02)
            assert executor.parked is None
        wait_for(lambda: executor.parked == "silent host")
        wait_for(lambda: threads() == before)
        executor.beat()
        assert executor.parked is None
        executor.wait(executor.submit(count, words.address), assist=False)
        wait_for(lambda: executor.parked == "silent host")
        executor.wait(executor.submit(count, words.address), assist=False)  # a submission is a sign of life too
        assert words.v[0] == 2


def test_a_worker_of_a_silent_host_ends_its_task_and_starts_no_other(library: Library) -> None:
    gates, words = [Words(), Words()], Words()
    with Executor(workers=1, heartbeat_timeout_s=0.2) as executor:
        hold = executor.register("hold", library.symbol("hold"))
        count = executor.register("count", library.symbol("count"))
        for gate in gates:
            executor.submit(hold, gate.address)
        last = executor.submit(count, words.address)
        gates[0].v[1] = 1
        wait_for(lambda: gates[1].v[0] == 1)
        time.sleep(0.5)  # nobody beats while the second task runs
        gates[1].v[1] = 1
        wait_for(lambda: executor.parked == "silent host")
        time.sleep(0.05)
        assert (words.v[0], executor.stats().depth) == (0, 1)
        executor.wait(last)  # one who waits is alive
        assert words.v[0] == 1


def test_a_waiting_host_is_alive(library: Library) -> None:
    gate = Words()
    with Executor(workers=1, heartbeat_timeout_s=0.2) as executor:
        hold = executor.register("hold", library.symbol("hold"))
        held = executor.submit(hold, gate.address)
        threading.Timer(0.6, lambda: gate.v.__setitem__(1, 1)).start()
        executor.wait(held, assist=False)
        assert executor.parked is None


def test_a_wait_without_assist_comes_back_from_a_task_that_does_not_end(library: Library) -> None:
    gate, words = Words(), Words()
    with Executor(workers=2) as executor:
        hold = executor.register("hold", library.symbol("hold"))
        count = executor.register("count", library.symbol("count"))
        held = executor.submit(hold, gate.address)
        with pytest.raises(TimedOut):
            executor.wait(held, timeout=0.05, assist=False)
        for _ in range(50):  # the executor goes on beside it
            executor.wait(executor.submit(count, words.address), assist=False)
        assert words.v[0] == 50
        gate.v[1] = 1
        executor.wait(held)
    with Executor() as executor, pytest.raises(UsageError, match="no workers"):
        executor.wait(0, assist=False)


def test_closing_gives_up_a_task_that_does_not_end_and_the_process_still_ends() -> None:
    """The stuck thread keeps its memory; leaving the interpreter with it neither hangs nor crashes."""
    program = """
import ctypes, time
from outlast.core.errors import TimedOut
from outlast.executor import Executor
libc = ctypes.CDLL(None)
executor = Executor(workers=1)
pause = executor.register("pause", ctypes.cast(libc.pause, ctypes.c_void_p).value)  # returns on a signal only
executor.submit(pause)
while executor.native.head != 1:  # until the worker has it
    time.sleep(0.001)
try:
    executor.close(timeout=0.2)
except TimedOut as error:
    print("given up:", error)
executor.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert "given up" in done.stdout


@pytest.mark.parametrize("bad", [{"idle_park_s": 0.0}, {"idle_park_s": -1.0}, {"heartbeat_timeout_s": 0.1}])
def test_senseless_times_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Executor(**bad)  # type: ignore[arg-type]
