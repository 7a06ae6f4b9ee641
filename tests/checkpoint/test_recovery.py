"""Steps logged, the log kept short, requests folded and restored: what comes back is what was committed, or nothing."""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.checkpointer import KV_REGION, REQUEST_REGION, Image, LogOperators, StepCheckpointer
from outlast.checkpoint.geometry import KVGeometry, gather
from outlast.checkpoint.handlers import KVHandlers
from outlast.checkpoint.recovery import LoggedRequest, Restorer, fold, note_all
from outlast.checkpoint.spans import Extent, Spans
from outlast.core import _native
from outlast.core.errors import DurabilityLost, Fenced, OperatorFailed, Refused, TimedOut
from outlast.core.log import DROP, EMISSION, KV_ROWS, KV_SEAL, REQUEST, Log, LogOwner, LogWriter, Manifest, Record
from outlast.executor import Executor

MANIFEST = Manifest(model="m")
GEOMETRY = KVGeometry(pieces=4, block_tokens=4, row_bytes=32, blocks=96, piece_stride=4 * 32 + 8)
SEGMENT = 16384


class StepWrite(ctypes.Structure):
    """`ol_step_write`."""

    _fields_ = (
        ("key", ctypes.c_uint64), ("table", ctypes.c_uint64), ("generation", ctypes.c_uint32),
        ("first", ctypes.c_uint32), ("count", ctypes.c_uint32), ("state_offset", ctypes.c_uint32),
        ("state", ctypes.c_uint64), ("state_length", ctypes.c_uint64),
    )  # fmt: skip


@dataclass
class Sequence:
    """A request of the fake engine. Rows depend on key, generation and position alone."""

    key: int
    generation: int = 1
    payload: bytes = b""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    emissions: list[bytes] = field(default_factory=list)

    def rows(self, first: int, count: int) -> bytes:
        return b"".join(
            random.Random(f"{self.key}/{self.generation}/{position}").randbytes(GEOMETRY.token_bytes)
            for position in range(first, first + count)
        )


