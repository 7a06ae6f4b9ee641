"""From an engine's tokens to what a client is shown: text, stop strings, log probabilities, one end per request."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from outlast.engines.protocol import Emission, EngineRequest, FinishReason
from outlast.serve.errors import ApiError, request_failed
from outlast.serve.jobs import Job
from outlast.serve.supervisor import Listener
from outlast.serve.text import StopStrings, Tokenizer

log = logging.getLogger("outlast.serve")


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token adds to one choice. `text` may be empty: a character or stop string may still be open."""

    choice: int
    text: str
    offset: int  #: characters of the choice shown before `text`
    emission: Emission
    writer_epoch: int
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a waiting client may be told between tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The terminal event: every choice has finished (`error` None), or the request has ended with an error."""

    error: ApiError | None


Event = Delta | Notice | Done


class Engines(Protocol):
    """What a generation needs of the supervisor."""

    def accept(self, request: EngineRequest, listener: Listener) -> None:
        """Raises ApiError if there is no room."""

    def cancel(self, key: int, end: str = ...) -> None:
        """Idempotent."""


def _first_key() -> int:
    """Keys must be new for the life of a log, which may outlive the server: count from the time, 2^20 per ms."""
    return (time.time_ns() // 1_000_000) << 20


_keys = itertools.count(_first_key())


class Choice:
    """One sequence: listens to the supervisor and turns its tokens into text."""

    def __init__(self, generation: Generation, index: int, tokenizer: Tokenizer) -> None:
        self.index = index
        self.key = next(_keys)
        self.tokens = 0
        self.cached = 0  #: tokens of its prompt that need not be computed
        self.finish: FinishReason | None = None
        self._generation = generation
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopStrings(generation.job.stops)
        self._stop_tokens = generation.job.stop_tokens
        self._shown = 0  #: characters

    def token(self, emission: Emission, writer_epoch: int) -> None:
        """See supervisor.Listener. Whatever goes wrong in here ends this request, and only it."""
        try:
            text, matched = self._text_of(emission)
        except Exception as error:  # a tokenizer may fail in its own ways; the stream must still end
            log.exception("request %s: token %d could not be turned into text", self._generation.id, emission.token)
            self._generation.fail(request_failed(f"token {emission.token} could not be turned into text ({error})"))
            return
        self.tokens += 1
        self.cached += emission.cached
        if matched:
            self.finish = "stop"
            if emission.finish is None:
                self._generation.engines.cancel(self.key, "stop")
        else:
            self.finish = emission.finish
        delta = Delta(self.index, text, self._shown, emission, writer_epoch, self.finish)
        self._shown += len(text)
        self._generation.progress(delta)

    def _text_of(self, emission: Emission) -> tuple[str, bool]:
        ends_here = emission.finish == "stop" and emission.token in self._stop_tokens
        text = "" if ends_here else self._detokenizer.push(emission.token)
        if emission.finish is not None:
            text += self._detokenizer.flush()
        shown, matched = self._stops.push(text)
        if emission.finish is not None and not matched:
            shown += self._stops.flush()
        return shown, matched

    def failed(self, error: ApiError) -> None:
        """See supervisor.Listener."""
        self._generation.fail(error)

    def interrupted(self) -> None:
        """See supervisor.Listener."""
        self._generation.notice("the engine is gone, another takes over")

    def resumed(self) -> None:
        """See supervisor.Listener."""
        self._generation.notice("the engine is back")


class Generation:
    """All sequences of one HTTP request. Its events end with exactly one Done, whatever happens."""

    def __init__(self, job: Job, tokenizer: Tokenizer, engines: Engines, request_id: str) -> None:
        """Hand every sequence to the engines; all or none. Raises ApiError if there is no room."""
        self.job = job
        self.id = request_id
        self.engines = engines
        self._events: deque[Event] = deque()  # bounded by max_tokens x choices
        self._wake = asyncio.Event()
        self._ended = False
        self.choices = [Choice(self, i, tokenizer) for i in range(job.choices)]
        try:
            for choice in self.choices:
                engines.accept(job.engine_request(choice.index, choice.key), choice)
        except BaseException:
            self.cancel()
            raise

    @property
    def completion_tokens(self) -> int:
        """As usage counts them: up to the token that ended each choice, end-of-answer tokens included."""
        return sum(choice.tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """As usage counts them: of each prompt once."""
        return sum(choice.cached for choice in self.choices[:: self.job.n])

    def progress(self, delta: Delta) -> None:
        """A choice got a token."""
        self._put(delta)
        if all(choice.finish is not None for choice in self.choices):
            self._end(None)

    def notice(self, text: str) -> None:
        """Tell a waiting client something; repeated notices of several choices are told once."""
        if not self._events or self._events[-1] != Notice(text):
            self._put(Notice(text))

    def fail(self, error: ApiError) -> None:
        """End the request with an error; its other choices are cancelled."""
        self._end(error)
        self.cancel()

    def cancel(self) -> None:
        """The client is gone, or nothing more is wanted. Frees the work in whatever phase it is; idempotent."""
        for choice in self.choices:
            self.engines.cancel(choice.key)
        self._end(request_failed("it was cancelled"))

    async def next(self, seconds: float | None = None) -> Event | None:
        """The next event; None if none came in time. After Done there is none to wait for."""
        if not self._events:
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), seconds)
            except TimeoutError:
                return None
        return self._events.popleft()

    def _put(self, event: Event) -> None:
        if not self._ended:
            self._events.append(event)
            self._wake.set()

    def _end(self, error: ApiError | None) -> None:
        self._put(Done(error))
        self._ended = True
