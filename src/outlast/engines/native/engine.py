"""The native engine: decoder, executor and checkpointer joined behind the `Engine` protocol.

One step is one plan in one ring: compute tasks, delta handlers, commit. A token is reported when that plan has ended,
so what a client sees is always explained by a committed epoch.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from outlast.checkpoint.checkpointer import Image, StepCheckpointer
from outlast.checkpoint.handlers import KVHandlers
from outlast.checkpoint.recovery import LoggedRequest, Restorer, note_all
from outlast.core import _native as core
from outlast.core.errors import DurabilityLost, Refused, UsageError
from outlast.core.jit import JitCache
from outlast.core.log import EMISSION
from outlast.core.memory import Memory
from outlast.engines.native import decoder as decoders
from outlast.engines.native import weights as weight_store
from outlast.engines.native.loading import BLOCK_TOKENS, manifest_of, open_weights, pool_geometry, weights_bytes
from outlast.engines.native.sequences import BlockPool, Emitted, encode_request
from outlast.engines.native.sequences import Sequence as Seq
from outlast.engines.native.state_log import StateLog, logged_tokens
from outlast.engines.protocol import Emission, EngineRequest, JournalEntry, RecoveryReport, SamplingParams
from outlast.executor import Executor

_logger = logging.getLogger(__name__)

#: Positions of a prompt in one step. Larger chunks fill the kernels' tiles better, smaller ones let running streams
#: through sooner; past 64 the gain is small.
PREFILL_CHUNK = 64
STEP_TIMEOUT = 300.0
#: Pool memory that one `prepare` maps, 4 to 8 ms of work; the log, mapped for reading, takes a quarter of the time.
PREPARE_BYTES = 32 << 20
_FIRST_NATIVE_FAULT = 100  #: fault points of the control page from here on are the log's kill points


class Control(Protocol):
    """What the engine uses of the worker's control page."""

    @property
    def heartbeat_address(self) -> int:
        """Word that the executor counts up with every task."""

    @property
    def fault_address(self) -> int:
        """Three words: point, passes to let through, action."""

    def mark(self, keys: Iterable[int]) -> None:
        """Name the requests of the running step."""


def default_threads() -> int:
    """Half of the cores, at most 4: the other half is for the server, the clients and the spare."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2))


def create(options: Mapping[str, Any], *, control: Control | None = None) -> NativeEngine:
    """Build an engine from JSON options, see `NativeEngine`. `weights_fd` and the log's descriptors are inherited."""
    path = Path(options["model"])
    if options.get("weights_fd") is not None:
        memory = Memory.from_fd(int(options["weights_fd"]), name="weights")
    else:
        memory = Memory.anonymous(weights_bytes(path), name="outlast-weights")
    pool = options.get("kv_fd")
    return NativeEngine(
        open_weights(memory, path),
        pool=None if pool is None else Memory.from_fd(int(pool), name="kv pool"),
        log=options.get("log") or None,
        kv_tokens=int(options["kv_tokens"]),
        block_tokens=int(options.get("block_tokens", BLOCK_TOKENS)),
        threads=int(options.get("threads") or default_threads()),
        prefill_chunk=int(options.get("prefill_chunk", PREFILL_CHUNK)),
        allow_degrade=bool(options.get("allow_degrade", False)),
        specialise=bool(options.get("specialise", True)),
        control=control,
    )


