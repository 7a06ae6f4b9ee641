"""The epoch log against a model: appends, aborts, crashes, restarts and compaction, in memory and in a folder."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import log_reader
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from log_reader import Row

from outlast.core.errors import CorruptState, Fenced, Refused, UsageError
from outlast.core.log import DROP, REQUEST, Log, LogOwner, LogWriter, Manifest, inspect, verify
from outlast.core.memory import Memory

SEGMENT = 16384
MANIFEST = Manifest(model="m", block_tokens=16)
OTHER = Manifest(model="m", block_tokens=32)

Make = Callable[..., LogOwner]


@pytest.fixture(params=["memory", "directory"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes logs of one of the two media."""
    owners = []

    def build(segments: int = 6) -> LogOwner:
        if request.param == "memory":
            owner = LogOwner.in_memory(segments * SEGMENT, segment_bytes=SEGMENT)
        else:
            owner = LogOwner.in_directory(
                tmp_path / str(len(owners)), segments * SEGMENT, segment_bytes=SEGMENT, durable=False
            )
        owners.append(owner)
        return owner

    yield build
    for owner in owners:
        owner.close()


def start(owner: LogOwner, manifest: Manifest = MANIFEST, *, cold: bool = False) -> LogWriter:
    return Log.open(owner.spec(), manifest).start(owner.fence(), manifest, cold=cold)


def row(key: int, payload: bytes = b"x", kind: int = REQUEST) -> Row:
    return Row(kind, 2, 1, key, 0, 0, payload)


def contents(owner: LogOwner) -> list[tuple[int, list[Row]]]:
    """What the native reader finds, by epoch (empty epochs do not show)."""
    log = Log.open(owner.spec(), None)
    out: list[tuple[int, list[Row]]] = []
    for r in log.records():
        if not out or out[-1][0] != r.epoch:
            out.append((r.epoch, []))
        out[-1][1].append(Row(r.type, r.region, r.generation, r.key, r.offset, r.tokens, r.payload))
    return out


def reference(owner: LogOwner) -> list[tuple[int, list[Row]]]:
    """What the reader in plain Python finds."""
    spec = owner.spec()
    if spec["kind"] == "memory":
        found = log_reader.read(*log_reader.arena_segments(os.pread(spec["fd"], spec["bytes"], 0)))
    else:
        found = log_reader.read(*log_reader.folder_segments(Path(spec["path"])))
    return [(epoch, rows) for epoch, rows in found if rows]


