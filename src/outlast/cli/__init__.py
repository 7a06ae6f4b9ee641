"""The `outlast` command: one module per verb, whose docstring is the verb's help.

A verb's module has `configure(parser)`, which adds its arguments, and `run(arguments) -> int`, which does the work and
returns the exit code. Modules import what is heavy inside `run`, so that every verb's help is quick.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

from outlast import __version__
from outlast.core.errors import EXIT_FAILED, EXIT_USAGE, OutlastError

if TYPE_CHECKING:
    import argparse

#: verb -> module; the order is that of the help
VERBS = {
    "chat": "outlast.cli.chat",
    "serve": "outlast.cli.serve",
    "demo": "outlast.cli.demo",
    "model": "outlast.cli.model",
    "log": "outlast.cli.log",
    "doctor": "outlast.cli.doctor",
    "top": "outlast.cli.top",
    "bench": "outlast.cli.bench",
}

_INTERRUPTED = 130  # as a shell reports an end by SIGINT


class Verb(Protocol):
    """What a module of this package offers."""

    __doc__: str | None

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; returns the exit code, or raises `OutlastError`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 usage, 3 not possible on this machine.

    A usage error ends by `SystemExit(2)`, as argparse does it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in VERBS:
            return _run(words[0], words[1:])
        _overview(words)
    except OutlastError as error:
        print(f"outlast: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`outlast doctor | head`). Nothing more can be said, not even by the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return EXIT_USAGE


def _run(name: str, words: Sequence[str]) -> int:
    import argparse
    import logging

    verb = cast("Verb", importlib.import_module(VERBS[name]))
    summary, _, details = (verb.__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog=f"outlast {name}",
        description=summary,
        epilog=details.strip() or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="say on standard error what is being done")
    verb.configure(parser)
    arguments = parser.parse_args(words)
    level = logging.INFO if arguments.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    code = verb.run(arguments)
    sys.stdout.flush()  # here, where a reader that has gone is dealt with
    return code


def _overview(words: Sequence[str]) -> None:
    """`outlast`, `--help`, `--version`, or a verb that does not exist."""
    import argparse

    rows = [f"  {name:<8} {_summary(module)}" for name, module in VERBS.items()] if _wants_help(words) else []
    parser = argparse.ArgumentParser(
        prog="outlast",
        usage="outlast VERB ...",
        description="Keeps long-running LLM agents running: streams that survive a killed engine.",
        epilog="\n".join(["verbs:", *rows, "", "`outlast VERB --help` explains one."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"outlast {__version__}")
    parser.add_argument("verb", nargs="?", help=argparse.SUPPRESS)
    found = parser.parse_args(words)
    if found.verb is None:
        parser.print_help()
    else:
        parser.error(f"no verb {found.verb!r}; there are {', '.join(VERBS)}")


def _wants_help(words: Sequence[str]) -> bool:
    return not words or words[0] in ("-h", "--help")


def _summary(module: str) -> str:
    return (importlib.import_module(module).__doc__ or "").partition("\n")[0]
