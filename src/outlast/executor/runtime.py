"""Ring, operator table and workers of one process, from Python."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from outlast.core import _native
from outlast.core.errors import (
    DurabilityLost,
    Fenced,
    OperatorFailed,
    OutlastError,
    Refused,
    TimedOut,
    UsageError,
)
from outlast.core.jit import Library
from outlast.executor.stats import AWAY, ExecutorStats, PlanStats, read, read_plans

if TYPE_CHECKING:
    from outlast.executor.operator import OperatorSpec

ABI_VERSION = _native.abi_version
DEFAULT_CAPACITY = 1024
DEFAULT_OPERATORS = 4096
MAX_PARTS = 65535  #: `ol_task.parts` has 16 bits
NO_WORD = "addresses, arguments and tickets are whole numbers from 0 to 2^64 - 1, time-outs are seconds"


@dataclass(slots=True)
class Operator:
    """A place in the operator table. `libraries` are the shared objects its two sides came from, None if shipped."""

    name: str
    index: int
    library: Library | None = None  #: of the active side
    previous: Library | None = None  #: of the other side, for a rollback
    spec: OperatorSpec | None = None  #: of the active side, if it was defined with one
    previous_spec: OperatorSpec | None = None


class Executor:
    """Ring, table and workers of one process. Thread-safe.

    `workers` extra threads take tasks; 0 = only threads that wait do. Timeouts are seconds.

    **Park.** Every backend keeps this contract. A parked executor holds no thread (on a GPU: no resident kernel),
    starts no task, and has its cursor saved: the tickets up to `native.head` are done, those after it stand in the
    ring. Submissions go on and queue until the ring is full, then they are refused; waits time out. `resume` starts
    the workers where they stopped.

    Workers also leave by themselves: after `idle_park_s` without a submission, and when the host gave no sign of life
    for `heartbeat_timeout_s`. Signs of life are `beat`, a submission, and a wait that goes on. A worker looks for them
    between tasks and counts from its look, so it leaves after one to two time-outs, once the task it runs has ended.
    The next submission brings workers back, after silence `beat` does as well. Callers that wait may run tasks all the
    while: only `park` stops them.

    **A task that does not end** can not be ended: no thread can be stopped safely from outside. `wait` times out; a
    caller that helps out (`assist`) may be the one who runs it, and then it does not come back at all. For operators
    that are not trusted use `workers` of at least 1 and `wait(assist=False)`: then a worker is stuck, callers are not,
    and up to `capacity` further tickets run on other workers. `close(timeout=...)` gives the stuck thread up.
    **A trap** (SIGSEGV, SIGFPE) in an operator ends the process. `define` therefore tries new operators in a process of
    their own.
    """

    def __init__(
        self,
        *,
        capacity: int = DEFAULT_CAPACITY,
        workers: int = 0,
        operators: int = DEFAULT_OPERATORS,
        idle_park_s: float | None = None,
        heartbeat_timeout_s: float | None = None,
    ) -> None:
        """`capacity`: tasks that may be outstanding, a power of two. `operators`: places in the operator table.

        `idle_park_s`, `heartbeat_timeout_s`: when workers leave by themselves; None = never. A heartbeat time-out is at
        least 0.2 s, as a waiting host beats every 50 ms.
        """
        if idle_park_s is not None and not idle_park_s > 0:
            raise UsageError(f"idle_park_s={idle_park_s}", why="it is not a number of seconds above 0")
        if heartbeat_timeout_s is not None and not heartbeat_timeout_s >= 0.2:
            raise UsageError(f"heartbeat_timeout_s={heartbeat_timeout_s}", why="a waiting host beats every 50 ms")
        try:
            self.native = _native.Executor(
                capacity, workers, 0, operators, idle_park_s or 0.0, heartbeat_timeout_s or 0.0
            )
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"executor of capacity {capacity} with {operators} operators", why=str(error).splitlines()[0]
            ) from error
        self.operators: dict[str, Operator] = {}
        #: Keeps the order of publications and of `Operator.previous` the same: else code still running is unloaded.
        self._publishing = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._keeping = threading.Lock()
        self._kept: deque[tuple[int, object]] = deque()  #: (ticket, what its task points at)
        self._counters: list[Callable[[], Mapping[int, int]]] = []

    def __getattr__(self, name: str) -> Any:
        """Only reached for what is missing: `native` is once the executor is closed, and costs nothing until then."""
        if name == "native":
            raise UsageError("the executor is closed", do="Make a new one.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def register(self, name: str, address: int, *, library: Library | None = None) -> Operator:
        """Add an operator (`ol_op_fn` at `address`). Raises `Refused` when the table is full."""
        with self._publishing:
            if name in self.operators:
                raise UsageError(f"operator {name!r} exists", do="Use swap to replace it.")
            try:
                index = self.native.register_operator(address, _abi_of(library))
            except (ValueError, IndexError) as error:
                raise Refused(f"operator {name!r} was not registered", why=str(error)) from error
            except TypeError as error:
                raise UsageError(f"address {address!r} of operator {name!r}", why=NO_WORD) from error
            operator = Operator(name, index, library)
            self.operators[name] = operator
            return operator

    def swap(
        self,
        operator: Operator,
        address: int,
        *,
        library: Library | None = None,
        spec: OperatorSpec | None = None,
        timeout: float = 10.0,
    ) -> int:
        """Publish new code for an operator while tasks run; returns the flip's ticket.

        Tasks submitted before run the old code, tasks submitted after the new one. The code that was replaced before
        the present one is unloaded. Raises `TimedOut` if tasks that may still run it do not end in time.
        """
        with self._publication(operator, timeout) as left:
            try:
                ticket = self.native.swap(operator.index, address, _abi_of(library), left)
            except ValueError as error:
                raise Refused(f"operator {operator.name!r} was not replaced", why=str(error)) from error
            except TypeError as error:
                raise UsageError(f"address {address!r} of operator {operator.name!r}", why=NO_WORD) from error
            if ticket == 0:
                raise TimedOut(
                    f"operator {operator.name!r} was not replaced", why="tasks that may run its old code go on"
                )
            if operator.previous is not None:
                operator.previous.close()  # its side was overwritten, which swap only does once it is quiescent
            operator.previous, operator.library = operator.library, library
            operator.previous_spec, operator.spec = operator.spec, spec
            return ticket

    def rollback(self, operator: Operator, *, timeout: float = 10.0) -> int:
        """Publish the code that was active before the last swap again; returns the flip's ticket."""
        with self._publication(operator, timeout) as left:
            try:
                ticket = self.native.rollback(operator.index, left)
            except RuntimeError as error:
                raise Refused(f"operator {operator.name!r} was not rolled back", why=str(error)) from error
            if ticket == 0:
                raise TimedOut(f"operator {operator.name!r} was not rolled back", why="its tasks do not end")
            operator.previous, operator.library = operator.library, operator.previous
            operator.previous_spec, operator.spec = operator.spec, operator.previous_spec
            return ticket

    def define(self, spec: OperatorSpec, *, canary: Literal["process", "here"] = "process") -> Operator:
        """Compile an operator, run its canary against its reference, and register it; see `outlast.executor.operator`.

        Raises `JitError` when it does not compile and `Refused` when the canary differs, fails, traps or does not end.
        """
        from outlast.executor import operator

        return operator.define(self, spec, canary=canary)

    def replace(
        self,
        operator: Operator,
        spec: OperatorSpec,
        *,
        canary: Literal["process", "here"] = "process",
        timeout: float = 10.0,
    ) -> int:
        """Compile and check new code for an operator, and only then publish it; returns the flip's ticket.

        Raises what `define` and `swap` do; the code that was active stays so.
        """
        from outlast.executor import operator as operators

        return operators.replace(self, operator, spec, canary=canary, timeout=timeout)

    def call(self, operator: Operator, *args: Any, parts: int = 1, timeout: float = 10.0, assist: bool = True) -> None:
        """Run a defined operator on arrays, tensors and numbers, and wait for it.

        Raises `UsageError` for an argument that does not fit its signature, else what `submit` and `wait` do.
        """
        from outlast.executor import operator as operators

        operators.call(self, operator, args, parts=parts, timeout=timeout, assist=assist)

    @contextlib.contextmanager
    def _publication(self, operator: Operator, timeout: float) -> Iterator[float]:
        """Hold the lock of publications; gives the seconds that are left."""
        deadline = time.monotonic() + timeout
        if not self._publishing.acquire(timeout=max(0.0, timeout)):
            raise TimedOut(f"operator {operator.name!r} was not published", why="another publication does not end")
        try:
            yield max(0.0, deadline - time.monotonic())
        finally:
            self._publishing.release()

    def generation(self, operator: Operator) -> int:
        """How often the operator was published, from 1."""
        return self.native.slot(operator.index)[0] >> 1

    def submit(
        self,
        operator: Operator,
        *args: int,
        after: int = 0,
        part: int = 0,
        parts: int = 1,
        timeout: float = 10.0,
        keep: object = None,
    ) -> int:
        """Put a task into the ring and return its ticket. `after`: run once every ticket up to it is done.

        The task's arguments are addresses: `keep` is held until the ticket is done, so that what they point at lives.
        Raises `Refused` when the ring stays full for `timeout`, `UsageError` if `after` was not given out yet.
        """
        if len(args) > 4:
            raise UsageError("a task has at most 4 arguments", why=f"{len(args)} were given")
        if not 0 <= part < parts <= MAX_PARTS:
            raise UsageError(f"part {part} of {parts}", why=f"parts count from 0 and there are at most {MAX_PARTS}")
        a = (*args, 0, 0, 0, 0)
        try:
            ticket = self.native.submit(operator.index, a[0], a[1], a[2], a[3], after, part, parts, timeout)
        except ValueError as error:
            raise UsageError(f"a task after ticket {after}", why=str(error)) from error
        except TypeError as error:
            raise UsageError(f"a task with arguments {args} after ticket {after!r}", why=NO_WORD) from error
        if ticket == 0:
            raise Refused("the task ring is full", why=f"no place within {timeout} s", do="Wait for earlier tickets.")
        if keep is not None or self._kept:
            with self._keeping:
                if keep is not None:
                    self._kept.append((ticket, keep))
                self._let_go()
        return ticket

    def _let_go(self) -> None:
        """Release what tasks that are done pointed at. The caller holds the lock `_keeping`."""
        done = self.native.completed
        while self._kept and self._kept[0][0] <= done:
            self._kept.popleft()

    def wait(self, ticket: int, *, timeout: float = 10.0, assist: bool = True) -> None:
        """Wait until `ticket` is done. Raises `TimedOut`, or `OperatorFailed` with the operator's text.

        With `assist` this thread runs tasks meanwhile: the cheapest way, but a task that does not end takes the thread
        with it, whatever the timeout. Without, the workers have to do it.
        """
        if not assist and self.native.workers == 0:
            raise UsageError("a wait without assist", why="this executor has no workers", do="Give it workers=1.")
        if ticket == 0:
            raise UsageError("ticket 0 was never given out", why="tickets count from 1")
        try:
            done = self.native.wait(ticket, timeout, assist)
        except IndexError as error:
            raise UsageError(f"ticket {ticket} was never given out") from error
        except TypeError as error:
            raise UsageError(f"ticket {ticket!r}, timeout {timeout!r}", why=NO_WORD) from error
        if not done:
            why = "the executor is parked" if self.native.away == 1 else ""
            raise TimedOut(f"ticket {ticket} is not done after {timeout} s", why=why)
        if self._kept:
            with self._keeping:
                self._let_go()
        status, text = self.native.status(ticket)
        if status != 0:
            raise failure(status, ticket, text)

    def run(self, tasks: int, count: int, *, timeout: float = 60.0) -> None:
        """Run a plan: `count` `ol_task` at address `tasks`, whose `after` counts tasks of the plan from 1.

        Returns when all are done. Once one fails the rest of the plan is not run, and its error is raised. After
        `TimedOut` no further task of it starts, but one may still be running: keep what the plan points to.
        """
        if tasks == 0 and count != 0:
            raise UsageError(f"a plan of {count} tasks", why="its address is 0")
        try:
            status, ticket, _, text = self.native.run(tasks, count, timeout)
        except ValueError as error:
            raise UsageError(f"a plan of {count} tasks", why=str(error)) from error
        except TypeError as error:
            raise UsageError(f"a plan of {count!r} tasks at {tasks!r}", why=NO_WORD) from error
        if status == 1:
            raise TimedOut(f"a plan of {count} tasks is not done after {timeout} s")
        if status != 0:
            raise failure(status, ticket, text)

    def park(self, *, drain: bool = True, timeout: float = 10.0) -> int:
        """Give the device back: no task starts any more, those that run end, the workers leave. Returns the cursor.

        The cursor is the last ticket that was run; later ones stay in the ring. With `drain` all tickets given out
        before are run first. Raises `TimedOut` if a task does not end in time; the executor then goes on as before.
        Do not call it from an operator. Parking twice does nothing.
        """
        if not self.native.park(drain, timeout):
            raise TimedOut(f"the executor was not parked within {timeout} s", why="a task that was started goes on")
        return self.native.head

    def resume(self) -> None:
        """Start the workers where they stopped. Does nothing when they are there."""
        self.native.resume()

    def beat(self) -> None:
        """Give a sign of life of the host; see `heartbeat_timeout_s`."""
        self.native.beat()

    @property
    def parked(self) -> str | None:
        """Why the workers are away ("asked", "idle", "silent host"), None when they are not."""
        return AWAY[self.native.away]

    @property
    def api(self) -> int:
        """Address of an `ol_executor` (native/include/outlast/plan.h) for native code; valid until `close`."""
        return self.native.api

    def plan_stats(self) -> PlanStats:
        """What was counted of plans."""
        return read_plans(self.native)

    def count_with(self, counter: Callable[[], Mapping[int, int]]) -> Callable[[], None]:
        """Add calls that the table does not see to `stats`: the steps of sequences, by operator index.

        `counter` returns totals that never fall. Returns a function that takes it out again.
        """
        self._counters.append(counter)
        return lambda: self._counters.remove(counter)

    def stats(self) -> ExecutorStats:
        """Counts, depth of the ring, and where the workers are. Costs some microseconds for each operator."""
        named = [(operator.name, operator.index) for operator in list(self.operators.values())]
        return read(self.native, named, list(self._counters))

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self, *, timeout: float | None = None) -> None:
        """Stop the workers, once the tasks that they run have ended. Repeating does nothing.

        A task that does not end within `timeout` seconds (None = wait for ever) is given up with `TimedOut`: its
        thread, the executor's memory, the loaded operators and what `keep` held stay for the life of the process.
        In a forked child, which has none of the threads, there is nothing to stop: memory and operators stay.
        """
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            self.native.abandon((list(self.operators.values()), self._kept))
            return
        ended = self.native.stop(1e9 if timeout is None else timeout)  # not in its destructor, which holds the GIL
        if not ended:
            self.native.abandon((list(self.operators.values()), self._kept))
            raise TimedOut(
                "the executor was closed around a task that goes on",
                why=f"it did not end within {timeout} s",
                do="Its thread stays until the process ends.",
            )
        del self.native
        for operator in self.operators.values():
            for library in (operator.library, operator.previous):
                if library is not None:
                    library.close()
        self.operators.clear()
        self._kept.clear()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def failure(status: int, ticket: int, text: str) -> OutlastError:
    """The error that a task's status stands for."""
    if status == _native.STATUS_FENCED:
        return Fenced(text)
    if status == _native.STATUS_DURABILITY:
        return DurabilityLost("the log could not be written", why=text)
    if status == _native.STATUS_REFUSED:
        return Refused("the log refused a record", why=text)
    return OperatorFailed(f"operator failed with status {status}", ticket=ticket, why=text)


def _abi_of(library: Library | None) -> int:
    """ABI version an operator was built for; shipped ones are of this build."""
    if library is None:
        return ABI_VERSION
    import ctypes

    return int(ctypes.c_uint32.from_address(library.symbol("outlast_abi")).value)