def poke(owner: LogOwner, segment: int, offset: int, data: bytes) -> None:
    """Overwrite bytes of a segment behind the log's back."""
    spec = owner.spec()
    if spec["kind"] == "directory":
        with (Path(spec["path"]) / f"segment-{segment:016x}.ologs").open("r+b") as file:
            file.seek(offset)
            file.write(data)
        return
    with Memory.from_fd(os.dup(spec["fd"])) as memory:
        for place in range((memory.size - 4096) // SEGMENT):
            at = 4096 + place * SEGMENT
            if (
                memory.buffer[at : at + 8] == b"OLSEGM1\0"
                and int.from_bytes(memory.buffer[at + 32 : at + 40], "little") == segment
            ):
                memory.buffer[at + offset : at + offset + len(data)] = data
                return
    raise AssertionError(f"no segment {segment}")


PLACES = 10
#: What a machine's live state may take, twice: compaction fills its segments at least half.
SPARE = 4


class LogMachine(RuleBasedStateMachine):
    """A dict of the last payload by key, and the log that must hold the same."""

    medium = "memory"

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="outlast-log-")
        capacity = PLACES * SEGMENT
        if self.medium == "memory":
            self.owner = LogOwner.in_memory(capacity, segment_bytes=SEGMENT)
        else:
            self.owner = LogOwner.in_directory(
                Path(self.folder) / "log", capacity, segment_bytes=SEGMENT, durable=False
            )
        self.live: dict[int, bytes] = {}
        self.epoch = 0
        self.writer_epoch = 0
        self.writer = start(self.owner)

    def teardown(self) -> None:
        if hasattr(self, "owner"):
            del self.writer
            self.owner.close()
            shutil.rmtree(self.folder)

    rows = st.lists(
        st.tuples(st.integers(0, 12), st.binary(max_size=40), st.integers(0, 18)).map(lambda t: (t[0], t[1] * t[2])),
        max_size=5,
    )

    def _apply(self, rows: list[Row]) -> None:
        for r in rows:
            if r.type == DROP:
                self.live.pop(r.key, None)
            else:
                self.live[r.key] = r.payload

    @rule(rows=rows, dead=st.lists(st.integers(0, 12), max_size=3))
    def append(self, rows: list[tuple[int, bytes]], dead: list[int]) -> None:
        epoch = [row(key, payload) for key, payload in rows] + [row(key, b"", DROP) for key in dead]
        self._make_room()
        number = self.writer.write(epoch)
        assert number > self.epoch
        self.epoch = number
        self._apply(epoch)

    @rule(rows=rows)
    def abort(self, rows: list[tuple[int, bytes]]) -> None:
        self._make_room()
        native = self.writer.native
        native.begin(sum(len(payload) for _, payload in rows), len(rows))
        for key, payload in rows:
            native.append(*row(key, payload))
        native.abort()

    @rule()
    def roll(self) -> None:
        self.writer.native.roll()

    def _make_room(self) -> None:
        """Compaction needs places itself, so it does not wait until there are none."""
        if self.writer.native.places_left < SPARE:
            self.compact()

    @rule()
    def compact(self) -> None:
        self.writer.compact([row(key, payload) for key, payload in self.live.items()])
        self.epoch = self.writer.native.committed_epoch

    @rule()
    def restart(self) -> None:
        self._reopen()

    @rule(rows=rows, reserve=st.booleans())
    def crash_within_an_epoch(self, rows: list[tuple[int, bytes]], reserve: bool) -> None:
        self._make_room()
        native = self.writer.native
        native.begin(sum(len(payload) for _, payload in rows), len(rows))
        for key, payload in rows:
            if reserve:
                native.reserve(REQUEST, 2, 1, key, 0, 0, len(payload))
            else:
                native.append(*row(key, payload))
        self._reopen()

    @precondition(lambda self: self.epoch > 0)
    @rule(garbage=st.binary(min_size=1, max_size=300), skip=st.integers(0, 200))
    def crash_with_rubbish_behind_the_last_commit(self, garbage: bytes, skip: int) -> None:
        report = Log.open(self.owner.spec(), None).report
        room = SEGMENT - report["end_offset"] - skip
        if room > 0 and report["end_segment"] == self.writer.native.segment:
            poke(self.owner, report["end_segment"], report["end_offset"] + skip, garbage[:room])
        self._reopen()

    def _reopen(self) -> None:
        before = self.owner.writer_epoch
        log = Log.open(self.owner.spec(), MANIFEST)
        assert self._replay(log) == self.live
        self.writer = log.start(self.owner.fence(), MANIFEST)
        assert self.writer.native.writer_epoch > before
        assert self.writer.native.committed_epoch == self.epoch
        again = Log.open(self.owner.spec(), MANIFEST)  # the tail was cut before the first append
        assert again.report["stop"] == ""
        assert self._replay(again) == self.live

    @staticmethod
    def _replay(log: Log) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for r in log.records():
            if r.type == DROP:
                found.pop(r.key, None)
            else:
                found[r.key] = r.payload
        return found

    @invariant()
    def both_readers_agree(self) -> None:
        if hasattr(self, "owner"):
            assert contents(self.owner) == reference(self.owner)

    @invariant()
    def capacity_is_kept(self) -> None:
        if hasattr(self, "owner"):
            assert self.owner.used() <= PLACES * SEGMENT + 4096
            assert self.writer.native.used_bytes <= PLACES * SEGMENT


class FolderMachine(LogMachine):
    medium = "directory"