class Engine:
    """An engine without a model: a step copies made-up rows into the pool; its plan has no task of its own."""

    def __init__(self, owner: LogOwner, *, workers: int = 0) -> None:
        self.owner = owner
        self.executor = Executor(workers=workers)
        self.handlers = KVHandlers(self.executor, GEOMETRY)
        self.operators = LogOperators.install(self.executor)
        self.memory = ctypes.create_string_buffer(GEOMETRY.pool_bytes)
        self.pool = ctypes.addressof(self.memory)
        self.free = list(range(GEOMETRY.blocks))
        random.Random(1).shuffle(self.free)
        self.sequences: dict[int, Sequence] = {}
        self.tables: list[ctypes.Array[ctypes.c_uint32]] = []  # all of them: a plan may point to an older one
        self.log = Log.open(owner.spec(), MANIFEST)
        self.use(self.log.start(owner.fence(), MANIFEST))

    def use(self, writer: LogWriter) -> None:
        self.keeper = StepCheckpointer(
            self.executor, writer, self.handlers, self.operators, self.pool, self.image, self.sequences.__contains__
        )

    def image(self, key: int) -> Image | None:
        s = self.sequences.get(key)
        return None if s is None else Image(s.generation, s.payload, s.emissions, s.computed, self.table(s))

    def table(self, s: Sequence) -> int:
        self.tables.append((ctypes.c_uint32 * max(1, len(s.blocks)))(*s.blocks))
        return ctypes.addressof(self.tables[-1])

    def open(self, key: int, payload: bytes = b"") -> Sequence:
        s = self.sequences[key] = Sequence(key, payload=payload or b"prompt %d" % key)
        self.keeper.open_request(key, s.generation, s.payload)
        return s

    def close(self, key: int) -> None:
        s = self.sequences.pop(key)
        self.free += s.blocks
        self.keeper.drop(key, s.generation)

    def step(self, work: list[tuple[int, int, bool]], *, timeout: float = 30.0) -> None:
        """(key, positions, whether a token is emitted) of each sequence."""
        writes = (StepWrite * len(work))()
        keep, spans = [], []
        for write, (key, count, emits) in zip(writes, work, strict=True):
            s = self.sequences[key]
            while len(s.blocks) * GEOMETRY.block_tokens < s.computed + count:
                s.blocks.append(self.free.pop())
            self.write(s, s.computed, count)
            state = b"token %d of %d" % (len(s.emissions), key)
            buffer, length = ctypes.create_string_buffer(state, 200), ctypes.c_uint32(len(state) if emits else 0)
            keep.append((buffer, length, state))
            write.key, write.table, write.generation = key, self.table(s), s.generation
            write.first, write.count, write.state_offset = s.computed, count, len(s.emissions)
            write.state, write.state_length = ctypes.addressof(buffer), ctypes.addressof(length)
            spans.append((key, s.computed, count, len(s.emissions) if emits else -1))
        self.keeper.run(0, 0, ctypes.addressof(writes), len(work), spans, timeout=timeout)
        for (key, count, emits), (_, _, state) in zip(work, keep, strict=True):
            s = self.sequences[key]
            s.computed += count
            if emits:
                s.emissions.append(state)

    def write(self, s: Sequence, first: int, count: int) -> None:
        rows = s.rows(first, count)
        at = 0
        for position in range(first, first + count):
            for piece in range(GEOMETRY.pieces):
                ctypes.memmove(
                    self.pool + GEOMETRY.row(s.blocks, position, piece),
                    rows[at : at + GEOMETRY.row_bytes],
                    GEOMETRY.row_bytes,
                )
                at += GEOMETRY.row_bytes

    def recover(self) -> dict[int, LoggedRequest]:
        """Take over what the log holds, into this engine's own pool."""
        logged = fold(self.log.records(), GEOMETRY)
        restorer = Restorer(self.executor, self.handlers, self.pool)
        for key, request in logged.items():
            positions = request.contiguous()
            s = Sequence(
                key, request.generation, request.payload or b"", computed=positions, emissions=request.tokens_emitted()
            )
            s.blocks = [self.free.pop() for _ in range(GEOMETRY.blocks_for(positions))]
            assert restorer.restore(request, positions, self.table(s)), (key, request.trouble)
            self.sequences[key] = s
        note_all(logged.values(), self.keeper.note_recovered)
        return logged

    def content(self) -> dict[int, tuple[int, bytes, tuple[bytes, ...], bytes]]:
        return {
            s.key: (
                s.generation,
                s.payload,
                tuple(s.emissions),
                gather(GEOMETRY, self.memory.raw, s.blocks, 0, s.computed),
            )
            for s in self.sequences.values()
        }


def memory_log(segments: int = 64) -> LogOwner:
    return LogOwner.in_memory(segments * SEGMENT, segment_bytes=SEGMENT)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_what_was_committed_comes_back(workers: int, seed: int) -> None:
    engine, rng = Engine(memory_log(200), workers=workers), random.Random(seed)
    for step in range(30):
        if len(engine.sequences) < 4 and rng.random() < 0.5:
            engine.open(step, rng.randbytes(rng.randrange(1, 300)))
        elif len(engine.sequences) > 1 and rng.random() < 0.1:
            engine.close(rng.choice(list(engine.sequences)))
        engine.step([(key, rng.randrange(0, 9), rng.random() < 0.7) for key in engine.sequences])
    after = Engine(engine.owner, workers=workers)
    after.recover()
    assert after.content() == engine.content()
    after.step([(key, 3, True) for key in after.sequences])
    third = Engine(engine.owner)
    third.recover()
    assert third.content() == after.content()


