"""The executor on a CUDA device: the interface of `outlast.executor.runtime.Executor`, served by a persistent kernel.

Operators are device code in the operators' dialect (`compile`), and the addresses that tasks carry are ones that the
device can follow: pinned memory from `allocate`, or device memory of the caller. See docs/explanation/cuda-backend.md.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from outlast.core import layout
from outlast.core.errors import NotPossibleHere, OutlastError, Refused, TimedOut, UsageError
from outlast.executor.backends import gates, nvrtc
from outlast.executor.backends.driver import Block, Driver
from outlast.executor.backends.kernel import PARK_S, Module, PersistentKernel
from outlast.executor.backends.plans import DOOMED, PLANS, Plans, tasks_at
from outlast.executor.backends.ring import Failure
from outlast.executor.backends.streams import Streams
from outlast.executor.backends.table import DeviceOperator, Table
from outlast.executor.backends.trial import Trials
from outlast.executor.kernels import Kernel
from outlast.executor.runtime import DEFAULT_CAPACITY, DEFAULT_OPERATORS, MAX_PARTS, failure
from outlast.executor.stats import AWAY, ExecutorStats

if TYPE_CHECKING:
    from outlast.executor.operator import OperatorSpec

__all__ = ["CudaExecutor", "DeviceOperator"]

IDLE_PARK_S = 2.0  #: a relaunch costs some microseconds, and a device that nobody needs is worth more than that
HEARTBEAT_S = 5.0
_DEPENDENCY = layout.constants()["OL_DEPENDENCY"]
_SPIN_S = 50e-6  # a task of a resident kernel takes some microseconds, so most waits end here
_PAUSE_S = 20e-6
_LOOK_S = 0.02  # how often a waiting thread asks the driver whether the kernel still lives
_FOR_EVER_S = 1e9


class CudaExecutor:
    """Ring, table and persistent kernel of one device. Thread-safe. Timeouts are seconds.

    Keeps the contract of `Executor`, with these differences. Callers never run tasks (`assist` changes nothing). The
    executor's own thread gives the signs of life. A task that does not end keeps its block of the kernel; a trap in an
    operator loses the device's context for the whole process, which every later call then says.
    """

    def __init__(
        self,
        *,
        capacity: int = DEFAULT_CAPACITY,
        workers: int = 1,
        operators: int = DEFAULT_OPERATORS,
        idle_park_s: float | None = IDLE_PARK_S,
        heartbeat_timeout_s: float | None = HEARTBEAT_S,
        threads: int = nvrtc.THREADS,
        device: int = 0,
        driver: Driver | None = None,
        cache: nvrtc.CubinCache | None = None,
        allow_lazy_loading: bool = False,
        live_load: bool = False,
        stack_bytes: int = gates.STACK_BYTES,
        first_ticket: int = 0,
    ) -> None:
        """Compile the kernel for the device and launch it.

        `capacity`: tasks that may be outstanding, a power of two. `workers`: blocks of the kernel, 1 to 4, of `threads`
        threads. `operators`: places in the operator table. `idle_park_s`, `heartbeat_timeout_s`: when the kernel leaves
        by itself; None = never. `live_load`: load modules beside the running kernel, which may block for ever and was
        never tried. `stack_bytes`: of each thread; less takes less of the device's memory, and then operators that need
        more are refused. Raises `NotPossibleHere` naming what is missing and what is possible instead.
        """
        if idle_park_s is not None and not idle_park_s > 0:
            raise UsageError(f"idle_park_s={idle_park_s}", why="it is not a number of seconds above 0")
        if heartbeat_timeout_s is not None and not heartbeat_timeout_s >= 0.5:
            raise UsageError(f"heartbeat_timeout_s={heartbeat_timeout_s}", why="the executor beats every 100 ms")
        self._publishing = threading.Lock()  # keeps the order of publications and of `previous` the same
        self.operators: dict[str, DeviceOperator] = {}
        self._kernel = PersistentKernel(
            driver or Driver(),
            device=device,
            capacity=capacity,
            blocks=workers,
            threads=threads,
            operators=operators,
            idle_park_s=idle_park_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            cache=cache,
            allow_lazy_loading=allow_lazy_loading,
            live_load=live_load,
            first_ticket=first_ticket,
            stack_bytes=stack_bytes,
        )
        self._ring = self._kernel.ring
        self._table = Table(self._kernel, operators)
        self._streams = Streams(self._kernel)
        self._plans = Plans()
        self._kept: deque[tuple[int, object]] = deque()  #: (ticket, what its task points at); under the kernel's lock
        self._counters: list[Callable[[], Mapping[int, int]]] = []
        self._refused = 0
        self._trials = Trials(self)

    # -- operators ---------------------------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """Index of the operator `sequence`."""
        return self._table.sequence.index

    @property
    def slots(self) -> int:
        """Device address of the slot table, for `ol_sequence.slots`."""
        return self._kernel.slots

    def compile(
        self, source: str, *, name: str, defines: Mapping[str, int | str] | None = None, timeout: float = PARK_S
    ) -> Module:
        """Compile operators for this device, check and load them. The kernel is away while they are loaded.

        `timeout`: how long the kernel may take to end the tasks that it runs. Raises `JitError` with the compiler's
        message, `Refused` with what does not fit under the kernel, `TimedOut` if the kernel does not leave.
        """
        kernel = self._kernel
        kernel.check()
        architecture = kernel.device.architecture
        image = kernel.cache.cubin(source, name=name, architecture=architecture, defines=defines)
        return kernel.load(image, name, timeout)

    def compile_shipped(self, kernels: list[Kernel], *, name: str) -> Module:
        """Compile operators that ship with the package (`outlast.executor.kernels`) as one module."""
        headers = dict.fromkeys(kernel.header for kernel in kernels)
        lines = [f'#include "outlast/ops/{header}"\n' for header in headers] + [kernel.source for kernel in kernels]
        return self.compile("".join([*lines, "OL_UNIT;\n"]), name=name)

    def allocate(self, size: int) -> Block:
        """Zeroed pinned memory that operators and this process share; freed by `close`."""
        return self._kernel.allocate(size)

    def register(self, name: str, address: int, *, library: Module | None = None) -> DeviceOperator:
        """Add an operator (`ol_op_fn` at a device address). Raises `Refused` when the table is full."""
        with self._publishing, self._kernel.lock:
            self._kernel.check()
            if name in self.operators:
                raise UsageError(f"operator {name!r} exists", do="Use swap to replace it.")
            self.operators[name] = operator = self._table.add(name, address, library)
            return operator

    def swap(
        self,
        operator: DeviceOperator,
        address: int,
        *,
        library: Module | None = None,
        spec: OperatorSpec | None = None,
        timeout: float = 10.0,
    ) -> int:
        """Publish new code for an operator while tasks run; returns the flip's ticket.

        Tasks submitted before run the old code, tasks submitted after the new one. The code that was replaced before
        the present one is unloaded. Raises `TimedOut` if tasks that may still run it do not end in time.
        """
        with self._publication(operator, timeout):
            ticket = self._table.flip(operator, address, library)
            if operator.previous is not None:
                operator.previous.close()  # its side was overwritten, which happens only once it is quiescent
            operator.previous, operator.library = operator.library, library
            operator.previous_spec, operator.spec = operator.spec, spec
            return ticket

    def rollback(self, operator: DeviceOperator, *, timeout: float = 10.0) -> int:
        """Publish the code that was active before the last swap again; returns the flip's ticket."""
        with self._publication(operator, timeout):
            ticket = self._table.flip_back(operator)
            operator.previous, operator.library = operator.library, operator.previous
            operator.previous_spec, operator.spec = operator.spec, operator.previous_spec
            return ticket

    def define(self, spec: OperatorSpec, *, canary: Literal["here"] = "here") -> DeviceOperator:
        """Compile an operator, run its canary on the device against its reference, and register it.

        The canary runs in this kernel: one that traps loses the context, one that does not end keeps its block. Raises
        `JitError` when it does not compile and `Refused` when it does not fit or the canary differs or fails.
        """
        _check_canary(canary)
        if spec.name in self.operators:
            raise UsageError(f"operator {spec.name!r} exists", do="Use replace to publish new code for it.")
        module = self._trials.checked(spec, self._table.trial)
        try:
            operator = self.register(spec.name, module.symbol(spec.name), library=module)
        except OutlastError:
            module.close()
            raise
        operator.spec = spec
        return operator

    def replace(
        self,
        operator: DeviceOperator,
        spec: OperatorSpec,
        *,
        canary: Literal["here"] = "here",
        timeout: float = 10.0,
    ) -> int:
        """Compile and check new code for an operator, and only then publish it; returns the flip's ticket.

        Raises what `define` and `swap` do; the code that was active stays so.
        """
        _check_canary(canary)
        if operator.spec is not None and operator.spec.signature != spec.signature:
            raise UsageError(
                f"operator {operator.name!r} can not be replaced by one with another signature",
                why="tasks in the ring carry arguments of the present one",
                do="Define it under another name.",
            )
        module = self._trials.checked(spec, self._table.trial)
        try:
            return self.swap(operator, module.symbol(spec.name), library=module, spec=spec, timeout=timeout)
        except OutlastError:
            module.close()
            raise

    def call(
        self, operator: DeviceOperator, *args: Any, parts: int = 1, timeout: float = 10.0, assist: bool = True
    ) -> None:
        """Run a defined operator on host arrays and numbers, which are copied, and wait for it.

        Raises `UsageError` for an argument that does not fit its signature, else what `submit` and `wait` do.
        """
        self._trials.call(operator, args, parts, timeout)

    @contextlib.contextmanager
    def _publication(self, operator: DeviceOperator, timeout: float) -> Iterator[None]:
        """Hold the locks of publications once nothing can run the operator's idle side any more."""
        deadline = time.monotonic() + timeout
        if not self._publishing.acquire(timeout=max(0.0, timeout)):
            raise TimedOut(f"operator {operator.name!r} was not published", why="another publication does not end")
        try:
            # All tickets up to the last flip, not that one alone: an earlier one may still run the idle side.
            if not self._until(lambda: self._completed() >= operator.flip_ticket, deadline):
                raise TimedOut(
                    f"operator {operator.name!r} was not replaced", why="tasks that may run its old code go on"
                )
            with self._kernel.lock:
                self._kernel.check()
                yield
        finally:
            self._publishing.release()

    def generation(self, operator: DeviceOperator) -> int:
        """How often the operator was published, from 1."""
        return operator.word >> 1

    # -- tasks -------------------------------------------------------------------------------------------------------

    def submit(
        self,
        operator: DeviceOperator,
        *args: int,
        after: int = 0,
        part: int = 0,
        parts: int = 1,
        timeout: float = 10.0,
        keep: object = None,
        stream: Any = None,
    ) -> int:
        """Put a task into the ring and return its ticket. `after`: run once every ticket up to it is done.

        The task's arguments are addresses: `keep` is held until the ticket is done, so that what they point at lives.
        `stream` (a CUstream, its address, or an object with `cuda_stream`): the task runs after what that stream was
        given before, and what it is given later runs after the task. Raises `Refused` when the ring stays full for
        `timeout`, `UsageError` if `after` was not given out yet.
        """
        if len(args) > 4:
            raise UsageError("a task has at most 4 arguments", why=f"{len(args)} were given")
        if not 0 <= part < parts <= MAX_PARTS:
            raise UsageError(f"part {part} of {parts}", why=f"parts count from 0 and there are at most {MAX_PARTS}")
        deadline = time.monotonic() + timeout

        def put(op: int | DeviceOperator, arguments: tuple[int, ...], **more: int) -> int:
            ticket = self._put(op, arguments, deadline, **more)
            if ticket == 0:
                self._refused += 1
                raise Refused(
                    "the task ring is full", why=f"no place within {timeout} s", do="Wait for earlier tickets."
                )
            return ticket

        def task() -> int:
            return put(operator, args, after=after, part=part, parts=parts)

        with self._kernel.lock if stream is not None or keep is not None else contextlib.nullcontext():
            ticket = task() if stream is None else self._streams.submit(stream, put, task)
            if keep is not None:
                self._kept.append((ticket, keep))
        if self._kept:
            self._let_go()
        return ticket

    def _let_go(self) -> None:
        """Release what tasks that are done pointed at."""
        with self._kernel.lock:
            done = self._completed()
            while self._kept and self._kept[0][0] <= done:
                self._kept.popleft()

    def _put(
        self,
        operator: int | DeviceOperator,
        args: tuple[int, ...],
        deadline: float,
        *,
        after: int = 0,
        part: int = 0,
        parts: int = 1,
        plan: int = 0,
    ) -> int:
        """Submit one task; 0 if there is no place until the deadline. A number as operator is a gate's."""
        kernel, ring = self._kernel, self._ring
        pause = 0.0
        while True:
            with kernel.lock:
                kernel.check()
                if not 0 <= after <= ring.tail:
                    raise UsageError(f"a task after ticket {after}", why="that ticket was not given out yet")
                if ring.free():
                    if after and ring.tail + 1 - after >= ring.capacity:
                        # So old that its mark on the device may be gone, and so old that it is done.
                        plan, after = DOOMED if ring.failure(after) is not None else plan, 0
                    op, word = (operator, 0) if isinstance(operator, int) else (operator.index, operator.word)
                    ticket = ring.put(op, word & 0xFFFFFFFF, args, after=after, part=part, parts=parts, plan=plan)
                    kernel.revive()
                    return ticket
                kernel.revive()
            if time.monotonic() >= deadline:
                return 0
            time.sleep(pause)
            pause = _PAUSE_S

    def _completed(self) -> int:
        with self._kernel.lock:
            self._kernel.check()
            return self._ring.completed()

    def _until(self, done: Callable[[], bool], deadline: float) -> bool:
        """Wait until `done()`; false at the deadline. Brings the kernel back if it left, and raises its error."""
        kernel = self._kernel
        started = looked = time.monotonic()
        with kernel.using():
            while not done():
                now = time.monotonic()
                if now >= deadline:
                    return False
                kernel.check()
                kernel.revive()
                if now - looked > _LOOK_S:
                    kernel.look()
                    looked = now
                if now - started > _SPIN_S:
                    time.sleep(_PAUSE_S)
            return True

    def wait(self, ticket: int, *, timeout: float = 10.0, assist: bool = True) -> None:
        """Wait until `ticket` is done. Raises `TimedOut`, or `OperatorFailed` with the operator's text."""
        failed = self.settled(ticket, timeout)
        if failed is not None:
            raise failure(failed.status, ticket, failed.text)

    def settled(self, ticket: int, timeout: float) -> Failure | None:
        """Wait until `ticket` is done and say how it failed, None if it did not. Raises `TimedOut`."""
        if not 0 < ticket <= self._ring.tail:
            raise UsageError(f"ticket {ticket} was never given out")
        if not self._until(lambda: self._ring.is_done(ticket), time.monotonic() + timeout):
            why = "the executor is parked" if self._kernel.parked else ""
            raise TimedOut(f"ticket {ticket} is not done after {timeout} s", why=why)
        if self._kept:
            self._let_go()
        with self._kernel.lock:
            self._kernel.check()
            return self._ring.failure(ticket)

    def run(self, tasks: int, count: int, *, timeout: float = 60.0) -> None:
        """Run a plan: `count` `ol_task` at host address `tasks`, whose `after` counts tasks of the plan from 1.

        Returns when all are done. Once one fails the rest of the plan is not run, and its error is raised. After
        `TimedOut` no further task of it starts, but one may still be running: keep what the plan points to.
        """
        deadline = time.monotonic() + timeout
        plan = tasks_at(tasks, count, len(self._table.operators))
        late = TimedOut(f"a plan of {count} tasks is not done after {timeout} s")
        number, tickets = 0, [0]

        def begun() -> bool:
            nonlocal number
            number = self._plans.begin(self._completed())
            return number != 0

        if not self._until(begun, deadline):
            raise late
        try:
            for task in plan:
                after, shares = tickets[task.after], {"part": task.part, "parts": max(1, task.parts)}
                ticket = self._put(
                    self._table.operators[task.op], tuple(task.arg), deadline, after=after, plan=number, **shares
                )
                if ticket == 0:
                    raise late
                tickets.append(ticket)
            if not self._until(lambda: all(map(self._ring.is_done, tickets[1:])), deadline):
                raise late
        except BaseException:
            with self._kernel.lock:
                if not self._kernel.closed:
                    self._ring.control.plan_failed[number % PLANS] = number
            raise
        finally:
            self._plans.end(number, tickets[-1])
        with self._kernel.lock:
            self._kernel.check()
            found = [(ticket, self._ring.failure(ticket)) for ticket in tickets[1:]]
        failed = [(ticket, one) for ticket, one in found if one is not None]
        if failed:  # the first that failed by itself, and not for another's sake
            ticket, one = next((pair for pair in failed if pair[1].status != _DEPENDENCY), failed[0])
            raise failure(one.status, ticket, one.text)

    # -- life --------------------------------------------------------------------------------------------------------

    def park(self, *, drain: bool = True, timeout: float = 10.0) -> int:
        """Give the device back: the kernel ends the tasks that it runs and leaves. Returns the cursor.

        The cursor is the last ticket that was run; later ones stay in the ring. With `drain` all tickets given out
        before are run first. Raises `TimedOut` if a task does not end in time; the executor then goes on as before.
        Parking twice does nothing.
        """
        deadline, last = time.monotonic() + timeout, self._ring.tail
        if drain and not self._kernel.parked and not self._until(lambda: self._completed() >= last, deadline):
            raise TimedOut(f"the executor was not parked within {timeout} s", why="a task that was started goes on")
        return self._kernel.park(max(0.0, deadline - time.monotonic()))

    def resume(self) -> None:
        """Launch the kernel where it stopped. Does nothing when it is there."""
        self._kernel.resume()

    def beat(self) -> None:
        """Give a sign of life of the host, and bring back a kernel that left by itself."""
        self._kernel.beat()

    @property
    def parked(self) -> str | None:
        """Why the kernel is away ("asked", "idle", "silent host"), None when it is not."""
        return AWAY[self._kernel.reason]

    def count_with(self, counter: Callable[[], Mapping[int, int]]) -> Callable[[], None]:
        """Add calls that the table does not see to `stats`: the steps of sequences, by operator index.

        `counter` returns totals that never fall. Returns a function that takes it out again.
        """
        self._counters.append(counter)
        return lambda: self._counters.remove(counter)

    def stats(self) -> ExecutorStats:
        """Counts, depth of the ring, and where the kernel is. Run times are of the device's clock, of every call."""
        kernel, ring = self._kernel, self._ring
        extra: dict[int, int] = {}
        for counter in list(self._counters):
            for index, calls in counter().items():
                extra[index] = extra.get(index, 0) + calls
        with kernel.lock:
            completed = self._completed()
            rows = self._table.counts(extra)
            return ExecutorStats(
                operators=rows,
                depth=ring.tail - completed,
                capacity=ring.capacity,
                workers=kernel.blocks,
                present=0 if kernel.reason else kernel.blocks,
                parked=self.parked,
                completed=completed,
                refused=self._refused,
            )

    def close(self, *, timeout: float | None = None) -> None:
        """Let the kernel end what it runs and leave, and give the device's memory back. Repeating does nothing.

        Tasks that it did not begin are dropped. A task that does not end within `timeout` seconds (None = wait for
        ever) is given up with `TimedOut`: the kernel and its memory stay until it misses the signs of life.
        """
        kernel = self._kernel
        with self._publishing:
            if kernel.closed:
                return
            if not kernel.lost:
                try:
                    kernel.park(_FOR_EVER_S if timeout is None else timeout)
                except TimedOut as error:
                    kernel.abandon()
                    raise TimedOut(
                        "the executor was closed around a task that goes on",
                        why=f"it did not end within {timeout} s",
                        do="Its block of the device stays taken until the task ends.",
                    ) from error
            for operator in self.operators.values():
                for module in (operator.library, operator.previous):
                    if module is not None:
                        module.close()
            kernel.close()
            self.operators.clear()
            self._kept.clear()

    def __enter__(self) -> CudaExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_canary(where: str) -> None:
    if where != "here":
        raise NotPossibleHere(
            f"a canary can not run with canary={where!r} on a device",
            why="another process would need a kernel and a context of its own",
            do='Pass canary="here", or try the same source on the CPU first: outlast.executor.Executor().',
        )