TestLogInMemory = LogMachine.TestCase
TestLogInMemory.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLogInFolder = FolderMachine.TestCase
TestLogInFolder.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_new_records_are_found_behind_a_torn_tail(make: Make) -> None:
    owner = make()
    writer = start(owner)
    writer.write([row(1, b"a")])
    writer.native.begin(100, 1)
    writer.native.append(*row(2, b"torn"))
    second = start(owner)
    assert second.write([row(3, b"after")]) > 1
    assert [r.key for _, rows in contents(owner) for r in rows] == [1, 3]
    assert verify_memory_or_folder(owner)


def verify_memory_or_folder(owner: LogOwner) -> bool:
    spec = owner.spec()
    return spec["kind"] == "memory" or verify(spec["path"])["ok"]


def test_epochs_and_writers_are_monotonic_over_restarts(make: Make) -> None:
    owner = make()
    epochs, writers = [], []
    for _ in range(6):
        writer = start(owner)
        epochs.append(writer.write([row(1)]))
        writer.native.begin(10, 1)  # spends a number
        writer.native.abort()
        epochs.append(writer.write([row(2)]))
        writers.append(writer.native.writer_epoch)
    assert epochs == sorted(set(epochs))
    assert writers == [1, 2, 3, 4, 5, 6]


def test_stale_writer_is_refused_at_every_door(make: Make) -> None:
    owner = make()
    stale = start(owner)
    stale.write([row(1)])
    stale.native.begin(100, 1)
    stale.native.append(*row(2, b"never"))
    epoch = owner.fence()
    with pytest.raises(Fenced):
        stale.native.commit()
    writer = Log.open(owner.spec(), MANIFEST).start(epoch, MANIFEST)
    writer.write([row(3, b"new owner")])
    # The stale writer gives up only now: the place of its epoch holds the new writer's.
    stale.native.abort()
    for act in (
        lambda: stale.write([row(4)]),
        lambda: stale.native.release_before(99),
        lambda: stale.compact([row(5)]),
    ):
        with pytest.raises(Fenced):
            act()
    with pytest.raises(Fenced):
        Log.open(owner.spec(), MANIFEST).start(epoch - 1, MANIFEST)
    assert [r.key for _, rows in contents(owner) for r in rows] == [1, 3]


def test_stale_writer_can_not_release_what_the_new_one_needs(make: Make) -> None:
    owner = make()
    stale = start(owner)
    for key in range(3):
        stale.write([row(key)])
        stale.native.roll()
    epoch = owner.fence()
    writer = Log.open(owner.spec(), MANIFEST).start(epoch, MANIFEST)
    with pytest.raises(Fenced):
        stale.native.release_before(3)
    writer.write([row(9)])
    assert [r.key for _, rows in contents(owner) for r in rows] == [0, 1, 2, 9]


def test_full_log_refuses_and_keeps_everything(make: Make) -> None:
    owner = make(segments=3)
    writer = start(owner)
    written = 0
    with pytest.raises(Refused, match="full"):  # noqa: PT012  how many fit is what is counted
        for _ in range(1000):
            writer.write([row(written, bytes(1000))])
            written += 1
    for _ in range(5):  # trying again changes nothing
        with pytest.raises(Refused):
            writer.write([row(99, bytes(1000))])
    assert [r.key for _, rows in contents(owner) for r in rows] == list(range(written))
    writer.native.release_before(3)
    writer.write([row(100)])
    keys = [r.key for _, rows in contents(owner) for r in rows]
    assert keys[-1] == 100
    assert keys == sorted(keys)
    assert contents(owner) == reference(owner)


def test_an_epoch_that_can_not_fit_is_refused_at_once(make: Make) -> None:
    owner = make()
    writer = start(owner)
    for size in (SEGMENT, 1 << 40, (1 << 64) - 200, (1 << 64) - 1):
        with pytest.raises(Refused, match="does not fit"):
            writer.native.begin(size, 1)
    with pytest.raises(Refused, match="does not fit"):
        writer.native.begin(1, (1 << 32) - 1)
    writer.native.begin(10, 1)
    with pytest.raises(Refused, match="more than"):
        writer.native.append(*row(1, bytes(4000)))
    writer.native.abort()
    assert writer.write([row(1, b"fits")])
    assert [rows for _, rows in contents(owner)] == [[row(1, b"fits")]]


