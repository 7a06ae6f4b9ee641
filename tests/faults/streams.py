"""Streams against a server whose engine is being killed, compared with the same streams undisturbed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import serve_harness as harness


@dataclass(frozen=True)
class Wish:
    """One request, and how to ask for it again."""

    text: str
    tokens: int
    temperature: float
    seed: int
    extra: tuple[tuple[str, Any], ...] = ()

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": self.tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            **dict(self.extra),
        }


def wishes(rng: random.Random, count: int, tokens: int) -> list[Wish]:
    """Greedy and sampled, with and without penalties, prompts of mixed length."""
    kinds: list[tuple[float, tuple[tuple[str, Any], ...]]] = [
        (0.0, ()),
        (1.0, ()),
        (0.8, (("top_p", 0.9), ("presence_penalty", 0.5))),
        (1.2, (("top_k", 40), ("frequency_penalty", 0.3), ("top_logprobs", 3))),
    ]
    out = []
    for index in range(count):
        temperature, extra = kinds[index % len(kinds)]
        text = "".join(rng.choice("abcdefghij klmnop") for _ in range(rng.randrange(5, 150)))
        out.append(Wish(text, tokens - rng.randrange(tokens // 4), temperature, rng.randrange(1 << 63), extra))
    return out


def outcome(seen: harness.Seen) -> dict[str, Any]:
    """What a client got, without what differs by nature (id, time, engine number)."""
    assert seen.status == 200, seen.errors
    assert seen.terminals == 1, (seen.terminals, seen.errors)
    assert not seen.errors, seen.errors
    assert seen.after_terminal == 0
    assert seen.closed
    logprobs = [
        entry["logprob"]
        for chunk in seen.chunks
        for choice in chunk["choices"]
        if choice.get("logprobs")
        for entry in choice["logprobs"]["content"]
    ]
    usage = [chunk["usage"] for chunk in seen.chunks if chunk.get("usage")]
    assert len(usage) == 1
    assert usage[0]["completion_tokens"] == len(seen.tokens)
    del usage[0]["prompt_tokens_details"]  # what is shared depends on what ran before
    return {"tokens": seen.tokens, "text": seen.text, "finish": seen.finish, "logprobs": logprobs, "usage": usage[0]}


@dataclass
class Tally:
    """What happened over all rounds."""

    kills: int = 0
    streams: int = 0
    tokens: int = 0
    rounds: int = 0
    stopped: int = 0  #: engines that were stopped (SIGSTOP) rather than killed
    differing: list[str] = field(default_factory=list)


def run_all(server: Any, model: str, asked: list[Wish], timeout: float = 120.0) -> list[dict[str, Any]]:
    """Run requests at once; outcomes in order. An assertion of any of them is raised here."""
    out: list[Any] = [None] * len(asked)

    def one(index: int) -> None:
        try:
            out[index] = outcome(harness.stream(server, asked[index].body(model)))
        except BaseException as error:  # noqa: BLE001  handed to the main thread
            out[index] = error

    threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(len(asked))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "a stream hangs"
    for value in out:
        if isinstance(value, BaseException):
            raise value
    return out


def kill_rounds(
    server: Any,
    model: str,
    *,
    kills: int,
    streams: int,
    tokens: int,
    seed: int,
    spares: bool = False,
    stop_share: float = 0.0,
    between: tuple[float, float] = (0.02, 0.4),
) -> Tally:
    """Rounds of `streams` requests, under which the active engine is killed at random moments, `kills` times in all.

    `spares`: now and then a spare is killed as well, alone or together with the active engine. `stop_share`: so many
    of the engines are stopped instead (a hang), which the supervisor must notice.
    """
    rng = random.Random(seed)
    tally = Tally()
    while tally.kills < kills:
        asked = wishes(rng, streams, tokens)
        expected = run_all(server, model, asked)
        done = threading.Event()

        def killer(done: threading.Event = done) -> None:
            while not done.is_set() and tally.kills < kills:
                if done.wait(rng.uniform(*between)):
                    return
                victims = server.engine_pids("active")
                if spares and rng.random() < 0.3:
                    others = server.engine_pids("spare")
                    victims = rng.choice([others, victims + others])
                for pid in victims:
                    number = signal.SIGSTOP if rng.random() < stop_share else signal.SIGKILL
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:
                        continue
                    tally.kills += number == signal.SIGKILL
                    tally.stopped += number == signal.SIGSTOP

        thread = threading.Thread(target=killer, daemon=True)
        thread.start()
        try:
            got = run_all(server, model, asked)
        finally:
            done.set()
            thread.join()
        tally.rounds += 1
        tally.streams += len(got)
        tally.tokens += sum(len(row["tokens"]) for row in got)
        for index, (before, after) in enumerate(zip(expected, got, strict=True)):
            for name in before:
                if before[name] != after[name]:
                    tally.differing.append(f"round {tally.rounds}, stream {index} ({asked[index]}): {name} differs")
    return tally
