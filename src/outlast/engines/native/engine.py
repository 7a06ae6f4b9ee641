"""The native engine: decoder, executor and checkpointer joined behind the `Engine` protocol.

One step is one plan in one ring: compute tasks, delta handlers, commit. A token is reported when that plan has ended,
so what a client sees is always explained by a committed epoch.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast.checkpoint.checkpointer import Image
from outlast.checkpoint.handlers import KVHandlers
from outlast.checkpoint.recovery import LoggedRequest, Restorer, note_all
from outlast.core import _native as core
from outlast.core.errors import DurabilityLost, Refused, UsageError
from outlast.core.jit import JitCache
from outlast.core.memory import Memory
from outlast.engines.native import decoder as decoders
from outlast.engines.native import weights as weight_store
from outlast.engines.native.blocks import BlockPool
from outlast.engines.native.loading import BLOCK_TOKENS, manifest_of, open_weights, pool_geometry, weights_bytes
from outlast.engines.native.logged_engine import Control, LoggedEngine, milliseconds_since
from outlast.engines.native.parts import Parts
from outlast.engines.native.rows import LoggedRows
from outlast.engines.native.scheduler import Scheduler, Share
from outlast.engines.native.sequences import Emitted, encode_request
from outlast.engines.native.sequences import Sequence as Seq
from outlast.engines.native.state_log import StateLog
from outlast.engines.protocol import Emission, EngineRequest, JournalEntry, RecoveryReport, SamplingParams
from outlast.executor import Executor

_logger = logging.getLogger(__name__)

#: Positions of prompts in one step. Larger chunks fill the kernels' tiles better, smaller ones let running streams
#: through sooner; past 64 the gain is small.
PREFILL_CHUNK = 64
STEP_TIMEOUT = 300.0
#: Tokens guessed behind the last one of a sequence that runs alone, at most: with it two tiles of four rows.
SPECULATE = 7


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
        compute=decoders.compute_mode(options.get("compute", decoders.COMPUTE)),
        prefill_chunk=int(options.get("prefill_chunk", PREFILL_CHUNK)),
        allow_degrade=bool(options.get("allow_degrade", False)),
        share_prefixes=bool(options.get("share_prefixes", True)),
        speculate=int(options.get("speculate", SPECULATE)),
        specialise=bool(options.get("specialise", True)),
        control=control,
    )


class NativeEngine(LoggedEngine):
    """See `outlast.engines.protocol.Engine`. `log=None` computes without recording anything."""

    def __init__(
        self,
        weights: weight_store.Weights,
        *,
        log: Mapping[str, Any] | None,
        kv_tokens: int,
        block_tokens: int = BLOCK_TOKENS,
        threads: int = 1,
        compute: decoders.Compute = decoders.COMPUTE,
        prefill_chunk: int = PREFILL_CHUNK,
        allow_degrade: bool = False,
        share_prefixes: bool = True,
        speculate: int = 0,
        specialise: bool = True,
        control: Control | None = None,
        pool: Memory | None = None,
    ) -> None:
        """`log`: what `LogOwner.spec` gave; `kv_tokens`: tokens the pool holds; `threads`: of a step; `compute`: see
        `Decoder`.

        `share_prefixes`: requests that begin with the same tokens use the same blocks. `speculate`: most tokens that
        are guessed in a step behind the last one of a sequence that runs alone; 0 = none.

        `pool`: pages for the KV pool that outlive this process. Their content is never read before it was written
        again from the log; but touching new pages is what makes a restore slow, and these have been touched. It belongs
        to the running engine: nothing is written before `recover`.
        """
        if threads < 1 or prefill_chunk < 1 or speculate < 0:
            raise UsageError(
                f"{threads} threads, prefill chunks of {prefill_chunk}, {speculate} drafts",
                why="the first two are at least 1, the third is not negative",
            )
        self._weights = weights
        self._parts = Parts(threads)
        super().__init__(control)
        self.geometry = pool_geometry(weights.config, kv_tokens, block_tokens)
        self._pool_memory = pool or Memory.anonymous(self.geometry.pool_bytes, name="outlast-kv")
        self.pool = self._pool_memory.address_of(0, self.geometry.pool_bytes)
        self.executor = Executor(workers=threads - 1)
        if control is not None:
            self.executor.native.set_heartbeat(control.heartbeat_address)
        self.decoder = decoders.Decoder(
            weights,
            self.pool,
            decoders.kv_geometry(weights.config, block_tokens, self.geometry.blocks),
            compute=compute,
        )
        self._slots = {
            name: self.executor.register(name, address).index for name, address in decoders.operators().items()
        }
        self.decoder.bind(self._slots)
        self.handlers = KVHandlers(self.executor, self.geometry)
        self.manifest = manifest_of(weights, self.geometry, compute)
        blocks = BlockPool(self.geometry, self.manifest.digest, sharing=share_prefixes, address=self.pool)
        self._rows = LoggedRows(self.geometry, blocks, Restorer(self.executor, self.handlers, self.pool))
        self._scheduler = Scheduler(
            self.decoder,
            blocks,
            self._rows,
            block_tokens=block_tokens,
            chunk=prefill_chunk,
            speculate=speculate,
        )
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
        self._steps = 0
        self._guessed = self._guessed_right = 0
        self._warm_up()
        if specialise:
            self.handlers.specialise_in_background(JitCache)

    @property
    def log_steps(self) -> bool:
        """Whether steps are logged; switched by benchmarks, step by step."""
        return self._rows.log_steps

    @log_steps.setter
    def log_steps(self, value: bool) -> None:
        self._rows.log_steps = value

    # --- the Engine protocol

    def recover(self, writer_epoch: int, journal: Sequence[JournalEntry], *, use_log: bool = True) -> RecoveryReport:
        """See `Engine.recover`."""
        self._arm_fault()
        started = time.perf_counter()
        logged: dict[int, LoggedRequest] = {}
        reason, times = "there is no log", {}
        if self._log is not None:
            logged, reason = self._log.recover(writer_epoch, use_log=use_log)
            self._rows.checkpointer = self._log.checkpointer
        times["scan"] = milliseconds_since(started)
        core.reach_kill_point("recover.scanned")
        started = time.perf_counter()
        known = [self._take_over(entry, logged.get(entry.request.key)) for entry in sorted(journal, key=_by_key)]
        if self._checkpointer is not None:
            note_all((logged[s.key] for s, kept in known if kept), self._checkpointer.note_recovered)
            for key in logged.keys() - self._sequences.keys():
                self._checkpointer.drop(key, logged[key].generation)
        times["requests"] = milliseconds_since(started)
        started = time.perf_counter()
        self._rows.recovered = logged
        self._scheduler.admit(parked_only=True)
        self._rows.recovered = {}
        restored = [s for s, kept in known if kept and s.generation == logged[s.key].generation]
        tokens = sum(self.decoder.computed(s.handle) for s in restored if s.handle >= 0)
        times["apply"] = milliseconds_since(started)
        core.reach_kill_point("recover.applied")
        if reason:
            _logger.info("cold start: %s", reason)
        return RecoveryReport(len(restored), len(journal) - len(restored), tokens, reason, times)

    def submit(self, request: EngineRequest) -> None:
        """See `Engine.submit`."""
        if len(request.prompt) + request.max_tokens > self._weights.config.context:
            raise Refused(
                f"a request of {len(request.prompt)} + {request.max_tokens} tokens",
                why=f"the context is {self._weights.config.context}",
            )
        self._scheduler.pool.check(len(request.prompt) + request.max_tokens)
        s = self._sequences[request.key] = Seq(request)
        self._scheduler.enqueue(s)

    def step(self) -> list[Emission]:
        """See `Engine.step`."""
        self._arm_fault()
        again = self._report_again()
        if again:
            return again
        try:
            self._scheduler.admit()
            shares = self._scheduler.choose()
            if not shares:
                return []
            self._compute(shares)
        except DurabilityLost as error:
            self._durability_lost(error)
            return []
        self._steps += 1
        return self._settle(shares)

    def stats(self) -> dict[str, float]:
        """See `Engine.stats`."""
        log = self._checkpointer.log.native if self._checkpointer is not None else None
        plans = self.executor.plan_stats()
        return {
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "preemptions": self._scheduler.preemptions,
            "drafts": self._guessed,
            "drafts_accepted": self._guessed_right,
            "positions_restored": self._scheduler.restored_positions,
            "positions_shared": self._scheduler.shared_positions,
            "kv_blocks_used": self.geometry.blocks - self._scheduler.pool.free,
            "kv_blocks_kept": self._scheduler.pool.kept,
            "kv_blocks_total": self.geometry.blocks,
            "log_bytes": log.bytes_appended if log is not None else 0,
            "log_used_bytes": log.used_bytes if log is not None else 0,
            "epochs": log.committed_epoch if log is not None else 0,
            "steps": self._steps,
            "tasks": plans.tasks,
            "plans_built": self.decoder.plans_built,
            "timed_plan_seconds": plans.timed_seconds,
            "timed_dispatch_seconds": plans.dispatch_seconds,
            "timed_wait_seconds": plans.wait_seconds,
            "handlers_specialised": float(self.handlers.specialised),
            "durability_degraded": float(self._log is not None and bool(self._log.degraded)),
        }

    # --- steps

    def _working(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    def _leave(self, s: Seq) -> None:
        self._scheduler.leave(s)

    def _compute(self, shares: Sequence[Share]) -> None:
        """Run one step's plan, and its epoch. The decoder's sequences stand as before if it fails."""
        if self._control is not None:
            self._control.mark(share.sequence.key for share in shares)
        items = []
        for share in shares:
            s = share.sequence
            items.append(decoders.Item(s.handle, share.positions, int(s.recheck), share.drafts))
        tokens = sum(item.positions + item.recheck + len(item.drafts) for item in items)
        parts = self._parts.choose(tokens)
        plan = self.decoder.plan(items, parts)
        started = time.perf_counter()
        try:
            if self._checkpointer is None or not self.log_steps:
                self.executor.run(plan.address, plan.count, timeout=STEP_TIMEOUT)
            else:
                self._checkpointer.run(
                    plan.address, plan.count, plan.writes_address, plan.writes_count, self._written(shares),
                    timeout=STEP_TIMEOUT, number=plan.number,
                )  # fmt: skip
        except BaseException:
            self.decoder.abandon()
            raise
        self._parts.ran(tokens, parts, time.perf_counter() - started)

    def _written(self, shares: Sequence[Share]) -> Iterator[tuple[int, int, int, int]]:
        """What a step wrote, see `StepCheckpointer.run`."""
        for share, accepted in zip(shares, self.decoder.accepted(), strict=True):
            s = share.sequence
            first = self.decoder.computed(s.handle)
            end = first + share.positions
            yield s.key, first, share.positions + accepted, len(s.emitted) if end == s.length else -1
            for index in range(accepted):
                yield s.key, end, 0, len(s.emitted) + 1 + index
            end += accepted
            if first <= s.rows_logged:
                s.rows_logged = max(s.rows_logged, end)

    def _settle(self, shares: Sequence[Share]) -> list[Emission]:
        """After a committed step: new tokens, ends, and state that did not stand up to being computed again."""
        out = []
        for share, result in zip(shares, self.decoder.commit(), strict=True):
            s = share.sequence
            s.recheck = s.alone = False
            if not result.verified:
                _logger.warning("request %d: restored rows differ from recomputed ones; computing it anew", s.key)
                self._rows.disown(s)
                self._scheduler.start_over(s)
            elif not result.finite:
                # Whoever shared a damaged row would fail as well.
                self._scheduler.leave(s, doubtful=True)
                self._fail(s.key, "the model's output is not finite")
            else:
                if result.token is not None:
                    s.emitted.append(Emitted(result.token, result.logprob, result.top))
                    s.emitted += [Emitted(*more) for more in result.more]
                    out += [self._emission(s, index) for index in range(s.reported, len(s.emitted))]
                    s.reported = len(s.emitted)
                    self._guessed += len(share.drafts)
                    self._guessed_right += len(result.more)
                    if s.drafts is not None:
                        s.drafts.judge(len(share.drafts), len(result.more))
                self._scheduler.publish(s)
                if s.finished:
                    self._scheduler.leave(s)
        return out

    def _durability_lost(self, error: DurabilityLost) -> None:
        """Go on in the fallback log with everything, or end all requests: nothing may leave uncommitted."""
        for s in self._scheduler.waiting:
            if s.parked:  # its rows are in the log that is lost
                s.generation += 1
                s.parked = s.rows_logged = 0
        kept = [key for key, s in self._sequences.items() if s.logged]
        if self._log is not None and self._log.durability_lost(error, kept):
            self._rows.checkpointer = self._log.checkpointer
            for s in self._scheduler.running:
                s.rows_logged = self.decoder.computed(s.handle)
            return
        for key in list(self._sequences):
            self._fail(key, f"durability lost: {error}")

    # --- the log

    def _image(self, key: int) -> Image | None:
        s = self._sequences.get(key)
        if s is None:
            return None
        return Image(
            s.generation,
            encode_request(s.request),
            [e.encode() for e in s.emitted],
            self.decoder.computed(s.handle) if s.handle >= 0 else s.parked,
            s.table_address(),
            parked=s.parked > 0,
        )

    def _take_over(self, entry: JournalEntry, logged: LoggedRequest | None) -> tuple[Seq, bool]:
        """Continue one request, and whether with what the log says of it. Its rows are restored when it is admitted."""
        s, known = self._known_again(entry, logged)
        kept = logged is not None and known
        if logged is not None:
            s.generation = logged.generation + (not kept)
        if logged is not None and kept:
            s.logged = True
            s.rows_logged = logged.contiguous()
            s.parked = min(s.rows_logged, s.length - 1)
            if logged.rows and not s.parked:
                self._rows.disown(s)
                kept = False
        if not s.finished:
            self._scheduler.enqueue(s)
        else:
            s.parked = 0
        return s, kept

    # --- start

    def _warm_up(self) -> None:
        """Touch code and weights once, in a pool of its own, so that the first step after a takeover is not slow."""
        native = decoders.kv_geometry(self._weights.config, self.geometry.block_tokens, 1)
        with Memory.anonymous(native.block_bytes) as scratch:
            decoder = decoders.Decoder(self._weights, scratch.address, native, compute=self.decoder.compute)
            decoder.bind(self._slots)
            handle = decoder.add(1, 1, [0, 0], 2, 0, SamplingParams())
            decoder.set_table(handle, [0])
            plan = decoder.plan([decoders.Item(handle, 2)], self._parts.most)
            self.executor.run(plan.address, plan.count, timeout=STEP_TIMEOUT)
            decoder.commit()


def _by_key(entry: JournalEntry) -> int:
    return entry.request.key
