"""Kill the engine under running streams, compare them with an uninterrupted run, and time it against a restart.

Four parts: the streams undisturbed; the same streams with SIGKILLs to the engine; the same kills where the engine is
restarted and its prompts are prefilled again (the baseline); and what checkpointing costs a decode step.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from outlast.bench import overhead
from outlast.bench.report import conditions, median, significant, spread
from outlast.bench.rounds import breakdown
from outlast.bench.stages import stage_for
from outlast.bench.transcripts import Transcript, Verdict
from outlast.bench.trial import Trial, requests_for, run_trial, settings_for
from outlast.core.errors import UsageError
from outlast.serve.settings import ENGINES

KILLS, STREAMS, TOKENS, CONTEXT = 3, 2, 200, 1000
#: The baseline is slow, and more of it tells nothing new: two streams and two kills. With more streams a restart takes
#: longer still (every prompt is prefilled), so this flatters the baseline.
_BASELINE_STREAMS = 2
_BASELINE_KILLS = 2
_OVERHEAD_QUADS = 100
#: What the fourth part finds; None where an engine has no such part.
_COST = ("overhead_pct", "overhead_interval", "bytes_per_token", "step_ms_off", "step_ms_on")


def configure(parser: argparse.ArgumentParser) -> None:
    """How much of it."""
    parser.add_argument("--kills", type=int, default=KILLS, metavar="N", help=f"engines to kill (default: {KILLS})")
    parser.add_argument(
        "--streams", type=int, default=STREAMS, metavar="N", help=f"streams at once (default: {STREAMS})"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=f"per stream (default: {TOKENS})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts, sampling and kills (default: 0)")
    parser.add_argument(
        "--context", type=int, default=CONTEXT, metavar="N", help=f"tokens of a prompt (default: {CONTEXT})"
    )
    parser.add_argument("--model", default="builtin", metavar="NAME|PATH", help="model to serve (default: builtin)")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="native", help="engine to kill (default: native)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report; `identical` and `contradicted` decide. Raises `UsageError` for numbers that have no meaning."""
    kills, streams, tokens, context = arguments.kills, arguments.streams, arguments.tokens, arguments.context
    for name, value, least in (
        ("kills", kills, 1),
        ("streams", streams, 1),
        ("tokens", tokens, 16),
        ("context", context, 64),
    ):
        if value < least:
            raise UsageError(f"--{name} {value}", why=f"it must be at least {least}")
    model, seed = arguments.model, arguments.seed
    requests = requests_for(model, streams, context=context, tokens=tokens, seed=seed)
    native = arguments.engine == "native"
    settings = replace(settings_for(model, streams, context=context, tokens=tokens), assembly=ENGINES[arguments.engine])
    # Its own way to compute anew takes the first time's steps; a server that knew no log would prefill.
    options = () if native else (("replay", "fast"),)
    with stage_for(arguments.json) as stage:
        trial = run_trial(settings, requests, kills=kills, seed=seed, stage=stage, title="outlast")
        again = run_trial(
            replace(settings, recovery="reprefill", checkpoint=False, spares=0, engine_options=options),
            requests[:_BASELINE_STREAMS], kills=min(kills, _BASELINE_KILLS), seed=seed + 1, stage=stage,
            title="baseline: restart and prefill again", reference=False,
        )  # fmt: skip
        cost = dict.fromkeys(_COST)
        if native:
            stage.note("checkpoint cost: decode steps with and without, in turn")
            cost = overhead.measure(model, context=context, quads=_OVERHEAD_QUADS, seed=seed)
    report = assess(trial, again, cost)
    report |= {"context": context, "seed": seed, "engine": arguments.engine}
    report |= conditions("openai", "uvicorn", "starlette")
    return report


def assess(trial: Trial, again: Trial, cost: dict[str, Any]) -> dict[str, Any]:
    """What the parts amount to. A stream that was not sent the reference's tokens makes `identical` false."""
    verdict = trial.verdict()
    recovery, restart = median(trial.recoveries), median(again.recoveries)
    return {
        "identical": verdict.identical,
        "contradicted": verdict.contradicted,
        "kills": len(trial.kills),
        "streams": len(trial.references),
        "tokens": trial.tokens,
        "recovery_ms_median": recovery,
        "recovery_ms_max": significant(max(trial.recoveries)) if trial.recoveries else None,
        "restart_ms_median": restart,
        "speedup": significant(restart / recovery, 4) if recovery and restart else None,
        "overhead_pct": cost["overhead_pct"],
        "overhead_interval": cost["overhead_interval"],
        "bytes_per_token": cost["bytes_per_token"],
        "lost": verdict.lost,
        "hung": verdict.hung,
        "differences": list(verdict.differences),
        "engines": _engines(trial),
        "rounds": len(trial.rounds),
        "phases_ms": breakdown(trial.kills),
        "baseline_kills": len(again.kills),
        "baseline_streams": len(again.rounds[0]) if again.rounds else 0,
        "baseline_identical": _baseline(trial.references, again).identical,
        "spread": {
            "recovery_ms": spread(trial.recoveries),
            "restart_ms": spread(again.recoveries),
            "step_ms_off": cost["step_ms_off"],
            "step_ms_on": cost["step_ms_on"],
        },
    }


def _baseline(references: list[Transcript], again: Trial) -> Verdict:
    return again.verdict(references[: len(again.rounds[0])] if again.rounds else references)


def _engines(trial: Trial) -> int:
    """Engines that made tokens of the rounds with kills."""
    return len({engine for streams in trial.rounds for one in streams for engine in one.engines})


def show(report: dict[str, Any]) -> None:
    """The report as a table on standard output."""
    from rich.console import Console
    from rich.table import Table

    costs = []
    if report["overhead_pct"] is not None:
        low, high = report["overhead_interval"]
        costs = [
            ("checkpointing costs", f"{report['overhead_pct']:.2f} % of tok/s (95 %: {low:.2f} .. {high:.2f})"),
            ("checkpoint bytes per token", f"{report['bytes_per_token']:,}"),
        ]
    rows = [
        ("kills", f"{report['kills']} x SIGKILL to the engine"),
        ("tokens", f"{report['tokens']} in {report['streams']} streams, context {report['context']}"),
        ("identical to an uninterrupted run", "yes" if report["identical"] else "NO"),
        ("tokens contradicted, repeated or lost", str(report["contradicted"])),
        (
            "from SIGKILL to the next token at the client",
            f"median {_ms(report['recovery_ms_median'])}, max {_ms(report['recovery_ms_max'])}",
        ),
        (
            "the same: engine restarted, prompts prefilled again",
            f"median {_ms(report['restart_ms_median'])} ({report['baseline_streams']} streams)",
        ),
        ("faster by", f"{report['speedup']:g}x" if report["speedup"] else "-"),
        *costs,
        ("machine", report["machine"]),
        ("load", ", ".join(map(str, report["load"]))),
    ]
    table = Table(show_header=False, box=None)
    for name, value in rows:
        table.add_row(name, value)
    console = Console(highlight=False)
    console.print(table)
    for line in report["differences"]:
        console.print(f"difference: {line}", markup=False)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"
