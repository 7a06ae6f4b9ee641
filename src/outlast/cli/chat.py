"""Chat with a model in the terminal; the answer goes on when the engine dies.

Starts a server of its own on a free loopback port and ends it afterwards, or talks to a running one (--url). /help in
the chat lists its commands; /kill kills the engine in the middle of an answer, to see it go on. When standard input is
no terminal, each of its lines is a message and the answers are printed plainly.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING

from outlast.core.errors import EXIT_DONE, NotPossibleHere, UsageError

if TYPE_CHECKING:
    from outlast.chat.keyboard import LineEditor
    from outlast.chat.screen import Screen
    from outlast.chat.session import Session

#: Small models wander at the API's default of 1.
TEMPERATURE = 0.5


def configure(parser: argparse.ArgumentParser) -> None:
    """What to talk to, and how."""
    parser.add_argument(
        "--model", metavar="NAME|PATH", help="a name of `outlast model list`, or a GGUF file (default: builtin); "
        "with --url one of the server's models",
    )  # fmt: skip
    parser.add_argument("--url", help="talk to a running server, for example http://127.0.0.1:8321")
    parser.add_argument(
        "--key-env", metavar="NAME", help="the environment variable that holds the key of the server at --url"
    )
    parser.add_argument("--fast", action="store_true", help="plain int8 activations: quicker, a little less exact")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of the engine; 0 lets it decide")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--temperature", type=float, default=TEMPERATURE, metavar="T",
        help=f"0: always the likeliest token (default: {TEMPERATURE})",
    )  # fmt: skip
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of an answer (default: 1024, and what fits)")
    parser.add_argument("--seed", type=int, metavar="N", help="the same answers each time")
    parser.add_argument("--no-history", action="store_true", help="keep no file of what was typed")
    parser.add_argument("--json", action="store_true", help="one JSON object per answer; lines in, also at a terminal")


def run(arguments: argparse.Namespace) -> int:
    """Until the person leaves or the input ends."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty() and not arguments.json
    session = _session(arguments)
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a character that the locale lacks is no end
    if arguments.url is None:
        _prepare(arguments.model or "builtin", interactive)
    with session:
        return _interactive(session, keep=not arguments.no_history) if interactive else _lines(session, arguments.json)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # through every `finally`: the terminal is set right, the server ended


def _session(arguments: argparse.Namespace) -> Session:
    from outlast.chat.exchange import Options
    from outlast.chat.own_server import settings_for
    from outlast.chat.session import Session

    if not 0 <= arguments.temperature <= 2:
        raise UsageError(f"--temperature {arguments.temperature:g}", why="it must be between 0 and 2")
    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise UsageError(f"--max-tokens {arguments.max_tokens}", why="it must be at least 1")
    if arguments.seed is not None and not -(1 << 63) <= arguments.seed < 1 << 64:
        raise UsageError(f"--seed {arguments.seed}", why="it must fit in 64 bits")
    options = Options(arguments.temperature, arguments.max_tokens, arguments.seed)
    if arguments.url is not None:
        if arguments.fast or arguments.threads:
            raise UsageError(
                "--fast and --threads have no meaning with --url", why="they are set where the server is started"
            )
        key = _key(arguments.key_env)
        return Session(options, system=arguments.system, url=arguments.url, model=arguments.model, key=key)
    if arguments.key_env is not None:
        raise UsageError("--key-env has no meaning without --url", why="a server of the chat's own asks for no key")
    settings = settings_for(arguments.model or "builtin", fast=arguments.fast, threads=arguments.threads)
    return Session(options, system=arguments.system, settings=settings)


def _key(name: str | None) -> str | None:
    """From the environment: an argument could be read by every user of the machine."""
    if name is None:
        return None
    try:
        return os.environ[name]
    except KeyError:
        why = f"there is no environment variable {name}"
        raise UsageError("no key for the server", why=why, do="--key-env takes the variable's name.") from None


def _prepare(model: str, interactive: bool) -> None:
    """See that a server can be started here; a known model that is not here yet is fetched if the person agrees."""
    from outlast.cli.extras import require
    from outlast.engines.native import models

    require("serve")
    try:
        models.find(model)
    except NotPossibleHere as error:
        known = models.MODELS[model]
        if not interactive:
            raise
        print(f"The model {known.title} ({known.size / 1e6:.0f} MB, {known.licence}) is not on this machine yet.")
        try:
            agreed = input("Fetch it now? [Y/n] ").strip().lower() in ("", "y", "yes")
        except EOFError:
            agreed = False
        if not agreed:
            raise error from None
        models.fetch(model, progress=print)


def _interactive(session: Session, *, keep: bool) -> int:
    from outlast.chat.screen import Screen
    from outlast.chat.terminal import HELP, Terminal

    screen = Screen()
    with screen.waiting("starting the server"):
        session.open()
    Terminal(session, screen, _editor(screen, keep, [name.split()[0] for name in HELP])).run()
    return EXIT_DONE


def _editor(screen: Screen, keep: bool, commands: list[str]) -> LineEditor:
    from outlast.chat.history import History, default_file
    from outlast.chat.keyboard import LineEditor

    history = None
    if keep:
        try:
            history = History(default_file())
        except OSError as error:
            screen.note(f"what you type is not kept: {error}")
    return LineEditor(history, commands)


def _lines(session: Session, as_json: bool) -> int:
    from outlast.chat import plain

    session.open()
    return plain.run(session, sys.stdin.buffer, sys.stdout, as_json=as_json)
