"""Damaged logs: whatever happened to the bytes, a reader gives a prefix of what was committed, or nothing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import log_reader
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from log_reader import PAGE, RECORD, SUPERBLOCK, crc32c

from outlast.core import _native
from outlast.core.errors import CorruptState
from outlast.core.jit import Compiler
from outlast.core.log import REQUEST, Log, LogOwner, Manifest, verify
from outlast.core.memory import Memory

SEGMENT = 16384
MANIFEST = Manifest(model="m")
NATIVE = Path(__file__).resolve().parent.parent.parent / "native"

Epochs = list[tuple[int, list[tuple[int, bytes]]]]


def fill(owner: LogOwner, *, segments: int = 3, per_segment: int = 2) -> Epochs:
    """Epochs of a few small records over several segments."""
    rng = random.Random(5)
    writer = Log.open(owner.spec(), MANIFEST).start(owner.fence(), MANIFEST)
    out: Epochs = []
    for segment in range(segments):
        if segment:
            writer.native.roll()
        for _ in range(per_segment):
            rows = [(len(out), rng.randbytes(rng.randrange(70))) for _ in range(rng.randrange(1, 3))]
            number = writer.write([(REQUEST, 2, 1, key, 0, 0, payload) for key, payload in rows])
            out.append((number, rows))
    return out


def found(opened: Any) -> Epochs:
    """Records of a native scan, by epoch."""
    out: Epochs = []
    for _, _, _, key, _, _, length, address, _, epoch, _ in opened.records():
        if not out or out[-1][0] != epoch:
            out.append((epoch, []))
        out[-1][1].append((key, ctypes.string_at(address, length)))
    return out


@pytest.fixture(scope="module")
def arena() -> Iterator[tuple[Memory, Epochs]]:
    owner = LogOwner.in_memory(4 * SEGMENT, segment_bytes=SEGMENT)
    epochs = fill(owner)
    with Memory.from_fd(os.dup(owner.fds()[0])) as memory:
        yield memory, epochs
    owner.close()


def scan(memory: Memory) -> Epochs:
    return found(_native.open_arena(memory.address, memory.size, None))


def used(memory: Memory) -> list[int]:
    """Offsets of all bytes that mean something: control page, superblocks, manifests, records."""
    report = _native.open_arena(memory.address, memory.size, None).describe()
    offsets = list(range(log_reader.CONTROL.size))
    for place, row in enumerate(report["segments"]):
        base = PAGE + place * SEGMENT
        offsets += range(base, base + SUPERBLOCK.size)
        offsets += range(base + 128, base + 128 + len(MANIFEST.text))
        offsets += range(base + PAGE, base + row["used"] + 64)
    return offsets


def test_every_flipped_bit_leaves_a_prefix(arena: tuple[Memory, Epochs]) -> None:
    memory, epochs = arena
    assert scan(memory) == epochs
    prefixes = [epochs[:n] for n in range(len(epochs) + 1)]
    noticed = 0
    offsets = used(memory)
    for offset in offsets:
        for bit in range(8):
            memory.buffer[offset] ^= 1 << bit
            try:
                opened = _native.open_arena(memory.address, memory.size, None)
            except CorruptState:
                noticed += 1
            else:
                assert found(opened) in prefixes, (offset, bit)
                noticed += found(opened) != epochs
            memory.buffer[offset] ^= 1 << bit
    assert scan(memory) == epochs
    # What remains unnoticed is the padding of payloads, the text of the manifest (compared with its digest by those who
    # read it), and words that only the owner reads.
    assert noticed > 0.6 * 8 * len(offsets)


def test_every_zeroed_tail_leaves_a_prefix(arena: tuple[Memory, Epochs]) -> None:
    memory, epochs = arena
    whole = bytes(memory.buffer)
    prefixes = [epochs[:n] for n in range(len(epochs) + 1)]
    counts = set()
    try:
        for end in range(PAGE, memory.size, 61):
            memory.buffer[end:] = bytes(memory.size - end)
            left = scan(memory)
            assert left in prefixes, end
            counts.add(len(left))
            memory.buffer[:] = whole
    finally:
        memory.buffer[:] = whole
    assert counts == set(range(len(epochs) + 1))


def test_every_cut_of_a_segment_file_leaves_a_prefix(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    owner = LogOwner.in_directory(folder, 6 * SEGMENT, segment_bytes=SEGMENT, durable=False)
    epochs = fill(owner)
    prefixes = [epochs[:n] for n in range(len(epochs) + 1)]
    for path in sorted(folder.glob("segment-*")):
        whole = path.read_bytes()
        for length in [*range(0, SEGMENT, 64), 1, 63, 4095, 4097, 4161, 5000, SEGMENT - 1]:
            os.truncate(path, length)
            left = found(_native.open_files(*_files(owner, folder)))
            assert left in prefixes, (path.name, length)
            assert left != epochs or length == SEGMENT
            assert not verify(folder)["ok"]
        # The same with zeros in place of what was cut off: sizes survive a crash that contents do not.
        for length in [*range(0, SEGMENT, 64), 1, 63, 4095, 4097, 4161, 5000, SEGMENT - 1]:
            path.write_bytes(whole[:length] + bytes(SEGMENT - length))
            assert found(_native.open_files(*_files(owner, folder))) in prefixes, (path.name, length)
        path.write_bytes(whole)
    assert verify(folder)["ok"]


def _files(owner: LogOwner, folder: Path) -> tuple[int, str, int, bool, bool, None]:
    return owner._control.address, str(folder), 100, False, False, None


@pytest.mark.parametrize("medium", ["memory", "directory"])
def test_a_damaged_log_can_be_continued(tmp_path: Path, medium: str) -> None:
    """After damage at a random place a new writer goes on behind the prefix, and what it writes is found."""
    rng = random.Random(8)
    for turn in range(60):
        if medium == "memory":
            owner = LogOwner.in_memory(6 * SEGMENT, segment_bytes=SEGMENT)
        else:
            folder = tmp_path / str(turn)
            owner = LogOwner.in_directory(folder, 6 * SEGMENT, segment_bytes=SEGMENT, durable=False)
        epochs = fill(owner)
        if medium == "memory":
            with Memory.from_fd(os.dup(owner.fds()[0])) as memory:
                offset = rng.choice([o for o in used(memory) if o >= PAGE])
                memory.buffer[offset] ^= 1 << rng.randrange(8)
        else:
            path = rng.choice(sorted(folder.glob("segment-*")))
            data = bytearray(path.read_bytes())
            data[rng.choice([rng.randrange(SUPERBLOCK.size), rng.randrange(PAGE, PAGE + 700)])] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        log = Log.open(owner.spec(), MANIFEST)
        before = found(log._opened)
        assert before == epochs[: len(before)]
        writer = log.start(owner.fence(), MANIFEST)
        number = writer.write([(REQUEST, 2, 1, 99, 0, 0, b"after")])
        again = found(Log.open(owner.spec(), MANIFEST)._opened)
        assert again == [*before, (number, [(99, b"after")])]
        owner.close()
        if medium == "directory":
            shutil.rmtree(folder)


# ---- hostile content under valid checksums -------------------------------------------------------------------------


def sealed(fields: tuple[int, ...]) -> bytes:
    """A record header with the CRC of what it holds."""
    raw = RECORD.pack(*fields)
    return raw[:8] + struct.pack("<I", crc32c(raw[:8] + bytes(4) + raw[12:])) + raw[12:]


extreme = st.one_of(
    st.sampled_from(
        [0, 1, 2, 3, 15, 16, 63, 64, SEGMENT, SEGMENT - PAGE, SEGMENT - PAGE - 64, 2**31, 2**32 - 1, 2**32 - 64]
    ),
    st.integers(0, 2**32 - 1),
)
header = st.fixed_dictionaries(
    {
        "type": st.sampled_from([0, 1, 2, 3, 7, 16, 19, 65535]),
        "writer": st.sampled_from([0, 1, 2, 2**64 - 1]),
        "epoch": st.sampled_from([0, 1, 7, 2**64 - 1]),
        "length": extreme,
        "count": extreme,
        "skip": st.sampled_from([0, 0, 0, 1, 2**31, 2**32 - 1]),
        "payload": st.sampled_from([None, b"", b"x" * 16]),
    }
)


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    headers=st.lists(header, max_size=12),
    start=st.sampled_from([PAGE, SEGMENT - 64, SEGMENT - 128, SEGMENT - 192, SEGMENT - 256]),
)
def test_hostile_fields_under_valid_checksums_stay_inside(headers: list[dict[str, int]], start: int) -> None:
    """Records that pass every CRC and lie about sizes: neither the reader nor the next writer leaves the segment."""
    owner = LogOwner.in_memory(3 * SEGMENT, segment_bytes=SEGMENT)
    writer = Log.open(owner.spec(), MANIFEST).start(owner.fence(), MANIFEST)
    writer.write([])
    with Memory.from_fd(os.dup(owner.fds()[0])) as memory:
        base = memory.buffer[PAGE : PAGE + SEGMENT]
        behind = bytes(memory.buffer[PAGE + SEGMENT :])
        at, sequence, digest = PAGE, 0, 0
        for h in headers:
            if at + 64 > SEGMENT:
                break
            sequence = (sequence + h["skip"]) % 2**32
            # A filler record brings the next one to the end of the segment, where room runs out.
            length = max(0, start - at - 64) if at < start and at > PAGE else h["length"]
            room = bytes(base[at + 64 : min(SEGMENT, at + 64 + length)])
            crc = crc32c(room) if length == len(room) else 0
            fields = (log_reader.MAGIC, h["type"], 0, 0, crc, h["writer"], h["epoch"], 1, 1, 1, 0, h["count"], length)
            fields = (*fields, sequence)
            base[at : at + 64] = sealed(fields)
            digest = crc32c(bytes(base[at : at + 64]), digest)
            sequence = (sequence + 1) % 2**32
            at = min(at + 64 + log_reader.padded(length), SEGMENT)
        base.release()
        records = _native.open_arena(memory.address, memory.size, None).records()
        for r in records:
            offset, length = r[7] - memory.address, r[6]
            assert offset >= PAGE
            assert offset + length <= PAGE + SEGMENT
        assert bytes(memory.buffer[PAGE + SEGMENT :]) == behind
    owner.close()


def test_a_commit_at_the_very_end_does_not_lead_the_writer_past_it() -> None:
    """Valid records up to the last byte: the next writer has no room for END, and must not put it behind."""
    for slack in (0, 64, 128):
        owner = LogOwner.in_memory(3 * SEGMENT, segment_bytes=SEGMENT)
        del_writer = Log.open(owner.spec(), MANIFEST).start(owner.fence(), MANIFEST)
        del_writer.write([])
        with Memory.from_fd(os.dup(owner.fds()[0])) as memory:
            segment = bytearray(memory.buffer[PAGE : PAGE + SEGMENT])
            length = SEGMENT - PAGE - 64 - 64 - 128 - slack
            begin = sealed((log_reader.MAGIC, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0))
            payload = bytes(length)
            data = sealed((log_reader.MAGIC, 16, 0, 0, crc32c(payload), 1, 1, 1, 1, 1, 0, 0, length, 1))
            body = struct.pack("<QII", length, 1, crc32c(data, crc32c(begin)))
            commit = sealed((log_reader.MAGIC, 2, 0, 0, crc32c(body), 1, 1, 0, 0, 0, 0, 0, 16, 2))
            segment[PAGE : SEGMENT - slack] = begin + data + payload + commit + body + bytes(48)
            memory.buffer[PAGE : PAGE + SEGMENT] = segment
            behind = bytes(memory.buffer[PAGE + SEGMENT :])
            log = Log.open(owner.spec(), MANIFEST)
            accepted = len(list(log.records()))
            assert accepted == (0 if slack == 0 else 1)
            writer = log.start(owner.fence(), MANIFEST)
            assert bytes(memory.buffer[PAGE + SEGMENT :]) == behind
            writer.write([(REQUEST, 2, 1, 5, 0, 0, b"next")])
            assert memory.buffer[PAGE + SEGMENT : PAGE + SEGMENT + 8] in (b"OLSEGM1\0", bytes(8))
            assert [r.key for r in Log.open(owner.spec(), MANIFEST).records()] == [1] * accepted + [5]
        owner.close()


@settings(max_examples=150)
@given(data=st.binary(max_size=600), places=st.integers(0, 2**32 - 1), size=st.integers(0, 2**64 - 1))
def test_rubbish_for_a_control_page_is_refused(data: bytes, places: int, size: int) -> None:
    with Memory.anonymous(4 * SEGMENT) as memory:
        memory.buffer[PAGE : PAGE + len(data)] = data
        log_reader.CONTROL.pack_into(
            memory.buffer, 0, b"OLCTRL1\0", 1, places, size, bytes(16), 0, log_reader.marked(1)
        )
        with contextlib.suppress(CorruptState):
            assert _native.open_arena(memory.address, memory.size, None).records() == []


def test_a_fuzzed_log_does_not_crash_reader_or_writer_under_address_sanitizer(
    compiler: Compiler, tmp_path: Path
) -> None:
    program = tmp_path / "fuzz"
    sources = [
        str(NATIVE / "tests" / "log_fuzz.cpp"),
        str(NATIVE / "core" / "log.cpp"),
        *map(str, sorted((NATIVE / "core").glob("crc32c*.cpp"))),
    ]
    flags = [
        "-std=c++20",
        "-O1",
        "-g",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        f"-I{NATIVE / 'include'}",
    ]
    built = subprocess.run(
        [*compiler.command, *flags, *sources, "-o", str(program)], capture_output=True, text=True, timeout=240
    )
    if built.returncode != 0 and "sanitize" in built.stderr + " ".join(flags) and "error:" not in built.stderr:
        pytest.skip(f"no AddressSanitizer with this compiler: {built.stderr.strip()[-300:]}")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program, "1", "4000"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert done.stdout.startswith("ok")