@pytest.mark.parametrize("segments", [4, 6, 20])
@pytest.mark.parametrize("seed", range(3))
def test_a_long_load_keeps_the_log_bounded_and_every_live_request_whole(segments: int, seed: int) -> None:
    """Live state is moved out of old segments again and again, across segment boundaries too."""
    owner, rng = memory_log(segments), random.Random(seed)
    engine = Engine(owner)
    key = 0
    longest = {4: 20, 6: 34, 20: 60}[segments]
    for step in range(400):
        for gone in [s.key for s in engine.sequences.values() if s.computed > longest]:
            engine.close(gone)
        if len(engine.sequences) < 3:
            key += 1
            engine.open(key, rng.randbytes(rng.randrange(1, 700)))
        engine.step([(k, rng.randrange(0, 4), rng.random() < 0.8) for k in engine.sequences if rng.random() < 0.8])
        assert owner.used() <= segments * SEGMENT + 4096
        if step % 40 == 39:
            after = Engine(owner)
            after.recover()
            assert after.content() == engine.content(), step
            # The new engine goes on: what it was told about old segments must be as good as knowing it.
            after.executor.close() if step % 80 == 39 else None
            if step % 80 == 39:
                engine.use(Log.open(owner.spec(), MANIFEST).start(owner.fence(), MANIFEST))
                note_all(
                    fold(Log.open(owner.spec(), MANIFEST).records(), GEOMETRY).values(), engine.keeper.note_recovered
                )
            else:
                engine = after
    assert engine.keeper.log.native.segment > segments  # it went around
    engine.executor.close()


def test_an_error_while_a_segment_is_emptied_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = memory_log(4)
    engine = Engine(owner)
    engine.open(1)
    for _ in range(12):
        engine.step([(1, 1, True)])
    rewrite, failures = engine.keeper._rewrite, []
    engine.open(2)

    def fail_once(*args: object) -> None:
        if not failures:
            failures.append(1)
            raise Refused("no place, just now")
        rewrite(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.keeper, "_rewrite", fail_once)
    for _ in range(60):
        try:
            engine.step([(2, 3, True)])
        except Refused:
            continue
        if engine.sequences[2].computed > 40:
            engine.close(2)
            engine.open(2)
    assert failures
    after = Engine(owner)
    after.recover()
    assert after.content() == engine.content()


def test_a_log_full_of_live_state_refuses_and_keeps_it() -> None:
    owner = memory_log(3)
    engine = Engine(owner)
    with pytest.raises(Refused, match="full"):  # noqa: PT012  how many fit is what is counted
        for key in range(200):
            engine.open(key)
            engine.step([(key, 2, True)])
    keys = set(engine.sequences) - {max(engine.sequences)}
    after = Engine(owner)
    logged = fold(after.log.records(), GEOMETRY)
    assert keys <= set(logged)


def test_a_failing_step_is_taken_back_and_can_be_repeated() -> None:
    owner = memory_log()
    engine = Engine(owner, workers=1)
    engine.open(1)
    engine.step([(1, 5, True)])
    s = engine.sequences[1]
    wrong = s.blocks[1]
    s.blocks[1] = 10**6  # the delta handler refuses it
    before = engine.keeper.log.native.committed_epoch
    engine.open(2)
    with pytest.raises(OperatorFailed, match="block table"):
        engine.keeper.run(*plan_of(engine, s, 5, 1), timeout=30.0)
    assert not engine.keeper.log.native.in_epoch
    assert engine.keeper.log.native.committed_epoch == before
    s.blocks[1] = wrong
    engine.step([(1, 3, True), (2, 4, False)])
    after = Engine(owner)
    after.recover()
    assert after.content() == engine.content()
    assert set(after.sequences) == {1, 2}  # what was queued with the failed step came with the next


def plan_of(
    engine: Engine, s: Sequence, first: int, count: int
) -> tuple[int, int, int, int, list[tuple[int, int, int, int]]]:
    write = StepWrite(s.key, engine.table(s), s.generation, first, count, 0, 0, 0)
    engine.kept = write  # type: ignore[attr-defined]
    return 0, 0, ctypes.addressof(write), 1, [(s.key, first, count, -1)]


