"""Plans of a device executor: tasks that are submitted together and stop together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from outlast.core import layout
from outlast.core.errors import UsageError
from outlast.executor.backends.ring import structure

PLANS = layout.constants()["OL_DEVICE_PLANS"]
DOOMED = layout.constants()["OL_PLAN_DOOMED"]
_TAKEN = 1 << 63  # a ticket that is never reached
_COUNT_MAX = (1 << 32) // PLANS - 1


class Plans:
    """Numbers of plans: `count * PLANS + place`, where `place` is a word of ol_device_ring.plan_failed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = [0] * PLANS  #: ticket after which a place is free again
        self._count = 0

    def begin(self, done: int) -> int:
        """A number whose place no task in the ring refers to; 0 = none is free. Tickets up to `done` are done."""
        with self._lock:
            for place, until in enumerate(self._until):
                if until <= done:
                    self._until[place] = _TAKEN
                    self._count = self._count % (_COUNT_MAX - 1) + 1  # from 1, and never that of DOOMED
                    return self._count * PLANS + place
        return 0

    def end(self, number: int, last: int) -> None:
        """No task of this plan will be submitted any more; `last` is the ticket of the last one, 0 = there is none."""
        with self._lock:
            self._until[number % PLANS] = last


def tasks_at(address: int, count: int, operators: int) -> Iterator[Any]:
    """The tasks of a plan in memory, checked before the first is given; raises `UsageError`."""
    plan: Any = (structure("ol_task") * count).from_address(address) if count else ()
    for index, task in enumerate(plan, 1):
        if task.after >= index:
            raise UsageError(f"a plan of {count} tasks", why=f"task {index} waits for itself or a later one")
        if task.op >= operators:
            raise UsageError(f"a plan of {count} tasks", why=f"task {index} names operator {task.op} of {operators}")
    return iter(plan)
