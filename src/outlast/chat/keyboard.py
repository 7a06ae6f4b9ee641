"""What the person types: edited lines at the prompt, plain lines and Ctrl-C while an answer is running."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import termios
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType

from outlast.chat.history import History

try:
    import readline as _readline

    _editing: ModuleType | None = _readline
except ImportError:  # a Python that was built without it
    _editing = None

CONTINUES = "\\"  #: at the end of a line: the message goes on in the next one
#: After the line end of a paste the next line is there at once; a person takes longer.
_PASTE_SECONDS = 0.005


class LineEditor:
    """Messages from a terminal, through readline where Python has it.

    A message has several lines if it was pasted as such or a line ends with a backslash.
    """

    def __init__(self, history: History | None, commands: Sequence[str]) -> None:
        """`history` None: nothing is kept beyond this chat. `commands` complete with the tabulator."""
        self._history = history
        self._commands = commands
        if _editing is None:
            return
        _editing.set_auto_history(False)
        _editing.clear_history()
        for entry in history.entries if history is not None else []:
            _editing.add_history(entry)
        _editing.set_completer(self._complete)
        _editing.set_completer_delims("\t\n")
        if _is_libedit(_editing):
            _editing.parse_and_bind("bind ^I rl_complete")
        else:
            _editing.parse_and_bind("set enable-bracketed-paste on")
            _editing.parse_and_bind("tab: complete")

    def read(self, prompt: str, more: str) -> str:
        """One message, without blanks around it. Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
        lines = [input(prompt)]
        while True:
            if lines[-1].endswith(CONTINUES):
                lines[-1] = lines[-1].removesuffix(CONTINUES)
                prompt = more
            elif self._pasting():
                prompt = ""
            else:
                break
            try:
                lines.append(input(prompt))
            except EOFError:
                break
        return "\n".join(lines).strip()

    def keep(self, text: str) -> None:
        """Enter a message in the history. Raises OSError if its file cannot be written."""
        if _editing is not None:
            last = _editing.get_current_history_length()
            if last and _editing.get_history_item(last) == text:
                return
            _editing.add_history(text)
        if self._history is not None:
            self._history.append(text)

    def _pasting(self) -> bool:
        """libedit knows no bracketed paste: lines that are there at once were pasted."""
        if _editing is None or not _is_libedit(_editing):
            return False
        return bool(select.select([sys.stdin], [], [], _PASTE_SECONDS)[0])

    def _complete(self, text: str, state: int) -> str | None:
        return _nth((command for command in self._commands if command.startswith(text)), state)


def _nth(values: Iterable[str], number: int) -> str | None:
    for index, value in enumerate(values):
        if index == number:
            return value
    return None


def _is_libedit(module: ModuleType) -> bool:
    return "libedit" in (module.__doc__ or "")


class RunningKeys:
    """While an answer is running: whole lines from the terminal, not echoed into the answer, and Ctrl-C as an event.

    A context manager; wait for both of its descriptors.
    """

    def __init__(self) -> None:
        self._in = sys.stdin.fileno()
        self._before: list[object] | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._old_handler: Callable[[int, types.FrameType | None], object] | int | None = None
        self._rest = b""
        self.interrupted = False  #: Ctrl-C was pressed
        self.ended = False  #: Ctrl-D was pressed, or the terminal is gone

    def __enter__(self) -> RunningKeys:
        self._old_handler = signal.signal(signal.SIGINT, self._on_interrupt)
        with contextlib.suppress(termios.error):
            self._before = termios.tcgetattr(self._in)
            quiet = termios.tcgetattr(self._in)
            quiet[3] &= ~termios.ECHO
            termios.tcsetattr(self._in, termios.TCSANOW, quiet)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._in, termios.TCSANOW, self._before)  # type: ignore[arg-type]
        signal.signal(signal.SIGINT, self._old_handler)
        self._wake_read.close()
        self._wake_write.close()

    def _on_interrupt(self, number: int, frame: types.FrameType | None) -> None:
        self.interrupted = True
        with contextlib.suppress(BlockingIOError):
            self._wake_write.send(b"\0", socket.MSG_DONTWAIT)

    def descriptors(self) -> list[int]:
        """To wait for."""
        return [self._wake_read.fileno(), *([] if self.ended else [self._in])]

    def lines(self, ready: Sequence[object]) -> Iterator[str]:
        """Lines that were typed, given what of the descriptors is readable."""
        if self._wake_read.fileno() in ready:
            self._wake_read.recv(4096)
        if self._in not in ready:
            return
        try:
            data = os.read(self._in, 64 << 10)
        except OSError:
            data = b""
        if not data and not self._rest:
            self.ended = True
        *whole, self._rest = (self._rest + data).split(b"\n") if data else (self._rest, b"")
        for line in whole:
            yield line.decode("utf-8", "replace").strip()
