"""Speed of the engine's steps beside the baselines': rounds in turn, all at the same context and of the same steps."""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outlast.bench.engine_sides import Prompts, Side
from outlast.bench.report import say, significant
from outlast.engines.native.decoder import StepPlan

#: After another side's turn its threads may still spin for a moment (OpenMP waits a few milliseconds before it sleeps).
_PAUSE_SECONDS = 0.01


@dataclass(slots=True)
class Measured:
    """Seconds per step (or of one filling) of one side, by round."""

    rounds: list[list[float]] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Of all steps."""
        return statistics.median(value for one in self.rounds for value in one)

    def by_round(self) -> list[float]:
        """The median of each round."""
        return [statistics.median(one) for one in self.rounds]


def prompts_of(count: int, length: int, vocabulary: int, *, seed: int = 0) -> Prompts:
    """Prompts of random tokens, another text for each stream and each seed."""
    rng = random.Random(length * 1009 + seed)
    return [tuple(rng.randrange(vocabulary) for _ in range(length)) for _ in range(count)]


def decode(
    sides: Mapping[str, Side], prompts: Mapping[str, Prompts], *, rounds: int, steps: int
) -> dict[str, Measured]:
    """Each side's decode steps behind its prompts. The first step of a round warms up and does not count."""
    for name, side in sides.items():
        say(f"  {name}: filling in {len(prompts[name])} x {len(prompts[name][0])} tokens")
        side.open(prompts[name])
    found = {name: Measured() for name in sides}
    for name, side in _turns(sides, rounds):
        side.step()
        found[name].rounds.append([side.step() for _ in range(steps)])
    return found


def fill(sides: Mapping[str, Side], length: int, vocabulary: int, *, rounds: int) -> dict[str, Measured]:
    """Seconds that each side takes for a prompt. Every round has a text of its own: one that was seen may be kept."""
    found = {name: Measured() for name in sides}
    for side in sides.values():
        side.open(prompts_of(1, length, vocabulary))
    for name, side in _turns(sides, rounds):
        text = prompts_of(1, length, vocabulary, seed=1 + len(found[name].rounds))
        found[name].rounds.append([side.open(text)])
    return found


def _turns(sides: Mapping[str, Side], rounds: int) -> Iterator[tuple[str, Side]]:
    """All sides in turn, each turn beginning with another one; pausing before each."""
    names = list(sides)
    for turn in range(rounds):
        shift = turn % len(names)
        for name in (*names[shift:], *names[:shift]):
            time.sleep(_PAUSE_SECONDS)
            yield name, sides[name]


@dataclass(frozen=True, slots=True)
class Rates:
    """What a row says of both sides: `streams` tokens a step, or `tokens` a filling."""

    tokens: int
    must: float | None = None
    aim: float | None = None


def row(
    what: str, context: int, found: Mapping[str, Measured], ours: str, baseline: str, rates: Rates
) -> dict[str, Any]:
    """One line of the report: both rates, the ratio of medians and the quartiles of the rounds' own ratios.

    `baseline` names an arm, or a group of them (all that begin with "llama.cpp, "), of which the quickest counts. One
    that was not measured gives a line that says so, with `ratio` None.
    """
    mine = found[ours]
    arms = [name for name in found if name == baseline or name.startswith(f"{baseline}, ")]
    line: dict[str, Any] = {
        "what": what, "context": context, "outlast": ours, "outlast_tok_s": significant(rates.tokens / mine.median, 4),
        "baseline": baseline, "baseline_tok_s": None, "ratio": None, "p25": None, "p75": None,
        "must": rates.must, "aim": rates.aim, "reached": None,
    }  # fmt: skip
    if not arms:
        return line | {"baseline": f"{baseline}: not installed"}
    quickest = min(arms, key=lambda name: found[name].median)
    base = found[quickest]
    each = sorted(b / m for b, m in zip(base.by_round(), mine.by_round(), strict=True))
    ratio = significant(base.median / mine.median, 4)
    return line | {
        "baseline": quickest,
        "baseline_tok_s": significant(rates.tokens / base.median, 4),
        "ratio": ratio,
        "p25": significant(each[len(each) // 4], 4),
        "p75": significant(each[len(each) * 3 // 4], 4),
        "reached": None if rates.must is None else ratio >= rates.must,
    }


def empty_share(run: Callable[[int, int], None], plan: StepPlan, empty: int, *, rounds: int) -> tuple[float, float]:
    """Seconds of a planned step, and of the same plan with every task replaced by an empty one (operator `empty`).

    The second is what dispatch and waiting between levels cost where there is no work. `run(address, count)` runs a
    plan. Medians of `rounds` runs of each in turn.
    """
    from outlast.checkpoint.handlers import Task

    whole = (Task * plan.count).from_address(plan.address)
    hollow = (Task * plan.count)(*whole)
    for task in hollow:
        task.op = empty
    seconds: dict[int, list[float]] = {plan.address: [], ctypes.addressof(hollow): []}
    for _ in range(rounds):
        for address, times in seconds.items():
            started = time.perf_counter()
            run(address, plan.count)
            times.append(time.perf_counter() - started)
    full, bare = seconds.values()
    return statistics.median(full), statistics.median(bare)


def empty_operator() -> int:
    """Address of an operator that does nothing and succeeds.

    `pthread_equal` of the C library compares two words, and a task's address is never its environment's: it returns 0.
    """
    return ctypes.cast(ctypes.CDLL(None).pthread_equal, ctypes.c_void_p).value or 0