def test_after_a_timeout_nothing_is_put_into_the_place_of_the_epoch() -> None:
    """A task of the plan may still be writing there."""
    owner = memory_log()
    engine = Engine(owner, workers=1)
    engine.open(1)
    engine.step([(1, 5, True)])
    started, end = threading.Event(), threading.Event()

    def body(*_: object) -> int:
        started.set()
        end.wait(10)
        return 0

    hold = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(body)
    operator = engine.executor.register("hold", ctypes.cast(hold, ctypes.c_void_p).value or 0)
    engine.executor.submit(operator)
    assert started.wait(10)  # the worker has it; the commit waits for all tickets before it
    try:
        with pytest.raises(TimedOut):
            engine.step([(1, 1, True)], timeout=0.05)
    finally:
        end.set()
    with pytest.raises(Refused, match="open already"):
        engine.step([(1, 1, True)])
    after = Engine(owner)
    after.recover()
    assert after.sequences[1].computed == 5


def test_a_fenced_engine_commits_nothing_more() -> None:
    owner = memory_log()
    engine = Engine(owner)
    engine.open(1)
    engine.step([(1, 5, True)])
    before = engine.content()
    owner.fence()
    with pytest.raises(Fenced):
        engine.step([(1, 1, True)])
    after = Engine(owner)
    after.recover()
    assert after.content() == before


def test_going_on_in_a_fallback_log_holds_everything(tmp_path: Path) -> None:
    fallback = memory_log(8)
    owner = LogOwner.in_directory(
        tmp_path / "log", 64 * SEGMENT, segment_bytes=SEGMENT, durable=False, fallback=fallback
    )
    engine, rng = Engine(owner), random.Random(1)
    for key in range(5):
        engine.open(key, rng.randbytes(600))
    for _ in range(12):
        engine.step([(key, rng.randrange(4), True) for key in engine.sequences])
    (tmp_path / "log").rename(tmp_path / "gone")
    engine.keeper.log.native.roll()
    for path in (tmp_path / "gone").glob("segment-*"):
        (path.parent / path.name.replace("segment-", "old-")).hardlink_to(path)
    for number in range(1, 64):  # whatever comes next is a folder: it can not be created
        path = tmp_path / "gone" / f"segment-{number:016x}.ologs"
        if not path.exists():
            path.mkdir()
    with pytest.raises(DurabilityLost):
        engine.step([(0, 1, True)])
    engine.use(Log.open(fallback.spec(), MANIFEST).start(owner.writer_epoch, MANIFEST, cold=True))
    engine.keeper.rebase(engine.sequences)
    engine.step([(key, 1, True) for key in engine.sequences])
    # The rebased state is known by segment: emptying old ones keeps it.
    for _ in range(120):
        engine.open(99)
        engine.step([(99, 8, True)])
        engine.close(99)
    engine.keeper.flush()
    after = Engine(fallback)
    after.recover()
    expected = engine.content()
    assert {k: after.content()[k] for k in expected} == expected


def test_a_drop_outlives_what_it_kills() -> None:
    """Records of a dead request never come back, though segments go one by one."""
    owner = memory_log(6)
    engine = Engine(owner)
    engine.open(1, b"dead soon")
    for _ in range(10):
        engine.step([(1, 4, True)])
    engine.close(1)
    for _ in range(200):
        engine.open(2)
        engine.step([(2, 4, True)])
        found = fold(Log.open(owner.spec(), MANIFEST).records(), GEOMETRY)
        assert set(found) == {2}
        engine.close(2)
        engine.keeper.flush()


# ---- fold ----------------------------------------------------------------------------------------------------------


class Records:
    """Makes records whose payloads live as long as this object."""

    def __init__(self) -> None:
        self.kept: list[ctypes.Array[ctypes.c_char]] = []

    def __call__(
        self,
        kind: int,
        key: int = 1,
        generation: int = 1,
        offset: int = 0,
        count: int = 0,
        payload: bytes = b"",
        segment: int = 1,
    ) -> Record:
        self.kept.append(ctypes.create_string_buffer(payload, max(1, len(payload))))
        region = KV_REGION if kind in (KV_ROWS, KV_SEAL) else REQUEST_REGION
        address = ctypes.addressof(self.kept[-1])
        return Record(kind, region, generation, key, offset, count, len(payload), address, segment, 1, 1)

    def rows(self, first: int, count: int, **fields: int) -> Record:
        return self(KV_ROWS, offset=first, count=count, payload=bytes(count * GEOMETRY.token_bytes), **fields)


