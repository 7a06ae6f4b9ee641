"""A whole server: parts, socket, supervisor and HTTP together; started, drained and ended in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn

from outlast.core.errors import EXIT_DONE, OutlastError
from outlast.serve.app import Gateway, build_app
from outlast.serve.assembly import Assembly
from outlast.serve.control import ControlPage
from outlast.serve.metrics import Metrics
from outlast.serve.settings import Settings
from outlast.serve.supervisor import Supervisor

log = logging.getLogger("outlast.serve")

#: After the drain, errors have been queued to every stream left; so long do they have to reach their clients.
_FLUSH_SECONDS = 2.0
_BACKLOG = 1024
#: Longer than the pauses of agents between two requests.
_KEEP_ALIVE_SECONDS = 75


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: the order of the end is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        what = f"can not listen on {settings.host}:{settings.port}"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            do = "Choose another --host: 127.0.0.1 for this machine alone, 0.0.0.0 for all of its addresses"
        else:
            do = "Choose another --port, or 0 for any"
        raise OutlastError(what, why=error.strerror or str(error), do=do) from None
    listener.listen(_BACKLOG)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Running:
    """A server on the event loop that made it."""

    def __init__(self, settings: Settings, assembly: Assembly) -> None:
        self.settings = settings
        self._assembly = assembly
        self._listener = _listen(settings)
        self.url = _url(self._listener)
        metrics = Metrics()
        self.supervisor = Supervisor(assembly.engine, assembly.log, settings, metrics)
        self.gateway = Gateway(self.supervisor, assembly.model, settings, metrics)
        self._stop = asyncio.Event()
        config = uvicorn.Config(
            build_app(self.gateway),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        self._http = _Uvicorn(config)

    def stop(self) -> None:
        """Begin the end; see `serve`."""
        self._stop.set()

    async def serve(self, ready: Callable[[], None]) -> None:
        """Serve until `stop`, then drain. `ready` is called once the first engine is active.

        The end: new requests are refused, open ones may finish for `drain` seconds, what is left ends with an error
        event, workers are stopped and reaped, the log's memory is given back.
        """
        self.supervisor.start()
        http = asyncio.ensure_future(self._http.serve(sockets=[self._listener]))
        tell = asyncio.ensure_future(self._tell(ready))
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({http, stop}, return_when=asyncio.FIRST_COMPLETED)
            self.gateway.draining = True
            await self.gateway.wait_until_idle(self.settings.drain)
        finally:
            tell.cancel()
            stop.cancel()
            await self.supervisor.stop()
            await self.gateway.wait_until_idle(_FLUSH_SECONDS)
            self._http.should_exit = True
            await http
            self._listener.close()
            self._assembly.log.close()
            self._assembly.close()

    async def _tell(self, ready: Callable[[], None]) -> None:
        while not self.supervisor.able:
            await asyncio.sleep(0.01)
        ready()


def run(settings: Settings, assembly: Assembly, announce: Callable[[str], None]) -> int:
    """Serve in this process until SIGTERM or SIGINT; a second one cuts the drain short. The exit status."""

    async def main() -> None:
        running = Running(settings, assembly)
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if running.gateway.draining:
                running.gateway.give_up_waiting()
            running.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        await running.serve(lambda: announce(running.url))

    asyncio.run(main())
    return EXIT_DONE


class Server:
    """A server in a thread of this process, for tests, the demo and benchmarks.

    The workers are processes of their own, as always. They end with this server, also when the process is killed.
    """

    def __init__(
        self, settings: Settings, assembly: Assembly, *, wait: bool = True, start_timeout: float = 120.0
    ) -> None:
        """Start and, unless told not to, wait until the first engine is active (OutlastError if that takes too long).

        Without `wait` it returns when the socket listens.
        """
        self._settings = settings
        self._assembly = assembly
        self._listening = threading.Event()
        self._ready = threading.Event()
        self._trouble: BaseException | None = None
        self._running: Running | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name="outlast-server", daemon=True)
        self._thread.start()
        in_time = (self._ready if wait else self._listening).wait(start_timeout)
        if self._trouble is not None:
            raise self._trouble
        if not in_time:
            trouble = self.health()["last_trouble"] if self._running else "it did not even listen"
            self.close()
            raise OutlastError("the server has no engine", why=trouble)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001  it belongs to whoever started the thread
            self._trouble = error
        self._listening.set()
        self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running = Running(self._settings, self._assembly)
        self._listening.set()
        await self._running.serve(self._ready.set)

    def _call(self, function: Callable[[Running], Any]) -> Any:
        """Run `function` on the server's loop and return what it returns."""
        running, loop = self._running, self._loop
        if running is None or loop is None or not self._thread.is_alive():
            raise OutlastError("the server is not running")

        async def call() -> Any:
            return function(running)

        return asyncio.run_coroutine_threadsafe(call(), loop).result(30)

    @property
    def url(self) -> str:
        """Where it listens, without a trailing slash; the API is below `/v1`."""
        assert self._running is not None
        return self._running.url

    def health(self) -> dict[str, Any]:
        """As /health."""
        return cast(dict[str, Any], self._call(lambda r: r.gateway.health()))

    def open_answers(self) -> int:
        """Answers that are being sent."""
        return cast(int, self._call(lambda r: r.gateway.open_answers))

    def engine_pids(self, role: str | None = None) -> list[int]:
        """Pids of the workers, the current one first; of one role ("active", "spare", ...) if given."""
        engines = self._call(lambda r: [(w.pid, w.role.value) for w in r.supervisor.workers()])
        return [pid for pid, its_role in engines if role in (None, its_role)]

    def control(self, pid: int) -> ControlPage:
        """A mapping of a worker's control page, to inject faults in tests. The caller closes it."""

        def duplicate(r: Running) -> ControlPage:
            worker = next(w for w in r.supervisor.workers() if w.pid == pid)
            return ControlPage.attach(os.dup(worker.control.fd))

        return cast(ControlPage, self._call(duplicate))

    def close(self) -> None:
        """Drain and end; returns when no worker is left. Idempotent."""
        if self._thread.is_alive() and self._running is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it may end at this moment
                self._loop.call_soon_threadsafe(self._running.stop)
        self._thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def print_ready(url: str) -> None:
    """The line that says where the server is, for people and programs."""
    print(json.dumps({"event": "ready", "url": url}), flush=True, file=sys.stdout)
