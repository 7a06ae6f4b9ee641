"""Run a benchmark; each one runs its baseline in the same run.

`--list` names them. Every benchmark prints machine, versions, spread and ratios; --json prints one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
from types import ModuleType

import outlast.bench
from outlast.cli import tables
from outlast.core.errors import EXIT_DONE, EXIT_FAILED, UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Name, output form; what follows is the benchmark's own."""
    parser.add_argument("name", nargs="?", help="benchmark to run; `outlast bench NAME --help` shows its options")
    parser.add_argument("--list", action="store_true", help="name the benchmarks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def names() -> dict[str, str]:
    """Benchmark -> its module's first line. A benchmark is a module of `outlast.bench` with a `run` function."""
    found = {}
    for info in pkgutil.iter_modules(outlast.bench.__path__):
        module = _load(info.name)
        if hasattr(module, "run"):
            found[info.name] = (module.__doc__ or "").partition("\n")[0]
    return found


def _load(name: str) -> ModuleType:
    return importlib.import_module(f"outlast.bench.{name.replace('-', '_')}")


def run(arguments: argparse.Namespace) -> int:
    """List, or run one: `run(args) -> dict`, with `configure(parser)` for options of its own.

    A report whose `ok` is false is a failure: something that must hold did not, beside the figures.
    """
    if arguments.list or arguments.name is None:
        print(tables.columns([(name.replace("_", "-"), text) for name, text in names().items()]) or "none yet")
        return 0
    known = names()
    if arguments.name.replace("-", "_") not in known:
        listed = ", ".join(name.replace("_", "-") for name in known)
        raise UsageError(f"no benchmark {arguments.name!r}", do=f"There are: {listed or 'none yet'}.")
    module = _load(arguments.name)
    parser = argparse.ArgumentParser(prog=f"outlast bench {arguments.name}", description=module.__doc__)
    parser.add_argument("--json", action="store_true", default=arguments.json, help="print one JSON object")
    if hasattr(module, "configure"):
        module.configure(parser)
    options = parser.parse_args(arguments.rest)
    report = module.run(options)
    print(json.dumps(report, indent=1) if options.json else tables.facts(report))
    return EXIT_DONE if report.get("ok", True) else EXIT_FAILED
