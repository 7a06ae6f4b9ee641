"""The engine process: builds an engine, waits as a spare, and after `activate` steps it and reports what it committed.

Started by the supervisor as `python -m outlast.serve.worker CONFIG` (CONFIG is JSON, see WorkerConfig). It ends when
told to (`stop`), when its socket closes, when its supervisor dies (the kernel sends SIGKILL), or by an exception of the
engine: then it reports `fatal` and exits with FATAL_EXIT. It never tries to go on after an exception, because state of
unknown quality must not be stepped; the spare takes over from the log instead.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any, cast

from outlast.core.errors import OutlastError, Refused
from outlast.engines.protocol import Engine, EngineRequest, JournalEntry
from outlast.serve import protocol as wire
from outlast.serve.control import POINT_RECOVER, POINT_REPORT, POINT_START, POINT_STEP, ControlPage, State

FATAL_EXIT = 70  #: EX_SOFTWARE of sysexits.h
#: While idle, wake this often to give a sign of life; a twentieth of the default hang limit.
IDLE_SECONDS = 0.1
STATS_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The one command-line argument of a worker."""

    factory: str
    options: dict[str, Any]
    socket_fd: int
    control_fd: int
    parent: int  #: pid of the supervisor

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> WorkerConfig:
        """From JSON."""
        return cls(**json.loads(text))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    prctl(2) acts on future deaths only, so a parent that is already gone is looked for afterwards.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(0)


def build_engine(factory: str, options: dict[str, Any], control: ControlPage) -> Engine:
    """Call `module:function(options, control=control)`."""
    module, _, name = factory.partition(":")
    create = getattr(importlib.import_module(module), name)
    return cast(Engine, create(options, control=control))


class Worker:
    """One engine, one socket, one thread."""

    def __init__(self, engine: Engine, connection: socket.socket, control: ControlPage) -> None:
        self._engine = engine
        self._socket = connection
        self._control = control
        self._lines = wire.LineBuffer()
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)
        self._entries: list[JournalEntry] = []
        self._epoch = 0  #: 0 until activated
        self._live: dict[int, EngineRequest] = {}
        self._stopped = False
        self._next_stats = 0.0

    def run(self) -> None:
        """Until told to stop or the supervisor is gone. Exceptions of the engine pass through."""
        self._control.state = State.SPARE
        while True:
            self._control.beat()
            busy = self._epoch > 0 and self._engine.busy()
            self._receive(0.0 if busy else IDLE_SECONDS)
            if self._stopped:
                return
            if not self._epoch:
                self._engine.prepare()
                continue
            if self._engine.busy():
                self._step()
            if time.monotonic() >= self._next_stats:
                self._next_stats = time.monotonic() + STATS_SECONDS
                self._send(wire.Stats({name: float(value) for name, value in self._engine.stats().items()}))

    def _receive(self, seconds: float) -> None:
        if not self._poll.poll(seconds * 1000):
            return
        data = self._socket.recv(_READ_BYTES)
        if not data:
            self._stopped = True  # the supervisor is gone
            return
        for line in self._lines.feed(data):
            self._handle(wire.decode_for_worker(line))

    def _handle(self, message: wire.ToWorker) -> None:
        match message:
            case wire.Entry(entry):
                self._entries.append(entry)
            case wire.Activate():
                self._activate(message)
            case wire.Submit(request):
                self._submit(request)
            case wire.Cancel(key):
                self._live.pop(key, None)
                self._engine.cancel(key)
            case wire.Release(key):
                self._engine.release(key)
            case wire.Stop():
                self._stopped = True

    def _activate(self, message: wire.Activate) -> None:
        if self._epoch or len(self._entries) != message.entries:
            raise wire.ProtocolError(
                "bad message: activate", why=f"{len(self._entries)} entries came, writer epoch was {self._epoch}"
            )
        self._control.suspect(())
        self._control.state = State.RECOVERING
        self._control.fault(POINT_RECOVER)
        entries, self._entries = self._entries, []
        report = self._engine.recover(message.writer_epoch, entries, use_log=message.use_log)
        self._live = {entry.request.key: entry.request for entry in entries}
        self._control.end_step()
        self._epoch = message.writer_epoch
        self._send(wire.Active(self._epoch, report))
        self._report_failures()

    def _submit(self, request: EngineRequest) -> None:
        self._control.begin_step([request.key])
        try:
            self._engine.submit(request)
        except Refused as refused:
            self._send(wire.Failed(request.key, str(refused), refused=True))
        else:
            self._live[request.key] = request
        self._control.end_step()

    def _step(self) -> None:
        self._control.begin_step(self._live)
        self._control.fault(POINT_STEP)
        emissions = self._engine.step()
        advanced = {emission.key for emission in emissions}
        if self._control.exact or len(self._live) == 1:
            advanced.update(self._control.suspects())
        self._control.fault(POINT_REPORT)
        self._control.end_step()
        for emission in emissions:
            if emission.finish is not None:
                self._live.pop(emission.key, None)
        if advanced:
            self._send(wire.Tokens(self._epoch, tuple(emissions), tuple(sorted(advanced))))
        self._report_failures()

    def _report_failures(self) -> None:
        for key, reason in self._engine.failures():
            self._live.pop(key, None)
            self._send(wire.Failed(key, reason, refused=False))

    def _send(self, message: wire.ToSupervisor) -> None:
        self._socket.sendall(wire.encode(message))


def main(argument: str) -> int:
    """Run a worker to its end; the exit status of the process."""
    config = WorkerConfig.decode(argument)
    die_with_parent(config.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to handle
    started = time.monotonic()
    connection = socket.socket(fileno=config.socket_fd)
    control = ControlPage.attach(config.control_fd)
    try:
        control.fault(POINT_START)
        engine = build_engine(config.factory, config.options, control)
        connection.sendall(wire.encode(wire.Ready(os.getpid(), time.monotonic() - started)))
        Worker(engine, connection, control).run()
        engine.close()
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the supervisor is gone; there is nobody to tell
    except BaseException as error:  # noqa: BLE001  whatever it is, this process is lost: say why and leave
        traceback.print_exc()
        text = str(error) if isinstance(error, OutlastError) else f"{type(error).__name__}: {error}"
        try:
            connection.sendall(wire.encode(wire.Fatal(text)))
        except OSError:
            return FATAL_EXIT
        return FATAL_EXIT
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stderr.flush()
    # Not sys.exit: threads of a broken engine must not hold the process back.
    os._exit(status)
