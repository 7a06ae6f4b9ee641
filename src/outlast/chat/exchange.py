"""One message and its answer: asks, follows the stream, makes room in a full context, notes takeovers and times."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outlast.chat.client import ChatError, Client, End, Model, Notice, Piece, Stream
from outlast.chat.conversation import Conversation, Turn

#: Room that is kept for the answer when nobody says; in a small context a quarter of it.
ANSWER_TOKENS = 1024
_CONTEXT_SHARE = 4
_KEEP_ALIVE = "keep-alive"
#: How servers name a prompt that is too long: this one and OpenAI, llama.cpp, this one again for the body's bytes.
_TOO_LONG = ("context_length_exceeded", "exceed_context_size_error", "body_too_large")


@dataclass(frozen=True, slots=True)
class Options:
    """What goes with every message. None leaves it to the server, `max_tokens` to the context."""

    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Takeover:
    """Another engine made the next token, `milliseconds` after the last one, or after the kill that we know of."""

    milliseconds: float
    killed: bool
    at_token: int  #: tokens of the answer before it


@dataclass(slots=True)
class Answer:
    """What has come so far. Complete when `finish` is set, nothing is in `error` and nobody `stopped` it."""

    text: str = ""
    tokens: int = 0
    finish: str | None = None
    error: ChatError | None = None
    stopped: bool = False
    takeovers: list[Takeover] = field(default_factory=list)
    dropped: int = 0  #: turns that were forgotten to make room
    prompt_tokens: int | None = None
    first_seconds: float | None = None  #: from asking to the first token
    seconds: float = 0.0  #: from the first token to the last

    @property
    def whole(self) -> bool:
        """Whether it came to its own end."""
        return self.error is None and not self.stopped

    @property
    def tokens_per_second(self) -> float | None:
        """Without the first token, whose time is that of the prompt."""
        return (self.tokens - 1) / self.seconds if self.tokens > 1 and self.seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Dropped:
    """So many of the oldest turns were forgotten: the context is full."""

    turns: int


Update = Piece | Notice | Takeover | Dropped | End


class Exchange:
    """Follow with `advance` whenever `fileno` is readable, until `done`; then the turn is in the conversation."""

    def __init__(
        self,
        client: Client,
        model: Model,
        conversation: Conversation,
        text: str,
        options: Options,
        *,
        engine: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask at once. `engine`: the one that made the last answer, to notice that another makes this one."""
        self.answer = Answer()
        self.engine = engine
        self.done = False
        self._client = client
        self._model = model
        self._conversation = conversation
        self._before = list(conversation.turns)
        self._untold = 0  #: turns left out, which is final once the server takes the rest
        self._text = text
        self._options = options
        self._clock = clock
        self._asked_at = self._last_at = clock()
        self._killed_at: float | None = None
        self._disturbed = False  #: the server has said something since the last token
        self._reserve = options.max_tokens or _reserve(model.context)
        self._stream = self._open()

    def _open(self) -> Stream:
        body: dict[str, Any] = {"model": self._model.id, "messages": self._conversation.messages(self._text)}
        if self._reserve:
            body["max_tokens"] = self._reserve
        for name in ("temperature", "seed"):
            value = getattr(self._options, name)
            if value is not None:
                body[name] = value
        return self._client.stream(body)

    def fileno(self) -> int:
        """Readable when there is something to `advance` over. It may be another one after each `advance`."""
        return self._stream.fileno()

    def wait(self) -> list[Update]:
        """Block until there are updates; for callers that wait for nothing else."""
        while not (updates := self.advance()):
            select.select([self], [], [])
        return updates

    def advance(self) -> list[Update]:
        """What has happened since the last call, in order; does not wait. The last one is an `End`."""
        out: list[Update] = []
        if self.done:
            return out
        for event in self._stream.pending():
            match event:
                case Piece():
                    self._piece(event, out)
                case Notice(text):
                    if text != _KEEP_ALIVE:
                        self._disturbed = True
                        out.append(event)
                case End():
                    self._end(event, out)
        return out

    def killed(self, engine: int | None) -> None:
        """Note that `engine` was killed now: the time to the next token counts from here."""
        self._killed_at = self._clock()
        if self.engine is None:  # it has given nothing yet
            self.engine = engine

    def stop(self) -> None:
        """Hang up; what has come stays in the conversation. Nothing if it is over."""
        if not self.done:
            self.answer.stopped = True
            self._finish()

    # ---

    def _piece(self, piece: Piece, out: list[Update]) -> None:
        now = self._clock()
        answer = self.answer
        other = piece.engine is not None and self.engine is not None and piece.engine != self.engine
        # Before the first token another engine may as well mean that one died while nobody asked for anything.
        if other and (answer.tokens or self._disturbed or self._killed_at is not None):
            since = self._killed_at if self._killed_at is not None else self._last_at
            takeover = Takeover((now - since) * 1000, self._killed_at is not None, answer.tokens)
            answer.takeovers.append(takeover)
            out.append(takeover)
            self._killed_at = None
        if piece.engine is not None:
            self.engine = piece.engine
        if answer.first_seconds is None:
            answer.first_seconds = now - self._asked_at
        else:
            answer.seconds += now - self._last_at
        self._last_at = now
        self._disturbed = False
        answer.tokens += piece.tokens
        answer.text += piece.text
        self._tell_dropped(out)
        out.append(piece)

    def _end(self, end: End, out: list[Update]) -> None:
        if end.error is not None and not self.answer.tokens and _too_long(end.error) and self._make_room():
            return
        if end.error is None:
            self._tell_dropped(out)
        self.answer.finish = end.finish
        self.answer.error = end.error
        self.answer.prompt_tokens = end.prompt_tokens
        if end.completion_tokens is not None:
            self.answer.tokens = end.completion_tokens
        self._finish()
        out.append(end)

    def _tell_dropped(self, out: list[Update]) -> None:
        if self._untold:
            self.answer.dropped, self._untold = self._untold, 0
            out.append(Dropped(self.answer.dropped))

    def _make_room(self) -> bool:
        """Ask again with less; False if there is nothing to leave out."""
        dropped = self._conversation.drop_oldest()
        if dropped:
            self._untold += dropped
        elif self._reserve and self._options.max_tokens is None:
            self._reserve = 0  # the server gives what is left
        else:
            return False
        self._stream.close()
        self._stream = self._open()
        return True

    def _finish(self) -> None:
        self._stream.close()
        self.done = True
        answer = self.answer
        if answer.whole or answer.text:
            self._conversation.add(Turn(self._text, answer.text, answer.whole))
        else:  # nothing was said, so nothing need be forgotten
            self._conversation.turns[:] = self._before


def _reserve(context: int | None) -> int:
    return ANSWER_TOKENS if context is None else max(1, min(ANSWER_TOKENS, context // _CONTEXT_SHARE))


def _too_long(error: ChatError) -> bool:
    if error.status not in (400, 413):
        return False
    return error.code in _TOO_LONG or "context length" in error.what.lower()
