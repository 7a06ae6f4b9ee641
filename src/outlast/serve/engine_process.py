"""One worker process as its supervisor sees it: start, talk, watch for death and silence, fence.

Nothing here decides anything; the supervisor does. Everything runs on the supervisor's event loop, without blocking.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Protocol

from outlast.serve import protocol as wire
from outlast.serve.control import ControlPage
from outlast.serve.log_owner import EngineSpec, LogOwner
from outlast.serve.worker import WorkerConfig

#: A worker that lets this much pile up unread is not alive in any useful sense. 64 full prompts of 128k tokens fit.
MAX_UNSENT = 128 << 20
_READ_BYTES = 256 << 10


class Role(enum.Enum):
    """What a worker is to the supervisor."""

    STARTING = "starting"
    SPARE = "spare"
    RECOVERING = "recovering"
    ACTIVE = "active"
    DEAD = "dead"


class Observer(Protocol):
    """Who is told. Calls come from the event loop, one at a time, never from inside a call to EngineProcess."""

    def on_message(self, worker: EngineProcess, message: wire.ToSupervisor) -> None:
        """A message arrived."""

    def on_death(self, worker: EngineProcess) -> None:
        """The process is gone and reaped, and all it had sent has been passed to `on_message`. Called once."""


class EngineProcess:
    """A worker process with its socket, control page and pidfd."""

    def __init__(self, number: int, spec: EngineSpec, log: LogOwner, observer: Observer) -> None:
        """Start the process. Raises OSError if the machine can not (no memory, no processes left)."""
        self.number = number  #: counts workers of this server from 1
        self.role = Role.STARTING
        self.died_as = Role.DEAD  #: the role it had, once it is dead
        self.cause = ""  #: why it died, for people
        self.writer_epoch = 0
        self.started_at = time.monotonic()
        self.changed_at = self.started_at  #: last change of role while alive
        self.stats: dict[str, float] = {}
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._lines = wire.LineBuffer()
        self._unsent = bytearray()
        self._eof = False
        self._silent = 0.0
        self._last_beat = -1
        self.control = ControlPage.create()
        ours, theirs = socket.socketpair()
        try:
            config = WorkerConfig(
                factory=spec.factory,
                options={**spec.options, "log": dict(log.spec()) or None, "fds": dict(spec.fds)},
                socket_fd=theirs.fileno(),
                control_fd=self.control.fd,
                parent=os.getpid(),
            )
            inherited = {theirs.fileno(), self.control.fd, *spec.fds.values(), *log.fds()}
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "outlast.serve.worker", config.encode()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the supervisor's own output stays clean
                pass_fds=sorted(inherited),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # a group of its own to fence, and no Ctrl-C from the terminal
            )
            try:
                self._pidfd = os.pidfd_open(self._popen.pid)
            except OSError:  # no descriptors left
                self._popen.kill()
                self._popen.wait()
                raise
        except BaseException:
            ours.close()
            self.control.close()
            raise
        finally:
            theirs.close()
        self.pid = self._popen.pid
        self._socket = ours
        ours.setblocking(False)
        self._loop.add_reader(self._pidfd, self._died)
        self._loop.add_reader(ours.fileno(), self._readable)

    # --- talking

    def send(self, message: wire.ToWorker) -> None:
        """Queue a message; order is kept. A worker that does not read is killed rather than waited for."""
        if self.role is Role.DEAD:
            return
        was_empty = not self._unsent
        self._unsent += wire.encode(message)
        if was_empty:
            self._flush()
        if len(self._unsent) > MAX_UNSENT:
            self.kill("it stopped reading its socket")

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(memoryview(self._unsent)[:_READ_BYTES])
                del self._unsent[:sent]
        except BlockingIOError:
            self._loop.add_writer(self._socket.fileno(), self._flush)
            return
        except OSError:
            self._unsent.clear()  # it is dying; the pidfd will tell
        self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        if not self._read_some() and self._eof:
            self._loop.remove_reader(self._socket.fileno())
            # Almost always the first sign of a death. A process that lives on without its socket is of no use either.
            self.kill("")

    def _read_some(self) -> bool:
        """Read once and pass whole messages on. False if there was nothing, or nothing more will come (`_eof`)."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._eof = True
            return False
        try:
            for line in self._lines.feed(data):
                self._observer.on_message(self, wire.decode_for_supervisor(line))
        except wire.ProtocolError as error:
            self._eof = True  # nothing after this can be trusted
            self._loop.remove_reader(self._socket.fileno())
            self.kill(str(error))
        return True

    # --- watching and dying

    def silent_for(self, elapsed: float) -> float:
        """Seconds without a heartbeat, given that the last call was `elapsed` seconds ago.

        Counts watching time, not wall time: if the supervisor itself was held up, that is not the worker's silence.
        """
        beat = self.control.heartbeat
        if beat != self._last_beat:
            self._last_beat = beat
            self._silent = 0.0
        else:
            self._silent += elapsed
        return self._silent

    def set_role(self, role: Role) -> None:
        """Change the role; silence is counted anew."""
        self.role = role
        self.changed_at = time.monotonic()
        self._silent = 0.0

    def kill(self, cause: str) -> None:
        """SIGKILL to the worker and whatever it started; `on_death` follows. The first `cause` given is kept."""
        if self.role is Role.DEAD:
            return
        self.cause = self.cause or cause
        # The leader is not reaped yet, so its number can not be anyone else's group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _died(self) -> None:
        """The pidfd is readable: the process is a zombie. Empty its socket, reap it, tell the observer."""
        self._loop.remove_reader(self._pidfd)
        self.kill("")  # what it started may still hold the log's memory
        while not self._eof and self._read_some():
            continue
        status = self._popen.wait()
        if not self.cause:
            self.cause = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self.died_as = self.role
        self.role = Role.DEAD
        self._observer.on_death(self)
        self._socket.close()
        os.close(self._pidfd)
        self.control.close()
