"""The engine's side of the epoch log: which log to recover from, what it says, what to do when it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from outlast.checkpoint.checkpointer import Image, LogOperators, StepCheckpointer
from outlast.checkpoint.handlers import KVHandlers
from outlast.checkpoint.recovery import LoggedRequest, fold
from outlast.core.errors import CorruptState, DurabilityLost
from outlast.core.log import Log, LogWriter, Manifest, map_memory
from outlast.engines.native.sequences import Emitted, decode_request
from outlast.engines.protocol import JournalEntry
from outlast.executor import Executor

_log = logging.getLogger(__name__)


class StateLog:
    """Opens the log at a takeover, hands out the checkpointer, and falls back to another log where that is allowed."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        manifest: Manifest,
        executor: Executor,
        handlers: KVHandlers,
        pool: int,
        *,
        image: Callable[[int], Image | None],
        alive: Callable[[int], bool],
        allow_degrade: bool,
    ) -> None:
        """`spec`: from `LogOwner.spec`; `pool`: address of the KV pool; `image`, `alive`: see `StepCheckpointer`."""
        self._spec = spec
        self._manifest = manifest
        self._executor = executor
        self._handlers = handlers
        self._operators = LogOperators.install(executor)
        self._pool = pool
        self._image = image
        self._alive = alive
        self._allow_degrade = allow_degrade
        self._memory = map_memory(spec) if spec["kind"] == "memory" else None
        self._mapped = 0
        self.checkpointer: StepCheckpointer | None = None  #: from `recover` on
        self.degraded = ""  #: why a lower durability than asked for is in use

    def map_present(self, limit: int) -> bool:
        """Map up to `limit` bytes that the present writer has filled; True when all are."""
        if self._memory is None or self._mapped >= self._memory.size:
            self._mapped = 0
            return True
        self._mapped = self._memory.map_present(self._mapped, limit, write=False)
        return False

    def recover(self, writer_epoch: int, *, use_log: bool) -> tuple[dict[int, LoggedRequest], str]:
        """Become the writer. Returns the requests in the log, by key, and, if nothing could be used, why."""
        log, self.degraded = self._choose()
        reason = "the log is not used" if not use_log else log.differs(self._manifest)
        logged: dict[int, LoggedRequest] = {}
        cold = bool(reason)
        if not cold:
            logged = fold(log.records(), self._handlers.geometry)
            if log.report["stop"] and not log.report["torn"]:
                _log.warning("the log is damaged in segment %d at offset %d: %s", log.report["stop_segment"],
                             log.report["stop_offset"], log.report["stop"])  # fmt: skip
            if log.empty:
                reason = log.report["stop"] or "the log is empty"
        self._use(log.start(writer_epoch, self._manifest, cold=cold))
        return logged, reason

    def durability_lost(self, error: DurabilityLost, live: Iterable[int]) -> bool:
        """The log can not be written. True if a fallback took over and holds everything of the requests `live`."""
        fallback = self._spec.get("fallback")
        if not self._allow_degrade or fallback is None or self.degraded or self.checkpointer is None:
            _log.error("%s", error)
            return False
        _log.error("%s; going on at the next lower durability", error)
        self.degraded = str(error)
        epoch = self.checkpointer.log.native.writer_epoch
        self._use(Log.open(fallback, self._manifest).start(epoch, self._manifest, cold=True))
        self.checkpointer.rebase(live)
        return True

    def _choose(self) -> tuple[Log, str]:
        """The log to recover from: the fallback, if an engine before had to go on in it."""
        fallback = self._spec.get("fallback")
        if fallback is not None:
            log = Log.open(fallback, self._manifest)
            if not log.empty:
                return log, "an earlier engine could not write the log of the durability asked for"
        return Log.open(self._spec, self._manifest, memory=self._memory), ""

    def _use(self, writer: LogWriter) -> None:
        self.checkpointer = StepCheckpointer(
            self._executor, writer, self._handlers, self._operators, self._pool, self._image, self._alive
        )


def logged_tokens(entry: JournalEntry, logged: LoggedRequest | None) -> list[Emitted] | None:
    """Tokens of the log if they are of this request and continue what its client was given, else None."""
    if logged is None or logged.payload is None:
        return None
    try:
        if decode_request(logged.payload) != entry.request:
            return None
        emitted = [Emitted.decode(data) for data in logged.tokens_emitted()]
    except CorruptState as error:
        _log.warning("request %d: %s", entry.request.key, error)
        return None
    if tuple(e.token for e in emitted[: len(entry.delivered)]) != entry.delivered:
        return None
    return emitted
