"""Ring, operator table and workers of one process, from Python."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

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

ABI_VERSION = _native.abi_version
DEFAULT_CAPACITY = 1024
DEFAULT_OPERATORS = 4096
MAX_PARTS = 65535  #: `ol_task.parts` has 16 bits


@dataclass(slots=True)
class Operator:
    """A place in the operator table. `libraries` are the shared objects its two sides came from, None if shipped."""

    name: str
    index: int
    library: Library | None = None  #: of the active side
    previous: Library | None = None  #: of the other side, for a rollback


class Executor:
    """Ring, table and workers of one process. Thread-safe.

    `workers` extra threads take tasks; 0 = only threads that wait do. Timeouts are seconds.
    """

    def __init__(
        self, *, capacity: int = DEFAULT_CAPACITY, workers: int = 0, operators: int = DEFAULT_OPERATORS
    ) -> None:
        """`capacity`: tasks that may be outstanding, a power of two. `operators`: places in the operator table."""
        try:
            self.native = _native.Executor(capacity, workers, 0, operators)
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"executor of capacity {capacity} with {operators} operators", why=str(error).splitlines()[0]
            ) from error
        self.operators: dict[str, Operator] = {}
        #: Keeps the order of publications and of `Operator.previous` the same: else code still running is unloaded.
        self._publishing = threading.Lock()
        self._closed = False

    def register(self, name: str, address: int, *, library: Library | None = None) -> Operator:
        """Add an operator (`ol_op_fn` at `address`). Raises `Refused` when the table is full."""
        with self._publishing:
            if name in self.operators:
                raise UsageError(f"operator {name!r} exists", do="Use swap to replace it.")
            try:
                index = self.native.register_operator(address, _abi_of(library))
            except (ValueError, IndexError) as error:
                raise Refused(f"operator {name!r} was not registered", why=str(error)) from error
            operator = Operator(name, index, library)
            self.operators[name] = operator
            return operator

    def swap(self, operator: Operator, address: int, *, library: Library | None = None, timeout: float = 10.0) -> int:
        """Publish new code for an operator while tasks run; returns the flip's ticket.

        Tasks submitted before run the old code, tasks submitted after the new one. The code that was replaced before
        the present one is unloaded. Raises `TimedOut` if tasks that may still run it do not end in time.
        """
        with self._publication(operator, timeout) as left:
            try:
                ticket = self.native.swap(operator.index, address, _abi_of(library), left)
            except ValueError as error:
                raise Refused(f"operator {operator.name!r} was not replaced", why=str(error)) from error
            if ticket == 0:
                raise TimedOut(
                    f"operator {operator.name!r} was not replaced", why="tasks that may run its old code go on"
                )
            if operator.previous is not None:
                operator.previous.close()  # its side was overwritten, which swap only does once it is quiescent
            operator.previous, operator.library = operator.library, library
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
            return ticket

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
    ) -> int:
        """Put a task into the ring and return its ticket. `after`: run once every ticket up to it is done.

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
        if ticket == 0:
            raise Refused("the task ring is full", why=f"no place within {timeout} s", do="Wait for earlier tickets.")
        return ticket

    def wait(self, ticket: int, *, timeout: float = 10.0) -> None:
        """Run tasks until `ticket` is done. Raises `TimedOut`, or `OperatorFailed` with the operator's text."""
        try:
            done = self.native.wait(ticket, timeout)
        except IndexError as error:
            raise UsageError(f"ticket {ticket} was never given out") from error
        if not done:
            raise TimedOut(f"ticket {ticket} is not done after {timeout} s")
        status, text = self.native.status(ticket)
        if status != 0:
            raise failure(status, ticket, text)

    def run(self, tasks: int, count: int, *, timeout: float = 60.0) -> None:
        """Run a plan: `count` `ol_task` at address `tasks`, whose `after` counts tasks of the plan from 1.

        Returns when all are done. Once one fails the rest of the plan is not run, and its error is raised. After
        `TimedOut` no further task of it starts, but one may still be running: keep what the plan points to.
        """
        try:
            status, ticket, _, text = self.native.run(tasks, count, timeout)
        except ValueError as error:
            raise UsageError(f"a plan of {count} tasks", why=str(error)) from error
        if status == 1:
            raise TimedOut(f"a plan of {count} tasks is not done after {timeout} s")
        if status != 0:
            raise failure(status, ticket, text)

    def close(self) -> None:
        """Stop the workers. Repeating does nothing."""
        if self._closed:
            return
        self._closed = True
        self.native.stop()  # here and not in its destructor, which would hold all Python threads meanwhile
        del self.native
        for operator in self.operators.values():
            for library in (operator.library, operator.previous):
                if library is not None:
                    library.close()
        self.operators.clear()

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
