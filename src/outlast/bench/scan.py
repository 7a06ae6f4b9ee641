"""Finding changed pages of an opaque region: a checkpoint of it, against copying all of it and comparing the copies."""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from outlast.bench.report import median, significant, spread
from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.regions import PAGE, BytesHandlers, OpaqueRegion
from outlast.core import _native
from outlast.core.errors import OutlastError
from outlast.core.log import SUPERBLOCK_BYTES, Log, LogOwner, LogWriter, Manifest, map_memory
from outlast.core.memory import Memory
from outlast.executor import Executor

REGION_BYTES = 256 << 20
DIRTY_SHARE = 0.01
#: Pages that the baseline compares in one memcmp(3) before it looks closer. It stops at the first difference, so that
#: few bytes are read twice, and the calls from Python stay below a tenth of its time.
_PIECE_PAGES = 16

_libc = ctypes.CDLL(None)
_memcmp = _libc.memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


class CopyAndCompare:
    """The baseline: keeps the last copy of a region, and takes a new one whose pages are compared with it."""

    def __init__(self, base: int, size: int) -> None:
        self._base = base
        self._size = size
        self._copies = [Memory.anonymous(size, name="outlast-bench") for _ in range(2)]
        for copy in self._copies:
            copy.prefault()
        _native.memcpy(self._copies[0].address, base, size)

    def changed(self) -> list[int]:
        """Numbers of pages that changed since the last call."""
        old, new = self._copies
        _native.memcpy(new.address, self._base, self._size)
        found = []
        step = _PIECE_PAGES * PAGE
        for at in range(0, self._size, step):
            length = min(step, self._size - at)
            if _memcmp(old.address + at, new.address + at, length):
                found += [
                    page // PAGE
                    for page in range(at, at + length, PAGE)
                    if _memcmp(old.address + page, new.address + page, PAGE)
                ]
        self._copies.reverse()
        return found

    def close(self) -> None:
        """Give the copies back."""
        for copy in self._copies:
            copy.close()


class _Log:
    """A log in warm memory whose segments hold a whole region, and of which only the last is kept."""

    def __init__(self, region_bytes: int) -> None:
        # The first epoch holds every page; each record has a header.
        segment = -(-(region_bytes + region_bytes // 8 + SUPERBLOCK_BYTES + (1 << 20)) // PAGE) * PAGE
        self._owner = LogOwner.in_memory(3 * segment, segment_bytes=segment)
        self._memory = map_memory(self._owner.spec())
        self._memory.prefault()
        manifest = Manifest(bench="scan")
        log = Log.open(self._owner.spec(), manifest, memory=self._memory)
        self.writer: LogWriter = log.start(self._owner.fence(), manifest)

    def close(self) -> None:
        del self.writer
        self._memory.close()
        self._owner.close()


def measure(*, size: int = REGION_BYTES, share: float = DIRTY_SHARE, epochs: int = 15, seed: int = 0) -> dict[str, Any]:
    """`scan_vs_compare`: median time of copy and compare by that of a checkpoint (find, append, commit), both on the
    same changes, in turn. `source`: the best way to find changes that the machine allows; `hash_vs_compare`: by hash.

    Raises `OutlastError` if the two sides do not find the same pages.
    """
    pages = size // PAGE
    dirty = max(1, int(pages * share))
    rng = random.Random(seed)
    with Executor() as executor, Memory.anonymous(size, name="outlast-bench") as memory:
        memory.prefault()
        _fill(memory, rng)
        handlers = BytesHandlers(executor)
        report: dict[str, Any] = {"region_bytes": size, "dirty_pages": dirty, "epochs": epochs}
        rows: dict[str, Any] = {}
        why = ""
        for source in ("userfaultfd", "hash"):
            try:
                region = OpaqueRegion(1, handlers, memory.address, size, source=source)
            except OSError as error:
                why = str(error)
                continue
            rows[source] = _compare(executor, region, memory, rng, dirty, epochs)
            del region
        best = "userfaultfd" if "userfaultfd" in rows else "hash"
        report |= {
            "scan_vs_compare": rows[best]["ratio"],
            "source": best,
            "why_not_exact": why,
            "hash_vs_compare": rows["hash"]["ratio"],
            "first_write_us_per_page": rows[best]["write_us_per_page"],
            "scan_by_source": rows,
            "scan_baseline": "memcpy of the whole region into warm memory, memcmp with the copy before",
        }
        return report


def _fill(memory: Memory, rng: random.Random) -> None:
    piece = rng.randbytes(1 << 20)
    for at in range(0, memory.size, len(piece)):
        memory.buffer[at : at + len(piece)] = piece[: memory.size - at]


def _compare(
    executor: Executor, region: OpaqueRegion, memory: Memory, rng: random.Random, dirty: int, epochs: int
) -> dict[str, Any]:
    log = _Log(memory.size)
    baseline = CopyAndCompare(memory.address, memory.size)
    try:
        checkpointer = Checkpointer(executor, log.writer, [region])
        checkpointer.checkpoint()
        baseline.changed()
        writes: list[float] = []
        ours: list[float] = []
        theirs: list[float] = []
        finds: list[int] = []
        for number in range(epochs):
            chosen = sorted(rng.sample(range(memory.size // PAGE), dirty))
            spots = [page * PAGE + rng.randrange(PAGE) for page in chosen]
            writes.append(_seconds(partial(_touch, memory, spots)))
            before = log.writer.native.bytes_appended
            found: list[int] = []
            acts: list[tuple[list[float], Callable[[], Any]]] = [
                (ours, checkpointer.checkpoint), (theirs, partial(_collect, baseline, found)),
            ]  # fmt: skip
            for seconds, act in acts if number % 2 else reversed(acts):
                seconds.append(_seconds(act))
            finds.append(log.writer.native.bytes_appended - before)
            log.writer.native.release_before(log.writer.native.segment)
            if found != chosen or not dirty * PAGE <= finds[-1] < 2 * dirty * PAGE + PAGE:
                raise OutlastError(
                    f"{region.source} and comparison differ",
                    why=f"{dirty} pages were written, {len(found)} compared unequal, {finds[-1]} bytes were logged",
                )
        return {
            "checkpoint_ms": median([1000 * s for s in ours]),
            "compare_ms": median([1000 * s for s in theirs]),
            "ratio": significant(statistics.median(theirs) / statistics.median(ours), 4),
            "p25": significant(spread(theirs)["median"] / spread(ours)["p75"], 4),
            "p75": significant(spread(theirs)["median"] / spread(ours)["p25"], 4),
            "write_us_per_page": significant(1e6 * statistics.median(writes) / dirty, 3),
            "bytes_per_epoch": round(statistics.median(finds)),
        }
    finally:
        baseline.close()
        log.close()


def _touch(memory: Memory, spots: list[int]) -> None:
    buffer = memory.buffer
    for spot in spots:
        buffer[spot] ^= 1


def _collect(baseline: CopyAndCompare, into: list[int]) -> None:
    into += baseline.changed()


def _seconds(act: Callable[[], Any]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started
