"""What executors of a process do, for others to read: Prometheus metrics, and a small file that `outlast top` shows.

Both are asked for: nothing is written and no thread runs unless `publish` is called or OUTLAST_TOP=1 is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.core.errors import UsageError
from outlast.core.paths import default_log_dir, make_private

if TYPE_CHECKING:
    from outlast.executor.program import Program
    from outlast.executor.replay import Replay
    from outlast.executor.runtime import Executor

PUBLISH_SECONDS = 1.0
_FORMAT = 1


# --- counts of steps


class StepCounts:
    """Calls of operators inside plans. The table counts tasks, and a plan is one task: its steps are counted here.

    A plan counts its runs; a step's calls are the runs of its plan. A step that is split among workers is counted by
    the table as well, once per part.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._past: Counter[int] = Counter()  #: of plans that are gone
        self._plans: list[deque[_Plan]] = []  #: one for each replay that lives
        #: of replays that are gone, not added up yet. The garbage collector may say so in the middle of anything, also
        #: in a thread that holds the lock.
        self._ended: deque[deque[_Plan]] = deque()

    def follow(self, owner: object, most: int) -> deque[_Plan]:
        """The list to which `owner` adds its plans with `add`; they are added up when it is gone."""
        plans: deque[_Plan] = deque(maxlen=most)
        with self._lock:
            self._plans.append(plans)
        weakref.finalize(owner, self._gone, plans).atexit = False
        return plans

    def add(self, plans: deque[_Plan], program: Program, executor: Executor) -> None:
        """Count a plan. Of more than `most` the oldest is added up and no longer looked at."""
        with self._lock:
            self._add_up()
            if len(plans) == plans.maxlen:
                self._past.update(plans.popleft().calls())
            plans.append(_Plan(program, executor))

    def totals(self) -> Mapping[int, int]:
        """Operator index -> calls; never falls."""
        with self._lock:
            self._add_up()
            found = self._past.copy()
            for plans in self._plans:
                for plan in plans:
                    found.update(plan.calls())
            return found

    def _gone(self, plans: deque[_Plan]) -> None:
        self._ended.append(plans)
        if self._lock.acquire(blocking=False):  # else the next to hold it adds up
            try:
                self._add_up()
            finally:
                self._lock.release()

    def _add_up(self) -> None:
        """Add up what has ended; the lock is held."""
        while self._ended:
            plans = self._ended.popleft()
            for plan in plans:
                self._past.update(plan.calls())
            self._plans = [one for one in self._plans if one is not plans]


class _Plan:
    """A plan's runs and which operators one run calls. Does not keep the plan's tensors alive."""

    __slots__ = ("_native", "_operators", "_stretches")

    def __init__(self, program: Program, executor: Executor) -> None:
        self._native = program.native
        names = (step.kernel if step.source is None else step.source.name for step in program.steps)
        self._operators = Counter(executor.operators[name].index for name in names)
        # Each stretch between two calls of PyTorch counts as a run.
        self._stretches = max(1, sum(stretch.external is None for stretch in program.stretches))

    def calls(self) -> dict[int, int]:
        runs = self._native.runs // self._stretches
        return {index: runs * n for index, n in self._operators.items()} if runs else {}


_counts: weakref.WeakKeyDictionary[Executor, StepCounts] = weakref.WeakKeyDictionary()
_replays: weakref.WeakSet[Replay] = weakref.WeakSet()
_lock = threading.Lock()


def follow(replay: Replay, executor: Executor, most: int) -> tuple[StepCounts, deque[_Plan]]:
    """Count a new replay's plans with those of its executor, and its fallbacks with those of the process."""
    with _lock:
        counts = _counts.get(executor)
        if counts is None:
            counts = _counts[executor] = StepCounts()
            executor.count_with(counts.totals)
        _replays.add(replay)
    return counts, counts.follow(replay, most)


def fallbacks(executor: Executor) -> Counter[tuple[str, str]]:
    """What the live replays of an executor leave to PyTorch: (overload, reason) -> calls in their newest plans.

    Calls that ran the function itself are under the name "whole function".
    """
    found: Counter[tuple[str, str]] = Counter()
    with _lock:
        replays = [one for one in _replays if one.executor is executor]
    for replay in replays:
        if replay.newest is not None:
            found.update(replay.newest.plan.fallbacks)
        for reason, calls in dict(replay.eager).items():
            found["whole function", reason] += calls
    return found


# --- Prometheus


