"""The journal of live requests: what was accepted, what its client was given, and how often it was near a death.

It is the supervisor's memory of the conversation and lives only there, so it outlasts every engine. An entry leaves
when its request ends, for whatever reason.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from outlast.engines.protocol import Emission, EngineRequest, JournalEntry

#: A request that was in the running step at this many deaths, without getting on in between, is ended.
STRIKES = 3


class Verdict(enum.Enum):
    """What a reported token is, seen from what the client already has."""

    NEW = "new"  #: the next one: give it to the client
    REPEATED = "repeated"  #: known and equal, as after a takeover: drop it
    CONTRADICTION = "contradiction"  #: known and different: never show it
    GAP = "gap"  #: tokens before it are missing: never show it
    UNKNOWN = "unknown"  #: the request has ended (cancelled, stopped): drop it


@dataclass(slots=True)
class LiveRequest:
    """One accepted sequence."""

    request: EngineRequest
    accepted_at: float  #: monotonic seconds
    delivered: list[int] = field(default_factory=list)
    strikes: int = 0
    given: bool = False  #: some engine was told of it


class Journal:
    """Live requests by key, in order of acceptance."""

    def __init__(self) -> None:
        self._live: dict[int, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: int) -> bool:
        return key in self._live

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._live.values()))

    def get(self, key: int) -> LiveRequest | None:
        """The live request of `key`, if it has not ended."""
        return self._live.get(key)

    def accept(self, request: EngineRequest, now: float) -> LiveRequest:
        """Enter a request. Its key must be new (ValueError)."""
        if request.key in self._live:
            raise ValueError(f"key {request.key} is already live")
        live = LiveRequest(request, now)
        self._live[request.key] = live
        return live

    def remove(self, key: int) -> LiveRequest | None:
        """The request has ended. Unknown keys are ignored."""
        return self._live.pop(key, None)

    def deliver(self, emission: Emission) -> Verdict:
        """Judge a reported token and, if it is the next one, record that the client is given it."""
        live = self._live.get(emission.key)
        if live is None:
            return Verdict.UNKNOWN
        have = len(live.delivered)
        if emission.index == have:
            live.delivered.append(emission.token)
            live.strikes = 0
            return Verdict.NEW
        if emission.index > have:
            return Verdict.GAP
        return Verdict.REPEATED if live.delivered[emission.index] == emission.token else Verdict.CONTRADICTION

    def advanced(self, keys: Iterable[int]) -> None:
        """These got on in a step that returned: they are not what kills engines."""
        for key in keys:
            live = self._live.get(key)
            if live is not None:
                live.strikes = 0

    def strike(self, keys: Iterable[int]) -> list[LiveRequest]:
        """An engine died working on `keys`. Returns those that have now collected STRIKES, for the caller to end."""
        out: list[LiveRequest] = []
        for key in keys:
            live = self._live.get(key)
            if live is not None:
                live.strikes += 1
                if live.strikes >= STRIKES:
                    out.append(live)
        return out

    def entries(self) -> list[JournalEntry]:
        """What the next engine has to know.

        A request that one more strike would end runs alone until it gets on, so that strike can only be its own doing:
        a neighbour of a request that kills engines never collects the last one. Earlier strikes do not separate
        anybody, because most deaths are nobody's fault, and 64 streams that each take a step of their own would wait
        for the last of them.
        """
        last = STRIKES - 1
        return [JournalEntry(v.request, tuple(v.delivered), alone=v.strikes >= last) for v in self._live.values()]
