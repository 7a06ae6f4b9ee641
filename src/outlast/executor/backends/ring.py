"""The host's side of a device ring: layouts, tickets, outcomes. The protocol stands in outlast/device_ring.h.

The host writes a task's body and then its sequence word, and reads an outcome's word before the rest. In Python each
is a plain 64-bit access in program order: the interpreter reorders nothing, and x86-64 keeps stores in order and loads
in order. Other processors would need fences, so they are refused.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from outlast.core import layout
from outlast.core.errors import NotPossibleHere, UsageError
from outlast.executor.backends.driver import CPU_INSTEAD, Block

KEPT_FAILURES = 1024
STATUS_FAILED = -1  #: OL_FAILED
_NOT_RUN = (layout.constants()["OL_NO_OPERATOR"], layout.constants()["OL_DEPENDENCY"])
LINE = 128  #: bytes

_SCALARS: dict[str, type[Any]] = {
    "char": ctypes.c_char,
    "int8_t": ctypes.c_int8,
    "uint8_t": ctypes.c_uint8,
    "int16_t": ctypes.c_int16,
    "uint16_t": ctypes.c_uint16,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


@functools.cache
def structure(name: str) -> type[ctypes.Structure]:
    """The ctypes view of a struct of the shared headers, such as `structure("ol_task")`."""
    described = layout.structs()[name]
    fields: list[tuple[str, Any]] = []
    for member in described.members:
        kind: Any = _SCALARS.get(member.type) or structure(member.type)
        for length in reversed(member.shape):
            kind = kind * length
        fields.append((member.name, kind))
    made: type[ctypes.Structure] = type(name, (ctypes.Structure,), {"_fields_": fields})
    offsets = [getattr(made, member.name).offset for member in described.members]
    if ctypes.sizeof(made) != described.size or offsets != [member.offset for member in described.members]:
        raise AssertionError(f"ctypes lays {name} out in another way than the headers say")
    return made


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed ticket."""

    op: int
    status: int
    text: str


@dataclass(slots=True)
class Account:
    """What an operator did, as far as outcomes were looked at."""

    calls: int = 0
    failed: int = 0
    newest_ns: deque[int] = field(default_factory=lambda: deque(maxlen=14))  #: run times of the newest calls


class Ring:
    """Tasks, outcomes and control words in one pinned block. The caller holds a lock where this is said."""

    @staticmethod
    def size(capacity: int) -> int:
        """Bytes of the pinned block."""
        per_task = layout.sizeof("ol_task") + layout.sizeof("ol_outcome")
        return layout.sizeof("ol_device_ring") + capacity * per_task

    def __init__(self, block: Block, capacity: int, first_ticket: int = 0) -> None:
        """Lay the ring out in zeroed memory. `first_ticket`: the ticket before the first one, for tests."""
        if platform.machine().lower() not in ("x86_64", "amd64"):
            raise NotPossibleHere(
                "the ring of a CUDA device can not be served from this processor",
                why=f"{platform.machine()} needs fences that the host side does not have yet",
                do=CPU_INSTEAD,
            )
        if capacity < 2 or capacity & (capacity - 1):
            raise UsageError(f"executor of capacity {capacity}", why="it is not a power of two of at least 2")
        self.capacity = capacity
        self.tail = self.done = first_ticket  #: highest ticket given out; all tickets up to `done` were looked at
        self._mask = capacity - 1
        outcome_bytes = layout.sizeof("ol_outcome")
        tasks_at = layout.sizeof("ol_device_ring")
        outcomes_at = tasks_at + capacity * layout.sizeof("ol_task")
        self.control: Any = structure("ol_device_ring").from_address(block.host)
        self._tasks: Any = (structure("ol_task") * capacity).from_address(block.host + tasks_at)
        self._outcomes: Any = (structure("ol_outcome") * capacity).from_address(block.host + outcomes_at)
        self._outcomes_device = block.device + outcomes_at
        self._outcome_bytes = outcome_bytes
        self.control.tasks = block.device + tasks_at
        self.control.outcomes = block.device + outcomes_at
        self.control.capacity = capacity
        for ticket in range(first_ticket + 1, first_ticket + capacity + 1):  # "empty" of the lap that begins
            self._tasks[(ticket - 1) & self._mask].seq = ticket - 1
        self._ops = [0] * capacity
        self.failures: OrderedDict[int, Failure] = OrderedDict()
        self.forgotten = 0  #: highest ticket whose failure is no longer kept
        self.accounts: dict[int, Account] = {}

    def free(self) -> bool:
        """Whether the next ticket has a place. The lock is held."""
        ticket = self.tail + 1
        if ticket - self.capacity > self.completed():
            return False
        return bool(self._tasks[(ticket - 1) & self._mask].seq == ticket - 1)

    def put(
        self,
        op: int,
        generation: int,
        args: tuple[int, ...],
        *,
        after: int = 0,
        part: int = 0,
        parts: int = 1,
        plan: int = 0,
    ) -> int:
        """Write the next task and show it; gives its ticket. `free()` said so, under the same lock."""
        ticket = self.tail + 1
        place = (ticket - 1) & self._mask
        task = self._tasks[place]
        task.op, task.generation, task.after = op, generation, after
        task.part, task.parts, task.plan = part, parts, plan
        for index in range(4):
            task.arg[index] = args[index] if index < len(args) else 0
        self._ops[place] = op
        self.tail = ticket
        task.seq = ticket
        return ticket

    def is_done(self, ticket: int) -> bool:
        """Whether a ticket is done; needs no lock. A later ticket in its place is proof."""
        return ticket <= self.done or bool(self._outcomes[(ticket - 1) & self._mask].word >> 1 >= ticket)

    def completed(self) -> int:
        """The highest ticket up to which all are done, with their outcomes looked at. The lock is held."""
        while self.done < self.tail:
            outcome = self._outcomes[self.done & self._mask]
            word = outcome.word
            if word >> 1 < self.done + 1:
                break
            self.done += 1
            if outcome.status not in _NOT_RUN:
                account = self.accounts.setdefault(self._ops[(self.done - 1) & self._mask], Account())
                account.calls += 1
                account.failed += word & 1
                account.newest_ns.append(max(0, outcome.ended - outcome.began))
            if word & 1:
                self._keep(self.done, self._failure(self.done))
        return self.done

    def failure(self, ticket: int) -> Failure | None:
        """How a done ticket failed, None if it did not; one no longer kept reads as failed. The lock is held."""
        if ticket > self.completed():  # done out of order; its place is not given out again before it is looked at
            return self._failure(ticket) if self._outcomes[(ticket - 1) & self._mask].word & 1 else None
        if ticket <= self.forgotten and ticket not in self.failures:
            return Failure(0, STATUS_FAILED, "its outcome is no longer kept")
        return self.failures.get(ticket)

    def outcome_word(self, ticket: int) -> int:
        """Device address of the word that becomes at least `ticket << 1` when the ticket is done."""
        return self._outcomes_device + ((ticket - 1) & self._mask) * self._outcome_bytes

    def _failure(self, ticket: int) -> Failure:
        place = (ticket - 1) & self._mask
        outcome = self._outcomes[place]
        return Failure(self._ops[place], outcome.status, outcome.text.decode(errors="replace"))

    def _keep(self, ticket: int, failure: Failure) -> None:
        self.failures[ticket] = failure
        if len(self.failures) > KEPT_FAILURES:
            oldest, _ = self.failures.popitem(last=False)
            self.forgotten = max(self.forgotten, oldest)
