"""How a running trial is shown: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from outlast.bench.report import say
from outlast.bench.rounds import Kill, Request

_REFRESH_PER_SECOND = 8
_BAR_WIDTH = 30
_EVENTS_SHOWN = 8
#: A plain line about the streams' tokens every so often, so that a long prefill does not look like a hang.
_LINE_SECONDS = 5.0


class Lines:
    """One line per round, kill and recovery."""

    def __init__(self, write: Callable[[str], None] = say) -> None:
        self._write = write
        self._counts: list[int] = []
        self._title = ""
        self._kills = 0
        self._next = 0.0

    def begin(self, title: str, requests: Sequence[Request]) -> None:
        """See `trial.Stage`."""
        self._kills = self._kills if title == self._title else 0
        self._title = title
        self._counts = [0] * len(requests)
        self._next = time.monotonic() + _LINE_SECONDS
        self._write(f"{title}: {len(requests)} streams of {requests[0].tokens} tokens")

    def token(self, stream: int, count: int) -> None:
        """See `rounds.Watcher`."""
        self._counts[stream] = count
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_SECONDS
            self._write(f"  tokens {' '.join(map(str, self._counts))}")

    def killed(self, kill: Kill) -> None:
        """See `rounds.Watcher`."""
        self._kills += 1
        self._write(f"  kill {self._kills}: engine {kill.engine} (pid {kill.pid}), tokens {_counts(kill)}")

    def recovered(self, kill: Kill) -> None:
        """See `rounds.Watcher`."""
        self._write(f"  going on after {_times(kill)}")

    def note(self, text: str) -> None:
        """Anything else."""
        self._write(text)

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


class Live:
    """A table of the streams and the last events, redrawn several times a second."""

    def __init__(self) -> None:
        from rich.live import Live as RichLive

        self._title = "starting"
        self._requests: list[Request] = []
        self._counts: list[int] = []
        self._states: list[str] = []
        self._events: list[str] = []
        self._kills = 0
        self._live = RichLive(get_renderable=self._render, refresh_per_second=_REFRESH_PER_SECOND)

    def begin(self, title: str, requests: Sequence[Request]) -> None:
        """See `trial.Stage`."""
        self._kills = self._kills if title == self._title else 0
        self._title = title
        self._requests = list(requests)
        self._counts = [0] * len(requests)
        self._states = ["prefill"] * len(requests)

    def token(self, stream: int, count: int) -> None:
        """See `rounds.Watcher`."""
        self._counts[stream] = count
        self._states[stream] = "done" if count >= self._requests[stream].tokens else "running"

    def killed(self, kill: Kill) -> None:
        """See `rounds.Watcher`."""
        self._kills += 1
        for stream in kill.tokens:
            self._states[stream] = "waiting"
        self.note(f"kill {self._kills}: engine {kill.engine}, pid {kill.pid}, at tokens {_counts(kill)}")

    def recovered(self, kill: Kill) -> None:
        """See `rounds.Watcher`."""
        self.note(f"going on after {_times(kill)}")

    def note(self, text: str) -> None:
        """A line below the table."""
        self._events = [*self._events, text][-_EVENTS_SHOWN:]

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self._title, title_justify="left", title_style="bold")
        for name, justify in (("stream", "right"), ("tokens are", "left"), ("tokens", "right"), ("", "left")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        table.add_column("state")
        for i, request in enumerate(self._requests):
            table.add_row(
                str(i), "sampled" if request.temperature else "greedy", str(self._counts[i]),
                ProgressBar(total=request.tokens, completed=self._counts[i], width=_BAR_WIDTH),
                Text(self._states[i], style="bold red" if self._states[i] == "waiting" else ""),
            )  # fmt: skip
        return Group(table, *(Text(line) for line in self._events))

    def __enter__(self) -> Live:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def stage_for(json: bool) -> Lines | Live:
    """The live table on a terminal; else lines: on standard error where standard output is for the JSON report."""
    if json:
        return Lines()
    return Live() if sys.stdout.isatty() else Lines(lambda text: print(text, flush=True))


def _counts(kill: Kill) -> str:
    return ", ".join(map(str, kill.tokens.values()))


def _times(kill: Kill) -> str:
    return ", ".join(f"{ms:.1f} ms" for ms in kill.milliseconds.values()) or "no token: the streams had ended"
