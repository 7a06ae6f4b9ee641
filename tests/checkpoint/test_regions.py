"""Append-only and opaque regions: what changed is logged, an aborted epoch loses no change, a crash loses no byte.

What is promised about concurrent writers: regions are checkpointed between steps, by the thread that steps. A page that
somebody writes during a checkpoint is logged as it was copied, perhaps half old and half new, and is found again by the
next one.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint import _native
from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.regions import PAGE, AppendRegion, BytesHandlers, OpaqueRegion, Run, merge
from outlast.core.errors import CorruptState, Fenced, OperatorFailed, Refused, UsageError
from outlast.core.log import PAGES, Log, LogOwner, LogWriter, Manifest, Record
from outlast.executor import Executor

MANIFEST = Manifest(model="m")
SOURCES = ["hash", "userfaultfd"]


class Pages:
    """Page-aligned private memory."""

    def __init__(self, pages: int) -> None:
        self.map = mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size = pages * PAGE
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def bytes(self) -> bytes:
        return ctypes.string_at(self.address, self.size)

    def put(self, offset: int, data: bytes) -> None:
        self.map[offset : offset + len(data)] = data


class Rig:
    """Executor, log and owner of one test; `again` is a process that starts after a crash."""

    def __init__(self, owner: LogOwner | None = None) -> None:
        self.owner = owner or LogOwner.in_memory(1 << 22, segment_bytes=1 << 19)
        self.executor = Executor()
        self.handlers = BytesHandlers(self.executor)
        self.log = Log.open(self.owner.spec(), MANIFEST)
        self.records = list(self.log.records())
        self.writer: LogWriter = self.log.start(self.owner.fence(), MANIFEST)

    def again(self) -> Rig:
        return Rig(self.owner)


def opaque(rig: Rig, pages: Pages, source: str, number: int = 7) -> OpaqueRegion:
    try:
        return OpaqueRegion(number, rig.handlers, pages.address, pages.size, source=source)
    except OSError as error:
        pytest.skip(f"userfaultfd is refused here: {error}")


def last_records(rig: Rig) -> list[Record]:
    records = list(Log.open(rig.owner.spec(), MANIFEST).records())
    return [r for r in records if r.epoch == records[-1].epoch]


# ---- append-only ---------------------------------------------------------------------------------------------------


@given(steps=st.lists(st.tuples(st.integers(0, 400), st.booleans()), max_size=12))
def test_append_region_comes_back_with_what_was_committed(steps: list[tuple[int, bool]]) -> None:
    rig, pages, rng = Rig(), Pages(2), random.Random(1)
    region = AppendRegion(3, rig.handlers, pages.address, pages.size)
    keeper = Checkpointer(rig.executor, rig.writer, [region])
    committed = b""
    for length, commit in steps:
        length = min(length, pages.size - region.watermark)
        pages.put(region.watermark, rng.randbytes(length))
        region.watermark += length
        if commit:
            keeper.checkpoint()
            committed = pages.bytes()[: region.watermark]
            assert region.durable == region.watermark
    after, fresh = rig.again(), Pages(2)
    restored = AppendRegion(3, after.handlers, fresh.address, fresh.size)
    for record in after.records:
        restored.apply(record, after.executor)
    assert restored.watermark == restored.durable == len(committed)
    assert fresh.bytes() == committed + bytes(fresh.size - len(committed))


def test_only_the_new_tail_is_written() -> None:
    rig, pages = Rig(), Pages(1)
    region = AppendRegion(3, rig.handlers, pages.address, pages.size)
    keeper = Checkpointer(rig.executor, rig.writer, [region])
    region.watermark = 100
    keeper.checkpoint()
    region.watermark = 130
    keeper.checkpoint()
    (record,) = last_records(rig)
    assert (record.key, record.length) == (100, 30)
    keeper.checkpoint()
    assert last_records(rig) == [record]  # an epoch without a change has no record


def test_watermark_misuse_is_refused() -> None:
    rig, pages = Rig(), Pages(1)
    region = AppendRegion(3, rig.handlers, pages.address, pages.size)
    keeper = Checkpointer(rig.executor, rig.writer, [region])
    region.watermark = 50
    keeper.checkpoint()
    for wrong in (49, PAGE + 1, -1):
        region.watermark = wrong
        with pytest.raises(UsageError, match="watermark"):
            keeper.checkpoint()
    region.watermark = 60
    keeper.checkpoint()
    assert region.durable == 60


def test_a_gap_or_a_foreign_record_is_refused() -> None:
    rig, pages = Rig(), Pages(1)
    region = AppendRegion(3, rig.handlers, pages.address, pages.size)
    keeper = Checkpointer(rig.executor, rig.writer, [region])
    for mark in (10, 20, 30):
        region.watermark = mark
        keeper.checkpoint()
    after, fresh = rig.again(), Pages(1)
    restored = AppendRegion(3, after.handlers, fresh.address, fresh.size)
    restored.apply(after.records[0], after.executor)
    with pytest.raises(CorruptState, match="gap"):
        restored.apply(after.records[2], after.executor)
    with pytest.raises(UsageError, match="region 3"):
        AppendRegion(4, after.handlers, fresh.address, fresh.size).apply(after.records[0], after.executor)
    small = AppendRegion(3, after.handlers, fresh.address, 5)
    with pytest.raises(OperatorFailed, match="leaves the region"):
        small.apply(after.records[0], after.executor)


@pytest.mark.parametrize("kind", ["append", "opaque"])
def test_another_incarnation_is_never_mixed_in(kind: str) -> None:
    rig, pages = Rig(), Pages(2)

    def make(rig: Rig, memory: Pages, generation: int) -> AppendRegion | OpaqueRegion:
        if kind == "append":
            return AppendRegion(3, rig.handlers, memory.address, memory.size, generation=generation)
        return OpaqueRegion(3, rig.handlers, memory.address, memory.size, source="hash", generation=generation)

    for generation in (1, 2):
        region = make(rig, pages, generation)
        pages.put(0, bytes([generation]) * 100)
        if isinstance(region, AppendRegion):
            region.watermark = 100 if generation == 1 else 40
        Checkpointer(rig.executor, rig.writer, [region]).checkpoint()
    after, fresh = rig.again(), Pages(2)
    current = make(after, fresh, 2)
    for record in after.records:
        current.apply(record, after.executor)
    assert fresh.bytes()[:100] == (b"\2" * 40 + bytes(60) if kind == "append" else b"\2" * 100)
    older = make(after, fresh, 1)
    with pytest.raises(CorruptState, match="generation"):
        older.apply(after.records[-1], after.executor)


# ---- opaque --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("seed", range(4))
def test_opaque_region_survives_writes_aborts_and_a_crash(source: str, seed: int) -> None:
    rig, pages, rng = Rig(), Pages(24), random.Random(seed)
    pages.put(5000, rng.randbytes(9000))  # before it was registered
    region = opaque(rig, pages, source)
    keeper = Checkpointer(rig.executor, rig.writer, [region])
    committed = bytes(pages.size)
    for step in range(40):
        for _ in range(rng.randrange(4)):
            length = rng.choice([1, 8, PAGE, 3 * PAGE, 500])
            pages.put(rng.randrange(pages.size - length), rng.randbytes(length))
        if step % 5 == 3:
            with pytest.raises(RuntimeError), failing_stage(region):
                keeper.checkpoint()
        elif step % 3 == 0:
            keeper.checkpoint()
            committed = pages.bytes()
        if rig.writer.native.places_left < 2:
            break
    pages.put(0, b"never committed")
    after, fresh = rig.again(), Pages(24)
    restored = opaque(after, fresh, source)
    for record in after.records:
        restored.apply(record, after.executor)
    assert fresh.bytes() == committed


class failing_stage:  # noqa: N801  reads as a verb
    """The region stages its records, then something fails before the commit."""

    def __init__(self, region: OpaqueRegion | AppendRegion) -> None:
        self._region = region

    def __enter__(self) -> None:
        stage = self._region.stage

        def fail(log: LogWriter, executor: Executor) -> int:
            stage(log, executor)
            raise RuntimeError("after staging")

        self._region.stage = fail  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        del self._region.stage


@pytest.mark.parametrize("source", SOURCES)
def test_the_first_epoch_holds_every_page_and_the_next_only_changes(source: str) -> None:
    rig, pages = Rig(), Pages(8)
    keeper = Checkpointer(rig.executor, rig.writer, [opaque(rig, pages, source)])
    keeper.checkpoint()
    assert [(r.key, r.tokens) for r in last_records(rig)] == [(0, 8)]
    for offset in (PAGE + 5, 2 * PAGE, 6 * PAGE - 1):
        pages.put(offset, b"!")
    keeper.checkpoint()
    assert [(r.key, r.tokens) for r in last_records(rig)] == [(1, 2), (5, 1)]  # adjacent pages are one record


@pytest.mark.parametrize("source", SOURCES)
def test_an_aborted_epoch_loses_no_change(source: str) -> None:
    rig, pages = Rig(), Pages(8)
    region = opaque(rig, pages, source)
    append = AppendRegion(8, rig.handlers, pages.address, pages.size)
    keeper = Checkpointer(rig.executor, rig.writer, [region, append])
    keeper.checkpoint()
    pages.put(2 * PAGE, b"two")
    append.watermark = 50
    with pytest.raises(RuntimeError), failing_stage(append):
        keeper.checkpoint()
    pages.put(4 * PAGE, b"four")
    with pytest.raises(Refused):  # the epoch does not even begin
        keeper.checkpoint([(20, 2, 1, 1, 0, 0, bytes(1 << 20))])
    append.watermark = PAGE * 9
    with pytest.raises(UsageError):  # the other region refuses
        keeper.checkpoint()
    append.watermark = 60
    pages.put(2 * PAGE, b"TWO")
    keeper.checkpoint()
    after, fresh = rig.again(), Pages(8)
    restored = OpaqueRegion(7, after.handlers, fresh.address, fresh.size, source="hash")
    for record in after.records:
        if record.region == 7:
            restored.apply(record, after.executor)
    assert fresh.bytes() == pages.bytes()
    assert [(r.key, r.length) for r in after.records if r.region == 8] == [(0, 60)]


@pytest.mark.parametrize("source", SOURCES)
def test_many_aborted_epochs_hold_no_more_than_the_region(source: str) -> None:
    rig, pages, rng = Rig(), Pages(8), random.Random(1)
    region = opaque(rig, pages, source)
    keeper = Checkpointer(rig.executor, rig.writer, [region])
    for _ in range(40):
        pages.put(rng.randrange(pages.size - 4), rng.randbytes(4))
        with pytest.raises(RuntimeError), failing_stage(region):
            keeper.checkpoint()
    assert region.collect()[0] <= pages.size
    keeper.checkpoint()
    after, fresh = rig.again(), Pages(8)
    restored = OpaqueRegion(7, after.handlers, fresh.address, fresh.size, source="hash")
    for record in after.records:
        restored.apply(record, after.executor)
    assert fresh.bytes() == pages.bytes()


def test_a_fenced_checkpointer_stops() -> None:
    rig, pages = Rig(), Pages(2)
    keeper = Checkpointer(rig.executor, rig.writer, [opaque(rig, pages, "hash")])
    keeper.checkpoint()
    rig.owner.fence()
    pages.put(0, b"late")
    with pytest.raises(Fenced):
        keeper.checkpoint()


def test_both_sources_find_the_same_pages() -> None:
    """userfaultfd is exact; the hash must find the same ones, as long as content changes."""
    rig, pages, rng = Rig(), Pages(64), random.Random(9)
    exact, hashed = opaque(rig, pages, "userfaultfd"), opaque(rig, pages, "hash")
    exact.collect()
    hashed.collect()
    for region in (exact, hashed):
        region.committed()
    for _ in range(30):
        touched = {rng.randrange(64) for _ in range(rng.randrange(20))}
        for page in touched:
            at = page * PAGE + rng.randrange(PAGE)
            pages.put(at, bytes([pages.map[at] ^ (1 + rng.randrange(255))]))
        exact.collect()
        hashed.collect()
        found = [
            {p for run in runs for p in range(run.offset // PAGE, (run.offset + run.length) // PAGE)}
            for runs in (exact._pending, [run for run, _ in hashed._copies])
        ]
        assert found == [touched, touched]
        for region in (exact, hashed):
            region.committed()


def test_a_write_of_the_same_bytes_is_a_change_to_userfaultfd_only() -> None:
    rig, pages = Rig(), Pages(4)
    exact, hashed = opaque(rig, pages, "userfaultfd"), opaque(rig, pages, "hash")
    for region in (exact, hashed):
        region.collect()
        region.committed()
    pages.put(PAGE, pages.map[PAGE : PAGE + 4])
    assert exact.collect() == (PAGE, 1)
    assert hashed.collect() == (0, 0)


@pytest.mark.parametrize("source", SOURCES)
def test_a_writer_during_checkpoints_is_found_by_the_next_one(source: str) -> None:
    rig, pages = Rig(), Pages(16)
    region = opaque(rig, pages, source)
    keeper = Checkpointer(rig.executor, rig.writer, [region])
    stop = threading.Event()

    def write() -> None:
        rng = random.Random(2)
        while not stop.is_set():
            pages.put(rng.randrange(pages.size - 8), rng.randbytes(8))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(12):
            keeper.checkpoint()
    finally:
        stop.set()
        thread.join()
    keeper.checkpoint()  # nobody writes now: this one makes it exact
    after, fresh = rig.again(), Pages(16)
    restored = OpaqueRegion(7, after.handlers, fresh.address, fresh.size, source="hash")
    for record in after.records:
        restored.apply(record, after.executor)
    assert fresh.bytes() == pages.bytes()


def test_a_tracker_that_fails_makes_everything_count_as_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, pages = Rig(), Pages(4)
    region = opaque(rig, pages, "userfaultfd")
    keeper = Checkpointer(rig.executor, rig.writer, [region])
    keeper.checkpoint()

    class Broken:
        def collect(self) -> list[tuple[int, int]]:
            raise OSError(5, "PAGEMAP_SCAN")

    tracker, region._tracker = region._tracker, Broken()  # type: ignore[assignment]
    with pytest.raises(OSError, match="PAGEMAP_SCAN"):
        keeper.checkpoint()
    region._tracker = tracker
    epoch = keeper.checkpoint()
    assert last_records(rig)[0].epoch == epoch
    assert [(r.key, r.tokens) for r in last_records(rig)] == [(0, 4)]


def test_pages_that_are_not_of_the_region_are_refused() -> None:
    rig, pages = Rig(), Pages(4)
    region = opaque(rig, pages, "hash")
    good = Record(PAGES, 7, 1, 0, 0, 1, PAGE, pages.address, 1, 1, 1)
    for change in ({"key": 4}, {"key": 2**52}, {"key": 2**64 - 1}, {"tokens": 2}, {"tokens": 0}, {"length": 5}):
        with pytest.raises(CorruptState):
            region.apply(good._replace(**change), rig.executor)
    with pytest.raises(CorruptState):
        region.apply(good._replace(key=3, tokens=2, length=2 * PAGE), rig.executor)


def test_regions_of_odd_shape_are_refused() -> None:
    rig, pages = Rig(), Pages(4)
    for base, size in (
        (pages.address + 1, PAGE),
        (pages.address, PAGE + 1),
        (pages.address, 0),
        (pages.address, -PAGE),
    ):
        with pytest.raises(UsageError, match="whole pages"):
            OpaqueRegion(1, rig.handlers, base, size)
    region = AppendRegion(1, rig.handlers, pages.address, 10)
    with pytest.raises(Refused, match="share a number"):
        Checkpointer(rig.executor, rig.writer, [region, region])


# ---- hash and runs -------------------------------------------------------------------------------------------------

MASK64, MASK32 = (1 << 64) - 1, (1 << 32) - 1


def nh_reference(page: bytes, seed: int) -> bytes:
    """NH with four Toeplitz iterations (RFC 4418, 5.2.2) and the key of SplitMix64, in plain integers."""
    words = []
    for _ in range(PAGE // 4 + 12):
        seed = (seed + 0x9E3779B97F4A7C15) & MASK64
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        words.append(((z ^ (z >> 31)) >> 16) & MASK32)
    message = [int.from_bytes(page[i : i + 4], "little") for i in range(0, PAGE, 4)]
    out = b""
    for t in range(4):
        key = words[4 * t :]
        total = sum(
            ((message[i] + key[i]) & MASK32) * ((message[i + 1] + key[i + 1]) & MASK32)
            for i in range(0, len(message), 2)
        )
        out += (total & MASK64).to_bytes(8, "little")
    return out


@given(
    seed=st.integers(0, MASK64), content=st.integers(0, 2**32), kind=st.sampled_from(["random", "zero", "ones", "one"])
)
def test_page_hash_equals_the_reference(seed: int, content: int, kind: str) -> None:
    page = {
        "random": random.Random(content).randbytes(PAGE),
        "zero": bytes(PAGE),
        "ones": b"\xff" * PAGE,
        "one": bytes(content % PAGE) + b"\1" + bytes(PAGE - 1 - content % PAGE),
    }[kind]
    assert _native.hash_page(page, seed) == nh_reference(page, seed)


def test_page_hash_is_of_whole_pages() -> None:
    for size in (0, 4095, 4097):
        with pytest.raises(ValueError, match="4096"):
            _native.hash_page(bytes(size), 1)


runs_of_bytes = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda t: Run(*t)), max_size=12)


@given(runs=runs_of_bytes)
def test_merged_runs_cover_the_same_bytes_in_order_and_apart(runs: list[Run]) -> None:
    def cover(some: list[Run]) -> set[int]:
        return {b for r in some for b in range(r.offset, r.offset + r.length)}

    merged = merge(runs)
    assert cover(merged) == cover(runs)
    assert all(a.offset + a.length < b.offset for a, b in itertools.pairwise(merged))
    assert merge(merged) == merged
