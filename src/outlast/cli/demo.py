"""Kill the engine under running streams and show that they go on.

Starts the server with the built-in model, opens streams with the `openai` client, kills the engine with SIGKILL at
random tokens, and compares every stream with an uninterrupted run. The exit code is 0 only if all are identical.
"""

from __future__ import annotations

import argparse
import json

from outlast.cli.extras import require
from outlast.core.errors import EXIT_DONE, EXIT_FAILED


def configure(parser: argparse.ArgumentParser) -> None:
    """How much of it, and how it is told."""
    from outlast.bench import demo  # not above: it loads an engine, which the list of all verbs does not need

    demo.configure(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the live view")


def run(arguments: argparse.Namespace) -> int:
    """Run it. Done only if every stream equals its uninterrupted run and nothing that was sent is contradicted."""
    require("demo")
    if arguments.engine == "transformers":
        require("hf")
    from outlast.bench import demo

    report = demo.run(arguments)
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        demo.show(report)
    return EXIT_DONE if report["identical"] and report["contradicted"] == 0 else EXIT_FAILED
