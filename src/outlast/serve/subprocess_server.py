"""A server in a process of its own, as a client-side object: for the demo and for tests that end the server itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, cast

from outlast.core.errors import OutlastError
from outlast.serve.control import ControlPage
from outlast.serve.settings import Settings


class SubprocessServer:
    """Start, ask, end. The process ends with the thread that made this object, at the latest."""

    def __init__(self, settings: Settings, *, start_timeout: float = 120.0, stderr: int | None = None) -> None:
        """Start and wait until the first engine is active. Raises OutlastError if it ends or takes too long.

        The error's `exit_code` is the server's own where it has one.

        `stderr`: descriptor that its messages go to; None = this process's standard error.
        """
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "outlast.serve", settings.to_json(), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            # Ctrl-C is for whoever started the server: it ends the server in its own order.
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.pid = self._popen.pid
        timer = threading.Timer(start_timeout, self._popen.kill)
        timer.start()
        assert self._popen.stdout is not None
        try:
            line = self._popen.stdout.readline()
        except BaseException:  # Ctrl-C, most likely
            self._popen.kill()
            self.wait()
            raise
        finally:
            timer.cancel()
        if not line:
            status = self.wait()
            error = OutlastError("the server did not start", why=f"exit status {status}; its errors are above")
            error.exit_code = status if status > 0 else error.exit_code
            raise error
        self.url: str = json.loads(line)["url"]  #: without a trailing slash; the API is below `/v1`

    def health(self) -> dict[str, Any]:
        """As /health."""
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=30) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:  # 503 has a body too
            body = error.read()
        return cast(dict[str, Any], json.loads(body))

    def engine_pids(self, role: str | None = None) -> list[int]:
        """Pids of the workers, the current one first; of one role ("active", "spare", ...) if given."""
        return [engine["pid"] for engine in self.health()["engines"] if role in (None, engine["role"])]

    def control(self, pid: int) -> ControlPage:
        """A mapping of a worker's control page, to inject faults in tests. The caller closes it."""
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if str(link.readlink()).startswith("/memfd:outlast-control"):
                return ControlPage.attach(os.open(link, os.O_RDWR))
        raise OutlastError(f"process {pid} has no control page", why="it is no engine worker")

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the server a signal."""
        self._popen.send_signal(number)

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._popen.poll() is None

    def wait(self, seconds: float | None = None) -> int:
        """Until the server has ended; its exit status."""
        status = self._popen.wait(seconds)
        assert self._popen.stdout is not None
        self._popen.stdout.close()
        return status

    def close(self) -> None:
        """Drain and end. Idempotent."""
        if self._popen.poll() is None:
            self._popen.terminate()
        self.wait()

    def __enter__(self) -> SubprocessServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
