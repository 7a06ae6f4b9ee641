"""What both engines are apart from computing: requests whose state is in the log, their reports, their ends."""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Protocol

from outlast.checkpoint.checkpointer import StepCheckpointer
from outlast.checkpoint.recovery import LoggedRequest
from outlast.core import _native as core
from outlast.core.memory import Memory
from outlast.engines.native.sequences import Emitted
from outlast.engines.native.sequences import Sequence as Seq
from outlast.engines.native.state_log import StateLog, logged_tokens
from outlast.engines.protocol import Emission, JournalEntry
from outlast.executor import Executor

#: Pool memory that one `prepare` maps, 4 to 8 ms of work; the log, mapped for reading, takes a quarter of the time.
PREPARE_BYTES = 32 << 20
_FIRST_NATIVE_FAULT = 100  #: fault points of the control page from here on are the log's kill points


class Control(Protocol):
    """What an engine uses of the worker's control page."""

    @property
    def heartbeat_address(self) -> int:
        """Word that the executor counts up with every task."""

    @property
    def fault_address(self) -> int:
        """Three words: point, passes to let through, action."""

    def mark(self, keys: Iterable[int]) -> None:
        """Name the requests of the running step."""


class LoggedEngine(ABC):
    """The part of `outlast.engines.protocol.Engine` that does not depend on how tokens are computed."""

    executor: Executor
    _pool_memory: Memory  #: the pages of the KV pool
    _log: StateLog | None

    def __init__(self, control: Control | None) -> None:
        self._control = control
        self._sequences: dict[int, Seq] = {}
        self._failures: list[tuple[int, str]] = []
        self._pool_mapped = 0

    @abstractmethod
    def _leave(self, s: Seq) -> None:
        """Free what a sequence holds, in whatever phase it is."""

    @abstractmethod
    def _working(self) -> bool:
        """Whether a sequence runs or waits."""

    # --- the Engine protocol

    def prepare(self) -> None:
        """See `Engine.prepare`: maps the pages of pool and log that the running engine has filled."""
        if self._pool_mapped < self._pool_memory.size:
            self._pool_mapped = self._pool_memory.map_present(self._pool_mapped, PREPARE_BYTES, write=True)
        elif self._log is None or self._log.map_present(4 * PREPARE_BYTES):
            self._pool_mapped = 0  # once more from the start: by now there is more

    def cancel(self, key: int) -> None:
        """See `Engine.cancel`."""
        self._forget(key)

    def release(self, key: int) -> None:
        """See `Engine.release`."""
        self._forget(key)

    def busy(self) -> bool:
        """See `Engine.busy`."""
        return bool(
            self._working() or self._failures or any(s.reported < len(s.emitted) for s in self._sequences.values())
        )

    def failures(self) -> list[tuple[int, str]]:
        """See `Engine.failures`."""
        out, self._failures = self._failures, []
        return out

    def close(self) -> None:
        """See `Engine.close`."""
        if self._checkpointer is not None:
            self._checkpointer.flush()
        self.executor.close()

    # --- requests

    def _report_again(self) -> list[Emission]:
        """Tokens that are in the log but of which the supervisor has not been told."""
        out = []
        for s in self._sequences.values():
            while s.reported < len(s.emitted):
                out.append(self._emission(s, s.reported))
                s.reported += 1
        return out

    def _emission(self, s: Seq, index: int) -> Emission:
        emitted = s.emitted[index]
        return Emission(
            s.key, index, emitted.token, emitted.logprob, emitted.top, s.finish_at(index), s.cached if index == 0 else 0
        )

    def _forget(self, key: int) -> None:
        s = self._sequences.pop(key, None)
        if s is None:
            return
        self._leave(s)
        if self._checkpointer is not None and s.logged:
            self._checkpointer.drop(key, s.generation)

    def _fail(self, key: int, reason: str) -> None:
        self._forget(key)
        self._failures.append((key, reason))

    # --- the log

    @property
    def _checkpointer(self) -> StepCheckpointer | None:
        return None if self._log is None else self._log.checkpointer

    def _known_again(self, entry: JournalEntry, logged: LoggedRequest | None) -> tuple[Seq, bool]:
        """A request of the journal with its tokens, and whether those are the log's."""
        s = Seq(entry.request, alone=entry.alone)
        self._sequences[s.key] = s
        emitted = logged_tokens(entry, logged)
        if emitted is None:
            # The log knows less than the client, or something else: what was delivered counts.
            s.emitted = [Emitted(token, 0.0) for token in entry.delivered]
        else:
            s.emitted = emitted
        s.reported = len(entry.delivered)
        return s, emitted is not None

    def _arm_fault(self) -> None:
        """Hand a fault that a test armed in the control page on to the log's kill points."""
        if self._control is None:
            return
        words = (ctypes.c_uint64 * 3).from_address(self._control.fault_address)
        if words[0] >= _FIRST_NATIVE_FAULT:
            core.arm_kill_point(core.kill_points()[words[0] - _FIRST_NATIVE_FAULT], words[1] + 1)
            words[0] = 0


def milliseconds_since(started: float) -> float:
    """Since `started` of `time.perf_counter`."""
    return (time.perf_counter() - started) * 1000.0
