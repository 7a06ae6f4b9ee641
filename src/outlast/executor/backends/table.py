"""The operator table of a device: two sides and a publishing word for each operator, in device memory.

The host keeps a copy and is the only one who writes. A flip writes the idle side and then the word, in order, and only
then lets submissions use it; see `ol_slot` in outlast/task.h.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.core import layout
from outlast.core.errors import Refused
from outlast.executor.backends.kernel import Module, PersistentKernel
from outlast.executor.backends.ring import Account
from outlast.executor.stats import OperatorStats

if TYPE_CHECKING:
    from outlast.executor.operator import OperatorSpec

_SLOT = {member.name: member.offset for member in layout.structs()["ol_slot"].members}


@dataclass(slots=True)
class DeviceOperator:
    """A place in the operator table. `word` and `flip_ticket` are those of `ol_slot`."""

    name: str
    index: int
    library: Module | None = None  #: of the active side; None if it came with the kernel
    previous: Module | None = None  #: of the other side, for a rollback
    spec: OperatorSpec | None = None  #: of the active side, if it was defined with one
    previous_spec: OperatorSpec | None = None
    word: int = 0
    flip_ticket: int = 0
    addresses: tuple[int, int] = (0, 0)  #: code on the two sides


class Table:
    """Places of operators. The kernel's lock guards it, and with it submissions."""

    def __init__(self, kernel: PersistentKernel, places: int) -> None:
        """A table of `places`; the first two are the operator `sequence` and a place to try others in."""
        self._kernel = kernel
        self._places = places
        self.operators: list[DeviceOperator] = []
        with kernel.lock:
            self.sequence = self.add("sequence", kernel.sequence, None)
            self.trial = self.add("trial", kernel.sequence, None)  # where canaries run; until then code that is there

    def add(self, name: str, address: int, library: Module | None) -> DeviceOperator:
        """Take the next place; raises `Refused`."""
        if len(self.operators) == self._places:
            raise Refused(f"operator {name!r} was not registered", why="operator table is full")
        _check(name, address, library, "registered")
        operator = DeviceOperator(name, len(self.operators), library)
        self._install(operator, 0, address)
        self.operators.append(operator)
        return operator

    def flip(self, operator: DeviceOperator, address: int, library: Module | None) -> int:
        """Publish new code on the idle side, which nothing can run; returns the flip's ticket. Raises `Refused`."""
        _check(operator.name, address, library, "replaced")
        return self._install(operator, operator.word & 1 ^ 1, address)

    def flip_back(self, operator: DeviceOperator) -> int:
        """Publish what stands on the idle side again; returns the flip's ticket. Raises `Refused`."""
        side = operator.word & 1 ^ 1
        address = operator.addresses[side]
        if address == 0:
            raise Refused(
                f"operator {operator.name!r} was not rolled back", why="there is no earlier operator to go back to"
            )
        return self._install(operator, side, address)

    def _install(self, operator: DeviceOperator, side: int, address: int) -> int:
        kernel = self._kernel
        word = (operator.word >> 1) + 1 << 1 | side
        place = kernel.slots + operator.index * layout.sizeof("ol_slot")
        with kernel.device.current():
            kernel.write(place + _SLOT["fn"] + 8 * side, address)
            kernel.write(place + _SLOT["word"], word)
        old = operator.addresses
        operator.addresses = (old[0], address) if side else (address, old[1])
        operator.word = word  # under the lock of submission: a ticket above `flip_ticket` carries the new generation
        operator.flip_ticket = kernel.ring.tail
        return operator.flip_ticket

    def counts(self, extra: Mapping[int, int]) -> list[OperatorStats]:
        """What was counted of each operator, `sequence` last; `extra` adds calls by index."""
        rows = []
        for one in [*self.operators[2:], self.sequence]:
            account = self._kernel.ring.accounts.get(one.index, Account())
            median = statistics.median(account.newest_ns) if account.newest_ns else None
            calls = account.calls + extra.get(one.index, 0)
            rows.append(OperatorStats(one.name, calls, account.failed, one.word >> 1, account.calls, median))
        return rows


def _check(name: str, address: int, library: Module | None, what: str) -> None:
    """Refuse code that can not be called."""
    if address == 0:
        raise Refused(f"operator {name!r} was not {what}", why="operator address is 0")
    if library is not None and library.abi != layout.abi_version():
        raise Refused(f"operator {name!r} was not {what}", why="operator was built for another ABI version")