class NativeEngine:
    """See `outlast.engines.protocol.Engine`. `log=None` computes without recording anything."""

    def __init__(
        self,
        weights: weight_store.Weights,
        *,
        log: Mapping[str, Any] | None,
        kv_tokens: int,
        block_tokens: int = BLOCK_TOKENS,
        threads: int = 1,
        prefill_chunk: int = PREFILL_CHUNK,
        allow_degrade: bool = False,
        specialise: bool = True,
        control: Control | None = None,
        pool: Memory | None = None,
    ) -> None:
        """`log`: what `LogOwner.spec` gave; `kv_tokens`: tokens the pool holds; `threads`: of a step.

        `pool`: pages for the KV pool that outlive this process. Their content is never read before it was written
        again from the log; but touching new pages is what makes a restore slow, and these have been touched. It belongs
        to the running engine: nothing is written before `recover`.
        """
        if threads < 1 or prefill_chunk < 1:
            raise UsageError(f"{threads} threads, prefill chunks of {prefill_chunk}", why="both must be at least 1")
        self._weights = weights
        self._parts = threads
        self._chunk = prefill_chunk
        self._control = control
        self.geometry = pool_geometry(weights.config, kv_tokens, block_tokens)
        self._pool_memory = pool or Memory.anonymous(self.geometry.pool_bytes, name="outlast-kv")
        self.pool = self._pool_memory.address_of(0, self.geometry.pool_bytes)
        self.executor = Executor(workers=threads - 1)
        if control is not None:
            self.executor.native.set_heartbeat(control.heartbeat_address)
        self.decoder = decoders.Decoder(
            weights, self.pool, decoders.kv_geometry(weights.config, block_tokens, self.geometry.blocks)
        )
        self._slots = {
            name: self.executor.register(name, address).index for name, address in decoders.operators().items()
        }
        self.decoder.bind(self._slots)
        self.handlers = KVHandlers(self.executor, self.geometry)
        self.manifest = manifest_of(weights, self.geometry)
        self._blocks = BlockPool(self.geometry)
        self._sequences: dict[int, Seq] = {}
        self._waiting: deque[int] = deque()
        self._running: list[int] = []
        self._failures: list[tuple[int, str]] = []
        self._log: StateLog | None = None
        if log is not None:
            self._log = StateLog(
                log,
                self.manifest,
                self.executor,
                self.handlers,
                self.pool,
                image=self._image,
                alive=self._sequences.__contains__,
                allow_degrade=allow_degrade,
            )
        self.log_steps = True  #: switched by benchmarks, step by step
        self._steps = 0
        self._pool_mapped = 0
        self._warm_up()
        if specialise:
            self.handlers.specialise_in_background(JitCache)

    # --- the Engine protocol

    def prepare(self) -> None:
        """See `Engine.prepare`: maps the pages of pool and log that the running engine has filled."""
        if self._pool_mapped < self._pool_memory.size:
            self._pool_mapped = self._pool_memory.map_present(self._pool_mapped, PREPARE_BYTES, write=True)
        elif self._log is None or self._log.map_present(4 * PREPARE_BYTES):
            self._pool_mapped = 0  # once more from the start: by now there is more

    def recover(self, writer_epoch: int, journal: Sequence[JournalEntry], *, use_log: bool = True) -> RecoveryReport:
        """See `Engine.recover`."""
        self._arm_fault()
        started = time.perf_counter()
        logged: dict[int, LoggedRequest] = {}
        reason, times = "there is no log", {}
        if self._log is not None:
            logged, reason = self._log.recover(writer_epoch, use_log=use_log)
        times["scan"] = _since(started)
        core.reach_kill_point("recover.scanned")
        started = time.perf_counter()
        restorer = Restorer(self.executor, self.handlers, self.pool)
        restored = tokens = 0
        kept = []
        # Those that were running get their blocks first; the others wait as before.
        for entry in sorted(journal, key=lambda e: e.request.key not in logged or not logged[e.request.key].rows):
            request = logged.get(entry.request.key)
            positions = self._take_over(entry, request, restorer)
            if positions >= 0 and request is not None:
                restored += 1
                tokens += positions
                kept.append(request)
        times["apply"] = _since(started)
        core.reach_kill_point("recover.applied")
        started = time.perf_counter()
        if self._checkpointer is not None:
            note_all(kept, self._checkpointer.note_recovered)
            alive = {entry.request.key for entry in journal}
            for key, request in logged.items():
                if key not in alive:
                    self._checkpointer.drop(key, request.generation)
        self._waiting = deque(sorted(self._waiting))
        times["requests"] = _since(started)
        if reason:
            _logger.info("cold start: %s", reason)
        return RecoveryReport(restored, len(journal) - restored, tokens, reason, times)

    def submit(self, request: EngineRequest) -> None:
        """See `Engine.submit`."""
        if len(request.prompt) + request.max_tokens > self._weights.config.context:
            raise Refused(
                f"a request of {len(request.prompt)} + {request.max_tokens} tokens",
                why=f"the context is {self._weights.config.context}",
            )
        self._blocks.check(len(request.prompt) + request.max_tokens)
        self._sequences[request.key] = Seq(request)
        self._waiting.append(request.key)

    def cancel(self, key: int) -> None:
        """See `Engine.cancel`."""
        self._forget(key)

    def release(self, key: int) -> None:
        """See `Engine.release`."""
        self._forget(key)

    def busy(self) -> bool:
        """See `Engine.busy`."""
        return bool(
            self._running or self._failures or any(s.reported < len(s.emitted) for s in self._sequences.values())
        ) or bool(self._waiting)

    def failures(self) -> list[tuple[int, str]]:
        """See `Engine.failures`."""
        out, self._failures = self._failures, []
        return out

    def step(self) -> list[Emission]:
        """See `Engine.step`."""
        self._arm_fault()
        again = self._report_again()
        if again:
            return again
        self._admit()
        batch = self._choose()
        if not batch:
            return []
        if self._control is not None:
            self._control.mark(s.key for s in batch)
        items, spans = [], []
        for s in batch:
            computed, length = self.decoder.computed(s.handle), self.decoder.length(s.handle)
            positions = min(self._chunk, length - computed)
            samples = computed + positions == length
            items.append(decoders.Item(s.handle, positions, 1 if s.recheck and computed > 0 else 0))
            spans.append((s.key, computed, positions, len(s.emitted) if samples else -1))
        plan = self.decoder.plan(items, self._parts)
        try:
            self._run(plan, spans)
        except DurabilityLost as error:
            self.decoder.abandon()
            kept = [key for key, s in self._sequences.items() if s.logged]
            if self._log is None or not self._log.durability_lost(error, kept):
                for key in list(self._sequences):  # nothing may leave uncommitted
                    self._fail(key, f"durability lost: {error}")
            return []
        except BaseException:
            self.decoder.abandon()
            raise
        self._steps += 1
        return self._settle(batch)

    def stats(self) -> dict[str, float]:
        """See `Engine.stats`."""
        log = self._checkpointer.log.native if self._checkpointer is not None else None
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "kv_blocks_used": self.geometry.blocks - self._blocks.free,
            "kv_blocks_total": self.geometry.blocks,
            "log_bytes": log.bytes_appended if log is not None else 0,
            "log_used_bytes": log.used_bytes if log is not None else 0,
            "epochs": log.committed_epoch if log is not None else 0,
            "steps": self._steps,
            "handlers_specialised": float(self.handlers.specialised),
            "durability_degraded": float(self._log is not None and bool(self._log.degraded)),
        }

    def close(self) -> None:
        """See `Engine.close`."""
        if self._checkpointer is not None:
            self._checkpointer.flush()
        self.executor.close()

    # --- steps

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
        return Emission(s.key, index, emitted.token, emitted.logprob, emitted.top, s.finish_at(index))

    def _admit(self) -> None:
        """Move requests from waiting to running in order, as long as their blocks are free."""
        while self._waiting:
            s = self._sequences[self._waiting[0]]
            blocks = self._blocks.take(s.total)
            if blocks is None:
                return
            self._waiting.popleft()
            self._start(s, blocks, computed=0)

    def _start(self, s: Seq, blocks: list[int], computed: int) -> None:
        s.blocks = blocks
        s.handle = self.decoder.add(s.key, s.generation, s.tokens(), len(s.request.prompt), computed, s.request.params)
        self.decoder.set_table(s.handle, blocks)
        self._running.append(s.key)
        if not s.logged:
            s.logged = True
            self._log_request(s)

    def _log_request(self, s: Seq) -> None:
        """Queue what the log must know of a request before its first step."""
        if self._checkpointer is not None:
            self._checkpointer.open_request(s.key, s.generation, encode_request(s.request))
            for index, emitted in enumerate(s.emitted):
                self._checkpointer.queue(EMISSION, s.generation, s.key, index, emitted.encode())

    def _choose(self) -> list[Seq]:
        """The sequences of the next step: one on probation alone, else every decoding one and one prompt's chunk."""
        running = [self._sequences[key] for key in self._running]
        for s in running:
            if s.alone:
                return [s]
        batch, prompt = [], False
        for s in running:
            rest = self.decoder.length(s.handle) - self.decoder.computed(s.handle)
            if rest > 1:
                if prompt:
                    continue
                prompt = True
            batch.append(s)
        return batch

    def _run(self, plan: decoders.StepPlan, spans: list[tuple[int, int, int, int]]) -> None:
        if self._checkpointer is None or not self.log_steps:
            self.executor.run(plan.address, plan.count, timeout=STEP_TIMEOUT)
        else:
            self._checkpointer.run(
                plan.address, plan.count, plan.writes_address, plan.writes_count, spans, timeout=STEP_TIMEOUT
            )

    def _settle(self, batch: list[Seq]) -> list[Emission]:
        """After a committed step: new tokens, ends, and state that did not stand up to being computed again."""
        out = []
        for s, result in zip(batch, self.decoder.commit(), strict=True):
            s.recheck = s.alone = False
            if not result.verified:
                _logger.warning("request %d: restored rows differ from recomputed ones; computing it anew", s.key)
                self._recompute(s)
            elif not result.finite:
                self._fail(s.key, "the model's output is not finite")
            elif result.token is not None:
                s.emitted.append(Emitted(result.token, result.logprob, result.top))
                out.append(self._emission(s, s.reported))
                s.reported += 1
                if s.finished:
                    self._stop(s)
        return out

    def _recompute(self, s: Seq) -> None:
        """Throw the rows of a running sequence away; its tokens stay."""
        s.generation += 1
        blocks, s.blocks = s.blocks, []
        self._running.remove(s.key)
        self.decoder.remove(s.handle)
        s.logged = False
        self._start(s, blocks, computed=0)

    def _stop(self, s: Seq) -> None:
        """Free what a sequence holds of the pool."""
        if s.handle >= 0:
            self.decoder.remove(s.handle)
            s.handle = -1
            self._running.remove(s.key)
        self._blocks.give(s.blocks)

    def _forget(self, key: int) -> None:
        s = self._sequences.pop(key, None)
        if s is None:
            return
        self._stop(s)
        with contextlib.suppress(ValueError):  # it is not waiting
            self._waiting.remove(key)
        if self._checkpointer is not None and s.logged:
            self._checkpointer.drop(key, s.generation)

    def _fail(self, key: int, reason: str) -> None:
        self._forget(key)
        self._failures.append((key, reason))

    # --- the log

    @property
    def _checkpointer(self) -> StepCheckpointer | None:
        return None if self._log is None else self._log.checkpointer

    def _image(self, key: int) -> Image | None:
        s = self._sequences.get(key)
        if s is None:
            return None
        return Image(
            s.generation,
            encode_request(s.request),
            [e.encode() for e in s.emitted],
            self.decoder.computed(s.handle) if s.handle >= 0 else 0,
            s.table_address(),
        )

    def _take_over(self, entry: JournalEntry, logged: LoggedRequest | None, restorer: Restorer) -> int:
        """Continue one request; the number of restored positions, or -1 if its rows are to be computed anew."""
        s = Seq(entry.request, alone=entry.alone)
        self._sequences[s.key] = s
        emitted = logged_tokens(entry, logged)
        if emitted is None:
            # The log knows less than the client, or something else: what was delivered counts.
            s.emitted = [Emitted(token, 0.0) for token in entry.delivered]
        else:
            s.emitted = emitted
        s.reported = len(entry.delivered)
        if logged is not None:
            s.generation = logged.generation
            s.logged = emitted is not None
        if s.finished:
            return 0 if emitted is not None else -1
        positions = 0
        if logged is not None and emitted is not None:
            positions = min(logged.contiguous(), len(s.tokens()) - 1)
        blocks = self._blocks.take(s.total) if positions > 0 else None
        if blocks is not None and logged is not None:
            s.blocks = blocks
            if restorer.restore(logged, positions, s.table_address()):
                s.recheck = True
                self._start(s, blocks, computed=positions)
                return positions
            _logger.warning(
                "request %d: %s; computing it anew", s.key, logged.trouble or "restored rows fail their digest"
            )
            self._blocks.give(s.blocks)
        if logged is not None and (logged.rows or emitted is None):
            s.generation += 1
            s.logged = False
        self._waiting.append(s.key)
        return 0 if positions == 0 and emitted is not None else -1

    # --- start and faults

    def _warm_up(self) -> None:
        """Touch code and weights once, in a pool of its own, so that the first step after a takeover is not slow."""
        native = decoders.kv_geometry(self._weights.config, self.geometry.block_tokens, 1)
        with Memory.anonymous(native.block_bytes) as scratch:
            decoder = decoders.Decoder(self._weights, scratch.address, native)
            decoder.bind(self._slots)
            handle = decoder.add(1, 1, [0, 0], 2, 0, SamplingParams())
            decoder.set_table(handle, [0])
            plan = decoder.plan([decoders.Item(handle, 2)], self._parts)
            self.executor.run(plan.address, plan.count, timeout=STEP_TIMEOUT)
            decoder.commit()

    def _arm_fault(self) -> None:
        """Hand a fault that a test armed in the control page on to the log's kill points."""
        if self._control is None:
            return
        words = (ctypes.c_uint64 * 3).from_address(self._control.fault_address)
        if words[0] >= _FIRST_NATIVE_FAULT:
            core.arm_kill_point(core.kill_points()[words[0] - _FIRST_NATIVE_FAULT], words[1] + 1)
            words[0] = 0


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1000.0
