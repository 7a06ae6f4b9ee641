"""The second engine: a causal language model of transformers behind the `Engine` protocol.

One sequence per forward, in turn, on one thread: its bits depend on nothing but its own tokens, their positions, and
what the manifest names. A step is one forward, one sampled token, one epoch of the log; a token is reported when that
epoch is committed. The log, its handlers and the recovery are those of the native engine.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast.checkpoint.checkpointer import Image
from outlast.checkpoint.handlers import KVHandlers
from outlast.checkpoint.recovery import LoggedRequest, Restorer, note_all
from outlast.core import _native as core
from outlast.core.errors import DurabilityLost, Refused, UsageError
from outlast.core.log import EMISSION, Manifest
from outlast.core.memory import Memory
from outlast.engines.hf.cache import SlotCache, heartbeat
from outlast.engines.hf.folder import BLOCK_TOKENS, SLOTS, Shape, digest_of, pool_geometry, read_shape, slot_tokens
from outlast.engines.hf.model import CausalModel, environment
from outlast.engines.hf.sampling import Sampler
from outlast.engines.hf.slots import Slots
from outlast.engines.hf.step import StepWrite
from outlast.engines.native.logged_engine import Control, LoggedEngine, milliseconds_since
from outlast.engines.native.sequences import Emitted, encode_request
from outlast.engines.native.sequences import Sequence as Seq
from outlast.engines.native.state_log import StateLog
from outlast.engines.protocol import Emission, EngineRequest, JournalEntry, RecoveryReport
from outlast.executor import Executor

_logger = logging.getLogger(__name__)

#: Prompt positions of one forward. Part of the manifest: another chunk gives other bits.
PREFILL_CHUNK = 64
COMMIT_TIMEOUT = 300.0


def create(options: Mapping[str, Any], *, control: Control | None = None) -> HfEngine:
    """Build an engine from JSON options, see `HfEngine`. The descriptors of pool and log are inherited."""
    pool = options.get("kv_fd")
    return HfEngine(
        Path(options["model"]),
        dtype=str(options.get("dtype", "float32")),
        digest=options.get("digest") or None,
        pool=None if pool is None else Memory.from_fd(int(pool), name="kv pool"),
        log=options.get("log") or None,
        kv_tokens=int(options["kv_tokens"]),
        block_tokens=int(options.get("block_tokens", BLOCK_TOKENS)),
        threads=int(options.get("threads") or 1),
        prefill_chunk=int(options.get("prefill_chunk", PREFILL_CHUNK)),
        replay=str(options.get("replay", "exact")),
        verify=bool(options.get("verify", True)),
        allow_degrade=bool(options.get("allow_degrade", False)),
        control=control,
    )


class _Running:
    """What a running sequence has beside what the log knows of it."""

    def __init__(self, slot: int, cache: SlotCache, computed: int) -> None:
        self.slot = slot
        self.cache = cache
        self.computed = computed  #: positions whose rows are in the pool


class HfEngine(LoggedEngine):
    """See `outlast.engines.protocol.Engine`. `log=None` computes without recording anything."""

    def __init__(
        self,
        folder: Path,
        *,
        log: Mapping[str, Any] | None,
        kv_tokens: int,
        dtype: str = "float32",
        digest: str | None = None,
        block_tokens: int = BLOCK_TOKENS,
        threads: int = 1,
        prefill_chunk: int = PREFILL_CHUNK,
        replay: str = "exact",
        verify: bool = True,
        allow_degrade: bool = False,
        control: Control | None = None,
        pool: Memory | None = None,
    ) -> None:
        """`folder`: config.json and *.safetensors; `digest`: of them, None = compute it; `kv_tokens`: positions that
        the pool holds; `pool`: pages that outlive this process, see `NativeEngine`.

        `replay`: how a request is computed anew whose rows are lost. "exact" takes the steps that were taken the first
        time, so that its tokens go on as they would have; "fast" takes its generated tokens in chunks as well, with
        other bits. `verify`: compute the last restored step again and compare its rows before the first new token.
        """
        if threads < 1 or prefill_chunk < 1 or replay not in ("exact", "fast"):
            raise UsageError(
                f"{threads} threads, prefill chunks of {prefill_chunk}, replay {replay!r}",
                why="the numbers must be at least 1, and replay is exact or fast",
            )
        self.shape: Shape = read_shape(folder, dtype)
        self._chunk = prefill_chunk
        self._exact = replay == "exact"
        self._verify = verify
        super().__init__(control)
        self._model = CausalModel(folder, self.shape, threads)
        self.geometry = pool_geometry(self.shape, kv_tokens, block_tokens)
        self._pool_memory = pool or Memory.anonymous(self.geometry.pool_bytes, name="outlast-kv")
        self.pool = self._pool_memory.address_of(0, self.geometry.pool_bytes)
        self._slots = Slots(self.geometry, self._pool_memory, SLOTS, kv_tokens)
        self._sampler = Sampler(self.shape.vocab)
        self.executor = Executor(workers=0)
        self._beat = heartbeat(0)
        if control is not None:
            self.executor.native.set_heartbeat(control.heartbeat_address)
            self._beat = heartbeat(control.heartbeat_address)
        self.handlers = KVHandlers(self.executor, self.geometry)
        self.manifest = Manifest(
            engine="transformers",
            model=digest or digest_of(folder),
            kv_type=self.shape.dtype,
            kv_layout="layer-kv-head-token",
            pieces=self.geometry.pieces,
            row_bytes=self.geometry.row_bytes,
            block_tokens=block_tokens,
            cache="region",
            max_length=slot_tokens(self.shape, kv_tokens, block_tokens),
            chunk=prefill_chunk,
            batch=1,
            threads=threads,
            attention="sdpa",
            adapter="none",
            parallel="1/1",
            **environment(),
        )
        self._active: dict[int, _Running] = {}  #: by key, in the order of their turns
        self._waiting: deque[int] = deque()
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
        self._verified = 0
        self._warm_up()

    # --- the Engine protocol

    def recover(self, writer_epoch: int, journal: Sequence[JournalEntry], *, use_log: bool = True) -> RecoveryReport:
        """See `Engine.recover`."""
        self._arm_fault()
        started = time.perf_counter()
        logged: dict[int, LoggedRequest] = {}
        reason, times = "there is no log", {}
        if self._log is not None:
            logged, reason = self._log.recover(writer_epoch, use_log=use_log)
        times["scan"] = milliseconds_since(started)
        core.reach_kill_point("recover.scanned")
        started = time.perf_counter()
        restorer = Restorer(self.executor, self.handlers, self.pool)
        restored = tokens = 0
        kept = []
        # Those that were running get their slots first; the others wait as before.
        for entry in sorted(journal, key=lambda e: e.request.key not in logged or not logged[e.request.key].rows):
            request = logged.get(entry.request.key)
            positions = self._take_over(entry, request, restorer)
            if positions >= 0 and request is not None:
                restored += 1
                tokens += positions
                kept.append(request)
        times["apply"] = milliseconds_since(started)
        core.reach_kill_point("recover.applied")
        started = time.perf_counter()
        if self._checkpointer is not None:
            note_all(kept, self._checkpointer.note_recovered)
            alive = {entry.request.key for entry in journal}
            for key, request in logged.items():
                if key not in alive:
                    self._checkpointer.drop(key, request.generation)
        self._waiting = deque(sorted(self._waiting))
        times["requests"] = milliseconds_since(started)
        if reason:
            _logger.info("cold start: %s", reason)
        return RecoveryReport(restored, len(journal) - restored, tokens, reason, times)

    def submit(self, request: EngineRequest) -> None:
        """See `Engine.submit`."""
        total = len(request.prompt) + request.max_tokens
        if total > self.shape.context:
            raise Refused(
                f"a request of {len(request.prompt)} + {request.max_tokens} tokens",
                why=f"the context is {self.shape.context}",
            )
        if max(request.prompt) >= self.shape.vocab:
            raise Refused(f"token {max(request.prompt)}", why=f"the model knows {self.shape.vocab}")
        self._slots.check(total)
        self._sequences[request.key] = Seq(request)
        self._waiting.append(request.key)

    def step(self) -> list[Emission]:
        """See `Engine.step`: the next sequence's piece of prompt, or its next token."""
        self._arm_fault()
        again = self._report_again()
        if again:
            return again
        self._admit()
        s = self._next()
        if s is None:
            return []
        if self._control is not None:
            self._control.mark([s.key])
        running = self._active[s.key]
        if s.recheck:
            s.recheck = False
            if not self._check(s, running):
                _logger.warning("request %d: restored rows differ from recomputed ones; computing it anew", s.key)
                self._recompute(s)
                return []
        s.alone = False
        first, tokens = running.computed, self._piece(s, running)
        samples = first + len(tokens) == len(s.request.prompt) + len(s.emitted)
        running.cache.rewind(first)
        logits = self._model.forward(tokens, running.cache, logits=samples)
        emitted = None
        if samples:
            emitted = self._sampler.choose(logits, s.request, [e.token for e in s.emitted])
            if emitted is None:
                self._fail(s.key, "the model's output is not finite")
                return []
        try:
            self._commit(s, first, len(tokens), emitted)
        except DurabilityLost as error:
            kept = [key for key, other in self._sequences.items() if other.logged]
            if self._log is None or not self._log.durability_lost(error, kept):
                for key in list(self._sequences):  # nothing may leave uncommitted
                    self._fail(key, f"durability lost: {error}")
            return []
        running.computed = first + len(tokens)
        self._steps += 1
        return [] if emitted is None else [self._settle(s, emitted)]

    def stats(self) -> dict[str, float]:
        """See `Engine.stats`."""
        log = self._checkpointer.log.native if self._checkpointer is not None else None
        return {
            "running": len(self._active),
            "waiting": len(self._waiting),
            "kv_blocks_used": self.geometry.blocks_for(self._slots.used),
            "kv_blocks_total": self.geometry.blocks_for(self._slots.budget),
            "log_bytes": log.bytes_appended if log is not None else 0,
            "log_used_bytes": log.used_bytes if log is not None else 0,
            "epochs": log.committed_epoch if log is not None else 0,
            "steps": self._steps,
            "verified": self._verified,
            "durability_degraded": float(self._log is not None and bool(self._log.degraded)),
        }

    # --- steps

    def _admit(self) -> None:
        """Move requests from waiting to running in order, as long as there is room for them."""
        while self._waiting:
            s = self._sequences[self._waiting[0]]
            slot = self._slots.take(s.total)
            if slot is None:
                return
            self._waiting.popleft()
            self._start(s, slot, computed=0)

    def _start(self, s: Seq, slot: int, computed: int) -> None:
        s.blocks = self._slots.table(slot)
        cache = self._model.slot(self._pool_memory, self._slots.offset(slot), self._slots.slot_tokens, self._beat)
        self._active[s.key] = _Running(slot, cache, computed)
        if not s.logged:
            s.logged = True
            self._log_request(s)

    def _log_request(self, s: Seq) -> None:
        """Queue what the log must know of a request before its first step."""
        if self._checkpointer is not None:
            self._checkpointer.open_request(s.key, s.generation, encode_request(s.request))
            for index, emitted in enumerate(s.emitted):
                self._checkpointer.queue(EMISSION, s.generation, s.key, index, emitted.encode())

    def _next(self) -> Seq | None:
        """Whose turn it is: one on probation before all others, else the one whose last turn is longest ago."""
        if not self._active:
            return None
        key = next((k for k in self._active if self._sequences[k].alone), next(iter(self._active)))
        self._active[key] = self._active.pop(key)
        return self._sequences[key]

    def _piece(self, s: Seq, running: _Running) -> list[int]:
        """Tokens of its next step: a chunk of the prompt, one generated token, or several where bits do not count."""
        tokens, prompt, first = s.tokens(), len(s.request.prompt), running.computed
        if first < prompt:
            return tokens[first : min(first + self._chunk, prompt)]
        return tokens[first : first + (1 if self._exact else self._chunk)]

    def _step_start(self, s: Seq, computed: int) -> int:
        """Where the step began that ended at position `computed`."""
        prompt = len(s.request.prompt)
        if computed > prompt:
            return computed - 1
        return (computed - 1) // self._chunk * self._chunk

    def _check(self, s: Seq, running: _Running) -> bool:
        """Compute the last restored step again; whether its rows are the restored ones, byte by byte."""
        end = running.computed
        first = self._step_start(s, end)
        before = running.cache.rows(first, end)
        running.cache.rewind(first)
        self._model.forward(s.tokens()[first:end], running.cache, logits=False)
        self._verified += 1
        return _same_bytes(before, running.cache.rows(first, end))

    def _commit(self, s: Seq, first: int, count: int, emitted: Emitted | None) -> None:
        if self._checkpointer is None:
            return
        write = StepWrite(s.key, s.generation, s.table_address(), first, count, len(s.emitted), emitted)
        spans = [(s.key, first, count, len(s.emitted) if emitted is not None else -1)]
        self._checkpointer.run(write.no_tasks, 0, write.address, 1, spans, timeout=COMMIT_TIMEOUT)

    def _settle(self, s: Seq, emitted: Emitted) -> Emission:
        """After a commit: the token counts."""
        s.emitted.append(emitted)
        out = self._emission(s, s.reported)
        s.reported += 1
        if s.finished:
            self._stop(s)
        return out

    def _recompute(self, s: Seq) -> None:
        """Throw the rows of a running sequence away; its tokens stay."""
        s.generation += 1
        s.logged = False
        if self._checkpointer is not None:
            self._checkpointer.forget_rows(s.key)
        running = self._active.pop(s.key)
        self._start(s, running.slot, computed=0)

    def _stop(self, s: Seq) -> None:
        """Free what a sequence holds of the pool."""
        running = self._active.pop(s.key, None)
        if running is not None:
            # A step that was not committed may have written a piece more.
            self._slots.give(running.slot, min(s.total, running.computed + self._chunk))
        s.blocks = []

    def _working(self) -> bool:
        return bool(self._active or self._waiting)

    def _leave(self, s: Seq) -> None:
        self._stop(s)
        with contextlib.suppress(ValueError):  # it is not waiting
            self._waiting.remove(s.key)

    # --- the log

    def computed(self, key: int) -> int:
        """Positions of a live request whose rows are in the pool."""
        running = self._active.get(key)
        return 0 if running is None else running.computed

    def _image(self, key: int) -> Image | None:
        s = self._sequences.get(key)
        if s is None:
            return None
        return Image(
            s.generation, encode_request(s.request), [e.encode() for e in s.emitted], self.computed(key),
            s.table_address(),
        )  # fmt: skip

    def _take_over(self, entry: JournalEntry, logged: LoggedRequest | None, restorer: Restorer) -> int:
        """Continue one request; the number of restored positions, or -1 if its rows are to be computed anew."""
        s, known = self._known_again(entry, logged)
        if logged is not None:
            s.generation = logged.generation
            s.logged = known
        if s.finished:
            return 0 if known else -1
        positions = 0
        if logged is not None and known:
            positions = self._whole_steps(s, min(logged.contiguous(), len(s.tokens()) - 1))
        slot = self._slots.take(s.total) if positions > 0 else None
        if slot is not None and logged is not None:
            s.blocks = self._slots.table(slot)
            if restorer.restore(logged, positions, s.table_address()):
                s.recheck = self._verify
                self._start(s, slot, computed=positions)
                return positions
            _logger.warning(
                "request %d: %s; computing it anew", s.key, logged.trouble or "restored rows fail their digest"
            )
            self._slots.give(slot, positions)
            s.blocks = []
        if logged is not None and (logged.rows or not known):
            s.generation += 1
            s.logged = False
        self._waiting.append(s.key)
        return 0 if positions == 0 and known else -1

    def _whole_steps(self, s: Seq, positions: int) -> int:
        """The largest end of a step that is not past `positions`: the next step must be one that was taken before."""
        prompt = len(s.request.prompt)
        return positions if positions >= prompt else positions // self._chunk * self._chunk

    # --- start

    def _warm_up(self) -> None:
        """Two forwards through region layers and a commit's worth of sampling: code and memory are touched once."""
        positions = self.geometry.block_tokens
        with Memory.anonymous(self.shape.pieces * positions * self.shape.row_bytes) as scratch:
            cache = self._model.slot(scratch, 0, positions, self._beat)
            self._model.forward([0, 0], cache, logits=False)
            logits = self._model.forward([0], cache, logits=True)
            self._sampler.choose(logits, EngineRequest(1, (0,), 1), [])
            del cache


def _same_bytes(a: Any, b: Any) -> bool:
    import torch

    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
