"""What a segment of the log holds of a request: exact, so that nothing is moved twice and nothing is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


class Spans:
    """A set of numbers, kept as sorted [first, end) that neither overlap nor touch."""

    __slots__ = ("_spans",)

    def __init__(self, *spans: tuple[int, int]) -> None:
        self._spans: list[tuple[int, int]] = []
        for first, end in spans:
            self.add(first, end)

    def add(self, first: int, end: int) -> None:
        """Add [first, end). Cheap where it continues the last span, as a request's steps do."""
        if end <= first:
            return
        spans = self._spans
        if not spans or first > spans[-1][1]:
            spans.append((first, end))
            return
        if first >= spans[-1][0]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
            return
        apart = [span for span in spans if span[1] < first or span[0] > end]
        joined = [span for span in spans if span[1] >= first and span[0] <= end]
        apart.append((min([first, *(span[0] for span in joined)]), max([end, *(span[1] for span in joined)])))
        self._spans = sorted(apart)

    def remove(self, other: Spans) -> None:
        """Take out what `other` holds."""
        for first, end in other:
            kept = []
            for start, stop in self._spans:
                kept += [span for span in ((start, min(stop, first)), (max(start, end), stop)) if span[0] < span[1]]
            self._spans = kept

    def below(self, limit: int) -> Iterator[tuple[int, int]]:
        """Spans of the numbers under `limit`."""
        for first, end in self._spans:
            if first < limit:
                yield first, min(end, limit)

    def total(self) -> int:
        """How many numbers it holds."""
        return sum(end - first for first, end in self._spans)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(tuple(self._spans))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spans) and self._spans == other._spans

    def __repr__(self) -> str:
        return f"Spans{tuple(self._spans)}"

    __hash__ = None  # type: ignore[assignment]  # it changes


@dataclass(slots=True)
class Extent:
    """What one segment holds of one request."""

    opened: bool = False  #: its REQUEST record
    rows: Spans = field(default_factory=Spans)  #: positions
    emissions: Spans = field(default_factory=Spans)  #: generated tokens

    def remove(self, later: Extent) -> None:
        """Forget what a later segment holds as well."""
        self.opened = self.opened and not later.opened
        self.rows.remove(later.rows)
        self.emissions.remove(later.emissions)
