"""Show what the executors of running processes do: operators, calls, time, queue, fallbacks.

A process is seen if it asked for it: OUTLAST_TOP=1 in its environment publishes its default executor, and
`outlast.executor.metrics.publish(executor)` any other. Ctrl-C ends.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from outlast.cli import tables
from outlast.core.errors import EXIT_DONE

_CLEAR = "\x1b[H\x1b[2J"


def configure(parser: argparse.ArgumentParser) -> None:
    """Which process, how often, in which form."""
    parser.add_argument("--pid", type=int, help="only this process")
    parser.add_argument("--once", action="store_true", help="print once and end (the default unless on a terminal)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and end")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between looks (1)")
    parser.add_argument("--lines", type=int, default=20, help="operators of each executor that are shown (20)")


def run(arguments: argparse.Namespace) -> int:
    """Show it once, or again and again."""
    if arguments.json:
        print(json.dumps({"executors": _look(arguments.pid)}, indent=1))
        return EXIT_DONE
    if arguments.once or not sys.stdout.isatty():
        print(show(_look(arguments.pid), {}, arguments.lines))
        return EXIT_DONE
    before: dict[Any, dict[str, Any]] = {}
    while True:
        found = _look(arguments.pid)
        print(_CLEAR + show(found, before, arguments.lines), flush=True)
        before = {_key(one): one for one in found}
        time.sleep(max(0.1, arguments.interval))


def _look(pid: int | None) -> list[dict[str, Any]]:
    from outlast.executor import metrics

    return [one for one in metrics.published() if pid is None or one["pid"] == pid]


def show(executors: Sequence[dict[str, Any]], before: dict[Any, dict[str, Any]], lines: int) -> str:
    """The tables; rates need the look `before`, by pid and name."""
    if not executors:
        return "no executor is published. Start a program with OUTLAST_TOP=1 in its environment."
    return "\n\n".join(_one(one, before.get(_key(one)), lines) for one in executors)


def _key(one: dict[str, Any]) -> tuple[int, str]:
    return one["pid"], one["name"]


def _one(one: dict[str, Any], before: dict[str, Any] | None, lines: int) -> str:
    age = time.time() - one["at"]
    state = f"parked ({one['parked']})" if one["parked"] else f"{one['present']} of {one['workers']} workers"
    head = [
        f"{one['pid']} {one['name']}: {one['command']}" + (f"  (silent for {age:.0f} s)" if age > 5 else ""),
        f"  queue {one['depth']} of {one['capacity']}, {state}, {one['completed']} tasks, {one['refused']} refused",
    ]
    past = {row["name"]: row["calls"] for row in before["operators"]} if before else {}
    seconds = one["at"] - before["at"] if before else 0.0
    rows = sorted(one["operators"], key=lambda row: row["calls"], reverse=True)
    table = [["operator", "calls", "per second", "ns", "failed"]]
    for row in rows[:lines]:
        rate = f"{(row['calls'] - past.get(row['name'], 0)) / seconds:.0f}" if seconds > 0 else "-"
        nanoseconds = "-" if row["sampled_ns_median"] is None else f"{row['sampled_ns_median']:.0f}"
        table.append([row["name"], str(row["calls"]), rate, nanoseconds, str(row["failures"])])
    parts = ["\n".join(head), tables.columns(table, indent="  ")]
    if len(rows) > lines:
        parts.append(f"  and {len(rows) - lines} more operators")
    if one["fallbacks"]:
        left = sorted(one["fallbacks"], key=lambda row: row["calls"], reverse=True)
        parts.append("  left to PyTorch:")
        parts.append(
            tables.columns([[str(row["calls"]), row["operator"], row["reason"]] for row in left[:lines]], indent="    ")
        )
    return "\n".join(parts)
