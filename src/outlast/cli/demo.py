"""Kill the engine under running streams and show that they go on.

Starts the server with the built-in model, opens streams with the `openai` client, kills the engine with SIGKILL at
random tokens, and compares every stream with an uninterrupted run. The exit code is 0 only if all are identical.
"""

from __future__ import annotations

import argparse
import importlib
import json

from outlast.cli.extras import require


def configure(parser: argparse.ArgumentParser) -> None:
    """How much of it."""
    parser.add_argument("--kills", type=int, default=3, metavar="N", help="times the engine is killed (default: 3)")
    parser.add_argument("--streams", type=int, default=4, metavar="N", help="streams at once (default: 4)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens per stream (default: 64)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and kills (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the live view")


def run(arguments: argparse.Namespace) -> int:
    """Run it; the report is a mapping with at least `identical` and `contradicted`."""
    require("demo")
    report = importlib.import_module("outlast.bench.demo").run(arguments)
    if arguments.json:
        print(json.dumps(report, indent=1))
    return 0 if report["identical"] and report["contradicted"] == 0 else 1
