"""Rounds in turn: several ways of doing the same, each measured beside the others, in one warm process."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from outlast.bench.report import median_interval, significant

#: One round of an arm lasts about this long: many clock ticks, and short beside what disturbs a machine.
ROUND_SECONDS = 0.002
_BUSY = "n = 0\nprint(flush=True)\nwhile True: n = (n * 1103515245 + 12345) & 0x7FFFFFFF"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way. `mode` makes the context that its calls run in (`torch.no_grad`, `torch.inference_mode`)."""

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...] = ()
    mode: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    group: str = ""  #: arms of one group are one baseline: the fastest of them counts

    def seconds(self, calls: int) -> float:
        """Time of `calls` calls."""
        call, args = self.call, self.args
        with self.mode():
            started = time.perf_counter()
            for _ in repeat(None, calls):
                call(*args)
            return time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Race:
    """What `race` measured: seconds per call, one for each round, by arm. Round i of all arms ran at the same time."""

    seconds: dict[str, list[float]]
    groups: dict[str, str]

    def median(self, arm: str) -> float:
        """Seconds per call."""
        return statistics.median(self.seconds[arm])

    def fastest(self, group: str) -> str:
        """The arm of a group with the smallest median."""
        return min((name for name, its in self.groups.items() if its == group), key=self.median)

    def ratio(self, baseline: str, ours: str) -> float:
        """Median of the baseline by median of ours: above 1, ours is quicker. `baseline` may name a group."""
        return significant(self.median(self._arm(baseline)) / self.median(self._arm(ours)), 4)

    def row(self, workload: str, baseline: str, ours: str, must: float | None) -> dict[str, Any]:
        """One line of the report: the ratio of medians, of minima, the quartiles of the rounds' own ratios."""
        base, mine = self._arm(baseline), self._arm(ours)
        each = sorted(b / m for b, m in zip(self.seconds[base], self.seconds[mine], strict=True))
        ratio = self.ratio(baseline, ours)
        return {
            "workload": workload,
            "baseline": base,
            "baseline_us": microseconds(self.median(base)),
            "outlast": mine,
            "outlast_us": microseconds(self.median(mine)),
            "ratio": ratio,
            "of_minima": significant(min(self.seconds[base]) / min(self.seconds[mine]), 4),
            "p25": significant(each[len(each) // 4], 4),
            "p75": significant(each[len(each) * 3 // 4], 4),
            "must": must,
            "reached": None if must is None else ratio >= must,
        }

    def table(self) -> dict[str, dict[str, Any]]:
        """Per arm: minimum, median, and the interval that covers the median in 19 of 20 cases, in microseconds."""
        return {
            name: {
                "min_us": microseconds(min(times)),
                "median_us": microseconds(statistics.median(times)),
                "interval_us": [microseconds(end) for end in median_interval(times)],
                "rounds": len(times),
            }
            for name, times in self.seconds.items()
        }

    def _arm(self, name: str) -> str:
        return self.fastest(name) if name in self.groups.values() else name


def race(arms: Sequence[Arm], *, rounds: int, round_seconds: float = ROUND_SECONDS) -> Race:
    """Measure the arms in turn, `rounds` times, each turn starting with another arm."""
    calls = {}
    for arm in arms:
        arm.seconds(3)  # plans, compiled code and caches are there from now on
        once = max(1e-8, min(arm.seconds(1) for _ in range(5)))
        calls[arm.name] = max(1, int(round_seconds / once))
        arm.seconds(calls[arm.name])
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for turn in range(rounds):
        shift = turn % len(arms)
        for arm in (*arms[shift:], *arms[:shift]):
            seconds[arm.name].append(arm.seconds(calls[arm.name]) / calls[arm.name])
    return Race(seconds, {arm.name: arm.group or arm.name for arm in arms})


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Other work on `processes` cores meanwhile: as many children of this process that count and never wait."""
    children = [subprocess.Popen([sys.executable, "-S", "-c", _BUSY], stdout=subprocess.PIPE) for _ in range(processes)]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()  # it runs
        yield
    finally:
        for child in children:
            child.kill()
            child.communicate()


def microseconds(seconds: float) -> float:
    """Four digits."""
    return significant(seconds * 1e6, 4)


def geometric(values: Sequence[float]) -> float:
    """Geometric mean, four digits."""
    return significant(statistics.geometric_mean(values), 4)
