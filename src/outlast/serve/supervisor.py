"""The supervisor: owns the log and the journal, keeps an engine active and spares ready, and replaces what dies.

A worker's way is starting -> spare -> recovering -> active -> dead; it may die anywhere. At most one worker
(`_current`) is recovering or active, and a new one is made current only after the last was reaped: that, and the
raised writer epoch, is the fence. Everything happens on one event loop in callbacks that do not block, so no two
decisions overlap.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from outlast.engines.protocol import Emission, EngineRequest
from outlast.serve import errors
from outlast.serve import protocol as wire
from outlast.serve.engine_process import EngineProcess, Role
from outlast.serve.errors import ApiError
from outlast.serve.journal import STRIKES, Journal, Verdict
from outlast.serve.log_owner import EngineSpec, LogOwner
from outlast.serve.metrics import Metrics, resident_bytes
from outlast.serve.settings import Settings
from outlast.serve.takeover import Backoff, Takeover

log = logging.getLogger("outlast.serve")

TICK_SECONDS = 0.05
#: A tick that comes later than this says something about the supervisor, not about the workers.
_MAX_TICK = 0.25
#: After a takeover the machine belongs to the requests that waited; a new spare starts when each has its next token,
#: or after this long.
_HOLD_SPARE_SECONDS = 2.0
#: After this many deaths in a row inside a takeover the log is suspected, and the next takeover recomputes.
_DEATHS_BEFORE_RECOMPUTE = 3
#: After this many, the journal is suspected, and its requests are ended.
_DEATHS_BEFORE_GIVING_UP = 6
_START_FAILURES_BEFORE_REFUSING = 3
#: An engine that dies idle this soon after its takeover would die again: start the next ones ever later.
_QUICK_DEATH_SECONDS = 1.0
_STOP_SECONDS = 5.0
_TAKEOVERS_KEPT = 64


class Listener(Protocol):
    """Who wants to know about one sequence. Called on the event loop; must not block."""

    def token(self, emission: Emission, writer_epoch: int) -> None:
        """The next token, committed and recorded. The last one has `finish`."""

    def failed(self, error: ApiError) -> None:
        """The sequence ended without a finish; nothing more comes."""

    def interrupted(self) -> None:
        """The engine is gone; another will take over."""

    def resumed(self) -> None:
        """Another engine has taken over."""


class Supervisor:
    """See the module. All methods are called on the event loop that ran `start`."""

    def __init__(self, spec: EngineSpec, log: LogOwner, settings: Settings, metrics: Metrics) -> None:
        self._spec = spec
        self._log = log
        self._settings = settings
        self._metrics = metrics
        self.journal = Journal()
        self.takeovers: deque[Takeover] = deque(maxlen=_TAKEOVERS_KEPT)
        self._listeners: dict[int, Listener] = {}
        self._workers: list[EngineProcess] = []
        self._current: EngineProcess | None = None
        self._takeover: Takeover | None = None  #: under way: from a death until every waiting request has a token
        self._number = 0
        self._writer_epoch = 0
        self._down_since: float | None = time.monotonic()  #: None while an engine is active
        self._ever_active = False
        self._stopping = False
        self._recovery_deaths = 0
        self._takeover_count = 0
        self._starts = Backoff()  #: of workers that never became ready
        self._idle_deaths = Backoff()  #: of engines that died without a request to blame
        self._last_trouble = ""
        self._hold_spare_until = 0.0
        self._last_tick = time.monotonic()
        self._tick_handle: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()
        metrics.add_gauges(self._gauges)

    # --- life

    def start(self) -> None:
        """Start the first worker and the watch."""
        self._last_tick = time.monotonic()
        self._tick()

    async def stop(self) -> None:
        """End what still runs with an error, stop all workers, return when every process is reaped."""
        self._stopping = True
        for live in self.journal:
            self._end(live.request.key, errors.shutting_down())
        for worker in self._workers:
            if worker.role is Role.STARTING:
                worker.kill("the server stops")  # it owns nothing, and would not read before it has loaded
            else:
                worker.send(wire.Stop())
        await self._wait_until_empty(_STOP_SECONDS)
        for worker in self._workers:
            worker.kill("it did not stop in time")
        await self._wait_until_empty(None)
        if self._tick_handle is not None:
            self._tick_handle.cancel()

    async def _wait_until_empty(self, seconds: float | None) -> None:
        self._emptied.clear()
        if not self._workers:
            return
        try:
            await asyncio.wait_for(self._emptied.wait(), seconds)
        except TimeoutError:
            return

    # --- requests

    def accept(self, request: EngineRequest, listener: Listener) -> None:
        """Enter a sequence in the journal and pass it to the engine, or to the next one. Raises ApiError."""
        if self._stopping:
            raise errors.shutting_down()
        settings = self._settings
        if len(self.journal) >= settings.max_requests:
            raise errors.overloaded(f"{len(self.journal)} sequences are running or waiting, which is the limit")
        if self._current is None:
            if self._starts.failures >= _START_FAILURES_BEFORE_REFUSING:
                raise errors.no_engine(f"the engine fails to start ({self._last_trouble})")
            if sum(not live.given for live in self.journal) >= settings.max_waiting:
                raise errors.overloaded(f"{settings.max_waiting} sequences wait for an engine, which is the limit")
        live = self.journal.accept(request, time.monotonic())
        self._listeners[request.key] = listener
        self._metrics.prompt_tokens.inc(len(request.prompt))
        if self._current is not None:
            live.given = True
            self._current.send(wire.Submit(request))

    def cancel(self, key: int, end: str = "cancelled") -> None:
        """Nobody wants the rest of `key`: free its work within a step, in whatever phase it is. Idempotent."""
        live = self.journal.remove(key)
        if live is None:
            return
        self._listeners.pop(key, None)
        self._metrics.requests.labels(end).inc()
        self._forget_in_engine(key, live.given)

    def _forget_in_engine(self, key: int, given: bool) -> None:
        if given and self._current is not None:
            self._current.send(wire.Cancel(key))
            self._current.send(wire.Release(key))
        if self._takeover is not None:
            self._takeover.waiting.discard(key)

    def _end(self, key: int, error: ApiError) -> None:
        """End a live sequence with an error."""
        live = self.journal.remove(key)
        if live is None:
            return
        listener = self._listeners.pop(key)
        self._metrics.requests.labels(error.code or "error").inc()
        self._forget_in_engine(key, live.given)
        listener.failed(error)

    # --- what workers say

    def on_message(self, worker: EngineProcess, message: wire.ToSupervisor) -> None:
        """See engine_process.Observer."""
        match message:
            case wire.Ready():
                if worker.role is Role.STARTING:
                    worker.set_role(Role.SPARE)
                    self._starts.succeeded()
                    self._ensure()
            case wire.Active():
                if worker is self._current and message.writer_epoch == worker.writer_epoch:
                    self._took_over(worker, message)
            case wire.Tokens():
                if worker is self._current and message.writer_epoch == worker.writer_epoch:
                    self._tokens(worker, message)
            case wire.Failed():
                if worker is self._current:
                    error = errors.invalid(None, message.reason, "request_too_large")
                    self._end(message.key, error if message.refused else errors.request_failed(message.reason))
            case wire.Stats():
                worker.stats = message.values
            case wire.Fatal():
                worker.cause = message.text

    def _took_over(self, worker: EngineProcess, message: wire.Active) -> None:
        worker.set_role(Role.ACTIVE)
        self._down_since = None
        self._ever_active = True
        self._recovery_deaths = 0
        takeover = self._takeover
        if takeover is not None:
            takeover.mark("recovered")
            takeover.take(message.report)
        else:
            self._hold_spare_until = 0.0  # the first start: nobody waits for a token yet
        for listener in list(self._listeners.values()):
            listener.resumed()
        self._check_takeover_done()
        self._ensure()

    def _tokens(self, worker: EngineProcess, message: wire.Tokens) -> None:
        self._idle_deaths.succeeded()
        for emission in message.emissions:
            match self.journal.deliver(emission):
                case Verdict.NEW:
                    self._deliver(worker, emission)
                case Verdict.REPEATED:
                    self._metrics.repeated.inc()
                case Verdict.CONTRADICTION:
                    self._metrics.contradictions.inc()
                    self._end(emission.key, errors.contradiction(f"token {emission.index} came out different"))
                case Verdict.GAP:
                    self._metrics.contradictions.inc()
                    self._end(emission.key, errors.contradiction(f"tokens before token {emission.index} are missing"))
        self.journal.advanced(message.advanced)
        self._check_takeover_done()

    def _deliver(self, worker: EngineProcess, emission: Emission) -> None:
        key = emission.key
        self._metrics.tokens.inc()
        listener = self._listeners[key]
        if self._takeover is not None and key in self._takeover.waiting:
            self._takeover.mark("first_token")
            self._takeover.waiting.discard(key)
        if emission.finish is not None:
            self.journal.remove(key)
            del self._listeners[key]
            self._metrics.requests.labels(emission.finish).inc()
            worker.send(wire.Release(key))
        listener.token(emission, worker.writer_epoch)

    def _check_takeover_done(self) -> None:
        takeover = self._takeover
        if takeover is None or takeover.waiting or self._current is None or self._current.role is not Role.ACTIVE:
            return
        first = takeover.milliseconds.get("first_token")
        if first is not None:
            takeover.mark("all_resumed")
            self._metrics.recovery.observe(first / 1000)
        log.warning(
            "pid %d took over from pid %d: %d requests restored, %d recomputed, ms %s%s",
            takeover.successor, takeover.victim, takeover.restored, takeover.recomputed, takeover.milliseconds,
            f" ({takeover.reason})" if takeover.reason else "",
        )  # fmt: skip
        self._takeover = None
        self._hold_spare_until = 0.0
        self._ensure()

    # --- deaths

    def on_death(self, worker: EngineProcess) -> None:
        """See engine_process.Observer."""
        self._workers.remove(worker)
        if worker is self._current:
            self._lost(worker)
        elif not self._stopping:
            self._idle_worker_died(worker)
        if not self._workers:
            self._emptied.set()
        self._ensure()

    def _idle_worker_died(self, worker: EngineProcess) -> None:
        self._last_trouble = worker.cause
        self._metrics.deaths.labels(worker.died_as.value).inc()
        log.warning("a %s engine (pid %d) ended: %s", worker.died_as.value, worker.pid, worker.cause)
        if worker.died_as is Role.STARTING:
            self._starts.failed(time.monotonic())

    def _lost(self, worker: EngineProcess) -> None:
        """The engine that served is dead and reaped."""
        self._current = None
        now = time.monotonic()
        self._down_since = self._down_since if self._down_since is not None else now
        self._metrics.deaths.labels(worker.died_as.value).inc()
        self._last_trouble = worker.cause
        if self._stopping:
            return
        log.warning("the %s engine (pid %d) is gone: %s", worker.died_as.value, worker.pid, worker.cause)
        self._metrics.takeovers.inc()
        self._takeover_count += 1
        self._takeover = Takeover(time.time(), worker.cause, worker.pid, now)
        self.takeovers.append(self._takeover)
        if worker.died_as is Role.RECOVERING:
            self._recovery_deaths += 1
        suspects = worker.control.suspects()
        if worker.died_as is Role.ACTIVE and not suspects and now - worker.changed_at < _QUICK_DEATH_SECONDS:
            self._idle_deaths.failed(now)
        for live in self.journal.strike(suspects):
            self._metrics.poisoned.inc()
            self._end(live.request.key, errors.killed_engine(STRIKES))
        if self._recovery_deaths >= _DEATHS_BEFORE_GIVING_UP:
            for live in self.journal:
                self._end(live.request.key, errors.no_engine(f"every takeover failed ({worker.cause})"))
        for listener in list(self._listeners.values()):
            listener.interrupted()

    # --- keeping up the number

    def _ensure(self) -> None:
        """Bring what runs closer to what should run."""
        if self._stopping:
            return
        if self._current is None:
            spare = next((w for w in self._workers if w.role is Role.SPARE), None)
            if spare is not None:
                self._activate(spare)
        now = time.monotonic()
        missing = 1 + self._settings.spares - len(self._workers)
        starting = any(w.role is Role.STARTING for w in self._workers)
        # One at a time: two that load side by side are both late. Nothing but the only engine may disturb a takeover.
        if missing <= 0 or starting or not (self._starts.over(now) and self._idle_deaths.over(now)):
            return
        if self._current is not None and (now < self._hold_spare_until or self._current.role is not Role.ACTIVE):
            return
        self._spawn()

    def _spawn(self) -> None:
        self._number += 1
        try:
            self._workers.append(EngineProcess(self._number, self._spec, self._log, self))
        except OSError as error:
            self._last_trouble = f"the process could not be started: {error}"
            self._starts.failed(time.monotonic())

    def _activate(self, worker: EngineProcess) -> None:
        """Make `worker` the owner of the log. No other worker that ever wrote is alive."""
        self._writer_epoch = self._log.fence()
        worker.writer_epoch = self._writer_epoch
        worker.set_role(Role.RECOVERING)
        self._current = worker
        self._hold_spare_until = time.monotonic() + _HOLD_SPARE_SECONDS
        entries = self.journal.entries()
        for live in self.journal:
            live.given = True
        if self._takeover is not None:
            self._takeover.successor = worker.pid
            # Streams that stand still; those that had no token yet only wait a little longer for their first.
            streams = {entry.request.key for entry in entries if entry.delivered}
            self._takeover.waiting = streams or {entry.request.key for entry in entries}
            self._takeover.mark("fenced")
        for entry in entries:
            worker.send(wire.Entry(entry))
        use_log = self._settings.recovery == "log" and self._recovery_deaths < _DEATHS_BEFORE_RECOMPUTE
        worker.send(wire.Activate(self._writer_epoch, use_log, len(entries)))

    def _tick(self) -> None:
        now = time.monotonic()
        elapsed = min(now - self._last_tick, _MAX_TICK)
        self._last_tick = now
        for worker in list(self._workers):
            self._watch(worker, now, elapsed)
        if self._down_since is not None:
            for live in self.journal:
                if now - max(live.accepted_at, self._down_since) > self._settings.wait_timeout:
                    why = self._last_trouble or "it is still starting"
                    self._end(live.request.key, errors.no_engine(why))
        self._ensure()
        self._tick_handle = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _watch(self, worker: EngineProcess, now: float, elapsed: float) -> None:
        silent = worker.silent_for(elapsed)
        settings = self._settings
        match worker.role:
            case Role.STARTING:
                if now - worker.started_at > settings.start_timeout:
                    worker.kill(f"it was not ready after {settings.start_timeout:g} s")
            case Role.RECOVERING:
                if silent > settings.recovery_timeout:
                    worker.kill(f"it gave no sign of life for {silent:.1f} s inside a takeover")
            case Role.ACTIVE | Role.SPARE:
                if silent > settings.hang_timeout:
                    worker.kill(f"it gave no sign of life for {silent:.1f} s")

    # --- reports

    @property
    def able(self) -> bool:
        """Whether a request sent now would be served: an engine is active, or takes over at this moment."""
        return not self._stopping and self._ever_active and (self._current is not None or self._starts.failures == 0)

    @property
    def status(self) -> str:
        """One word for /health."""
        if self._stopping:
            return "stopping"
        if self._current is not None and self._current.role is Role.ACTIVE:
            return "ok"
        if self._starts.failures >= _START_FAILURES_BEFORE_REFUSING:
            return "failing"
        return "recovering" if self._ever_active else "starting"

    def snapshot(self) -> dict[str, Any]:
        """JSON-able state of engines and takeovers, for /health."""
        now = time.monotonic()
        engines = [
            {
                "pid": w.pid, "number": w.number, "role": w.role.value, "writer_epoch": w.writer_epoch,
                "age_s": round(now - w.started_at, 3), "in_role_s": round(now - w.changed_at, 3),
            }
            for w in self._workers
        ]  # fmt: skip
        return {
            "engines": engines,
            "writer_epoch": self._writer_epoch,
            "live": len(self.journal),
            "started": self._number,
            "start_failures": self._starts.failures,
            "last_trouble": self._last_trouble,
            "takeover_count": self._takeover_count,
            "durability_degraded": bool(self._current and self._current.stats.get("durability_degraded")),
            "takeovers": [takeover.public() for takeover in self.takeovers],
        }

    def workers(self) -> list[EngineProcess]:
        """The processes that exist, the current one first."""
        return sorted(self._workers, key=lambda w: (w is not self._current, w.number))

    def _gauges(self) -> Mapping[str, float]:
        gauges: dict[str, float] = {
            "live_requests": len(self.journal),
            "waiting_requests": sum(not live.given for live in self.journal),
            "engines": len(self._workers),
            "spares_ready": sum(w.role is Role.SPARE for w in self._workers),
            "writer_epoch": self._writer_epoch,
            "log_bytes": self._log.used(),
            "supervisor_resident_bytes": resident_bytes(),
        }
        if self._current is not None:
            gauges.update({f"engine_{name}": value for name, value in self._current.stats.items()})
        return gauges
