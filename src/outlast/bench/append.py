"""What the log adds to a copy: append and commit of one record, against memcpy of the same bytes."""

from __future__ import annotations

import ctypes
import random
import time
from typing import Any

from outlast.bench.report import median, spread
from outlast.core import _native
from outlast.core.log import APPEND, SUPERBLOCK_BYTES, Log, LogOwner, Manifest, map_memory
from outlast.core.memory import Memory

MIB = 1 << 20
#: Bytes of one step, from a few tokens of a small model to prefill chunks of a large one. The first is below what the
#: figure is asked for, to show the fixed cost.
SIZES = (64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB)
_LEAST = MIB
_SEGMENT_BYTES = 64 * MIB
_SEGMENTS = 4
#: Bytes that each side moves per size: enough that a pass goes round the whole memory, which no cache holds.
_BYTES_PER_SIZE = 1 << 30


class _Sink:
    """A log in warm memory that only ever holds its last segments."""

    def __init__(self) -> None:
        self.owner = LogOwner.in_memory(_SEGMENTS * _SEGMENT_BYTES, segment_bytes=_SEGMENT_BYTES)
        self.memory = map_memory(self.owner.spec())
        self.memory.prefault()
        manifest = Manifest(bench="append")
        log = Log.open(self.owner.spec(), manifest, memory=self.memory)
        self.writer = log.start(self.owner.fence(), manifest)

    def append(self, source: int, length: int) -> None:
        """One epoch of one record, copied and checked on the way."""
        native = self.writer.native
        native.begin(length, 1)
        native.append_at(APPEND, 1, 1, 1, 0, 0, source, length)
        native.commit()
        native.release_before(native.segment)

    def stage(self, source: int, length: int) -> None:
        """The same in the way of a step: room first, bytes copied into it by someone else, then sealed."""
        native = self.writer.native
        native.begin(length, 1)
        address, handle = native.reserve(APPEND, 1, 1, 1, 0, 0, length)
        _native.memcpy(address, source, length)
        native.seal(handle)
        native.commit()
        native.release_before(native.segment)

    def close(self) -> None:
        """Give the memory back."""
        del self.writer
        self.memory.close()
        self.owner.close()


def measure(*, rounds: int = 1, seed: int = 0) -> dict[str, Any]:
    """`append_vs_memcpy`: median over the pairs of 1 MiB and more of the time of memcpy by that of append and commit.

    Both copy from one source into warm shared memory of the same size, each time to the place after the last, in turn.
    """
    sink = _Sink()
    plain = Memory.anonymous(sink.memory.size, name="outlast-bench")
    plain.prefault()
    source = ctypes.create_string_buffer(random.Random(seed).randbytes(max(SIZES)), max(SIZES))
    try:
        rows: dict[str, Any] = {}
        ratios: list[float] = []
        staged: list[float] = []
        for size in SIZES:
            pairs = [_pair(sink, plain, ctypes.addressof(source), size, i) for i in range(_pairs(size, rounds))]
            found = [copy / append for copy, append, _ in pairs]
            rows[_name(size)] = {
                "memcpy_GB_s": median([size / copy / 1e9 for copy, _, _ in pairs]),
                "append_GB_s": median([size / append / 1e9 for _, append, _ in pairs]),
                "ratio": median(found),
                "p25": spread(found)["p25"],
                "p75": spread(found)["p75"],
                "staged_ratio": median([copy / stage for copy, _, stage in pairs]),
                "pairs": len(pairs),
            }
            if size >= _LEAST:
                ratios += found
                staged += [copy / stage for copy, _, stage in pairs]
        return {
            "append_vs_memcpy": median(ratios),
            "staged_vs_memcpy": median(staged),
            "append_spread": spread(ratios),
            "append_by_size": rows,
            "crc32c": _native.crc32c_kind(),
        }
    finally:
        sink.close()
        plain.close()


def _pairs(size: int, rounds: int) -> int:
    return max(8, rounds * _BYTES_PER_SIZE // size // 4)


def _pair(sink: _Sink, plain: Memory, source: int, size: int, number: int) -> tuple[float, float, float]:
    """Seconds of (memcpy, append + commit, the same staged)."""
    places = (plain.size - SUPERBLOCK_BYTES) // size
    to = plain.address + SUPERBLOCK_BYTES + number % places * size
    started = time.perf_counter()
    _native.memcpy(to, source, size)
    copied = time.perf_counter()
    sink.append(source, size)
    appended = time.perf_counter()
    sink.stage(source, size)
    return copied - started, appended - copied, time.perf_counter() - appended


def _name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size >> 10} KiB"
