"""Server-sent events, cut out of a byte stream (WHATWG HTML, section 9.2.6), with a bound on everything."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.core.errors import OutlastError

#: A chunk with one token and 20 log probabilities has 3 kB; one with a whole answer may have hundreds.
MAX_EVENT_BYTES = 4 << 20


class BadStream(OutlastError):
    """The other side does not speak the protocol."""


@dataclass(frozen=True, slots=True)
class Data:
    """The `data` of one event; several fields are joined by newlines."""

    text: str


@dataclass(frozen=True, slots=True)
class Comment:
    """A line that clients skip; servers send them to say that they live."""

    text: str


class EventParser:
    """Feed it bytes as they come; lines may end in LF, CR LF or CR, and break anywhere, also inside a character.

    An event counts when its blank line has come: the rest of a broken stream is never seen. Fields other than `data`
    have no meaning here and are dropped.
    """

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit
        self._rest = bytearray()
        self._data: list[str] = []
        self._size = 0  #: bytes of `_data`
        self._after_cr = False
        self._first = True

    def feed(self, data: bytes) -> list[Data | Comment]:
        """What `data` completes. Raises `BadStream` for an event larger than the bound."""
        out: list[Data | Comment] = []
        start = len(self._rest)
        self._rest += data
        if self._after_cr and data:  # then nothing else was left
            if data[:1] == b"\n":
                del self._rest[:1]
            self._after_cr = False
        while (end := self._line_end(start)) >= 0:
            line = bytes(self._rest[:end])
            self._after_cr = self._rest[end:] == b"\r"  # its LF may be on its way
            del self._rest[: end + (2 if self._rest[end : end + 2] == b"\r\n" else 1)]
            start = 0
            self._line(line, out)
        if len(self._rest) + self._size > self._limit:
            raise BadStream("an event is too large", why=f"it has more than {self._limit} bytes")
        return out

    def _line_end(self, start: int) -> int:
        ends = [at for at in (self._rest.find(b"\n", start), self._rest.find(b"\r", start)) if at >= 0]
        return min(ends, default=-1)

    def _line(self, raw: bytes, out: list[Data | Comment]) -> None:
        line = raw.decode("utf-8", "replace")
        if self._first:
            line = line.removeprefix("\ufeff")
            self._first = False
        if not line:
            if self._data:
                out.append(Data("\n".join(self._data)))
            self._data, self._size = [], 0
            return
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not name:
            out.append(Comment(value))
        elif name == "data":
            self._data.append(value)
            self._size += len(raw)
