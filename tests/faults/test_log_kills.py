"""SIGKILL at every step of an append, a new segment, a release and a reopening: exactly the committed epochs remain."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from outlast.core import _native
from outlast.core.log import REQUEST, Log, LogOwner, LogWriter, Manifest, verify

pytestmark = pytest.mark.faults

SEGMENT = 16384
MANIFEST = Manifest(model="m")
#: Points that a log passes by itself; the others belong to an engine's recovery.
POINTS = [name for name in _native.kill_points() if not name.startswith("recover")]
#: Once this point was passed the epoch counts, though its writer did not live to say so.
COMMITTED = "commit.header"


def make(medium: str, folder: Path) -> LogOwner:
    if medium == "memory":
        return LogOwner.in_memory(6 * SEGMENT, segment_bytes=SEGMENT)
    return LogOwner.in_directory(folder / "log", 6 * SEGMENT, segment_bytes=SEGMENT, durable=medium == "durable")


def start(owner: LogOwner) -> LogWriter:
    return Log.open(owner.spec(), MANIFEST).start(owner.fence(), MANIFEST)


def row(key: int, payload: bytes) -> tuple[int, int, int, int, int, int, bytes]:
    return (REQUEST, 2, 1, key, 0, 0, payload)


def state(owner: LogOwner) -> dict[int, bytes]:
    return {r.key: r.payload for r in Log.open(owner.spec(), MANIFEST).records()}


def killed(work: Callable[[], None], point: str, countdown: int) -> bool:
    """Run `work` in a child that dies at the point; False if it got to the end."""
    pid = os.fork()
    if pid == 0:
        try:
            _native.arm_kill_point(point, countdown)
            work()
        except BaseException:  # noqa: BLE001  the child has nobody to raise to
            os._exit(3)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child's work failed"
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("medium", ["memory", "directory", "durable"])
@pytest.mark.parametrize("point", [p for p in POINTS if p not in ("release", "open.cut")])
def test_an_append_killed_at_each_step_counts_whole_or_not(point: str, medium: str, tmp_path: Path) -> None:
    owner = make(medium, tmp_path)
    rng = random.Random(point)
    writer = start(owner)
    expected = {key: rng.randbytes(200) for key in range(4)}
    for key, payload in expected.items():
        writer.write([row(key, payload)])
    for attempt in range(4):
        writer = start(owner)
        epoch = writer.native.committed_epoch
        new = {100 * attempt + i: rng.randbytes(rng.randrange(400)) for i in range(3)}

        def work(writer: LogWriter = writer, new: dict[int, bytes] = new) -> None:
            writer.native.roll()
            writer.write([row(key, payload) for key, payload in new.items()])

        assert killed(work, point, 1 if "append" not in point else rng.randrange(1, 4)), "the point was not passed"
        if point == COMMITTED:
            expected |= new
        assert state(owner) == expected
        if medium != "memory":
            assert verify(tmp_path / "log")["ok"]
        writer = start(owner)
        assert writer.native.committed_epoch == epoch + (point == COMMITTED)
        expected[9] = b"after %d" % attempt
        writer.write([row(9, expected[9])])
        assert state(owner) == expected


@pytest.mark.parametrize("medium", ["memory", "directory"])
@pytest.mark.parametrize("point", [p for p in POINTS if p != "open.cut"])
def test_a_compaction_killed_at_each_step_loses_and_revives_nothing(point: str, medium: str, tmp_path: Path) -> None:
    reached = 0
    for countdown in range(1, 8):
        owner = make(medium, tmp_path / str(countdown))
        writer = start(owner)
        rng = random.Random(countdown)
        live: dict[int, bytes] = {}
        while writer.native.places_left > 3:
            key = rng.randrange(6)
            live[key] = rng.randbytes(rng.randrange(1500))
            writer.write([row(key, live[key])])

        def work(writer: LogWriter = writer, live: dict[int, bytes] = live) -> None:
            writer.compact([row(key, payload) for key, payload in live.items()])

        died = killed(work, point, countdown)
        reached += died
        assert state(owner) == live
        writer = start(owner)
        assert state(owner) == live
        writer.compact([row(key, payload) for key, payload in live.items()])
        assert state(owner) == live
        assert writer.native.oldest_segment >= 3  # the old ones are gone now
        if medium == "directory":
            assert verify(tmp_path / str(countdown) / "log")["ok"]
        owner.close()
        if not died:
            break
    assert reached > 0


@pytest.mark.parametrize("medium", ["memory", "directory"])
def test_a_writer_killed_while_it_cuts_a_torn_tail_is_followed_by_another(medium: str, tmp_path: Path) -> None:
    owner = make(medium, tmp_path)
    writer = start(owner)
    writer.write([row(1, b"one")])
    writer.native.begin(100, 1)
    writer.native.append(*row(2, b"torn"))
    epoch = owner.fence()
    assert killed(lambda: Log.open(owner.spec(), MANIFEST).start(epoch, MANIFEST) and None, "open.cut", 1)
    writer = start(owner)
    writer.write([row(3, b"three")])
    assert state(owner) == {1: b"one", 3: b"three"}


@pytest.mark.parametrize("medium", ["memory", "directory"])
def test_kills_at_random_moments_leave_what_was_acknowledged(medium: str, tmp_path: Path) -> None:
    """Not at a named point: the child reports each epoch after its commit, and is killed at any instruction."""
    owner = make(medium, tmp_path)
    rng = random.Random(medium)
    acknowledged = 0
    for _ in range(25):
        writer = start(owner)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            value = acknowledged
            while True:
                if writer.native.places_left < 3:
                    writer.compact([row(0, value.to_bytes(8, "little") * 40)])
                value += 1
                writer.write([row(0, value.to_bytes(8, "little") * 40)])
                os.write(write, value.to_bytes(8, "little"))
        os.close(write)
        for _ in range(rng.randrange(1, 60)):
            acknowledged = int.from_bytes(os.read(read, 8), "little")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while data := os.read(read, 8):
            acknowledged = int.from_bytes(data, "little")
        os.close(read)
        found = state(owner)[0]
        value = int.from_bytes(found[:8], "little")
        assert found == found[:8] * 40
        assert value in (acknowledged, acknowledged + 1)
        acknowledged = value
