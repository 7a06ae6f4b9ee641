"""The server that a chat starts for itself: on a free loopback port, quiet, gone when the chat is."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import tempfile
from typing import Any

from outlast.core.errors import NotPossibleHere, OutlastError
from outlast.serve.settings import Settings
from outlast.serve.subprocess_server import SubprocessServer

#: What a server that dies has written last is shown, up to so many lines.
_LAST_LINES = 5
_LAST_BYTES = 4096
_ERROR_PREFIX = "error: "  # of `python -m outlast.serve`


class OwnServer:
    """Starts when it is made. Its messages go to a file without a name, and are shown if it fails.

    The process ends with the thread that made this object, at the latest.
    """

    def __init__(self, settings: Settings) -> None:
        """Wait until it can be asked. Raises OutlastError with the server's own reason and exit code."""
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        try:
            self._server = SubprocessServer(settings, stderr=self._messages.fileno())
        except OutlastError as error:
            words = self.last_words()
            self._messages.close()
            raise _did_not_start(error, words) from None
        except BaseException:
            self._messages.close()
            raise
        self.url = self._server.url

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._server.running

    def obituary(self) -> str:
        """How a server that has ended has ended."""
        status = self._server.wait()
        with contextlib.suppress(ValueError):
            return f"it was ended by {signal.Signals(-status).name}"
        words = self.last_words()
        return f"it ended with status {status}" + (f": {words}" if words else "")

    def last_words(self) -> str:
        """The end of what it wrote to standard error."""
        self._messages.seek(max(0, self._messages.seek(0, os.SEEK_END) - _LAST_BYTES))
        lines = self._messages.read().decode(errors="replace").splitlines()
        stated = [line.removeprefix(_ERROR_PREFIX) for line in lines if line.startswith(_ERROR_PREFIX)]
        return stated[-1] if stated else "\n".join(lines[-_LAST_LINES:])

    def close(self) -> None:
        """End it. Idempotent."""
        if not self._messages.closed:
            self._server.close()
            self._messages.close()


def _did_not_start(error: OutlastError, words: str) -> OutlastError:
    clear = OutlastError("the server did not start", why=words or error.why)
    clear.exit_code = error.exit_code
    return clear


def settings_for(model: str, *, fast: bool = False, threads: int = 0) -> Settings:
    """For one person: any free port, no long drain. Raises NotPossibleHere for a `fast` that no engine has."""
    settings = Settings(model=model, port=0, drain=0.5, threads=threads)
    if not fast:
        return settings
    # An engine passes over options that it does not know: asked for in vain, it would not be fast, and not say so.
    if "fast" not in {field.name for field in dataclasses.fields(Settings)}:
        raise NotPossibleHere("there is no fast mode", why="the engine of this version computes in one way only")
    chosen: dict[str, Any] = {"fast": True}
    return dataclasses.replace(settings, **chosen)
