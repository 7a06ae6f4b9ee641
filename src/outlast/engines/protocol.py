"""The contract between a serving process and an engine: what an engine must do, and when its promises hold.

An engine lives in one worker process and is driven by one thread. It is told of requests by number, works on
token ids only, and reports tokens after the epoch that explains them is committed. It never sees text, sockets
or clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens of one request are chosen. Defaults mean "off"; ranges are those of the OpenAI API.

    The random number of a token is a function of (`seed`, `stream`, position) alone (Philox 4x32-10, Salmon et al.,
    SC'11), so neither neighbours nor restarts change it.
    """

    temperature: float = 1.0  #: 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  #: 0 = all
    min_p: float = 0.0
    seed: int = 0  #: unsigned 64 bit
    stream: int = 0  #: index of the choice (`n` > 1)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0  #: alternatives to report, at most 20
    typical_p: float = 1.0  #: locally typical sampling (Meister et al., 2023)
    min_tokens: int = 0  #: none of the stop tokens before so many were generated


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate. `key` is unique for the life of the log and greater than 0."""

    key: int
    prompt: tuple[int, ...]  #: token ids, at least one
    max_tokens: int
    stop_tokens: tuple[int, ...] = ()  #: generation ends after one of these; it is reported with finish "stop"
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class Emission:
    """One token, already committed. `index` counts the request's generated tokens from 0."""

    key: int
    index: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None
    cached: int = 0  #: with index 0: positions of the prompt that another request's rows served


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """What the supervisor knows of a live request at a takeover: the request and what its client was already given."""

    request: EngineRequest
    delivered: tuple[int, ...]  #: token ids the engine reported and the supervisor received
    alone: bool = False  #: on probation: do not share a step with other requests until it has advanced


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What a takeover did. Every live request is in exactly one of the two counts."""

    restored: int  #: went on from logged state
    recomputed: int  #: state was missing or doubtful: prompt and delivered tokens are prefilled again
    tokens_restored: int
    reason: str  #: why nothing could be restored ("" if the log was used), e.g. which manifest field differs
    milliseconds: dict[str, float]  #: by phase: scan, apply, requests


class Engine(Protocol):
    """A source of tokens whose state survives it.

    Calls come from one thread: `prepare` any number of times, then `recover` exactly once, then the others in any
    order. Any exception means that the whole process is lost: the supervisor fences it and a spare takes over. A fault
    of a single request is reported through `failures`, not raised.
    """

    def prepare(self) -> None:
        """Called about ten times a second while this process waits as a spare: get ready for a takeover.

        At most a few milliseconds of work. Reads what the running engine shares, writes nothing of it.
        """

    def recover(self, writer_epoch: int, journal: Sequence[JournalEntry], *, use_log: bool = True) -> RecoveryReport:
        """Become the owner of the log under `writer_epoch` and continue the journal's requests.

        For each entry, tokens of the log past `delivered` are reported again by the next `step`; where the log is
        behind `delivered` or contradicts it, `delivered` wins and the state is recomputed. Requests of the log that the
        journal does not name are dropped. `use_log=False` recomputes everything (the benchmark's baseline).
        """

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises `outlast.core.errors.Refused` if it can never fit (context, pool)."""

    def cancel(self, key: int) -> None:
        """Forget a request in any phase and free its memory before the next step. Unknown keys are ignored."""

    def release(self, key: int) -> None:
        """The supervisor has received the finish of `key`: its logged state is no longer needed."""

    def step(self) -> list[Emission]:
        """Do one bounded piece of work (at most one prefill chunk over all prompts, and for each decoding request a
        token and the few that were guessed right behind it) and commit it.

        Returns what was committed, including tokens that a takeover has to report again. [] when idle.
        """

    def busy(self) -> bool:
        """True while `step` has something to do."""

    def failures(self) -> list[tuple[int, str]]:
        """Requests that ended by a fault of their own since the last call: (key, reason). Their state is freed."""

    def stats(self) -> dict[str, float]:
        """Gauges for /metrics: running, waiting, kv_blocks_used, kv_blocks_total, log_bytes, epochs, ..."""

    def close(self) -> None:
        """Release what the engine holds. The log stays whole."""
