"""Look into a log folder: its segments, epochs and regions, and the first bad record.

`inspect` shows what is there. `verify` also judges: exit code 1 if anything but a torn last epoch, which is what a
crash leaves and is harmless, is wrong. Both only read, and may be used while a server runs.
"""

from __future__ import annotations

import argparse
import json

from outlast.cli import tables
from outlast.core.errors import EXIT_DONE, EXIT_FAILED
from outlast.core.paths import default_log_dir


def configure(parser: argparse.ArgumentParser) -> None:
    """Action and folder."""
    parser.add_argument("action", choices=("inspect", "verify"))
    parser.add_argument("directory", nargs="?", metavar="DIR", help=f"log folder (default: {default_log_dir()})")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; for `verify`, the exit code is the judgement."""
    from outlast.core import log

    directory = arguments.directory or default_log_dir()
    report = log.verify(directory) if arguments.action == "verify" else log.inspect(directory)
    print(json.dumps(report, indent=1) if arguments.json else tables.facts(report))
    return EXIT_DONE if report.get("ok", True) else EXIT_FAILED
