"""From a scanned log back to state: fold records into requests, put their rows into a new pool, check what came back.

The order is that of docs/explanation/recovery.md: fence (the owner did), manifest (the scan did), last whole epoch (the
scan did), logical remap, generation veto, request state, verification. Doubt about a request is a miss of that request:
it is computed again from its tokens, never used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from outlast.checkpoint.checkpointer import KV_REGION, REQUEST_REGION
from outlast.checkpoint.geometry import KVGeometry
from outlast.checkpoint.handlers import KVHandlers, Task
from outlast.checkpoint.spans import Extent
from outlast.core.errors import OperatorFailed
from outlast.core.log import DROP, EMISSION, KV_ROWS, KV_SEAL, REQUEST, Record
from outlast.executor import Executor, Operator

_DIGEST_BYTES = 32
_ARGS_BYTES = 64


@dataclass(slots=True)
class LoggedRequest:
    """What the log says about one request."""

    key: int
    generation: int
    payload: bytes | None = None
    emissions: dict[int, bytes] = field(default_factory=dict)
    rows: list[Record] = field(default_factory=list)
    seals: dict[int, bytes] = field(default_factory=dict)
    segments: dict[int, Extent] = field(default_factory=dict)  #: what each segment of the log holds of it
    trouble: str = ""  #: why its rows must not be used

    def tokens_emitted(self) -> list[bytes]:
        """Emissions 0, 1, 2 ... up to the first that is missing."""
        out: list[bytes] = []
        while len(out) in self.emissions:
            out.append(self.emissions[len(out)])
        return out

    def contiguous(self) -> int:
        """Positions from 0 on that all have rows."""
        end = 0
        for first, last in sorted((record.offset, record.offset + record.tokens) for record in self.rows):
            if first > end:
                break
            end = max(end, last)
        return end


def fold(records: Iterable[Record], geometry: KVGeometry) -> dict[int, LoggedRequest]:
    """Requests that are alive at the end of `records` (in log order), by key.

    A record of an older generation of its request is dropped; one of a newer generation makes what came before dead.
    """
    live: dict[int, LoggedRequest] = {}
    for record in records:
        kind = record.type
        if record.region not in (KV_REGION, REQUEST_REGION):
            continue
        request = live.get(record.key)
        if kind == DROP:
            if request is not None and request.generation <= record.generation:
                del live[record.key]
            continue
        if request is None or record.generation > request.generation:
            request = live[record.key] = LoggedRequest(record.key, record.generation)
        elif record.generation < request.generation:
            continue
        extent = request.segments.get(record.segment)
        if extent is None:
            extent = request.segments[record.segment] = Extent()
        if kind == KV_ROWS:
            if record.length != record.tokens * geometry.token_bytes:
                request.trouble = f"a row record holds {record.length} bytes for {record.tokens} tokens"
            request.rows.append(record)
            extent.rows.add(record.offset, record.offset + record.tokens)
        elif kind == KV_SEAL:
            request.seals[record.offset] = record.payload
        elif kind == EMISSION:
            request.emissions[record.offset] = record.payload
            extent.emissions.add(record.offset, record.offset + 1)
        elif kind == REQUEST:
            request.payload = record.payload
            extent.opened = True
    return live


class Restorer:
    """Puts logged rows into a pool through new block tables, as one plan of executor tasks."""

    def __init__(self, executor: Executor, handlers: KVHandlers, pool: int) -> None:
        self._executor = executor
        self._handlers = handlers
        self._pool = pool

    def restore(self, request: LoggedRequest, positions: int, table: int, *, first: int = 0) -> bool:
        """Rows of positions [`first`, `positions`) of `request` through the block table at address `table`.

        `first` is the start of a block: what stands before it is in the pool already and not touched.
        True if all of them are back and every full block has the digest it was sealed with. On False the pool's blocks
        from `first` on hold rubbish and must be computed anew.
        """
        if request.trouble or request.contiguous() < positions:
            return False
        geometry = self._handlers.geometry
        applies = []
        for record in request.rows:
            begin = max(record.offset, first)
            count = min(record.offset + record.tokens, positions) - begin
            if count > 0:
                staged = record.address + (begin - record.offset) * geometry.token_bytes
                applies.append(geometry.args(self._pool, table, staged, begin, count))
        # A block is sealed in the epoch that fills it: one without a seal is as doubtful as one with a wrong seal.
        full = range(first // geometry.block_tokens, positions // geometry.block_tokens)
        if any(len(request.seals.get(block, b"")) != _DIGEST_BYTES for block in full):
            return False
        digests = ctypes.create_string_buffer(max(1, len(full)) * _DIGEST_BYTES)
        checks = [
            geometry.args(
                self._pool, table, ctypes.addressof(digests) + i * _DIGEST_BYTES, block * geometry.block_tokens,
                geometry.block_tokens,
            )
            for i, block in enumerate(full)
        ]  # fmt: skip
        try:
            self._run([(self._handlers.apply, applies), (self._handlers.digest, checks)])
        except OperatorFailed:
            return False
        return all(
            digests.raw[i * _DIGEST_BYTES : (i + 1) * _DIGEST_BYTES] == request.seals[block]
            for i, block in enumerate(full)
        )

    def _run(self, levels: Sequence[tuple[Operator, list[bytes]]]) -> None:
        """Rows are applied in log order (a later record may repeat a position), digests after them."""
        total = sum(len(args) for _, args in levels)
        if total == 0:
            return
        block = ctypes.create_string_buffer(b"".join(a for _, args in levels for a in args), total * _ARGS_BYTES)
        tasks = (Task * total)()
        at = 0
        for operator, args in levels:
            for _ in args:
                task = tasks[at]
                task.op, task.parts, task.after = operator.index, 1, at
                task.arg[0] = ctypes.addressof(block) + at * _ARGS_BYTES
                at += 1
        self._executor.run(ctypes.addressof(tasks), total, timeout=120.0)


def note_all(requests: Iterable[LoggedRequest], note: Callable[[int, Mapping[int, Extent]], None]) -> None:
    """Tell a StepCheckpointer (`note_recovered`) which segments hold what of restored requests."""
    for request in requests:
        note(request.key, request.segments)
