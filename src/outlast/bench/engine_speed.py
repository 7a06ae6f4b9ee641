"""Speed of the engine's steps beside the baselines': rounds in turn, all at the same context and of the same steps."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outlast.bench.engine_sides import Native, Prompts, Side
from outlast.bench.report import say, significant

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


def dispatch(side: Native, *, plans: int, steps: int) -> dict[str, Any]:
    """What of decode steps is dispatch, by the executor's own counts: until `plans` were timed, or after `steps`.

    `pct` is of the whole time of plans; `wait_pct` of the same is the calling thread waiting for others' tasks. None
    where no plan was timed, as other programs took the core during each.
    """
    before = after = side.plan_stats()
    for _ in range(steps):
        side.step()
        after = side.plan_stats()
        if after.timed - before.timed == plans:
            break
    timed = after.timed - before.timed
    if timed == 0:
        return {"tasks": None, "plans_timed": 0, "step_us": None, "dispatch_us": None, "pct": None, "wait_pct": None}
    seconds = after.timed_seconds - before.timed_seconds
    taken = after.dispatch_seconds - before.dispatch_seconds
    return {
        "tasks": round((after.tasks - before.tasks) / (after.plans - before.plans)),
        "plans_timed": timed,
        "step_us": significant(1e6 * seconds / timed, 4),
        "dispatch_us": significant(1e6 * taken / timed, 4),
        "pct": significant(100 * taken / seconds, 3),
        "wait_pct": significant(100 * (after.wait_seconds - before.wait_seconds) / seconds, 3),
    }
