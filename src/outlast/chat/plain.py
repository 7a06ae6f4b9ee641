"""The chat without a terminal: a line in, an answer out, for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from outlast.chat.client import Piece
from outlast.chat.exchange import Answer, Dropped
from outlast.chat.screen import harmless
from outlast.chat.session import Session
from outlast.core.errors import EXIT_DONE, EXIT_FAILED


def run(session: Session, lines: Iterable[bytes], out: TextIO, *, as_json: bool) -> int:
    """Answer every line that is not empty, in one conversation; the exit code. Lines are messages, never commands.

    Done if every answer came whole. An answer that fails is reported and the next line is asked; a server that is gone
    ends it.
    """
    code = EXIT_DONE
    on_terminal = out.isatty()
    for line in lines:
        text = line.decode("utf-8", "replace").strip()
        if not text:
            continue
        exchange = session.ask(text)
        try:
            while not exchange.done:
                for update in exchange.wait():
                    if isinstance(update, Piece) and not as_json:
                        out.write(harmless(update.text) if on_terminal else update.text)
                        out.flush()
                    elif isinstance(update, Dropped) and not as_json:
                        _say(f"the context is full: the {update.turns} oldest turns are forgotten")
        finally:
            exchange.stop()
            session.settle(exchange)
        answer = exchange.answer
        if as_json:
            out.write(json.dumps(record(answer)) + "\n")
        elif not answer.text.endswith("\n"):
            out.write("\n")
        out.flush()
        if answer.error is not None:
            code = EXIT_FAILED
            _say(str(answer.error))
            how = session.lost(answer.error)
            if how is not None or answer.error.code == "unreachable":
                _say(f"the server is gone{f' ({how})' if how else ''}; what follows is not asked")
                return code
    return code


def record(answer: Answer) -> dict[str, Any]:
    """One answer for programs."""
    speed, first = answer.tokens_per_second, answer.first_seconds
    return {
        "text": answer.text,
        "tokens": answer.tokens,
        "tokens_per_second": round(speed, 2) if speed is not None else None,
        "first_token_ms": round(first * 1000, 2) if first is not None else None,
        "takeovers": len(answer.takeovers),
        "takeover_ms": [round(takeover.milliseconds, 2) for takeover in answer.takeovers],
        "finish_reason": answer.finish,
        "dropped_turns": answer.dropped,
        "error": str(answer.error) if answer.error is not None else None,
    }


def _say(text: str) -> None:
    print(f"outlast: {harmless(text)}", file=sys.stderr, flush=True)
