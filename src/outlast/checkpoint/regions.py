"""Registered state beside the KV pool: append-only buffers and opaque memory. What each writes, and how it comes back.

Every kind answers two questions: what changed since the last epoch (`delta`, into a log record that is staged in
place), and how a committed record is put back (`apply`). Bytes are copied once; what is hashed and logged is the copy.
"""

from __future__ import annotations

import ctypes
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outlast.checkpoint import _native
from outlast.core.errors import CorruptState, UsageError
from outlast.core.log import APPEND, PAGES, LogWriter, Record
from outlast.executor import Executor, Operator

PAGE = 4096
_BYTES_ARGS = struct.Struct("<QQQQII")  # ol_bytes_args
#: Changed pages found by hashing are collected in pieces of this size: they must wait somewhere until their number is
#: known, and a piece that stays in the second-level cache costs no extra memory traffic.
_HASH_PIECE_PAGES = 64


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes [offset, offset + length) of a region."""

    offset: int
    length: int


class Region(Protocol):
    """A piece of state that a `Checkpointer` records. Called from one thread, between steps of whoever writes it."""

    number: int  #: names the region in the log, unique and stable over restarts

    def collect(self) -> tuple[int, int]:
        """Find what changed and return the (payload bytes, records) its delta needs at most. Kept until `stage`."""

    def stage(self, log: LogWriter, executor: Executor) -> int:
        """Write the collected changes as records of the open epoch; returns payload bytes."""

    def committed(self) -> None:
        """The epoch of the last `stage` counts."""

    def aborted(self) -> None:
        """It does not: the same changes must be found again by the next `collect`."""

    def apply(self, record: Record, executor: Executor) -> None:
        """Put a committed record back. Records come in log order; a later one wins."""


class BytesHandlers:
    """The operators that copy runs of bytes, installed once per executor."""

    def __init__(self, executor: Executor) -> None:
        shipped = _native.operators()
        self.executor = executor
        self.delta = executor.register("bytes_delta", shipped["bytes_delta"])
        self.apply = executor.register("bytes_apply", shipped["bytes_apply"])

    def run(self, operator: Operator, base: int, size: int, runs: Sequence[Run], staged: int) -> None:
        """Copy `runs` between the region at address `base` and `staged`, in the direction of `operator`."""
        numbers = [number for run in runs for number in (run.offset, run.length)]
        c_runs = (ctypes.c_uint64 * len(numbers))(*numbers)
        args = ctypes.create_string_buffer(
            _BYTES_ARGS.pack(base, size, ctypes.addressof(c_runs), staged, len(runs), 0), _BYTES_ARGS.size
        )
        self.executor.wait(self.executor.submit(operator, ctypes.addressof(args)), timeout=60.0)


class AppendRegion:
    """A buffer that only grows: bytes below the watermark never change. The delta is the new tail."""

    def __init__(self, number: int, handlers: BytesHandlers, base: int, size: int, *, generation: int = 1) -> None:
        """`base`: address of `size` bytes."""
        self.number = number
        self.generation = generation
        self.size = size
        self.watermark = 0  #: bytes that are valid; the owner raises it
        self.durable = 0  #: bytes that are committed
        self._handlers = handlers
        self._base = base
        self._staged = 0

    def collect(self) -> tuple[int, int]:
        """See `Region`. Raises `UsageError` if the watermark went back or past the end."""
        if not self.durable <= self.watermark <= self.size:
            raise UsageError(
                f"append-only region {self.number}: watermark {self.watermark}",
                why=f"it must stay between the committed {self.durable} and the size {self.size}",
            )
        length = self.watermark - self.durable
        self._staged = self.watermark
        return (length, 1 if length else 0)

    def stage(self, log: LogWriter, executor: Executor) -> int:
        """See `Region`."""
        length = self._staged - self.durable
        if not length:
            return 0
        address, handle = log.native.reserve(APPEND, self.number, self.generation, self.durable, 0, 0, length)
        self._handlers.run(self._handlers.delta, self._base, self.size, [Run(self.durable, length)], address)
        log.native.seal(handle)
        return length

    def committed(self) -> None:
        """See `Region`."""
        self.durable = self._staged

    def aborted(self) -> None:
        """See `Region`."""
        self._staged = self.durable

    def apply(self, record: Record, executor: Executor) -> None:
        """See `Region`. Raises `CorruptState` on a gap."""
        if not _of_this_incarnation(self, record):
            return
        if record.key > self.watermark:
            raise CorruptState(
                f"append-only region {self.number} has a gap", why=f"bytes {self.watermark}..{record.key} are missing"
            )
        self._handlers.run(
            self._handlers.apply, self._base, self.size, [Run(record.key, record.length)], record.address
        )
        self.watermark = self.durable = self._staged = max(self.watermark, record.key + record.length)


class OpaqueRegion:
    """Memory of which nothing is known. Changed pages are found by userfaultfd where the machine allows it (exact, no
    scan of the content), else by a 256-bit hash per page (docs/reference/dirty-sources.md).

    The first epoch holds every page.
    """

    def __init__(
        self,
        number: int,
        handlers: BytesHandlers,
        base: int,
        size: int,
        *,
        source: str = "auto",
        generation: int = 1,
    ) -> None:
        """`base`: page-aligned address of `size` bytes, whole pages. `source`: "auto", "userfaultfd" or "hash".

        "userfaultfd" raises `OSError` where it is not allowed; "auto" does not, and `source` tells what is in use.
        """
        if size <= 0 or size % PAGE or base % PAGE:
            raise UsageError(f"opaque region {number} of {size} bytes", why=f"it must be whole pages of {PAGE} bytes")
        self.number = number
        self.generation = generation
        self.size = size
        self._handlers = handlers
        self._base = base
        self._tracker: _native.WriteTracker | None = None
        self._hashes: _native.PageHashes | None = None
        self.why_not_exact = ""
        if source in ("auto", "userfaultfd"):
            try:
                self._tracker = _native.WriteTracker(base, size)
            except OSError as error:
                if source == "userfaultfd":
                    raise
                self.why_not_exact = str(error)
        if self._tracker is None:
            self._hashes = _native.PageHashes(base, size, secrets.randbits(64))
        self.source = "userfaultfd" if self._tracker is not None else "hash"
        self._pending: list[Run] = [Run(0, size)] if self._tracker is not None else []
        self._copies: list[tuple[Run, bytes]] = []

    def collect(self) -> tuple[int, int]:
        """See `Region`."""
        if self._tracker is not None:
            try:
                fresh = [Run(offset, length) for offset, length in self._tracker.collect()]
            except OSError:
                self._pending = [Run(0, self.size)]  # what it had found by then is lost, so everything may have changed
                raise
            self._pending = merge([*self._pending, *fresh])
            return sum(run.length for run in self._pending), len(self._pending)
        assert self._hashes is not None
        left, self._copies = self._copies, []  # of an aborted epoch
        buffer = ctypes.create_string_buffer(_HASH_PIECE_PAGES * PAGE)
        page = 0
        while page < self._hashes.pages:
            pages, page = self._hashes.scan(page, _HASH_PIECE_PAGES, ctypes.addressof(buffer))
            at = 0
            for run in merge([Run(number * PAGE, PAGE) for number in pages]):
                self._copies.append((run, ctypes.string_at(ctypes.addressof(buffer) + at, run.length)))
                at += run.length
        if left:
            self._copies = _newest([*left, *self._copies])
        return sum(run.length for run, _ in self._copies), len(self._copies)

    def stage(self, log: LogWriter, executor: Executor) -> int:
        """See `Region`. One record per run of adjacent pages."""
        total = 0
        if self._tracker is not None:
            for run in self._pending:
                address, handle = log.native.reserve(
                    PAGES, self.number, self.generation, run.offset // PAGE, 0, run.length // PAGE, run.length
                )
                self._handlers.run(self._handlers.delta, self._base, self.size, [run], address)
                log.native.seal(handle)
                total += run.length
            return total
        for run, content in self._copies:
            log.native.append(PAGES, self.number, self.generation, run.offset // PAGE, 0, run.length // PAGE, content)
            total += run.length
        return total

    def committed(self) -> None:
        """See `Region`."""
        self._pending = []
        self._copies = []

    def aborted(self) -> None:
        """See `Region`. Collected runs stay pending; for hashes the copies do."""

    def apply(self, record: Record, executor: Executor) -> None:
        """See `Region`. Raises `CorruptState` if the record is not of pages of this region."""
        if not _of_this_incarnation(self, record):
            return
        if record.length != record.tokens * PAGE:
            raise CorruptState(f"opaque region {self.number}: {record.tokens} pages in {record.length} bytes")
        if (record.key + record.tokens) * PAGE > self.size:
            raise CorruptState(f"opaque region {self.number} has no page {record.key + record.tokens - 1}")
        self._handlers.run(
            self._handlers.apply, self._base, self.size, [Run(record.key * PAGE, record.length)], record.address
        )


def _of_this_incarnation(region: AppendRegion | OpaqueRegion, record: Record) -> bool:
    """False for a record of an older incarnation, which must not be used; a newer one raises `CorruptState`."""
    if record.region != region.number:
        raise UsageError(f"a record of region {record.region}", why=f"this is region {region.number}")
    if record.generation > region.generation:
        raise CorruptState(
            f"region {region.number} is of generation {region.generation}", why=f"the log holds {record.generation}"
        )
    return record.generation == region.generation


def _newest(copies: Sequence[tuple[Run, bytes]]) -> list[tuple[Run, bytes]]:
    """One copy of each page, the last one: however often an epoch is aborted, no more than the region is held."""
    pages = {run.offset + at: content[at : at + PAGE] for run, content in copies for at in range(0, run.length, PAGE)}
    return [
        (run, b"".join(pages[offset] for offset in range(run.offset, run.offset + run.length, PAGE)))
        for run in merge([Run(offset, PAGE) for offset in pages])
    ]


def merge(runs: Sequence[Run]) -> list[Run]:
    """Sorted, with overlapping and adjacent runs joined."""
    out: list[Run] = []
    for run in sorted(runs, key=lambda r: r.offset):
        if out and run.offset <= out[-1].offset + out[-1].length:
            end = max(out[-1].offset + out[-1].length, run.offset + run.length)
            out[-1] = Run(out[-1].offset, end - out[-1].offset)
        else:
            out.append(run)
    return out
