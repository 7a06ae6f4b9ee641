"""What may go to a terminal: text that cannot control it, dim notes, and a line that says what is being waited for."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

_DIM, _BOLD, _PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"
_ERASE_LINE = "\r\x1b[K"
_SPIN_SECONDS = 0.1
#: Shorter waits are not worth a word.
_SPIN_AFTER = 0.3


def _visible(code: int) -> str:
    """A sign for a character that would act on a terminal."""
    if code < 0x20:
        return chr(0x2400 + code)  # the block "Control Pictures"
    if code == 0x7F:
        return "\u2421"
    if 0xD800 <= code < 0xE000:
        return "\ufffd"
    return f"<{code:02X}>"


#: C0 but newline and tab, DEL, C1, half surrogates, and what reorders the text around it: U+202A-U+202E and
#: U+2066-U+2069 ("Trojan Source", CVE-2021-42574). Line and paragraph separators are as good as newlines.
_TABLE = {
    code: _visible(code)
    for code in (
        *(c for c in range(0x20) if c not in (0x09, 0x0A)),
        *range(0x7F, 0xA0), *range(0xD800, 0xE000), *range(0x202A, 0x202F), *range(0x2066, 0x206A),
    )
} | {0x2028: "\n", 0x2029: "\n"}  # fmt: skip


def harmless(text: str) -> str:
    """`text` with everything that could move the cursor, change colours or reorder text made visible instead.

    Carriage returns before newlines are dropped. Works piece by piece: no sequence survives by being split.
    """
    return text.replace("\r\n", "\n").translate(_TABLE)


class Screen:
    """Standard output of an interactive chat."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        capable = os.environ.get("TERM", "dumb") != "dumb"
        self._erases = capable
        self._styled = capable and not os.environ.get("NO_COLOR")
        self._at_start = True  #: of a line

    def write(self, text: str) -> None:
        """The model's words, made harmless."""
        if text:
            self._put(harmless(text))

    def note(self, text: str) -> None:
        """A remark of the program on a line of its own."""
        self.fresh_line()
        self._put(self._style(_DIM, harmless(text)) + "\n")

    def inline(self, text: str) -> None:
        """A remark in the middle of the model's words."""
        self._put(self._style(_DIM, f"[{harmless(text)}]"))

    def plain(self, text: str) -> None:
        """Lines of the program itself."""
        self.fresh_line()
        self._put(harmless(text) + "\n")

    def fresh_line(self) -> None:
        """End the line if something is on it."""
        if not self._at_start:
            self._put("\n")

    def prompt(self, text: str) -> str:
        """`text` as readline wants it: what has no width is marked."""
        return f"\x01{_BOLD}\x02{text}\x01{_PLAIN}\x02" if self._styled else text

    def started_line(self) -> None:
        """The person has ended a line: the cursor is at the start of the next."""
        self._at_start = True

    def show_waiting(self, text: str) -> None:
        """Replace the current line, which holds nothing else, by `text`; `clear_waiting` takes it away."""
        if self._erases:
            self._out.write(_ERASE_LINE + self._style(_DIM, text))
            self._out.flush()

    def clear_waiting(self) -> None:
        """See `show_waiting`."""
        if self._erases:
            self._out.write(_ERASE_LINE)
            self._out.flush()

    def _style(self, style: str, text: str) -> str:
        return f"{style}{text}{_PLAIN}" if self._styled else text

    def _put(self, text: str) -> None:
        self._at_start = text.removesuffix(_PLAIN).endswith("\n")
        self._out.write(text)
        self._out.flush()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show `what` and the seconds so far while the block runs, from a thread: the block may not write."""
        done = threading.Event()
        started = time.monotonic()

        def spin() -> None:
            if done.wait(_SPIN_AFTER):
                return
            while not done.wait(_SPIN_SECONDS):
                self.show_waiting(f"{what} ... {time.monotonic() - started:.1f} s")
            self.clear_waiting()

        thread = threading.Thread(target=spin, name="outlast-chat-waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
