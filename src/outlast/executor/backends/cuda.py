"""The executor on a CUDA device: the interface of `outlast.executor.runtime.Executor`, served by a persistent kernel.

Operators are device code in the operators' dialect (`compile`), and the addresses that tasks carry are ones that the
device can follow: pinned memory from `allocate`, or device memory of the caller. Docs: explanation/cuda-backend.md.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from outlast.core import layout
from outlast.core.errors import NotPossibleHere, OperatorFailed, Refused, TimedOut, UsageError
from outlast.executor.backends import nvrtc
from outlast.executor.backends.driver import Block, Driver
from outlast.executor.backends.kernel import Module, PersistentKernel
from outlast.executor.backends.ring import LINE, Failure, structure
from outlast.executor.kernels import Kernel

__all__ = ["MAX_OPERATORS", "CudaExecutor", "DeviceOperator"]

DEFAULT_CAPACITY = 1024
MAX_OPERATORS = 1024  #: 64 kB of device memory
MAX_PARTS = 65535  #: `ol_task.parts` has 16 bits
_STREAMS = 64  #: streams of the caller that have work in flight at once
_OP_GATE = layout.constants()["OL_OP_GATE"]
_PLAN_DOOMED = layout.constants()["OL_PLAN_DOOMED"]
_PLANS = layout.constants()["OL_DEVICE_PLANS"]
_DEPENDENCY = layout.constants()["OL_DEPENDENCY"]
_SLOT = {member.name: member.offset for member in layout.structs()["ol_slot"].members}
_SLOT_BYTES = layout.sizeof("ol_slot")
_SPIN_S = 50e-6  # a task of a resident kernel takes some microseconds, so most waits end here
_PAUSE_S = 20e-6
_LOOK_S = 0.02  # how often a waiting thread asks the driver whether the kernel still lives


@dataclass(slots=True)
class DeviceOperator:
    """A place in the operator table. `word` and `flip_ticket` are those of `ol_slot`."""

    name: str
    index: int
    library: Module | None = None  #: of the active side; None if it came with the kernel
    previous: Module | None = None  #: of the other side, for a rollback
    word: int = 0
    flip_ticket: int = 0
    addresses: tuple[int, int] = (0, 0)  #: code on the two sides


@dataclass(slots=True)
class _Gate:
    """A word that one stream of the caller raises when it reaches a point."""

    address: int
    value: int = 0
    ticket: int = 0  #: of the last gate task that waits for it


class CudaExecutor:
    """Ring, table and persistent kernel of one device. Thread-safe. Timeouts are seconds."""

    def __init__(
        self,
        *,
        capacity: int = DEFAULT_CAPACITY,
        workers: int = 1,
        threads: int = nvrtc.THREADS,
        device: int = 0,
        idle: float = 2.0,
        heartbeat: float = 5.0,
        driver: Driver | None = None,
        cache: nvrtc.CubinCache | None = None,
        allow_lazy_loading: bool = False,
        live_load: bool = False,
        first_ticket: int = 0,
    ) -> None:
        """Compile the kernel for the device and launch it.

        `capacity`: tasks that may be outstanding, a power of two. `workers`: blocks, 1 to 4. `idle`: seconds without a
        task after which the kernel leaves by itself (0 = never); it returns with the next task. `heartbeat`: it also
        leaves if this process stands still for so long. `live_load`: load modules beside the running kernel, which
        may block for ever and was never tried. Raises `NotPossibleHere` naming what is missing.
        """
        self._publishing = threading.Lock()  # keeps the order of publications and of `previous` the same
        self.operators: dict[str, DeviceOperator] = {}
        self._table: list[DeviceOperator] = []
        self._plans: list[int] = [0] * _PLANS  #: ticket after which a place is free again
        self._plan_number = 0
        self._gates: dict[int, _Gate] = {}
        self._kernel = PersistentKernel(
            driver or Driver(),
            device=device,
            capacity=capacity,
            blocks=workers,
            threads=threads,
            operators=MAX_OPERATORS,
            idle=idle,
            heartbeat=heartbeat,
            cache=cache,
            allow_lazy_loading=allow_lazy_loading,
            live_load=live_load,
            first_ticket=first_ticket,
        )
        self._ring = self._kernel.ring
        self.register("sequence", self._kernel.sequence)
        block = self._kernel.allocate(_STREAMS * LINE)
        self._free_gates = [block.device + LINE * i for i in range(_STREAMS)]

    # -- operators ---------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """Device address of the slot table, for `ol_sequence.slots`."""
        return self._kernel.slots

    def compile(self, source: str, *, name: str, defines: Mapping[str, int | str] | None = None) -> Module:
        """Compile operators for this device, check and load them. The kernel is parked meanwhile.

        Raises `JitError` with the compiler's message, `Refused` with what does not fit under the kernel, `TimedOut` if
        the kernel does not leave.
        """
        kernel = self._kernel
        kernel.check()
        architecture = kernel.device.architecture
        return kernel.load(kernel.cache.cubin(source, name=name, architecture=architecture, defines=defines), name)

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
            if len(self._table) == MAX_OPERATORS:
                raise Refused(f"operator {name!r} was not registered", why="operator table is full")
            self._check_code(name, address, library)
            operator = DeviceOperator(name, len(self._table), library)
            self._install(operator, side=0, address=address)
            self._table.append(operator)
            self.operators[name] = operator
            return operator

    def swap(
        self, operator: DeviceOperator, address: int, *, library: Module | None = None, timeout: float = 10.0
    ) -> int:
        """Publish new code for an operator while tasks run; returns the flip's ticket.

        Tasks submitted before run the old code, tasks submitted after the new one. The code that was replaced before
        the present one is unloaded. Raises `TimedOut` if tasks that may still run it do not end in time.
        """
        with self._publication(operator, timeout):
            self._check_code(operator.name, address, library)
            ticket = self._install(operator, side=operator.word & 1 ^ 1, address=address)
            if operator.previous is not None:
                operator.previous.close()  # its side was overwritten, which happens only once it is quiescent
            operator.previous, operator.library = operator.library, library
            return ticket

    def rollback(self, operator: DeviceOperator, *, timeout: float = 10.0) -> int:
        """Publish the code that was active before the last swap again; returns the flip's ticket."""
        with self._publication(operator, timeout):
            side = operator.word & 1 ^ 1
            address = operator.addresses[side]
            if address == 0:
                raise Refused(
                    f"operator {operator.name!r} was not rolled back", why="there is no earlier operator to go back to"
                )
            ticket = self._install(operator, side=side, address=address)
            operator.previous, operator.library = operator.library, operator.previous
            return ticket

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

    def _check_code(self, name: str, address: int, library: Module | None) -> None:
        if address == 0:
            raise Refused(f"operator {name!r} was not registered", why="operator address is 0")
        if library is not None and library.abi != layout.abi_version():
            raise Refused(f"operator {name!r} was not registered", why="operator was built for another ABI version")

    def _install(self, operator: DeviceOperator, *, side: int, address: int) -> int:
        """Write the idle side, then the publishing word, then let new tickets use it. The locks are held."""
        word = (operator.word >> 1) + 1 << 1 | side
        place = self._kernel.slots + operator.index * _SLOT_BYTES
        with self._kernel.device.current():
            self._kernel.write(place + _SLOT["fn"] + 8 * side, address)
            self._kernel.write(place + _SLOT["word"], word)
        addresses = list(operator.addresses)
        addresses[side] = address
        operator.addresses = (addresses[0], addresses[1])
        operator.word = word  # under the lock of submission: a ticket above `flip_ticket` carries the new generation
        operator.flip_ticket = self._ring.tail
        return operator.flip_ticket

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
        stream: Any = None,
    ) -> int:
        """Put a task into the ring and return its ticket. `after`: run once every ticket up to it is done.

        `stream` (a CUstream, its address, or an object with `cuda_stream`): the task runs after what was put into that
        stream before, and what is put into it later runs after the task. Raises `Refused` when the ring stays full
        for `timeout`, `UsageError` if `after` was not given out yet.
        """
        if len(args) > 4:
            raise UsageError("a task has at most 4 arguments", why=f"{len(args)} were given")
        if not 0 <= part < parts <= MAX_PARTS:
            raise UsageError(f"part {part} of {parts}", why=f"parts count from 0 and there are at most {MAX_PARTS}")
        deadline = time.monotonic() + timeout
        if stream is not None:
            return self._submit_in_stream(operator, args, after, part, parts, deadline, stream)
        ticket = self._put(operator, args, deadline, after=after, part=part, parts=parts)
        return ticket or self._full(timeout)

    def _full(self, timeout: float) -> int:
        raise Refused("the task ring is full", why=f"no place within {timeout:.3g} s", do="Wait for earlier tickets.")

    def _submit_in_stream(
        self,
        operator: DeviceOperator,
        args: tuple[int, ...],
        after: int,
        part: int,
        parts: int,
        deadline: float,
        stream: Any,
    ) -> int:
        kernel = self._kernel
        if not kernel.device.stream_values:
            raise NotPossibleHere(
                "tasks can not be ordered with a stream",
                why=f"{kernel.device.name} has no 64-bit stream memory operations",
                do="Synchronise the stream, submit without `stream`, and wait for the ticket.",
            )
        handle = getattr(stream, "cuda_stream", stream)
        number = int(handle)
        # One lock over all four steps: two threads that use one stream must not cross over.
        with kernel.lock:
            gate = self._gate(number)
            gate.value += 1
            with kernel.device.current():
                kernel.driver.call("cuStreamWriteValue64", handle, gate.address, gate.value, 0)
            left = deadline - time.monotonic()
            gate.ticket = self._put(None, (gate.address, gate.value), deadline) or self._full(left)
            ticket = self._put(operator, args, deadline, after=after, part=part, parts=parts) or self._full(left)
            with kernel.device.current():
                at_least = kernel.driver.api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
                kernel.driver.call(
                    "cuStreamWaitValue64", handle, self._ring.outcome_word(ticket), ticket << 1, int(at_least)
                )
            return ticket

    def _gate(self, stream: int) -> _Gate:
        """The gate of a stream; one whose tasks are done is taken over when there are too many streams."""
        if stream not in self._gates:
            if not self._free_gates:
                idle = [key for key, gate in self._gates.items() if self._ring.is_done(gate.ticket)]
                if not idle:
                    raise Refused("too many streams", why=f"{_STREAMS} streams have tasks in flight")
                # The word keeps its value, so the new owner has to go on from there.
                self._gates[stream] = self._gates.pop(idle[0])
            else:
                self._gates[stream] = _Gate(self._free_gates.pop())
        return self._gates[stream]

    def _put(
        self,
        operator: DeviceOperator | None,
        args: tuple[int, ...],
        deadline: float,
        *,
        after: int = 0,
        part: int = 0,
        parts: int = 1,
        plan: int = 0,
    ) -> int:
        """Submit one task, a gate if `operator` is None; 0 if there is no place until the deadline."""
        kernel, ring = self._kernel, self._ring
        pause = 0.0
        while True:
            with kernel.lock:
                kernel.check()
                if after > ring.tail or after < 0:
                    raise UsageError(f"a task after ticket {after}", why="that ticket was not given out yet")
                if ring.free():
                    if after and ring.tail + 1 - after >= ring.capacity:
                        # So old that its mark on the device may be gone, and so old that it is done.
                        plan, after = _PLAN_DOOMED if ring.failure(after) is not None else plan, 0
                    op, word = (_OP_GATE, 0) if operator is None else (operator.index, operator.word)
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
            return self._ring.completed()

    def _until(self, done: Any, deadline: float) -> bool:
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

    def wait(self, ticket: int, *, timeout: float = 10.0) -> None:
        """Wait until `ticket` is done. Raises `TimedOut`, or `OperatorFailed` with the operator's text."""
        if not 0 < ticket <= self._ring.tail:
            raise UsageError(f"ticket {ticket} was never given out")
        if not self._until(lambda: self._ring.is_done(ticket), time.monotonic() + timeout):
            why = "the executor is parked" if self._kernel.parked else ""
            raise TimedOut(f"ticket {ticket} is not done after {timeout} s", why=why)
        with self._kernel.lock:
            self._kernel.check()
            failure = self._ring.failure(ticket)
        if failure is not None:
            raise _failed(ticket, failure)

    def run(self, tasks: int, count: int, *, timeout: float = 60.0) -> None:
        """Run a plan: `count` `ol_task` at host address `tasks`, whose `after` counts tasks of the plan from 1.

        Returns when all are done. Once one fails the rest of the plan is not run, and its error is raised. After
        `TimedOut` no further task of it starts, but one may still be running: keep what the plan points to.
        """
        deadline = time.monotonic() + timeout
        plan: Any = (structure("ol_task") * count).from_address(tasks) if count else []
        for index, task in enumerate(plan):
            if task.after > index:
                raise UsageError(f"a plan of {count} tasks", why=f"task {index + 1} waits for itself or a later one")
            if task.op >= len(self._table):
                raise UsageError(f"a plan of {count} tasks", why=f"task {index + 1} names operator {task.op}")
        place = self._plan_place(deadline)
        number = self._plan_number << 6 | place
        tickets: list[int] = []
        try:
            for task in plan:
                after = tickets[task.after - 1] if task.after else 0
                operator, args = self._table[task.op], tuple(task.arg)
                ticket = self._put(
                    operator, args, deadline, after=after, part=task.part, parts=max(1, task.parts), plan=number
                )
                if ticket == 0:
                    raise TimedOut(f"a plan of {count} tasks is not done after {timeout} s")
                tickets.append(ticket)
            for ticket in tickets:
                if not self._until(lambda ticket=ticket: self._ring.is_done(ticket), deadline):
                    raise TimedOut(f"a plan of {count} tasks is not done after {timeout} s")
        except BaseException:
            self._ring.control.plan_failed[place] = number
            raise
        finally:
            with self._kernel.lock:
                self._plans[place] = tickets[-1] if tickets else 0
        with self._kernel.lock:
            self._kernel.check()
            failures = [(ticket, self._ring.failure(ticket)) for ticket in tickets]
        real = [(t, f) for t, f in failures if f is not None]
        if real:  # the first that failed by itself, and not for another's sake
            raise _failed(*next((pair for pair in real if pair[1].status != _DEPENDENCY), real[0]))

    def _plan_place(self, deadline: float) -> int:
        """A place in `plan_failed` that no task in the ring refers to."""
        found: list[int] = []

        def look() -> bool:
            with self._kernel.lock:
                done = self._ring.completed()
                for place, until in enumerate(self._plans):
                    if until <= done:
                        self._plans[place] = 1 << 63  # taken
                        self._plan_number = (self._plan_number + 1) % (1 << 25) or 1
                        found.append(place)
                        return True
            return False

        if not self._until(look, deadline):
            raise TimedOut("a plan was not begun", why=f"{_PLANS} plans run already")
        return found[0]

    # -- life --------------------------------------------------------------------------------------------------------

    def park(self, *, timeout: float = 10.0) -> int:
        """Let the kernel end what it runs and leave the device; returns how many tickets it has claimed.

        Tasks that it did not begin stay in the ring until `resume`. Raises `TimedOut` if it does not leave in time; it
        then goes on.
        """
        return self._kernel.park(timeout)

    def resume(self) -> None:
        """Launch the parked kernel again, where it stopped. Repeating does nothing."""
        self._kernel.resume()

    @property
    def parked(self) -> bool:
        """Whether `park` was called and `resume` was not."""
        return self._kernel.parked

    def stats(self) -> dict[str, Any]:
        """Counts since the start. `operators`: calls, failures and device seconds of each, as far as tasks are done."""
        kernel, ring = self._kernel, self._ring
        with kernel.lock:
            done = 0 if kernel.closed else ring.completed()
            return {
                "backend": "cuda",
                "submitted": ring.tail,
                "completed": done,
                "outstanding": ring.tail - done,
                "failed": ring.failed,
                "launches": kernel.launches,
                "parks": kernel.parks,
                "modules": kernel.loaded,
                "operators": {
                    self._table[op].name: {"calls": a.calls, "failed": a.failed, "seconds": a.device_ns * 1e-9}
                    for op, a in sorted(ring.accounts.items())
                    if op < len(self._table)
                },
            }

    def close(self, *, timeout: float = 10.0) -> None:
        """Let the kernel leave and give the device's memory back; tasks that it did not begin are dropped.

        Repeating does nothing. Raises `TimedOut`, with everything still in place, if a task does not end.
        """
        kernel = self._kernel
        if kernel.closed:
            return
        with self._publishing:
            if not kernel.lost:
                kernel.park(timeout)
            for operator in self.operators.values():
                for module in (operator.library, operator.previous):
                    if module is not None:
                        module.close()
            kernel.close()
            self.operators.clear()

    def __enter__(self) -> CudaExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _failed(ticket: int, failure: Failure) -> OperatorFailed:
    return OperatorFailed(f"operator failed with status {failure.status}", ticket=ticket, why=failure.text)
