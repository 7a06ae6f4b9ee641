"""One chat: its server, its model, its conversation, and the figures of its answers."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from outlast.chat.client import OWN_SILENCE_SECONDS, ChatError, Client, Model
from outlast.chat.conversation import Conversation
from outlast.chat.exchange import Answer, Exchange, Options, Takeover
from outlast.chat.kill import Victim, kill_engine
from outlast.chat.own_server import OwnServer
from outlast.core.errors import UsageError
from outlast.serve.settings import Settings

#: After a connection has broken, a server that has ended has so long to be seen as ended.
_END_SECONDS = 1.0


class Session:
    """`open` it, then `ask`; a context manager that ends its own server."""

    def __init__(
        self,
        options: Options,
        *,
        system: str | None = None,
        url: str | None = None,
        model: str | None = None,
        key: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        """With `url` a server that runs already, which may ask for a `key`; `model` chooses among its models.

        Without it a server of the chat's own, for `settings`.
        """
        self.options = options
        self.conversation = Conversation(system)
        self.answers = 0
        self.tokens = 0
        self.takeovers: list[Takeover] = []
        self.last: Answer | None = None
        self._url = url
        self._key = key
        self._wanted = model
        self._settings = settings or Settings(port=0)
        self._own: OwnServer | None = None
        self._engine: int | None = None
        self._client: Client | None = None
        self._model: Model | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Start the server, or find the running one, and its model. Raises OutlastError."""
        if self._url is None:
            self._own = OwnServer(self._settings)
            self._engine = None
            self._client = Client(self._own.url, silence=OWN_SILENCE_SECONDS)
        else:
            self._client = Client(self._url, key=self._key)
        self._model = self._choose(self._client.models())

    def _choose(self, models: list[Model]) -> Model:
        for model in models:
            if self._wanted in (None, model.id):
                return model
        names = ", ".join(model.id for model in models)
        raise UsageError(f"the server has no model {self._wanted!r}", do=f"It has: {names}.")

    @property
    def client(self) -> Client:
        """Of the server, once it is open."""
        assert self._client is not None
        return self._client

    @property
    def model(self) -> Model:
        """That answers, once it is open."""
        assert self._model is not None
        return self._model

    @property
    def server(self) -> str:
        """Where it is, for people."""
        return f"{self.client.url} ({'started by this chat' if self._own else 'running before'})"

    def ask(self, text: str) -> Exchange:
        """Send a message; the conversation goes along. `settle` when it is done."""
        return Exchange(self.client, self.model, self.conversation, text, self.options, engine=self._engine)

    def settle(self, exchange: Exchange) -> None:
        """Count what has come."""
        answer = exchange.answer
        self._engine = exchange.engine
        if answer.whole or answer.tokens:
            self.last = answer
            self.answers += 1
            self.tokens += answer.tokens
            self.takeovers += answer.takeovers

    def kill_engine(self) -> Victim:
        """See `kill.kill_engine`."""
        return kill_engine(self.client)

    def lost(self, error: ChatError | None = None) -> str | None:
        """How our own server ended, if it has; after a broken connection it is given a moment to be seen as ended."""
        if self._own is None:
            return None
        deadline = time.monotonic() + (_END_SECONDS if error and error.code in ("unreachable", "truncated") else 0)
        while self._own.running:
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.01)
        return self._own.obituary()

    def restart(self) -> None:
        """Start a server in the place of one that has ended; the conversation goes on. Raises OutlastError."""
        self.close()
        self.open()

    def close(self) -> None:
        """End our own server, if there is one."""
        if self._own is not None:
            self._own.close()
            self._own = None

    def stats(self) -> dict[str, str]:
        """What `/stats` shows; asks the server for its engines."""
        rows = {"server": self.server, "model": self.model.id}
        turns = len(self.conversation.turns)
        held = f"{turns} {'turn' if turns == 1 else 'turns'}"
        if self.last is not None and self.last.prompt_tokens is not None and turns:
            size = f" of {self.model.context}" if self.model.context else ""
            held += f", {self.last.prompt_tokens + self.last.tokens}{size} tokens of context"
        rows["conversation"] = held
        rows["answers"] = f"{self.answers}, {self.tokens} tokens"
        if self.last is not None:
            rows["last answer"] = describe(self.last)
        times = ", ".join(f"{takeover.milliseconds:.0f} ms" for takeover in self.takeovers)
        rows["takeovers"] = f"{len(self.takeovers)} in answers" + (f" ({times})" if times else "")
        with contextlib.suppress(ChatError):
            rows.update(_engines(self.client.health()))
        return rows


def _engines(health: dict[str, Any]) -> dict[str, str]:
    engines = health.get("engines")
    if not isinstance(engines, list):
        return {}
    shown = [f"{row.get('role')} (pid {row.get('pid')})" for row in engines if isinstance(row, dict)]
    return {"engines": ", ".join(shown) or "none"}


def describe(answer: Answer) -> str:
    """An answer's figures in one line."""
    parts = [f"{answer.tokens} {'token' if answer.tokens == 1 else 'tokens'}"]
    if answer.tokens_per_second is not None:
        parts.append(f"{answer.tokens_per_second:.0f} tok/s")
    if answer.first_seconds is not None:
        parts.append(f"first after {answer.first_seconds * 1000:.0f} ms")
    if answer.takeovers:
        count = len(answer.takeovers)
        parts.append(f"{count} {'takeover' if count == 1 else 'takeovers'}")
    return ", ".join(parts)
