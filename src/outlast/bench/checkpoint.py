"""What checkpointing costs: decode with and without it, append against memcpy, finding changes against comparing.

`append_vs_memcpy`: bandwidth of log append and commit by that of memcpy of the same bytes, at 1 MiB and more.
`overhead_pct`: of a decode step's tok/s, checkpointing on and off in turn. `scan_vs_compare`: a checkpoint of an opaque
region of 256 MiB of which 1 % of the pages changed, against copying the region and comparing it with its last copy.
"""

from __future__ import annotations

import argparse
from typing import Any

from outlast.bench import append, overhead, scan
from outlast.bench.report import conditions, say
from outlast.core.errors import UsageError

CONTEXTS, QUADS, EPOCHS = (1000, 32), 150, 15
_PARTS = ("append", "overhead", "scan")


def configure(parser: argparse.ArgumentParser) -> None:
    """Which parts, and how much."""
    parser.add_argument("--only", choices=_PARTS, action="append", help="a part to run; default: all")
    parser.add_argument("--model", default="builtin", metavar="NAME|PATH", help="model to decode (default: builtin)")
    parser.add_argument(
        "--quads", type=int, default=QUADS, metavar="N", help=f"decode steps with and without / 4 (default: {QUADS})"
    )
    parser.add_argument(
        "--region-mib", type=int, default=scan.REGION_BYTES >> 20, metavar="N",
        help=f"size of the opaque region (default: {scan.REGION_BYTES >> 20})",
    )  # fmt: skip
    parser.add_argument("--epochs", type=int, default=EPOCHS, metavar="N", help=f"of the region (default: {EPOCHS})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of content and places (default: 0)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report. Its overhead is that at a context of 1,000 tokens; `overhead_by_context` has the other one too."""
    if min(arguments.quads, arguments.region_mib, arguments.epochs) < 1:
        raise UsageError("nothing to measure", why="--quads, --region-mib and --epochs are at least 1")
    parts = arguments.only or _PARTS
    report: dict[str, Any] = {}
    if "append" in parts:
        say("log append and commit against memcpy of the same bytes into the same kind of memory")
        report |= append.measure(seed=arguments.seed)
    if "scan" in parts:
        say(f"checkpoint of an opaque region of {arguments.region_mib} MiB against copy and compare")
        report |= scan.measure(size=arguments.region_mib << 20, epochs=arguments.epochs, seed=arguments.seed)
    if "overhead" in parts:
        rows = {}
        for context in CONTEXTS:
            say(f"decode steps with and without checkpointing in turn, context {context}")
            rows[str(context)] = overhead.measure(
                arguments.model, context=context, quads=arguments.quads, seed=arguments.seed
            )
        first = rows[str(CONTEXTS[0])]
        report |= {
            "overhead_pct": first["overhead_pct"],
            "overhead_interval": first["overhead_interval"],
            "bytes_per_token": first["bytes_per_token"],
            "overhead_by_context": rows,
        }
    return report | conditions()
