"""A round: several streams through the `openai` client while the engine under them is killed, timed at the client.

The engine is killed by its pid, as /health names it, and only if the kernel says that the server is its parent. The
time of a recovery runs from just before kill(2) to the first token that another engine made, as the client gets it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from outlast.bench.report import significant
from outlast.bench.transcripts import Received, Transcript
from outlast.core.errors import OutlastError

if TYPE_CHECKING:
    import openai

#: Waiting for a spare costs the streams nothing, but each look at /health costs the machine a request.
_LOOK_SECONDS = 0.05
#: Silence on every stream after which a round is given up. A prefill of several contexts is silent for long.
_STALL_SECONDS = 300.0
#: A kill is planned at least so many tokens before a stream's end: it shall have something to go on with.
_TAIL_TOKENS = 4


class ServerProcess(Protocol):
    """What a round needs of a server in a process of its own."""

    url: str
    pid: int

    def health(self) -> dict[str, Any]:
        """As /health."""


@dataclass(frozen=True, slots=True)
class Request:
    """One stream to open."""

    messages: list[dict[str, str]]
    tokens: int  #: to generate, whatever the model thinks of it
    temperature: float  #: 0 = greedy
    seed: int

    def body(self, model: str) -> dict[str, Any]:
        """Arguments of `chat.completions.create`."""
        return {
            "model": model, "messages": self.messages, "max_completion_tokens": self.tokens, "seed": self.seed,
            "temperature": self.temperature, "top_p": 0.95 if self.temperature else 1.0,
            "stream": True, "stream_options": {"include_usage": True}, "logprobs": True,
            "extra_body": {"ignore_eos": True},
        }  # fmt: skip


@dataclass(slots=True)
class Kill:
    """One SIGKILL to the active engine."""

    at: float  #: monotonic seconds, just before kill(2)
    wall: float  #: the same in seconds since 1970
    pid: int
    engine: int  #: writer epoch of the victim
    stream: int  #: the stream whose token count gave the moment
    tokens: dict[int, int]  #: tokens that each live stream had got by then
    milliseconds: dict[int, float] = field(default_factory=dict)  #: by stream, until its next token
    server: dict[str, Any] = field(default_factory=dict)  #: the server's own account of the takeover

    @property
    def missing(self) -> set[int]:
        """Streams that were live at the kill and have not gone on."""
        return self.tokens.keys() - self.milliseconds.keys()


class Watcher(Protocol):
    """Who is told of what happens in a round."""

    def token(self, stream: int, count: int) -> None:
        """A stream has `count` tokens."""

    def killed(self, kill: Kill) -> None:
        """The engine was just killed."""

    def recovered(self, kill: Kill) -> None:
        """Every stream that was live at the kill has gone on, or has ended."""


class Round:
    """Runs once. `kills` is the most it will do; streams may end before."""

    def __init__(
        self,
        server: ServerProcess,
        client: openai.AsyncOpenAI,
        model: str,
        requests: Sequence[Request],
        *,
        kills: int = 0,
        rng: random.Random | None = None,
        spare: bool = True,
        watcher: Watcher | None = None,
    ) -> None:
        """`spare`: kill only while a loaded spare waits."""
        self.transcripts = [Transcript() for _ in requests]
        self.kills: list[Kill] = []
        self._server = server
        self._client = client
        self._model = model
        self._requests = list(requests)
        self._wanted = kills
        self._rng = rng or random.Random(0)
        self._spare = spare
        self._watcher = watcher
        self._news = asyncio.Event()
        self._ended = [False] * len(requests)

    async def run(self) -> None:
        """Until every stream has ended and every kill was answered. Raises `OutlastError` if all fall silent."""
        streams = [asyncio.ensure_future(self._stream(i)) for i in range(len(self._requests))]
        killer = asyncio.ensure_future(self._killer())
        try:
            waiting: set[asyncio.Future[None]] = {*streams, killer}
            while waiting:
                before = self._progress()
                done, waiting = await asyncio.wait(waiting, timeout=_STALL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if not done and self._progress() == before:
                    raise OutlastError(
                        f"no stream got a token for {_STALL_SECONDS:g} s", why=f"tokens so far: {before}",
                        do="See the server's messages above.",
                    )  # fmt: skip
        finally:
            for task in (*streams, killer):
                task.cancel()
            await asyncio.gather(*streams, killer, return_exceptions=True)

    def _progress(self) -> list[int]:
        return [len(transcript.tokens) for transcript in self.transcripts]

    # --- streams

    async def _stream(self, index: int) -> None:
        import openai

        transcript = self.transcripts[index]
        try:
            answer = await self._client.chat.completions.create(**self._requests[index].body(self._model))
            async with answer:
                async for chunk in answer:
                    self._chunk(index, transcript, chunk, time.monotonic())
        except (openai.APIError, OSError) as error:
            transcript.error = f"{type(error).__name__}: {error}"
        self._ended[index] = True
        for kill in self.kills:  # what a stream does not get after its end is no recovery
            if index in kill.missing:
                del kill.tokens[index]
        self._news.set()

    def _chunk(self, index: int, transcript: Transcript, chunk: Any, now: float) -> None:
        if chunk.usage is not None:
            transcript.counted = chunk.usage.completion_tokens
        for choice in chunk.choices:
            transcript.finish = choice.finish_reason or transcript.finish
            ours = (chunk.model_extra or {}).get("outlast")
            if ours is None:
                continue
            entries = choice.logprobs.content if choice.logprobs and choice.logprobs.content else []
            last = len(ours["token_ids"]) - 1
            for at, token in enumerate(ours["token_ids"]):
                text = (choice.delta.content or "") if at == last else ""
                logprob = entries[at].logprob if at < len(entries) else float("nan")
                transcript.tokens.append(Received(token, text, logprob, ours["engine"], now))
            self._token(index, ours["engine"], now)

    def _token(self, index: int, engine: int, now: float) -> None:
        for kill in self.kills:
            if index in kill.missing and engine > kill.engine:
                kill.milliseconds[index] = (now - kill.at) * 1000
        self._news.set()
        if self._watcher is not None:
            self._watcher.token(index, len(self.transcripts[index].tokens))

    # --- kills

    async def _killer(self) -> None:
        while len(self.kills) < self._wanted:
            target = await self._target()
            if target is None:
                return
            kill = self._kill(*target)
            if kill is None:
                continue
            if self._watcher is not None:
                self._watcher.killed(kill)
            await self._until(lambda kill=kill: not kill.missing)
            if self._watcher is not None:
                self._watcher.recovered(kill)

    def _live(self) -> list[int]:
        return [i for i, ended in enumerate(self._ended) if not ended]

    def _left(self, index: int) -> int:
        return self._requests[index].tokens - len(self.transcripts[index].tokens) - _TAIL_TOKENS

    async def _until(self, condition: Any) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    async def _target(self) -> tuple[int, int, int] | None:
        """Wait for the next random moment: (victim's pid, its writer epoch, the stream); None once there is none."""
        while True:
            await self._until(lambda: all(self.transcripts[i].tokens for i in self._live()))
            health = await asyncio.to_thread(self._server.health)
            self._note_takeovers(health)
            able = [i for i in self._live() if self._left(i) > 0]
            if not able:
                return None
            active = [one for one in health["engines"] if one["role"] == "active"]
            ready = any(one["role"] == "spare" for one in health["engines"]) or not self._spare
            if not active or not ready:
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            stream = self._rng.choice(able)
            have = len(self.transcripts[stream].tokens)
            goal = have + self._rng.randint(1, max(1, self._left(stream) // (self._wanted - len(self.kills))))
            await self._until(
                lambda stream=stream, goal=goal: self._ended[stream] or len(self.transcripts[stream].tokens) >= goal
            )
            if self._ended[stream]:
                continue
            # Not at the moment a token arrives, but anywhere in the step after it.
            await asyncio.sleep(self._rng.random() * self._step_seconds(stream))
            if self._left(stream) > -_TAIL_TOKENS and not self._ended[stream]:
                return active[0]["pid"], active[0]["writer_epoch"], stream

    def _step_seconds(self, stream: int) -> float:
        tokens = self.transcripts[stream].tokens[-2:]
        return max(0.0, tokens[-1].at - tokens[0].at)

    def _kill(self, pid: int, engine: int, stream: int) -> Kill | None:
        """None if the process is no engine of this server any more, whatever ended it."""
        if parent_of(pid) != self._server.pid:
            return None
        tokens = {i: len(self.transcripts[i].tokens) for i in self._live()}
        kill = Kill(time.monotonic(), time.time(), pid, engine, stream, tokens)
        os.kill(pid, signal.SIGKILL)
        self.kills.append(kill)
        return kill

    def _note_takeovers(self, health: dict[str, Any]) -> None:
        for kill in self.kills:
            for takeover in health["takeovers"]:
                if takeover["victim"] == kill.pid:
                    kill.server = takeover

    async def account(self) -> None:
        """Fetch what the server says of the last takeovers."""
        self._note_takeovers(await asyncio.to_thread(self._server.health))


def parent_of(pid: int) -> int:
    """Parent of a process; 0 if there is no such process."""
    try:
        # The name in parentheses may hold anything, so count from its end: state, then parent.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def phases(kill: Kill) -> dict[str, float]:
    """Where the time of one recovery went, in milliseconds, from the server's account; {} if it has none.

    detection: kill(2) to the supervisor's reaping the process; fence: to the raised writer epoch; scan, apply and
    requests: inside the new engine; handover: messages on both ways; first_step: from "recovered" to the first token at
    the supervisor; delivery: from there to the client. Wall clock of one machine on both sides.
    """
    times = kill.server.get("milliseconds", {})
    if not kill.milliseconds or "first_token" not in times or "recovered" not in times:
        return {}
    engine = {name: times.get(f"engine_{name}", 0.0) for name in ("scan", "apply", "requests")}
    detection = (kill.server["at"] - kill.wall) * 1000
    return {
        "detection": detection,
        "fence": times["fenced"],
        **engine,
        "handover": times["recovered"] - times["fenced"] - sum(engine.values()),
        "first_step": times["first_token"] - times["recovered"],
        "delivery": min(kill.milliseconds.values()) - detection - times["first_token"],
    }


def breakdown(kills: list[Kill]) -> dict[str, float]:
    """Medians of the phases (see `phases`) over kills; they need not add up to the median of the sum."""
    found = [phase for phase in map(phases, kills) if phase]
    names = found[0] if found else {}
    return {name: significant(statistics.median(one[name] for one in found), 4) for name in names}
