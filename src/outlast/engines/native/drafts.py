"""Guesses of the next tokens, looked up in what a sequence has said so far (prompt lookup, A. Saxena, 2023).

Agents' texts repeat themselves: a tool's output is quoted, a file is written again with a line changed. A guess costs
one more row in a step and can not change a token: each is drawn from its own position's logits and random number, and
the guess behind it counts only if it is what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Tokens in a row that must stand further up for what followed them there to be guessed; longest first. Two alone are
#: found too often by chance, and count only after a hit.
GRAMS = (4, 3, 2)
_SURE = 3
#: Guesses of a try behind no hit. The kernels work on tiles of four rows: measured, three guesses make a step
#: 1.5 times as long and one makes it no shorter.
_PROBE = 3
#: Tokens to wait after the first miss, doubled with each further one: a text without repetition loses 1 to 2 %.
_PAUSE = 8
_LONGEST_PAUSE = 128


class Drafts:
    """Guesses for one sequence, and how wide they are worth being. `width`: most guesses of a step."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  #: behind the latest place of these tokens that is not the end
        self._indexed = 0
        self._now = min(width, _PROBE)  #: guesses that the next try may have
        self._pause = 0  #: tokens until that try
        self._hit = False  #: of the last try
        self._misses = 0  #: tries without a hit in a row

    def extend(self, tokens: Sequence[int]) -> None:
        """What the sequence has become longer by."""
        self._tokens += tokens
        self._pause = max(0, self._pause - len(tokens))

    @property
    def known(self) -> int:
        """Tokens told so far."""
        return len(self._tokens)

    def propose(self, most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may come next; () while guessing does not pay."""
        tokens = self._tokens
        if self._pause or most <= 0:
            return ()
        for end in range(self._indexed + 1, len(tokens)):
            for length in GRAMS:
                if end >= length:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._indexed = max(0, len(tokens) - 1)
        for length in GRAMS:
            if len(tokens) > length and (length >= _SURE or self._hit):
                at = self._ends.get(tuple(tokens[-length:]))
                if at is not None:
                    return tuple(tokens[at : at + min(most, self._now)])
        return ()

    def judge(self, proposed: int, accepted: int) -> None:
        """What became of the last guesses. All right: wider next time. None: narrower, and later."""
        if not proposed:
            return
        self._hit = accepted > 0
        if accepted == proposed:
            self._now = min(self._width, 2 * self._now + 1)
        else:
            self._now = min(self._width, _PROBE)
        if accepted:
            self._misses = 0
        else:
            self._pause = min(_LONGEST_PAUSE, _PAUSE << self._misses)
            self._misses += 1
