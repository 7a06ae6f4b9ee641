"""What a client was sent on one stream, and how it differs from an uninterrupted run of the same request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Received:
    """One token as it arrived."""

    token: int
    text: str  #: what it added to the answer; "" while a character is incomplete
    logprob: float
    engine: int  #: writer epoch of the engine that made it
    at: float  #: monotonic seconds


@dataclass(slots=True)
class Transcript:
    """One stream, from its first chunk to its end."""

    tokens: list[Received] = field(default_factory=list)
    finish: str | None = None  #: finish_reason
    counted: int | None = None  #: completion tokens by the server's `usage`
    error: str = ""  #: why it ended without a finish

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(received.text for received in self.tokens)

    @property
    def engines(self) -> list[int]:
        """Writer epochs that took part, in order of appearance."""
        return list(dict.fromkeys(received.engine for received in self.tokens))


@dataclass(frozen=True, slots=True)
class Difference:
    """How a transcript differs from its reference."""

    identical: bool  #: token ids, log probabilities, text, end and usage are all the same
    contradicted: int  #: positions where what was sent is not what the reference has there, missing or surplus ones too
    lost: int  #: tokens of the reference that never came
    hung: bool  #: the stream had no end of its own
    first: str  #: the first difference, for people; "" if there is none


def compare(reference: Transcript, observed: Transcript) -> Difference:
    """Position by position: a token that is repeated or left out moves all later ones, and each of them counts."""
    both = list(zip(reference.tokens, observed.tokens, strict=False))
    wrong = [i for i, (want, got) in enumerate(both) if not _same(want, got)]
    lost = max(0, len(reference.tokens) - len(observed.tokens))
    surplus = max(0, len(observed.tokens) - len(reference.tokens))
    hung = observed.finish is None
    first = ""
    if wrong:
        want, got = both[wrong[0]]
        first = f"token {wrong[0]}: {_tell(got)} instead of {_tell(want)}, from engine {got.engine}"
    elif hung:
        first = f"no end after token {len(observed.tokens)}: {observed.error or 'the stream stopped'}"
    elif lost or surplus:
        first = f"{len(observed.tokens)} tokens instead of {len(reference.tokens)}"
    elif reference.text != observed.text:
        first = "the same tokens gave another text"
    elif reference.finish != observed.finish:
        first = f"finish {observed.finish} instead of {reference.finish}"
    elif observed.counted != len(observed.tokens) or reference.counted != observed.counted:
        first = f"usage counts {observed.counted} tokens, {len(observed.tokens)} came"
    return Difference(not first, len(wrong) + lost + surplus, lost, hung, first)


def _same(want: Received, got: Received) -> bool:
    return (want.token, want.text, want.logprob) == (got.token, got.text, got.logprob)


def _tell(received: Received) -> str:
    return f"{received.token} ({received.text!r}, log probability {received.logprob:g})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """All streams of a run together."""

    identical: bool
    contradicted: int
    lost: int
    hung: int
    differences: tuple[str, ...]


def judge(references: Sequence[Transcript], rounds: Sequence[Sequence[Transcript]]) -> Verdict:
    """Compare every stream of every round with the reference of its number. A run without a token proves nothing."""
    found = [
        (f"round {number}, stream {index}: ", compare(reference, observed))
        for number, streams in enumerate(rounds, 1)
        for index, (reference, observed) in enumerate(zip(references, streams, strict=True))
    ]
    whole = bool(found) and all(r.tokens and r.finish is not None and not r.error for r in references)
    differences = [where + one.first for where, one in found if one.first]
    if not whole:
        differences.append("the reference run has no whole streams")
    return Verdict(
        identical=whole and all(one.identical for _, one in found),
        contradicted=sum(one.contradicted for _, one in found),
        lost=sum(one.lost for _, one in found),
        hung=sum(one.hung for _, one in found),
        differences=tuple(differences),
    )