class ExecutorCollector:
    """A collector for prometheus-client: `REGISTRY.register(ExecutorCollector({"default": executor}))`.

    The label `executor` is the name given here. Counts are read when they are scraped.
    """

    def __init__(self, executors: Mapping[str, Executor]) -> None:
        self._executors = dict(executors)

    def describe(self) -> Iterable[Any]:
        """Nothing: names are known without asking, and registering does not read."""
        return []

    def collect(self) -> Iterator[Any]:
        """One family per name of docs/reference/executor-metrics.md."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        prefix, one, each = "outlast_executor", ["executor"], ["executor", "operator"]
        calls = CounterMetricFamily(
            f"{prefix}_operator_calls", "Calls of an operator, steps of plans included", labels=each
        )
        failures = CounterMetricFamily(f"{prefix}_operator_failures", "Calls that ended with an error", labels=each)
        seconds = GaugeMetricFamily(f"{prefix}_operator_seconds", "Run time, median of newest samples", labels=each)
        generation = GaugeMetricFamily(f"{prefix}_operator_generation", "How often it was published", labels=each)
        completed = CounterMetricFamily(f"{prefix}_tasks", "Tasks done", labels=one)
        refused = CounterMetricFamily(f"{prefix}_refused", "Submissions that found the ring full", labels=one)
        depth = GaugeMetricFamily(f"{prefix}_queue_depth", "Tickets given out that are not done", labels=one)
        capacity = GaugeMetricFamily(f"{prefix}_queue_capacity", "Tickets that may be outstanding", labels=one)
        present = GaugeMetricFamily(f"{prefix}_workers", "Workers that are not away", labels=one)
        left = GaugeMetricFamily(
            f"{prefix}_fallbacks", "Calls that live replays leave to PyTorch", labels=["executor", "operator", "reason"]
        )
        for name, executor in self._executors.items():
            stats = executor.stats()
            for row in stats.operators:
                calls.add_metric([name, row.name], row.calls)
                failures.add_metric([name, row.name], row.failures)
                generation.add_metric([name, row.name], row.generation)
                if row.sampled_ns_median is not None:
                    seconds.add_metric([name, row.name], row.sampled_ns_median / 1e9)
            completed.add_metric([name], stats.completed)
            refused.add_metric([name], stats.refused)
            depth.add_metric([name], stats.depth)
            capacity.add_metric([name], stats.capacity)
            present.add_metric([name], stats.present)
            for (operator, reason), n in fallbacks(executor).items():
                left.add_metric([name, operator, reason], n)
        yield from (calls, failures, seconds, generation, completed, refused, depth, capacity, present, left)


# --- the file that `outlast top` reads


def folder() -> Path:
    """Where processes publish: `outlast/top` below the user's state folder."""
    return default_log_dir().parent / "top"


class Publication:
    """Writes an executor's counts to a file every second until `close` or the end of the process."""

    def __init__(self, executor: Executor, name: str, where: Path, seconds: float) -> None:
        self._executor = weakref.ref(executor)
        self._name = name
        self._seconds = seconds
        make_private(where)
        self.path = where / f"{os.getpid()}-{name}.json"
        self._stop = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._go, name="outlast-top", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and take the file away."""
        self._stop.set()
        self._thread.join()
        self.path.unlink(missing_ok=True)

    def _go(self) -> None:
        while not self._stop.wait(self._seconds):
            try:
                if not self._write():
                    break
            except OSError:
                continue  # a full disk: what stands there grows old, which `outlast top` shows
        self.path.unlink(missing_ok=True)

    def _write(self) -> bool:
        executor = self._executor()
        if executor is None or executor.closed:
            return False
        try:
            text = json.dumps(snapshot(executor, self._name))
        except UsageError:  # closed meanwhile: its native part is gone
            return False
        beside = self.path.with_suffix(".new")
        beside.write_text(text)
        beside.replace(self.path)
        return True


def publish(
    executor: Executor, *, name: str = "default", where: Path | None = None, seconds: float = PUBLISH_SECONDS
) -> Publication:
    """Let `outlast top` see an executor of this process. OUTLAST_TOP=1 does it for the default executor."""
    return Publication(executor, name, where or folder(), seconds)


def snapshot(executor: Executor, name: str) -> dict[str, Any]:
    """What is published: plain numbers and texts."""
    stats = asdict(executor.stats())
    operators = [row for row in stats.pop("operators") if row["calls"] or row["failures"]]
    left = [
        {"operator": operator, "reason": reason, "calls": n} for (operator, reason), n in fallbacks(executor).items()
    ]
    return {
        "format": _FORMAT, "pid": os.getpid(), "started": started(os.getpid()), "at": time.time(), "name": name,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200] if sys.argv else "",
        **stats, "operators": operators, "fallbacks": left,
    }  # fmt: skip


def started(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 if there is none. Tells a pid from its later re-use."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def published(where: Path | None = None) -> list[dict[str, Any]]:
    """What live processes published, by pid and name. Files of processes that are gone are removed."""
    found = []
    for path in sorted((where or folder()).glob("*-*.json")):
        try:
            one = json.loads(path.read_text())
            pid, ticks, kind = int(one["pid"]), int(one["started"]), one["format"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # another writes it just now, or it is none of ours
        if ticks == 0 or started(pid) != ticks:
            with contextlib.suppress(OSError):
                path.unlink()
        elif kind == _FORMAT:
            found.append(one)
    return sorted(found, key=lambda one: (one["pid"], one["name"]))