def test_an_older_generation_never_overrides_a_newer_one() -> None:
    make = Records()
    records = [
        make(REQUEST, payload=b"one", generation=1), make.rows(0, 4, generation=1),
        make(EMISSION, payload=b"a", generation=1),
        make(REQUEST, payload=b"two", generation=2), make.rows(0, 2, generation=2),
        make.rows(2, 4, generation=1), make(EMISSION, payload=b"b", generation=1),  # left over
        make(DROP, generation=1),  # kills nothing: its incarnation is gone
    ]  # fmt: skip
    (request,) = fold(records, GEOMETRY).values()
    assert (request.generation, request.payload, request.contiguous(), request.tokens_emitted()) == (2, b"two", 2, [])
    assert fold([*records, make(DROP, generation=2)], GEOMETRY) == {}
    assert fold([*records, make(DROP, generation=3)], GEOMETRY) == {}
    revived = fold([*records, make(DROP, generation=2), make(REQUEST, payload=b"three", generation=3)], GEOMETRY)
    assert revived[1].payload == b"three"


def test_foreign_regions_are_passed_over() -> None:
    make = Records()
    assert fold([make(REQUEST, payload=b"x")._replace(region=9)], GEOMETRY) == {}


@given(
    parts=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=12),
    tokens=st.lists(st.integers(0, 8), max_size=10),
    order=st.randoms(),
)
def test_order_gaps_and_repeats(parts: list[tuple[int, int]], tokens: list[int], order: random.Random) -> None:
    """Contiguous positions and tokens from 0 on, whatever the order in which they were logged."""
    make = Records()
    records = [make.rows(first, count) for first, count in parts]
    records += [make(EMISSION, offset=index, payload=b"%d" % index) for index in tokens]
    order.shuffle(records)
    logged = fold(records, GEOMETRY).get(1)
    covered = {p for first, count in parts for p in range(first, first + count)}
    expected = next(p for p in range(100) if p not in covered)
    if logged is None:
        assert not records
        return
    assert logged.contiguous() == expected
    until = next(i for i in range(100) if i not in tokens)
    assert logged.tokens_emitted() == [b"%d" % i for i in range(until)]


def test_the_segments_of_a_request_are_noted() -> None:
    make = Records()
    records = [
        make(REQUEST, payload=b"x", segment=3), make.rows(0, 4, segment=3), make.rows(4, 2, segment=4),
        make(EMISSION, offset=0, payload=b"a", segment=4), make(EMISSION, offset=3, payload=b"b", segment=4),
    ]  # fmt: skip
    assert fold(records, GEOMETRY)[1].segments == {
        3: Extent(True, Spans((0, 4)), Spans()),
        4: Extent(False, Spans((4, 6)), Spans((0, 1), (3, 4))),
    }


numbers = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda t: (t[0], t[0] + t[1])), max_size=10)


@given(ours=numbers, theirs=numbers, limit=st.integers(0, 40))
def test_spans_are_sets_of_numbers(ours: list[tuple[int, int]], theirs: list[tuple[int, int]], limit: int) -> None:
    a, b = Spans(*ours), Spans(*theirs)
    left = {n for first, end in ours for n in range(first, end)}
    right = {n for first, end in theirs for n in range(first, end)}
    assert {n for first, end in a for n in range(first, end)} == left
    assert a.total() == len(left)
    assert {n for first, end in a.below(limit) for n in range(first, end)} == {n for n in left if n < limit}
    a.remove(b)
    assert {n for first, end in a for n in range(first, end)} == left - right
    listed = list(a)
    assert all(x[0] < x[1] < y[0] for x, y in itertools.pairwise(listed))


# ---- restore -------------------------------------------------------------------------------------------------------


@pytest.fixture
def logged_ten() -> tuple[Engine, LoggedRequest, Engine]:
    """A request of ten positions, an engine to restore it into, and the one that wrote it."""
    engine = Engine(memory_log())
    engine.open(1)
    for count in (3, 4, 3):
        engine.step([(1, count, True)])
    after = Engine(engine.owner)
    (request,) = fold(after.log.records(), GEOMETRY).values()
    return after, request, engine