def test_records_of_a_recycled_segment_never_come_back(make: Make) -> None:
    owner = make(segments=3)
    writer = start(owner)
    for turn in range(40):
        for i in range(6):
            writer.write([row(1000 * turn + i, bytes([turn]) * 900)])
        writer.compact([row(7, b"live%d" % turn)])
        found = {r.key for _, rows in contents(owner) for r in rows}
        assert found == {7}
        # A restart in the middle of an epoch over old content.
        writer.native.begin(900, 1)
        address, _ = writer.native.reserve(REQUEST, 2, 1, 5, 0, 0, 900)
        assert address
        writer = start(owner)
        assert {r.key for _, rows in contents(owner) for r in rows} == {7}


def test_log_stays_within_its_capacity_under_a_steady_load(make: Make) -> None:
    owner = make(segments=4)
    writer = start(owner)
    rng = random.Random(3)
    live: dict[int, bytes] = {}
    for _ in range(600):
        key = rng.randrange(8)
        payload = rng.randbytes(rng.randrange(600))
        if writer.native.places_left < 2:
            writer.compact([row(k, v) for k, v in live.items()])
        writer.write([row(key, payload)])
        live[key] = payload
        assert owner.used() <= 4 * SEGMENT + 4096
    found = {r.key: r.payload for _, rows in contents(owner) for r in rows}
    assert found == live
    assert writer.native.bytes_appended > 8 * SEGMENT


@pytest.mark.parametrize("loses", ["superblock", "whole"])
def test_losing_the_first_segment_is_not_taken_for_having_released_it(make: Make, loses: str) -> None:
    """What follows is deltas on what is gone: using it would be worse than using nothing."""
    owner = make()
    writer = start(owner)
    for key in range(4):
        writer.write([row(key)])
        writer.native.roll()
    if loses == "superblock":
        poke(owner, 1, 9, b"\xff")
    elif owner.spec()["kind"] == "directory":
        (Path(owner.spec()["path"]) / "segment-0000000000000001.ologs").unlink()
    else:
        poke(owner, 1, 0, bytes(8))
    log = Log.open(owner.spec(), MANIFEST)
    assert list(log.records()) == []
    assert log.report["stop"]
    writer = log.start(owner.fence(), MANIFEST)
    writer.write([row(9)])
    assert [r.key for _, rows in contents(owner) for r in rows] == [9]


def test_an_interrupted_release_is_finished_by_the_next_writer(make: Make) -> None:
    owner = make()
    writer = start(owner)
    for key in range(4):
        writer.write([row(key)])
        writer.native.roll()
    # As if the writer had died between naming segment 3 the oldest and releasing 1 and 2.
    with Memory.from_fd(os.dup(owner.fds()[0])) as memory:
        memory.buffer[48:56] = log_reader.marked(3).to_bytes(8, "little")
    assert [r.key for _, rows in contents(owner) for r in rows] == [2, 3]
    writer = start(owner)
    assert writer.native.oldest_segment == 3
    assert writer.native.places_left == 4
    assert verify_memory_or_folder(owner)


def test_another_manifest_names_the_field_and_is_not_read(make: Make) -> None:
    owner = make()
    start(owner).write([row(1, b"under the first manifest")])
    log = Log.open(owner.spec(), OTHER)
    assert list(log.records()) == []
    assert log.differs(OTHER) == "manifest field block_tokens is 16 in the log and 32 here"
    with pytest.raises(Refused, match="another manifest"):
        log.start(owner.fence(), OTHER)
    assert [r.key for _, rows in contents(owner) for r in rows] == [1]  # refusing destroyed nothing
    assert Log.open(owner.spec(), MANIFEST).differs(MANIFEST) == ""
    writer = start(owner, OTHER, cold=True)
    writer.write([row(2)])
    assert [r.key for r in Log.open(owner.spec(), OTHER).records()] == [2]
    assert list(Log.open(owner.spec(), MANIFEST).records()) == []


