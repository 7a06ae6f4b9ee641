"""Time from SIGKILL to the engine until the next token at the client, against a restart and a new prefill.

Several numbers of streams, each with prompts of 1,000 tokens, killed at random tokens. Baseline in the same run: the
same server without log and spare, which starts the engine again and prefills prompts and tokens. `ratio` is that of the
medians with one stream (or with the fewest streams asked for).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from outlast.bench.report import conditions, median, say, significant, spread
from outlast.bench.rounds import breakdown
from outlast.bench.stages import Lines
from outlast.bench.trial import Trial, requests_for, run_trial, settings_for
from outlast.core.errors import UsageError

STREAMS, KILLS, CONTEXT, TOKENS = (1, 4, 8), 10, 1000, 250
#: Each kill of the baseline costs a prefill of every stream; these many tell its median well enough.
_BASELINE_KILLS = {1: 3}
_BASELINE_KILLS_OF_MORE = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """How much of it."""
    parser.add_argument(
        "--streams", type=_numbers, default=STREAMS, metavar="N,N", help="numbers of streams (default: 1,4,8)"
    )
    parser.add_argument("--kills", type=int, default=KILLS, metavar="N", help=f"of each number (default: {KILLS})")
    parser.add_argument("--context", type=int, default=CONTEXT, metavar="N", help=f"of prompts (default: {CONTEXT})")
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=f"per stream (default: {TOKENS})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts, sampling and kills (default: 0)")
    parser.add_argument("--model", default="builtin", metavar="NAME|PATH", help="model to serve (default: builtin)")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from None


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report: medians and ratios by number of streams, and where the time went."""
    if arguments.kills < 1 or min(arguments.streams) < 1:
        raise UsageError("nothing to kill", do="Ask for at least one stream and one kill.")
    stage = Lines()
    rows, parts = {}, {}
    totals = {"contradicted": 0, "lost": 0, "hung": 0}
    identical = True
    for streams in arguments.streams:
        shape = {"context": arguments.context, "tokens": arguments.tokens}
        requests = requests_for(arguments.model, streams, seed=arguments.seed, **shape)
        settings = settings_for(arguments.model, streams, **shape)
        trial = run_trial(
            settings, requests, kills=arguments.kills, seed=arguments.seed, stage=stage, title=f"{streams} streams"
        )
        again = run_trial(
            replace(settings, recovery="reprefill", checkpoint=False, spares=0), requests,
            kills=min(arguments.kills, _BASELINE_KILLS.get(streams, _BASELINE_KILLS_OF_MORE)),
            seed=arguments.seed + 1, stage=stage, title=f"{streams} streams, baseline", reference=False,
        )  # fmt: skip
        verdict = trial.verdict()
        for line in verdict.differences:
            say(f"difference: {line}")
        identical &= verdict.identical
        totals["contradicted"] += verdict.contradicted
        totals["lost"] += verdict.lost
        totals["hung"] += verdict.hung
        rows[str(streams)] = _row(trial, again)
        parts[str(streams)] = breakdown(trial.kills)
    first = rows[str(min(arguments.streams))]
    return {
        "ratio": first["ratio"],
        "recovery_ms_median": first["recovery_ms"],
        "recovery_ms_max": max(row["max"] for row in rows.values()),
        "restart_ms_median": first["restart_ms"],
        "identical": identical,
        "ok": identical and not any(totals.values()),
        **totals,
        "kills": sum(row["kills"] for row in rows.values()),
        "context": arguments.context,
        "baseline": "the same server without log and spare: engine restarted, prompts and tokens prefilled",
        "by_streams": rows,
        "phases_ms_by_streams": parts,
        **conditions("openai", "uvicorn", "starlette"),
    }


def _row(trial: Trial, again: Trial) -> dict[str, Any]:
    recovery, restart = median(trial.recoveries), median(again.recoveries)
    found = spread(trial.recoveries)
    return {
        "kills": len(trial.kills),
        "recovery_ms": recovery,
        "p25": found.get("p25"),
        "p75": found.get("p75"),
        "max": found.get("max", 0.0),
        "restart_ms": restart,
        "restart_max": spread(again.recoveries).get("max"),
        "restart_kills": len(again.kills),
        "ratio": significant(restart / recovery, 4) if recovery and restart else None,
    }
