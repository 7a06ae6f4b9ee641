"""Into how many parts a step's work is cut: one per thread, but one in all while the other threads do not help.

A thread on a core that is busy elsewhere holds up every level of a plan: with one of two cores busy, two threads are
slower than one. No result depends on the number of parts, so it can follow what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_WEIGHT = 0.25  #: of the newest measurement in an estimate
_MARGIN = 1.03  #: the other choice must be better by this much
#: Steps until the choice that lost is tried again: doubled each time it loses again, since a try may be dear.
_FIRST_TRY, _LAST_TRY = 16, 256


@dataclass(slots=True)
class _Kind:
    """Steps of about the same size."""

    alone: float = 0.0  #: seconds per token in one part, 0 = not measured
    shared: float = 0.0  #: the same in all parts
    sharing: bool = True  #: what is better as far as known
    until_try: int = _FIRST_TRY
    interval: int = _FIRST_TRY


@dataclass(slots=True)
class Parts:
    """Chooses for steps that may use up to `most` threads.

    `choose` before a step and `ran` after it, with the same number of tokens. Steps are told apart by the power of two
    below their number of tokens; contexts grow slowly enough for running estimates to follow.
    """

    most: int
    _kinds: dict[int, _Kind] = field(default_factory=dict)

    def choose(self, tokens: int) -> int:
        """Parts of the next step, 1 or `most`."""
        if self.most == 1:
            return 1
        kind = self._kinds.setdefault(tokens.bit_length(), _Kind())
        trying = kind.until_try <= 0
        return self.most if kind.sharing != trying else 1

    def ran(self, tokens: int, parts: int, seconds: float) -> None:
        """A step of `tokens` tokens in `parts` parts took so long."""
        if self.most == 1:
            return
        kind = self._kinds.setdefault(tokens.bit_length(), _Kind())
        cost, shared = seconds / max(1, tokens), parts > 1
        was = kind.shared if shared else kind.alone
        trying = shared != kind.sharing
        # A try speaks for itself: what was measured long ago does not count.
        now = cost if was == 0.0 or trying else was + _WEIGHT * (cost - was)
        if shared:
            kind.shared = now
        else:
            kind.alone = now
        kind.until_try -= 1
        if kind.alone == 0.0 or kind.shared == 0.0:
            return
        mine, other = (kind.shared, kind.alone) if kind.sharing else (kind.alone, kind.shared)
        if other * _MARGIN < mine:
            kind.sharing = not kind.sharing
            kind.until_try = kind.interval = _FIRST_TRY
        elif trying:
            kind.interval = min(2 * kind.interval, _LAST_TRY)
            kind.until_try = kind.interval