def test_a_log_is_not_continued_under_another_manifest_unseen(make: Make) -> None:
    """Opened for any manifest and started under one: its next segment would end the log for every reader."""
    owner = make()
    start(owner).write([row(1)])
    with pytest.raises(Refused, match="another manifest"):
        Log.open(owner.spec(), None).start(owner.fence(), OTHER)


def test_manifest_texts_that_are_damaged_or_odd_are_named(make: Make) -> None:
    owner = make()
    start(owner).write([row(1)])
    poke(owner, 1, 128 + 3, b"!")
    assert "damaged" in Log.open(owner.spec(), OTHER).differs(OTHER)
    with pytest.raises(Refused, match="too long"):
        start(owner, Manifest(text="x" * 5000), cold=True)


def test_seal_and_commit_refuse_misuse(make: Make) -> None:
    native = start(make()).native
    with pytest.raises(Refused, match="no epoch"):
        native.commit()
    with pytest.raises(Refused, match="no epoch"):
        native.append(*row(1))
    native.begin(100, 2)
    with pytest.raises(Refused, match="open already"):
        native.begin(1, 1)
    with pytest.raises(Refused, match="reservation"):
        native.seal(0)
    with pytest.raises(Refused, match="belong to the log"):
        native.append(1, 0, 0, 0, 0, 0, b"")
    native.reserve(REQUEST, 2, 1, 1, 0, 0, 5)
    with pytest.raises(Refused, match="not sealed"):
        native.commit()
    native.seal(0)
    native.commit()


# ---- folders -------------------------------------------------------------------------------------------------------


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    first = LogOwner.in_directory(tmp_path, 4 * SEGMENT, segment_bytes=SEGMENT)
    with pytest.raises(Refused, match="in use"):
        LogOwner.in_directory(tmp_path, 4 * SEGMENT, segment_bytes=SEGMENT)
    first.close()
    LogOwner.in_directory(tmp_path, 4 * SEGMENT, segment_bytes=SEGMENT).close()


