"""Show what this machine offers, why not more, and what to do about it.

Each line was tried just now: an operator is compiled and called, a page is write-protected and found written. States:
ok, limited (works, with less), missing. The exit code is 0 whatever is found.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Iterator

from outlast import __version__
from outlast.cli import extras, tables
from outlast.core import machine
from outlast.core.errors import OutlastError
from outlast.core.machine import Finding
from outlast.core.paths import default_log_dir

_MARKS = {"ok": "ok", "limited": "limited", "missing": "MISSING"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Output form."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Try everything and report."""
    rows = list(findings())
    if arguments.json:
        print(json.dumps({"outlast": __version__, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1))
        return 0
    print(f"outlast {__version__}")
    print(tables.columns([(row.name, _MARKS[row.state], ". ".join(filter(None, _texts(row)))) for row in rows]))
    return 0


def _texts(row: Finding) -> tuple[str, str]:
    return row.detail.rstrip("."), row.advice


def findings() -> Iterator[Finding]:
    """All rows, in the order of the table."""
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield _kernel()
    yield from machine.findings(default_log_dir())
    yield _extensions()
    yield from _backends()
    yield _model()
    yield from map(_extra, extras.extras())


def _kernel() -> Finding:
    state = "ok" if sys.platform == "linux" else "missing"
    advice = "" if state == "ok" else "outlast runs on Linux."
    return Finding("platform", "ok" if state == "ok" else "missing", platform.platform(), advice)


def _extensions() -> Finding:
    """Whether the compiled parts of this package load."""
    import importlib

    lacking = []
    for name in (f"outlast.{part}._native" for part in ("core", "checkpoint", "engines.native", "executor")):
        try:
            importlib.import_module(name)
        except ImportError as error:
            lacking.append(f"{name}: {error}")
    if lacking:
        return Finding("extensions", "missing", "; ".join(lacking), "Build them: pip install -e . (or make demo).")
    return Finding("extensions", "ok", "core, checkpoint, executor and native engine load")


def _backends() -> Iterator[Finding]:
    """Where the executor can run."""
    from outlast.executor import backends

    for row in backends.available():
        yield Finding(f"executor {row.backend}", "ok" if row.works else "missing", row.detail, row.advice)


def _model() -> Finding:
    from outlast.engines.native import models

    try:
        return Finding("model", "ok", f"builtin: {models.find('builtin')}")
    except OutlastError as error:
        return Finding("model", "missing", f"{error.what}: {error.why}", error.do)


def _extra(name: str) -> Finding:
    lacking = extras.missing(name)
    if not lacking:
        return Finding(f"extra {name}", "ok", ", ".join(extras.extras()[name]))
    return Finding(f"extra {name}", "missing", f"not installed: {', '.join(lacking)}", f"pip install 'outlast[{name}]'")
