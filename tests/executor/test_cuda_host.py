"""The host side of the CUDA backend over a recording driver: what it asks for, in which order, and what it refuses.

Nothing here runs on a GPU; see recording_driver.py for what such a test can and can not show.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from outlast.core import layout
from outlast.core.errors import NotPossibleHere, OperatorFailed, Refused, TimedOut, UsageError
from outlast.executor import backends
from outlast.executor.backends import gates, nvrtc
from outlast.executor.backends.cuda import CudaExecutor
from outlast.executor.backends.driver import Driver
from outlast.executor.backends.ring import structure

UNIT = """
#include "outlast/dialect.h"
struct words { uint64_t v[8]; };
#ifndef STEP
#define STEP 1
#endif
OL_OPERATOR(bump, words, a) { if (threadIdx.x == 0) const_cast<words *>(a)->v[0] += STEP; return OL_OK; }
OL_UNIT;
"""
ILLEGAL_ADDRESS = 700


class Desk:
    """An executor over a recording driver, and both."""

    def __init__(self, cubins: nvrtc.CubinCache, **options: Any) -> None:
        from recording_driver import RecordingDriver

        self.driver = RecordingDriver()
        self.driver.program = self._run
        self.hold = False
        self.executor = CudaExecutor(driver=Driver(self.driver), cache=cubins, **options)
        self.words = structure("ol_task").from_address(self.executor.allocate(64).host)

    def _run(self, module: Any, name: str, task: Any) -> tuple[int, str]:
        while self.hold:
            time.sleep(20e-6)
        return (-9, "asked to fail") if task.arg[1] else (0, "")

    def bump(self, **defines: int | str) -> Any:
        return self.executor.compile(UNIT, name="bump", defines=defines)

    def registered(self) -> Any:
        module = self.bump()
        return self.executor.register("bump", module.symbol("bump"), library=module)

    def after(self, mark: int) -> list[str]:
        """Names of the calls from `mark` on, without those that are asked all the time."""
        return [name for name in self.driver.names()[mark:] if name not in ("cuCtxPushCurrent", "cuCtxPopCurrent")]


@pytest.fixture
def desk(cubins: nvrtc.CubinCache) -> Iterator[Desk]:
    made = Desk(cubins, capacity=16)
    yield made
    made.hold = False
    made.driver.stuck.clear()
    made.executor.close(timeout=5)


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# -- start -------------------------------------------------------------------------------------------------------------


def test_modules_load_eagerly_from_before_the_driver_starts(
    cubins: nvrtc.CubinCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    desk = Desk(cubins)
    assert desk.driver.environment_at_init == "EAGER"
    assert desk.driver.names()[0] == "cuInit"
    desk.executor.close()


def test_a_process_that_loads_lazily_already_is_refused_unless_it_is_asked_for(cubins: nvrtc.CubinCache) -> None:
    from recording_driver import RecordingDriver

    driver = RecordingDriver()
    driver.lazy = True
    with pytest.raises(NotPossibleHere, match="CUDA_MODULE_LOADING=EAGER"):
        CudaExecutor(driver=Driver(driver), cache=cubins)
    assert "cuDevicePrimaryCtxRetain" not in driver.names()
    CudaExecutor(driver=Driver(driver), cache=cubins, allow_lazy_loading=True).close()


def test_stack_memory_and_streams_are_set_up_before_the_launch(desk: Desk) -> None:
    names = desk.driver.names()
    launch = names.index("cuLaunchKernel")
    for name in ("cuCtxSetLimit", "cuMemHostAlloc", "cuMemAlloc", "cuModuleLoadData", "cuMemsetD8Async"):
        assert names.index(name) < launch, name
    limit = next(arguments for name, arguments in desk.driver.calls if name == "cuCtxSetLimit")
    assert limit[1] == gates.STACK_BYTES
    priorities = [arguments for name, arguments in desk.driver.calls if name == "cuStreamCreateWithPriority"]
    assert [(int(flags), priority) for flags, priority in priorities] == [
        (1, 0)
    ] * 2  # not blocking, the least of 0 … -5
    _, arguments = next(call for call in desk.driver.calls if call[0] == "cuLaunchKernel")
    assert arguments[1:8] == (1, 1, 1, nvrtc.THREADS, 1, 1, 0)


def test_a_start_that_fails_gives_back_what_it_took(cubins: nvrtc.CubinCache) -> None:
    from recording_driver import RecordingDriver

    driver = RecordingDriver()
    driver.failing["cuLaunchKernel"] = 2
    with pytest.raises(Exception, match="CUDA_ERROR_OUT_OF_MEMORY"):
        CudaExecutor(driver=Driver(driver), cache=cubins)
    names = driver.names()
    for take, give in (
        ("cuMemHostAlloc", "cuMemFreeHost"),
        ("cuMemAlloc", "cuMemFree"),
        ("cuStreamCreateWithPriority", "cuStreamDestroy"),
        ("cuModuleLoadData", "cuModuleUnload"),
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease"),
        ("cuCtxPushCurrent", "cuCtxPopCurrent"),
    ):
        assert names.count(take) == names.count(give), take


def test_closing_gives_everything_back_after_the_kernel_left(desk: Desk) -> None:
    desk.registered()
    desk.executor.close()
    names = desk.driver.names()
    for take, give in (
        ("cuMemHostAlloc", "cuMemFreeHost"),
        ("cuMemAlloc", "cuMemFree"),
        ("cuStreamCreateWithPriority", "cuStreamDestroy"),
        ("cuModuleLoadData", "cuModuleUnload"),
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease"),
        ("cuCtxPushCurrent", "cuCtxPopCurrent"),
    ):
        assert names.count(take) == names.count(give), take
    assert names[-1] == "cuDevicePrimaryCtxRelease"
    with pytest.raises(UsageError, match="closed"):
        desk.executor.submit(desk.executor._table.sequence)


def test_without_a_driver_the_error_names_what_is_missing_and_what_works() -> None:
    class NoLibrary:
        @staticmethod
        def cuInit(flags: int) -> tuple[int]:  # noqa: N802 - the driver's name
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    with pytest.raises(NotPossibleHere, match=r"libcuda\.so\.1.*outlast\.executor\.Executor"):
        Driver(NoLibrary())


def test_every_backend_is_listed_with_a_reason_where_it_does_not_work() -> None:
    rows = {row.backend: row for row in backends.available()}
    assert set(rows) == {"cpu", "cuda"}
    assert rows["cpu"].works
    assert rows["cuda"].works or (rows["cuda"].detail and rows["cuda"].advice)


# -- loading and unloading ---------------------------------------------------------------------------------------------


def test_the_kernel_is_away_while_a_module_is_loaded(desk: Desk) -> None:
    launches = desk.driver.names().count("cuLaunchKernel")
    mark = len(desk.driver.names())
    seen = []
    load = type(desk.driver).do_cuModuleLoadData

    def watched(driver: Any, image: bytes) -> Any:
        seen.append(any(thread.is_alive() for thread in driver._kernels.values()))
        return load(driver, image)

    type(desk.driver).do_cuModuleLoadData = watched
    try:
        desk.bump()
    finally:
        type(desk.driver).do_cuModuleLoadData = load
    assert seen == [False]
    calls = desk.after(mark)
    assert calls.index("cuModuleLoadData") < calls.index("cuModuleGetGlobal") < calls.index("cuLaunchKernel")
    assert desk.driver.names().count("cuLaunchKernel") == launches + 1


def test_a_load_waits_for_the_task_that_runs_and_gives_up_at_the_deadline(desk: Desk) -> None:
    operator = desk.registered()
    desk.hold = True
    ticket = desk.executor.submit(operator, 1)
    wait_until(lambda: desk.driver.ran)
    loads = desk.driver.names().count("cuModuleLoadData")
    with pytest.raises(TimedOut, match="has not left"):
        desk.executor.compile(UNIT, name="bump", timeout=0.05)
    assert desk.driver.names().count("cuModuleLoadData") == loads
    desk.hold = False
    desk.executor.wait(ticket)  # it goes on as before
    desk.executor.wait(desk.executor.submit(operator, 1))


def test_new_code_is_published_after_it_was_loaded_side_first_and_word_last(desk: Desk) -> None:
    operator = desk.registered()
    mark = len(desk.driver.names())
    newer = desk.bump(STEP=2)
    desk.executor.swap(operator, newer.symbol("bump"), library=newer)
    place = desk.executor.slots + operator.index * layout.sizeof("ol_slot")
    offsets = {member.name: member.offset for member in layout.structs()["ol_slot"].members}
    calls = [(name, arguments) for name, arguments in desk.driver.calls[mark:] if name == "cuMemcpyHtoDAsync"]
    assert [arguments[0] for _, arguments in calls] == [place + offsets["fn"] + 8, place + offsets["word"]]
    names = desk.after(mark)
    assert names.index("cuModuleLoadData") < names.index("cuMemcpyHtoDAsync")
    slot: Any = structure("ol_slot").from_address(place)
    assert (slot.word, slot.fn[1]) == (2 << 1 | 1, newer.symbol("bump"))


def test_a_replaced_module_is_unloaded_only_once_nothing_can_run_it(desk: Desk) -> None:
    first = desk.bump()
    operator = desk.executor.register("bump", first.symbol("bump"), library=first)
    old = desk.driver.modules[-1]
    second = desk.bump(STEP=2)
    desk.hold = True
    running = desk.executor.submit(operator, 1)  # of the first generation, and it goes on
    wait_until(lambda: desk.driver.ran)
    flip = desk.executor.swap(operator, second.symbol("bump"), library=second)
    assert flip == running
    with pytest.raises(TimedOut, match="old code go on"):
        desk.executor.swap(operator, second.symbol("bump"), timeout=0.05)
    assert not old.unloaded
    desk.hold = False
    desk.executor.wait(running)
    third = desk.bump(STEP=3)
    assert not old.unloaded  # a rollback may still want it
    desk.executor.swap(operator, third.symbol("bump"), library=third)
    assert not old.unloaded  # the kernel is there, and unloading may wait for it
    desk.bump(STEP=4)
    assert old.unloaded
    assert [module.unloaded for module in desk.driver.modules[-3:]] == [False] * 3


def test_swaps_in_a_row_do_not_pile_up_modules(desk: Desk) -> None:
    operator = desk.registered()
    for turn in range(60):
        module = desk.bump(STEP=turn % 3 + 1)
        desk.executor.swap(operator, module.symbol("bump"), library=module)
        desk.executor.wait(desk.executor.submit(operator, 1))
    alive = [module for module in desk.driver.modules if not module.unloaded]
    assert len(alive) <= 4  # the kernel, both sides, and one that waits for the kernel to be away


def test_a_module_of_another_abi_is_refused(desk: Desk) -> None:
    module = desk.bump()
    module.abi += 1
    with pytest.raises(Refused, match="another ABI version"):
        desk.executor.register("bump", module.symbol("bump"), library=module)


def test_a_module_that_does_not_fit_is_not_given_to_the_driver(desk: Desk) -> None:
    loads = desk.driver.names().count("cuModuleLoadData")
    source = """
        #include "outlast/dialect.h"
        struct words { uint64_t v[8]; };
        OL_OPERATOR(op, words, a) {
            volatile char b[8192];
            for (int i = 0; i < 8192; ++i) b[i] = a->v[0];
            return b[a->v[1]];
        }
        OL_UNIT;
    """
    with pytest.raises(Refused, match="bytes of stack"):
        desk.executor.compile(source, name="deep")
    assert desk.driver.names().count("cuModuleLoadData") == loads


def test_a_full_table_refuses_one_operator_more(cubins: nvrtc.CubinCache) -> None:
    desk = Desk(cubins, operators=4)
    address = desk.bump().symbol("bump")
    for name in ("one", "two"):  # `sequence` and the place of trials come first
        desk.executor.register(name, address)
    with pytest.raises(Refused, match="table is full"):
        desk.executor.register("three", address)
    desk.executor.close()


# -- life of the kernel ------------------------------------------------------------------------------------------------


def test_a_kernel_that_left_idle_comes_back_with_the_next_task(desk: Desk) -> None:
    operator = desk.registered()
    launches = desk.driver.names().count("cuLaunchKernel")
    desk.driver.leave_idle.set()
    wait_until(lambda: desk.executor.parked == "idle")
    assert desk.executor.stats().present == 0
    desk.executor.wait(desk.executor.submit(operator, 1))
    assert desk.driver.names().count("cuLaunchKernel") == launches + 1
    assert desk.executor.parked is None


def test_a_kernel_that_leaves_just_as_work_arrives_is_brought_back_though_nobody_waits(desk: Desk) -> None:
    operator = desk.registered()
    revive, desk.executor._kernel.revive = (
        desk.executor._kernel.revive,
        lambda **_: None,
    )  # the submission sees it running
    desk.driver.leave_idle.set()
    wait_until(lambda: desk.executor.parked == "idle")
    ticket = desk.executor.submit(operator, 1)
    desk.executor._kernel.revive = revive
    wait_until(lambda: desk.executor._ring.is_done(ticket))  # the heartbeat's thread did it


def test_a_parked_kernel_stays_away_whatever_is_submitted(desk: Desk) -> None:
    operator = desk.registered()
    last = desk.executor.submit(operator, 1)
    assert desk.executor.park() == last
    assert desk.executor.parked == "asked"
    launches = desk.driver.names().count("cuLaunchKernel")
    ticket = desk.executor.submit(operator, 1)
    module = desk.bump(STEP=5)  # a load while parked brings nothing back
    assert module.symbol("bump")
    with pytest.raises(TimedOut, match="parked"):
        desk.executor.wait(ticket, timeout=0.05)
    assert desk.driver.names().count("cuLaunchKernel") == launches
    desk.executor.resume()
    desk.executor.wait(ticket)


def test_parking_gives_up_at_its_deadline_and_the_kernel_goes_on(desk: Desk) -> None:
    operator = desk.registered()
    desk.hold = True
    ticket = desk.executor.submit(operator, 1)
    wait_until(lambda: desk.driver.ran)
    for drain in (True, False):
        with pytest.raises(TimedOut):
            desk.executor.park(drain=drain, timeout=0.05)
    assert desk.executor.parked is None
    desk.hold = False
    desk.executor.wait(ticket)
    desk.executor.wait(desk.executor.submit(operator, 1))


def test_a_kernel_that_never_answers_holds_no_caller(desk: Desk) -> None:
    operator = desk.registered()
    desk.driver.stuck.set()
    ticket = desk.executor.submit(operator, 1)
    started = time.monotonic()
    with pytest.raises(TimedOut):
        desk.executor.wait(ticket, timeout=0.1)
    with pytest.raises(TimedOut, match="goes on"):
        desk.executor.close(timeout=0.1)
    assert time.monotonic() - started < 5
    assert "cuMemFree" not in desk.driver.names()  # it would wait for the kernel, for ever
    assert "cuCtxSynchronize" not in desk.driver.names()


def test_an_operator_that_traps_is_reported_by_every_later_call(desk: Desk) -> None:
    operator = desk.registered()
    ticket = desk.executor.submit(operator, 1)
    desk.executor.wait(ticket)
    desk.driver.stuck.set()
    doomed = desk.executor.submit(operator, 1)
    desk.driver.trap = ILLEGAL_ADDRESS
    for _ in range(2):
        with pytest.raises(Exception, match="CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
            desk.executor.wait(doomed, timeout=5)
        assert "Restart the process" in str(caught.value)
    with pytest.raises(Exception, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        desk.executor.submit(operator, 1)
    desk.executor.close()
    assert "cuMemFree" not in desk.driver.names()


def test_the_host_shows_that_it_lives(desk: Desk) -> None:
    control = desk.executor._ring.control
    before = control.heartbeat
    wait_until(lambda: control.heartbeat >= before + 3)
    assert control.heartbeat_ns == 5_000_000_000
    assert control.idle_ns == 2_000_000_000


# -- tasks -------------------------------------------------------------------------------------------------------------


def test_a_stream_is_made_to_write_before_and_to_wait_behind_the_task(desk: Desk) -> None:
    operator = desk.registered()
    mark = len(desk.driver.names())
    ticket = desk.executor.submit(operator, 1, stream=0x55)
    assert desk.after(mark) == ["cuStreamWriteValue64", "cuStreamWaitValue64"]
    (_, write), (_, wait) = [call for call in desk.driver.calls[mark:] if call[0].startswith("cuStream")]
    assert (write[0], wait[0]) == (0x55, 0x55)
    assert wait[1:] == (desk.executor._ring.outcome_word(ticket), ticket << 1, 0)  # 0: at least
    desk.executor.wait(ticket)
    assert ctypes.c_uint64.from_address(wait[1]).value >= wait[2]


def test_a_task_does_not_run_before_its_stream_reached_it(desk: Desk) -> None:
    from recording_driver import STALLED_STREAM

    operator = desk.registered()
    ticket = desk.executor.submit(operator, 1, stream=STALLED_STREAM)
    behind = desk.executor.submit(operator, 1)
    time.sleep(0.05)
    assert not desk.driver.ran
    assert desk.executor.park(drain=False) == 0  # a closed gate holds nothing: the kernel can leave
    desk.executor.resume()
    _, (_, address, value, _) = next(call for call in desk.driver.calls if call[0] == "cuStreamWriteValue64")
    ctypes.c_uint64.from_address(address).value = value
    desk.executor.wait(behind)
    desk.executor.wait(ticket)


def test_gates_of_one_stream_count_up_and_those_of_many_streams_are_taken_over(desk: Desk) -> None:
    operator = desk.registered()
    for stream in [*range(0x100, 0x100 + 70), 0x100, 0x100]:
        desk.executor.wait(desk.executor.submit(operator, 1, stream=stream))
    writes = [arguments[1:3] for name, arguments in desk.driver.calls if name == "cuStreamWriteValue64"]
    last: dict[int, int] = {}
    for address, value in writes:
        assert value == last.get(address, 0) + 1  # a word that fell back would open the gate too early
        last[address] = value
    assert len(last) == 64


def test_a_torch_like_stream_is_understood(desk: Desk) -> None:
    class Stream:
        cuda_stream = 0x99

    mark = len(desk.driver.names())
    desk.executor.wait(desk.executor.submit(desk.registered(), 1, stream=Stream()))
    assert next(args for name, args in desk.driver.calls[mark:] if name == "cuStreamWriteValue64")[0] == 0x99


def test_what_a_task_points_at_is_kept_until_it_is_done(desk: Desk) -> None:
    class Held:
        pass

    operator, held = desk.registered(), Held()
    alive = weakref.ref(held)
    desk.hold = True
    ticket = desk.executor.submit(operator, 1, keep=held)
    del held
    assert alive() is not None
    desk.hold = False
    desk.executor.wait(ticket)
    assert alive() is None


def test_tickets_go_on_where_the_counters_wrap_32_bits(cubins: nvrtc.CubinCache) -> None:
    desk = Desk(cubins, capacity=8, first_ticket=2**32 - 5)
    operator = desk.registered()
    tickets = [desk.executor.submit(operator, 1) for _ in range(40)]
    assert tickets[0] == 2**32 - 4
    for ticket in tickets:
        desk.executor.wait(ticket)
    assert [ticket for ticket, _, _ in desk.driver.ran] == tickets
    desk.executor.close()


def test_failures_beyond_those_that_are_kept_read_as_failures(desk: Desk) -> None:
    operator = desk.registered()
    tickets = [desk.executor.submit(operator, 1, 1) for _ in range(1100)]
    with pytest.raises(OperatorFailed):
        desk.executor.wait(tickets[-1])
    with pytest.raises(OperatorFailed, match="asked to fail"):
        desk.executor.wait(tickets[600])
    with pytest.raises(OperatorFailed, match="no longer kept"):
        desk.executor.wait(tickets[3])


def test_counts_of_operators_are_those_of_the_tasks(desk: Desk) -> None:
    operator = desk.registered()
    for fails in (0, 0, 1):
        ticket = desk.executor.submit(operator, 1, fails)
    with pytest.raises(OperatorFailed):
        desk.executor.wait(ticket)
    with pytest.raises(OperatorFailed):
        desk.executor.wait(desk.executor.submit(operator, 1, after=ticket))
    stats = desk.executor.stats()
    (bump,) = [row for row in stats.operators if row.name == "bump"]
    assert (bump.calls, bump.failures, bump.generation, bump.sampled_ns_median) == (3, 1, 1, 500)
    assert (stats.completed, stats.depth, stats.workers, stats.present) == (4, 0, 1, 1)
    assert stats.operators[-1].name == "sequence"