def test_two_owners_that_make_the_same_folder_at_once_do_not_both_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one comes between our look and our control page."""
    from outlast.core import log as module

    create, others = module._create_control, []

    def late(folder: Path, segment_bytes: int) -> None:
        if not others:
            monkeypatch.setattr(module, "_create_control", create)
            others.append(LogOwner.in_directory(folder, 4 * SEGMENT, segment_bytes=SEGMENT))
        create(folder, segment_bytes)

    monkeypatch.setattr(module, "_create_control", late)
    with pytest.raises(Refused, match="in use"):
        LogOwner.in_directory(tmp_path, 4 * SEGMENT, segment_bytes=SEGMENT)
    assert start(others[0]).write([row(1)]) == 1
    assert verify(tmp_path)["epochs"] == 1
    assert not list(tmp_path.glob(".control-*"))


def test_a_refused_owner_does_not_keep_the_folder(tmp_path: Path) -> None:
    LogOwner.in_directory(tmp_path, 4 * SEGMENT, segment_bytes=SEGMENT).close()
    with pytest.raises(UsageError):
        LogOwner.in_directory(tmp_path, SEGMENT, segment_bytes=SEGMENT)  # too small for the existing segments
    LogOwner.in_directory(tmp_path, 4 * SEGMENT, segment_bytes=SEGMENT).close()


def test_a_control_page_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "control").write_bytes(b"not a log" + bytes(5000))
    with pytest.raises(CorruptState, match="magic"):
        LogOwner.in_directory(tmp_path, 4 * SEGMENT, segment_bytes=SEGMENT)
    (tmp_path / "control").write_bytes(b"OLCTRL1\0")
    with pytest.raises(CorruptState, match="too short"):
        LogOwner.in_directory(tmp_path, 4 * SEGMENT, segment_bytes=SEGMENT)


def test_left_over_scratch_files_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / f".control-{os.getpid()}").write_bytes(b"half")
    (tmp_path / ".control-1").write_bytes(b"half")
    owner = LogOwner.in_directory(tmp_path, 4 * SEGMENT, segment_bytes=SEGMENT)
    assert start(owner).write([row(1)]) == 1


def test_foreign_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    owner = LogOwner.in_directory(tmp_path / "log", 6 * SEGMENT, segment_bytes=SEGMENT, durable=False)
    writer = start(owner)
    writer.write([row(1)])
    folder = tmp_path / "log"
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * SEGMENT)
    (folder / "segment-zzzzzzzzzzzzzzzz.ologs").write_bytes(b"?")
    (folder / "segment-ffffffffffffffff.ologs").write_bytes(b"?" * SEGMENT)
    (folder / "segment-1.ologs").write_bytes(b"?")
    (folder / "notes.txt").write_text("mine")
    (folder / "segment-0000000000000007.ologs").symlink_to(secret)
    os.mkfifo(folder / "segment-0000000000000008.ologs")
    (folder / "segment-0000000000000009.ologs").mkdir()
    assert inspect(folder)["epochs"] == 1  # and does not wait for the pipe
    writer = start(owner)
    for key in range(20):
        writer.write([row(key, bytes(1000))])
        if writer.native.places_left < 2:
            writer.compact([row(1)])
    assert secret.read_bytes() == b"s" * SEGMENT
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_symlink_in_the_place_of_the_next_segment_is_not_followed(tmp_path: Path) -> None:
    from outlast.core.errors import DurabilityLost

    owner = LogOwner.in_directory(tmp_path / "log", 6 * SEGMENT, segment_bytes=SEGMENT, durable=False)
    writer = start(owner)
    writer.write([row(1)])
    (tmp_path / "secret").write_bytes(b"s" * SEGMENT)
    (tmp_path / "log" / "segment-0000000000000002.ologs").symlink_to(tmp_path / "secret")
    writer.native.roll()
    with pytest.raises(DurabilityLost):
        writer.write([row(2)])
    assert (tmp_path / "secret").read_bytes() == b"s" * SEGMENT
    (tmp_path / "log" / "segment-0000000000000002.ologs").unlink()
    writer.write([row(3)])
    assert [r.key for _, rows in contents(owner) for r in rows] == [1, 3]


def test_log_files_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        owner = LogOwner.in_directory(tmp_path / "log", 6 * SEGMENT, segment_bytes=SEGMENT)
        start(owner).write([row(1)])
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "log").iterdir()}
    assert modes == {"control": 0o600, "segment-0000000000000001.ologs": 0o600}
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o700


def test_closed_owner_answers_and_refuses(make: Make) -> None:
    owner = make()
    owner.fence()
    owner.close()
    assert owner.writer_epoch == 1
    with pytest.raises(UsageError):
        owner.fence()


def test_opening_again_and_again_leaves_no_descriptors(make: Make) -> None:
    owner = make()
    start(owner).write([row(1)])

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    for _ in range(3):
        contents(owner)
    before = descriptors()
    for _ in range(50):
        contents(owner)
    assert descriptors() <= before + 2


def test_records_hold_the_memory_they_point_into(make: Make) -> None:
    owner = make()
    start(owner).write([row(key, bytes([key]) * 100) for key in range(5)])
    records = Log.open(owner.spec(), None).records()  # nobody else holds the log
    assert [r.payload for r in records] == [bytes([key]) * 100 for key in range(5)]


# ---- inspect and verify --------------------------------------------------------------------------------------------


def test_verify_judges_a_torn_tail_as_harmless_and_damage_as_not(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    owner = LogOwner.in_directory(folder, 6 * SEGMENT, segment_bytes=SEGMENT, durable=False)
    writer = start(owner)
    writer.write([row(1, b"one")])
    writer.write([row(2, b"two"), row(2, b"", DROP)])
    clean = verify(folder)
    assert (clean["ok"], clean["torn"], clean["first_bad"], clean["epochs"], clean["keys"]) == (True, False, None, 2, 2)
    assert clean["regions"] == {"2/request": {"records": 2, "bytes": 6}, "2/drop": {"records": 1, "bytes": 0}}
    writer.native.begin(10, 1)
    torn = verify(folder)
    assert (torn["ok"], torn["torn"]) == (True, True)
    assert torn["first_bad"]["why"] == "an epoch was begun and not committed"
    writer.native.abort()
    poke(owner, 1, 4096 + 64 + 64, b"X")  # payload of the first record
    bad = verify(folder)
    assert (bad["ok"], bad["epochs"]) == (False, 0)
    assert bad["first_bad"] == {"segment": 1, "offset": 4096 + 64, "why": "payload fails its CRC"}


def test_a_crash_while_begin_is_written_is_a_torn_tail(tmp_path: Path) -> None:
    owner = LogOwner.in_directory(tmp_path, 6 * SEGMENT, segment_bytes=SEGMENT, durable=False)
    writer = start(owner)
    writer.write([row(1)])
    end = Log.open(owner.spec(), None).report["end_offset"]
    writer.native.begin(10, 1)
    for zeroed in ((8, 12), (0, 4)):  # header CRC not stored yet; magic neither
        poke(owner, 1, end + zeroed[0], bytes(zeroed[1] - zeroed[0]))
        report = verify(tmp_path)
        assert (report["ok"], report["torn"], report["epochs"]) == (True, True, 1)


def test_a_crash_between_creating_and_beginning_a_segment_is_harmless(tmp_path: Path) -> None:
    owner = LogOwner.in_directory(tmp_path, 6 * SEGMENT, segment_bytes=SEGMENT, durable=False)
    writer = start(owner)
    writer.write([row(1)])
    writer.native.roll()
    writer.write([row(2)])
    (tmp_path / "segment-0000000000000002.ologs").write_bytes(bytes(SEGMENT))
    report = verify(tmp_path)
    assert (report["ok"], report["epochs"]) == (True, 1)
    writer = start(owner)
    writer.write([row(3)])
    assert [r.key for _, rows in contents(owner) for r in rows] == [1, 3]
    assert verify(tmp_path)["ok"]


def test_verify_sees_segments_that_can_not_be_reached(tmp_path: Path) -> None:
    owner = LogOwner.in_directory(tmp_path, 8 * SEGMENT, segment_bytes=SEGMENT, durable=False)
    writer = start(owner)
    for key in range(4):
        writer.write([row(key)])
        writer.native.roll()
    (tmp_path / "segment-0000000000000002.ologs").rename(tmp_path / "elsewhere")
    report = verify(tmp_path)
    assert (report["ok"], report["epochs"], report["unread_segments"]) == (False, 1, [3, 4])
    assert report["first_bad"]["why"] == "segment 2 is missing"
    shutil.copy(tmp_path / "segment-0000000000000003.ologs", tmp_path / "segment-0000000000000002.ologs")
    report = verify(tmp_path)  # a segment under another's name
    assert (report["ok"], report["epochs"]) == (False, 1)
    assert "superblock" in report["first_bad"]["why"]


def test_verify_checks_the_manifest_text(tmp_path: Path) -> None:
    owner = LogOwner.in_directory(tmp_path, 8 * SEGMENT, segment_bytes=SEGMENT, durable=False)
    start(owner).write([row(1)])
    assert verify(tmp_path)["ok"]
    poke(owner, 1, 130, b"#")
    assert not verify(tmp_path)["ok"]


def test_inspecting_what_is_no_log_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no log"):
        inspect(tmp_path)


def test_inspect_works_while_a_writer_compacts(tmp_path: Path) -> None:
    owner = LogOwner.in_directory(tmp_path, 4 * SEGMENT, segment_bytes=SEGMENT, durable=False)
    writer = start(owner)
    pid = os.fork()
    if pid == 0:
        try:
            for turn in range(300):
                writer.write([row(1, bytes(2000))])
                if turn % 3 == 2:
                    writer.compact([row(1, b"live")])
        finally:
            os._exit(0)
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        report = inspect(tmp_path)
        assert "missing" not in report["stop"]
    assert verify(tmp_path)["ok"]
