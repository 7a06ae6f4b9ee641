"""One call of a replay on a time line, for chrome://tracing and Perfetto (Trace Event Format, "X" events).

The call is made on copies of the arguments, so that nothing of the caller's changes, and step by step on one thread: a
step that is otherwise split among workers is one event here. Reading the clock adds some 20 ns to each step.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outlast.core.errors import OutlastError, Refused
from outlast.executor.errors import raise_step_failure
from outlast.executor.planner import External, Plan, Step
from outlast.executor.program import Program
from outlast.executor.replay import Mixed, Replay
from outlast.executor.trace import overload_name
from outlast.executor.values import Value

if TYPE_CHECKING:
    import torch

_WARM_CALLS = 3


def record(replay: Replay, *args: torch.Tensor) -> dict[str, Any]:
    """The trace of one warm call with arguments like `args`, as the JSON object that the viewers load.

    Times are microseconds from the start of the call. Raises `Refused` if the arguments are not all tensors, or such
    that the replay would run the function eagerly.
    """
    import torch

    if not all(isinstance(one, torch.Tensor) for one in args):
        raise Refused("a trace with arguments that are no tensors", why="they select a plan of their own",
                      do="Capture a function of the tensors alone.")  # fmt: skip
    own = Replay(replay.function, replay.fuse, "recapture", replay.executor, 1, replay.timeout)
    with torch.no_grad():
        own.prepare(*args)
        program = own.newest
        assert program is not None
        copies = tuple(_copy(one) for one in args)
        recorder = _Recorder(program, replay.timeout)
        for _ in range(_WARM_CALLS):
            recorder.events.clear()
            started = time.perf_counter_ns()
            recorder(copies)
            ended = time.perf_counter_ns()
    return {"traceEvents": _events(recorder, started, ended), "displayTimeUnit": "ns",
            "otherData": {"steps": len(program.steps), "scratch_bytes": program.arena_bytes}}  # fmt: skip


@dataclasses.dataclass(slots=True)
class _Event:
    name: str
    category: str
    start: int  #: nanoseconds of the steady clock
    end: int
    details: dict[str, Any]


class _Recorder(Mixed):
    """Runs a program as a replay does, and notes when each step began and ended."""

    def __init__(self, program: Program, timeout: float) -> None:
        constants = [(ref, _copy(tensor)) for ref, tensor in program.plan.trace.constants]
        changes = any(buffer.kind == "constant" for buffer in program.plan.mutated)
        plan: Plan = program.plan
        if changes:  # what the function changes besides its arguments stays as it is
            plan = dataclasses.replace(plan, trace=dataclasses.replace(plan.trace, constants=constants))
        self.events: list[_Event] = []
        super().__init__(plan, dataclasses.replace(program, native=_Timed(program, self.events)), timeout)

    def _external(self, step: External, look: Any, bases: Any) -> bool:
        started = time.perf_counter_ns()
        going_on = super()._external(step, look, bases)
        details = {"reason": step.reason, **_operands(step.reads, [one for one in step.outs if one is not None])}
        self.events.append(
            _Event(overload_name(step.call.op), "PyTorch", started, time.perf_counter_ns(), details)
        )  # fmt: skip
        return going_on


class _Timed:
    """A native program whose `run` leaves an event for each step."""

    def __init__(self, program: Program, events: list[_Event]) -> None:
        self._program = program
        self._native = program.native
        self._events = events

    def run(self, first: int, count: int, timeout: float) -> Any:
        (status, step, text), times = self._native.run_timed(first, count, timeout)
        if status != 0:
            raise_step_failure(self._program, step, status, text)
        for i in range(count):
            one = self._program.steps[first + i]
            self._events.append(_Event(_name(one), "kernel", times[i], times[i + 1], _details(first + i, one)))
        return status, step, text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


def _name(step: Step) -> str:
    return step.kernel if step.source is None else f"fused ({step.source.name})"


def _details(index: int, step: Step) -> dict[str, Any]:
    return {"step": index, "level": step.level, "shares": step.shares, **_operands(step.reads, step.writes)}


def _operands(reads: Sequence[Value], writes: Sequence[Value]) -> dict[str, Any]:
    return {
        "reads": [f"{one.dtype}{list(one.shape)}" for one in reads],
        "writes": [f"{one.dtype}{list(one.shape)}" for one in writes],
        "elements": sum(one.numel for one in writes),
    }


def _events(recorder: _Recorder, started: int, ended: int) -> list[dict[str, Any]]:
    pid = os.getpid()
    common = {"ph": "X", "pid": pid, "tid": 1}
    found: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "tid": 1, "name": "process_name", "args": {"name": "outlast replay"}},
        {"ph": "M", "pid": pid, "tid": 1, "name": "thread_name", "args": {"name": "caller"}},
        {"name": "call", "cat": "call", "ts": 0.0, "dur": (ended - started) / 1000, "args": {}, **common},
    ]
    for one in recorder.events:
        if not started <= one.start <= one.end <= ended:
            raise OutlastError("the clocks of the trace differ", why="a step lies outside of its call")
        found.append({
            "name": one.name, "cat": one.category, "ts": (one.start - started) / 1000,
            "dur": (one.end - one.start) / 1000, "args": one.details, **common,
        })  # fmt: skip
    return found


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same content and strides in memory of its own."""
    import torch

    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor.as_strided(tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
