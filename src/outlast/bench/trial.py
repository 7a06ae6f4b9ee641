"""A trial: one server, an uninterrupted round of streams, and rounds of the same streams with kills."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Protocol

from outlast.bench.prompts import conversation
from outlast.bench.report import say
from outlast.bench.rounds import Kill, Request, Round, Watcher
from outlast.bench.transcripts import Transcript, Verdict, judge
from outlast.core.errors import OutlastError
from outlast.engines.native import models
from outlast.engines.native.gguf import Gguf
from outlast.engines.native.tokenizer import Tokenizer
from outlast.serve.settings import Settings
from outlast.serve.subprocess_server import SubprocessServer

#: Rounds in a row without a kill after which no more are tried: the streams are too short for a spare to get ready.
_IDLE_ROUNDS = 5
#: Every second stream is sampled, at a temperature where tokens differ from the greedy ones.
_TEMPERATURE = 0.9
#: Prompts end at a sentence, and the pool is handed out in blocks: room beyond context and tokens.
_SLACK_TOKENS = 192
_LEAST_POOL_TOKENS = 8192
_MESSAGES_SHOWN = 16 << 10  #: bytes of the server's last messages that are shown when something went wrong


class Stage(Watcher, Protocol):
    """A watcher that is told of rounds as well."""

    def begin(self, title: str, requests: Sequence[Request]) -> None:
        """A round begins."""


@dataclass(slots=True)
class Trial:
    """What happened."""

    references: list[Transcript] = field(default_factory=list)
    rounds: list[list[Transcript]] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)

    @property
    def recoveries(self) -> list[float]:
        """Milliseconds from each kill to the next token of each stream that was live."""
        return [ms for kill in self.kills for ms in kill.milliseconds.values()]

    @property
    def tokens(self) -> int:
        """Tokens received in rounds with kills."""
        return sum(len(one.tokens) for streams in self.rounds for one in streams)

    def verdict(self, references: Sequence[Transcript] | None = None) -> Verdict:
        """Compare with this trial's own reference round, or with another's."""
        return judge(references or self.references, self.rounds)


def requests_for(model: str, streams: int, *, context: int, tokens: int, seed: int) -> list[Request]:
    """Prompts of about `context` tokens, each with text of its own; greedy and sampled in turn."""
    with Gguf(models.find(model)) as gguf:
        tokenizer = Tokenizer(gguf)
    return [
        Request(
            conversation(seed * 1009 + index, context, tokenizer), tokens, _TEMPERATURE if index % 2 else 0.0,
            seed * 7919 + index,
        )
        for index in range(streams)
    ]  # fmt: skip


def settings_for(model: str, streams: int, *, context: int, tokens: int) -> Settings:
    """A server on a free loopback port that holds all streams at once; on interrupt it does not wait for them."""
    pool = max(_LEAST_POOL_TOKENS, streams * (context + tokens + _SLACK_TOKENS))
    return Settings(model=model, port=0, drain=1.0, kv_tokens=pool)


def run_trial(
    settings: Settings,
    requests: Sequence[Request],
    *,
    kills: int,
    seed: int,
    stage: Stage,
    title: str,
    reference: bool = True,
) -> Trial:
    """Start the server, run, end the server. Rounds are repeated until `kills` kills were made.

    Raises `OutlastError` if the streams end before a kill is possible, again and again.
    """
    trial = Trial()
    with tempfile.TemporaryFile() as messages:
        try:
            # The server ends with the thread that started it: this one.
            with SubprocessServer(settings, stderr=messages.fileno()) as server:
                asyncio.run(
                    _trial(server, settings, requests, kills, random.Random(seed), stage, title, reference, trial)
                )
            if not trial.verdict(trial.references or trial.rounds[0]).identical:
                _show(messages)
        except Exception:
            _show(messages)
            raise
    return trial


def _show(messages: IO[bytes]) -> None:
    """Takeovers are announced on the server's standard error; they matter only when something is wrong."""
    messages.seek(max(0, messages.seek(0, 2) - _MESSAGES_SHOWN))
    say("the server's messages:\n" + messages.read().decode(errors="replace"))


async def _trial(
    server: SubprocessServer,
    settings: Settings,
    requests: Sequence[Request],
    kills: int,
    rng: random.Random,
    stage: Stage,
    title: str,
    reference: bool,
    trial: Trial,
) -> None:
    import openai

    async with openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=openai.Timeout(600.0)
    ) as client:
        model = (await client.models.list()).data[0].id

        def new_round(left: int) -> Round:
            return Round(server, client, model, requests, kills=left, rng=rng, spare=settings.spares > 0, watcher=stage)

        if reference:
            stage.begin(f"{title}: uninterrupted", requests)
            quiet = new_round(0)
            await quiet.run()
            trial.references = quiet.transcripts
        idle = 0
        while len(trial.kills) < kills:
            stage.begin(f"{title}: with kills", requests)
            one = new_round(kills - len(trial.kills))
            await one.run()
            await one.account()
            trial.rounds.append(one.transcripts)
            trial.kills += one.kills
            idle = 0 if one.kills else idle + 1
            if idle == _IDLE_ROUNDS:
                raise OutlastError(
                    f"no kill in {idle} rounds", why="the streams end before another engine is ready",
                    do="Ask for more --tokens.",
                )  # fmt: skip
