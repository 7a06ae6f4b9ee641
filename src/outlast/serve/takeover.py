"""The record of one replacement of an engine, for /health, the log and the benchmarks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from outlast.engines.protocol import RecoveryReport


@dataclass(slots=True)
class Takeover:
    """From a death until every stream that was interrupted has its next token."""

    at: float  #: seconds since 1970
    cause: str
    victim: int  #: pid
    seen: float  #: monotonic seconds when the death was seen
    successor: int = 0  #: pid
    milliseconds: dict[str, float] = field(
        default_factory=dict
    )  #: since `seen`; `engine_*` are the engine's own phases
    restored: int = 0
    recomputed: int = 0
    tokens_restored: int = 0
    reason: str = ""
    waiting: set[int] = field(default_factory=set)  #: keys that have had no token since

    def mark(self, name: str) -> None:
        """Note that `name` is reached now, if it was not reached before."""
        self.milliseconds.setdefault(name, round((time.monotonic() - self.seen) * 1000, 3))

    def take(self, report: RecoveryReport) -> None:
        """What the engine says of its part."""
        self.milliseconds.update({f"engine_{name}": ms for name, ms in report.milliseconds.items()})
        self.restored, self.recomputed = report.restored, report.recomputed
        self.tokens_restored, self.reason = report.tokens_restored, report.reason

    def public(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "at": self.at, "cause": self.cause, "victim": self.victim, "successor": self.successor,
            "milliseconds": self.milliseconds, "restored": self.restored, "recomputed": self.recomputed,
            "tokens_restored": self.tokens_restored, "reason": self.reason,
        }  # fmt: skip


class Backoff:
    """How long to wait before the next start, from the failures since the last success."""

    _SECONDS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

    def __init__(self) -> None:
        self.failures = 0
        self._until = 0.0

    def failed(self, now: float) -> None:
        """One more."""
        self.failures += 1
        self.wait(now)

    def wait(self, now: float) -> None:
        """Not a failure in itself, but the next start is as late as after the last one."""
        self._until = now + self._SECONDS[min(self.failures, len(self._SECONDS) - 1)]

    def succeeded(self) -> None:
        """Start afresh."""
        self.failures = 0
        self._until = 0.0

    def over(self, now: float) -> bool:
        """Whether a start is due."""
        return now >= self._until
