"""What an executor counts, as one typed snapshot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outlast.core import _native

#: Why the workers are away, by the number in `Away` of native/core/executor.hpp.
AWAY = (None, "asked", "idle", "silent host")


@dataclass(frozen=True, slots=True)
class OperatorStats:
    """What was counted of one operator since it was registered. `calls` covers all its generations."""

    name: str
    calls: int
    failures: int  #: calls that ended with an error status
    generation: int
    samples: int  #: calls that were timed: every 256th ticket is
    sampled_ns_median: float | None  #: run time in nanoseconds, median of the newest 14 samples; None without any


@dataclass(frozen=True, slots=True)
class PlanStats:
    """What was counted of plans (`Executor.run`). Every 16th is timed: where the time of its calling thread went.

    One in which that thread lost its core to another does not count as timed.

    What is neither in operators nor waiting for tasks that other threads run is dispatch: handing tasks in, claiming
    them, finishing them. Seconds, since the executor was made.
    """

    plans: int
    tasks: int  #: of these plans
    timed: int  #: plans that were timed
    timed_seconds: float
    operator_seconds: float
    wait_seconds: float

    @property
    def dispatch_seconds(self) -> float:
        """Of the timed plans."""
        return max(0.0, self.timed_seconds - self.operator_seconds - self.wait_seconds)


def read_plans(native: _native.Executor) -> PlanStats:
    """Read the counts of an executor's plans."""
    plans, tasks, timed, *ns = native.plan_counts()
    return PlanStats(plans, tasks, timed, *(value / 1e9 for value in ns))


@dataclass(frozen=True, slots=True)
class ExecutorStats:
    """One look at an executor. Numbers of different words are read one after the other, not at one instant."""

    operators: list[OperatorStats]
    depth: int  #: tickets given out that are not done
    capacity: int
    workers: int  #: as configured
    present: int  #: workers that are not away
    parked: str | None  #: why the workers are away: "asked", "idle", "silent host"; None = they are not
    completed: int  #: tasks done
    refused: int  #: submissions that found the ring full until their deadline


def read(
    native: _native.Executor, named: Iterable[tuple[str, int]], counters: Iterable[Callable[[], Mapping[int, int]]]
) -> ExecutorStats:
    """Read the counts of the operators `named` (name, index) and of `sequence`; `counters` add calls from elsewhere."""
    extra: dict[int, int] = {}
    for counter in counters:
        for index, calls in counter().items():
            extra[index] = extra.get(index, 0) + calls
    rows = []
    for name, index in (*named, ("sequence", native.sequence)):
        calls, failures, samples, ns = native.counts(index)
        generation = 1 if index == native.sequence else native.slot(index)[0] >> 1
        median = statistics.median(ns) if ns else None
        rows.append(OperatorStats(name, calls + extra.get(index, 0), failures, generation, samples, median))
    completed = native.completed
    return ExecutorStats(
        operators=rows,
        depth=max(0, native.tail - completed),
        capacity=native.capacity,
        workers=native.workers,
        present=native.present,
        parked=AWAY[native.away],
        completed=completed,
        refused=native.refused,
    )