def restore(engine: Engine, request: LoggedRequest, positions: int = 10, blocks: tuple[int, ...] = (7, 3, 9)) -> bool:
    table = (ctypes.c_uint32 * len(blocks))(*blocks)
    return Restorer(engine.executor, engine.handlers, engine.pool).restore(request, positions, ctypes.addressof(table))


def test_rows_come_back_through_a_new_table(logged_ten: tuple[Engine, LoggedRequest, Engine]) -> None:
    after, request, engine = logged_ten
    for positions in (10, 9, 8, 5, 4, 1):
        ctypes.memset(after.pool, 0, GEOMETRY.pool_bytes)
        assert restore(after, request, positions)
        expected = gather(GEOMETRY, engine.memory.raw, engine.sequences[1].blocks, 0, positions)
        assert gather(GEOMETRY, after.memory.raw, [7, 3, 9], 0, positions) == expected
        if positions % 4:
            following = gather(GEOMETRY, after.memory.raw, [7, 3, 9], positions, 1)
            assert following == bytes(GEOMETRY.token_bytes)  # not a position more than asked for


def test_doubt_about_rows_is_a_miss(logged_ten: tuple[Engine, LoggedRequest, Engine]) -> None:
    after, request, _ = logged_ten
    assert restore(after, request)
    assert not restore(after, request, 11)  # never logged
    seal = request.seals[1]
    request.seals[1] = bytes([seal[0] ^ 1]) + seal[1:]
    assert not restore(after, request)
    assert restore(after, request, 7)  # the block is not used as a whole
    request.seals[1] = seal[:31]
    assert not restore(after, request)
    del request.seals[1]
    assert not restore(after, request)  # every full block was sealed in the epoch that filled it
    request.seals[1] = seal
    assert restore(after, request)
    assert not restore(after, request, blocks=(7, 10**6, 9))  # the new table itself is wrong
    rows = request.rows.pop(1)
    assert not restore(after, request)
    request.rows.insert(1, rows)
    assert restore(after, request)
    request.trouble = "a row record holds 5 bytes for 3 tokens"
    assert not restore(after, request)


def test_rows_changed_under_a_valid_checksum_fail_their_digest(
    logged_ten: tuple[Engine, LoggedRequest, Engine],
) -> None:
    after, request, _ = logged_ten
    byte = ctypes.c_uint8.from_address(request.rows[0].address + 5)
    byte.value ^= 1
    assert not restore(after, request)
    byte.value ^= 1
    assert restore(after, request)


def test_short_row_records_are_trouble() -> None:
    make = Records()
    short = make.rows(0, 4)._replace(length=3 * GEOMETRY.token_bytes)
    (request,) = fold([make(REQUEST, payload=b"x"), short], GEOMETRY).values()
    assert "bytes for 4 tokens" in request.trouble
    assert not restore(Engine(memory_log()), request, 4)


def test_a_sequence_of_no_positions_is_restored() -> None:
    assert restore(Engine(memory_log()), LoggedRequest(1, 1), 0)


def test_log_operators_report_what_went_wrong_and_do_not_throw() -> None:
    """An exception that left an operator would end the process."""
    engine = Engine(memory_log())
    native = engine.keeper.log.native
    for name, args, text in (
        ("seal", (native.address, 5), "no such reservation"),
        ("finish", (native.address, 0, 0, REQUEST_REGION), "no epoch"),
    ):
        operator = getattr(engine.operators, name)
        with pytest.raises(Refused, match=text):
            engine.executor.wait(engine.executor.submit(operator, *args))
    native.begin(100, 2)
    native.reserve(KV_ROWS, 1, 1, 1, 0, 1, 10)
    with pytest.raises(Refused, match="not sealed"):
        engine.executor.wait(engine.executor.submit(engine.operators.finish, native.address, 0, 0, REQUEST_REGION))
    assert _native.STATUS_REFUSED < 0
