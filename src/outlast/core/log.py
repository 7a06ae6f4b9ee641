"""The epoch log: what is in it survives the process that wrote it.

An owner (`LogOwner`, in the supervisor) holds the memory or the folder and names the writer; one writer at a time
(`LogWriter`, in the engine) appends epochs; whoever recovers scans it first (`Log`). The byte layout is
native/include/outlast/log.h, explained in docs/reference/log-format.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import logging
import os
import re
import struct
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from outlast.core import _native
from outlast.core.errors import CorruptState, OutlastError, Refused, UsageError
from outlast.core.memory import Memory
from outlast.core.paths import make_private

_log = logging.getLogger(__name__)

CONTROL_BYTES = 4096
SUPERBLOCK_BYTES = 4096
_CONTROL = struct.Struct("<8sIIQ16sQQ")  # ol_log_control
_MAGIC = b"OLCTRL1\0"
_VERSION = 1
_WRITER_EPOCH_OFFSET = 40
_SEGMENT_BITS = 40
_FIRST = (
    1 | (_native.crc32c((1).to_bytes(8, "little")) & 0xFFFFFF) << _SEGMENT_BITS
)  #: ol_log_control.oldest of a new log
_SEGMENT_NAME = re.compile(r"segment-([0-9a-f]{16})\.ologs")

#: Segments are a compromise: an epoch must fit one, and space comes back a segment at a time.
DEFAULT_SEGMENT_BYTES = 32 << 20
MIN_SEGMENTS = 3  #: one being written, one being emptied, one to empty it into

BEGIN, COMMIT, END = 1, 2, 3
DATA = 16
KV_ROWS, KV_SEAL, APPEND, PAGES, REQUEST, EMISSION, DROP = range(16, 23)
TYPE_NAMES = {
    KV_ROWS: "kv-rows", KV_SEAL: "kv-seal", APPEND: "append", PAGES: "pages", REQUEST: "request",
    EMISSION: "emission", DROP: "drop",
}  # fmt: skip


class Record(NamedTuple):
    """A committed data record. `address` is that of its payload, valid while its `Log` or writer holds the segment."""

    type: int
    region: int
    generation: int
    key: int
    offset: int
    tokens: int  #: `count` of the header; a tuple has a method of that name
    length: int  #: payload bytes
    address: int
    segment: int
    epoch: int
    writer_epoch: int

    @property
    def payload(self) -> bytes:
        """A copy of the payload."""
        return ctypes.string_at(self.address, self.length)


class Manifest:
    """What makes logged state usable: model and weights, dtype, layout, block size, kernels, tokenizer.

    State written under one manifest is never read under another.
    """

    def __init__(self, **fields: str | int) -> None:
        """`fields`: whatever must be equal for the bytes to mean the same."""
        self.fields = fields
        self.text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        self.digest = hashlib.sha256(self.text).digest()


class LogOwner:
    """Owner of a log's memory or folder: creates it, passes it on, raises the writer epoch. Holds no engine state."""

    def __init__(self, control: Memory, spec: dict[str, Any], fallback: LogOwner | None = None) -> None:
        """Use `in_memory` or `in_directory`."""
        self._control = control
        self._spec = spec
        self._fallback = fallback
        self._word = ctypes.c_uint64.from_address(control.address + _WRITER_EPOCH_OFFSET)

    @classmethod
    def in_memory(cls, capacity: int, *, segment_bytes: int = DEFAULT_SEGMENT_BYTES) -> LogOwner:
        """A log in an anonymous memfd: it lives as long as any process holds it. Pages are taken as they are used."""
        segments = _segments_in(capacity, segment_bytes)
        memory = Memory.anonymous(CONTROL_BYTES + segments * segment_bytes, name="outlast-log")
        _CONTROL.pack_into(memory.buffer, 0, _MAGIC, _VERSION, segments, segment_bytes, uuid.uuid4().bytes, 0, _FIRST)
        return cls(memory, {"kind": "memory", "fd": memory.fd, "bytes": memory.size})

    @classmethod
    def in_directory(
        cls,
        directory: str | os.PathLike[str],
        capacity: int,
        *,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        durable: bool = True,
        fallback: LogOwner | None = None,
    ) -> LogOwner:
        """A log of one file per segment (0600) in a folder of its own, made if it does not exist.

        An existing log there is continued, with its own segment size. `durable`: a commit returns after the bytes were
        flushed. `fallback`: where a writer may go on when this one fails (see docs/how-to/serve.md).
        Raises `Refused` while another process owns it.
        """
        folder = Path(directory)
        path = folder / "control"
        try:
            make_private(folder)
        except OSError as error:
            raise OutlastError(f"cannot use {folder} for the log", why=error.strerror or str(error)) from error
        if not path.exists():
            _segments_in(capacity, segment_bytes)
            _create_control(folder, segment_bytes)
        control = Memory.open(path)
        try:
            try:
                fcntl.flock(control.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Refused(
                    f"the log in {folder} is in use",
                    why="another process owns it",
                    do="Stop it, or give another folder.",
                ) from None
            _, _, segments, actual, *_ = _read_control(control.buffer, str(path))
            if segments != 0:
                raise CorruptState(f"{path} is not the control page of a log", do="Move it away to start an empty log.")
            spec = {
                "kind": "directory", "path": str(folder.absolute()), "fd": control.fd,
                "max_segments": _segments_in(capacity, actual), "durable": durable,
            }  # fmt: skip
        except BaseException:
            control.close()
            raise
        if fallback is not None:
            spec["fallback"] = dict(fallback.spec())
        return cls(control, spec, fallback)

    @property
    def writer_epoch(self) -> int:
        """Number of the writer that owns the log now; 0 before the first."""
        return int(self._word.value)

    def fence(self) -> int:
        """Shut the present writer out and return the next writer's epoch.

        Call it only when the old writer's process is proven dead: the word stops its next commit, not a store that is
        under way.
        """
        if self._control.closed:
            raise UsageError("the log is closed")
        newest = max([self.writer_epoch, self._fallback.writer_epoch if self._fallback else 0]) + 1
        self._word.value = newest
        if self._spec.get("durable"):
            # Records of the new writer reach the medium; if its number did not, the host's next start would name a
            # writer that the log has already seen, or an older one.
            try:
                os.fsync(self._control.fd)
            except OSError as error:  # the writer's next commit meets the same fault, and reports it
                _log.warning("the log's control page was not flushed: %s", error)
        if self._fallback is not None:
            self._fallback._word.value = newest
        return newest

    def fds(self) -> tuple[int, ...]:
        """Descriptors that a writer's process must inherit under the same numbers."""
        return (self._control.fd, *(self._fallback.fds() if self._fallback else ()))

    def spec(self) -> Mapping[str, Any]:
        """JSON-able description for `Log.open` in a process that inherited `fds`."""
        return self._spec

    def used(self) -> int:
        """Bytes of memory or files that the log takes now."""
        if self._spec["kind"] == "memory":
            return os.fstat(self._control.fd).st_blocks * 512
        total = 0
        for path in Path(self._spec["path"]).glob("segment-*.ologs"):
            try:
                total += path.stat().st_size
            except FileNotFoundError:  # released meanwhile
                continue
        return total + (self._fallback.used() if self._fallback else 0)

    def close(self) -> None:
        """Give memory and lock back. Files stay; memory is gone with the last process that holds it."""
        if self._control.closed:
            return
        self._word = ctypes.c_uint64(self._word.value)  # no longer that of the memory, which goes
        if self._fallback is not None:
            self._fallback.close()
        self._control.close()


class Log:
    """A log as it was found: scanned up to the first byte that does not fit. `start` turns it into a writer."""

    def __init__(self, opened: _native.OpenLog, control: Memory | None, durable: bool, *, owned: bool) -> None:
        """Use `open`. `owned`: `control` goes when this object does."""
        self._opened = opened
        self._control = control
        if owned and control is not None:  # a native writer holds `opened`, whatever becomes of this object
            weakref.finalize(opened, control.close).atexit = False
        self._durable = durable
        self.report: dict[str, Any] = opened.describe()

    @classmethod
    def open(cls, spec: Mapping[str, Any], manifest: Manifest | None, *, memory: Memory | None = None) -> Log:
        """Scan the log that an owner described. With `manifest`, one written under another manifest is not read.

        `memory`: the log's memory if the caller has mapped it already (`map_memory`); it must stay open.
        """
        control = memory or map_memory(spec)
        digest = None if manifest is None else manifest.digest
        try:
            _read_control(control.buffer, control.name)
            if spec["kind"] == "memory":
                opened = _native.open_arena(control.address, control.size, digest)
            else:
                opened = _native.open_files(
                    control.address, spec["path"], spec["max_segments"], True, bool(spec["durable"]), digest
                )
        except BaseException:
            if memory is None:
                control.close()
            raise
        return cls(opened, control, bool(spec.get("durable", False)), owned=memory is None)

    def records(self) -> Iterator[Record]:
        """Data records of committed epochs, oldest first. Addresses stay valid as long as this object or its writer."""
        for row in self._opened.records():  # a generator: it holds this object, and so the memory
            yield Record._make(row)

    @property
    def empty(self) -> bool:
        """No epoch was committed."""
        return int(self.report["epochs"]) == 0

    def differs(self, manifest: Manifest) -> str:
        """Why this log can not be continued under `manifest`: the first field that differs; "" if it can."""
        if not self.report["manifest_differs"]:
            return ""
        text = self.report["manifest_text"]
        if hashlib.sha256(text).digest() != self.report["manifest"]:
            return "the manifest in the log is damaged"
        try:
            found = json.loads(text)
        except ValueError:
            return "the manifest in the log can not be read"
        if not isinstance(found, dict):
            return "the manifest in the log can not be read"
        for name, value in manifest.fields.items():
            if found.get(name) != value:
                return f"manifest field {name} is {found.get(name)!r} in the log and {value!r} here"
        return "the manifest in the log has other fields"

    def start(self, writer_epoch: int, manifest: Manifest, *, cold: bool = False) -> LogWriter:
        """Become the writer `writer_epoch`, cutting a torn tail first. `cold`: release all that is there.

        Raises `Fenced` if the owner has named another writer meanwhile, `Refused` if the log was written under another
        manifest and `cold` is not given.
        """
        writer = _native.LogWriter(self._opened, writer_epoch, manifest.digest, manifest.text, cold, self._durable)
        return LogWriter(writer, self)


class LogWriter:
    """Appends epochs. For one process and one thread at a time; `native` is shared with executor operators."""

    def __init__(self, native: _native.LogWriter, log: Log) -> None:
        """Use `Log.start`."""
        self.native = native
        self._log = log  # keeps the mapping

    def write(self, records: Iterable[tuple[int, int, int, int, int, int, bytes]]) -> int:
        """Append one epoch of (type, region, generation, key, offset, count, payload); returns its number.

        All or nothing: after an error nothing of it counts.
        """
        rows = list(records)
        self.native.begin(sum(len(row[6]) for row in rows), len(rows))
        try:
            for row in rows:
                self.native.append(*row)
            self.native.commit()
        except BaseException:
            self.native.abort()
            raise
        return self.native.committed_epoch

    def compact(self, live: Iterable[tuple[int, int, int, int, int, int, bytes]]) -> None:
        """Replace everything before by `live`, in a fresh segment; older segments are released after the commit.

        A crash on the way leaves the old segments, or both: replaying both gives the same state, since a record says
        where its bytes belong.
        """
        self.native.roll()
        first = None
        epoch: list[tuple[int, int, int, int, int, int, bytes]] = []
        size = 0
        limit = self.native.segment_bytes // 2
        for row in live:
            if epoch and size + len(row[6]) + 128 > limit:
                self.write(epoch)
                first = first or self.native.segment
                epoch, size = [], 0
            epoch.append(row)
            size += len(row[6]) + 128
        self.write(epoch)
        self.native.release_before(first or self.native.segment)


def map_memory(spec: Mapping[str, Any]) -> Memory:
    """Map what `spec` names: the whole log if it lives in memory, else its control page."""
    return Memory.from_fd(os.dup(int(spec["fd"])), name="log")


def _segments_in(capacity: int, segment_bytes: int) -> int:
    if segment_bytes % 4096 or segment_bytes < 4 * SUPERBLOCK_BYTES:
        raise UsageError(f"segments of {segment_bytes} bytes", why="the size is a multiple of 4096, at least 16384")
    segments = capacity // segment_bytes
    if segments < MIN_SEGMENTS:
        raise UsageError(
            f"a log of {capacity} bytes", why=f"it must hold {MIN_SEGMENTS} segments of {segment_bytes} bytes"
        )
    return segments


def _create_control(folder: Path, segment_bytes: int) -> None:
    """Make the control page; if another process makes it at the same moment, one of the two pages stays."""
    scratch = folder / f".control-{os.getpid()}"
    scratch.unlink(missing_ok=True)
    try:
        with Memory.create(scratch, CONTROL_BYTES) as fresh:
            _CONTROL.pack_into(fresh.buffer, 0, _MAGIC, _VERSION, 0, segment_bytes, uuid.uuid4().bytes, 0, _FIRST)
            os.fsync(fresh.fd)
        # Not a rename: that would replace the page of an owner which came first, and both would own the folder.
        with contextlib.suppress(FileExistsError):
            (folder / "control").hardlink_to(scratch)
    finally:
        scratch.unlink(missing_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_control(buffer: memoryview, name: str) -> tuple[bytes, int, int, int, bytes, int, int]:
    if len(buffer) < CONTROL_BYTES:
        raise CorruptState(f"{name} is too short for a control page")
    magic, version, segments, segment_bytes, identity, writer, oldest = _CONTROL.unpack_from(buffer)
    if magic != _MAGIC:
        raise CorruptState(
            f"{name} is not the control page of a log",
            why="its magic differs",
            do="Move it away to start an empty log.",
        )
    if version != _VERSION:
        raise CorruptState(f"{name} is of log version {version}", why=f"this build reads version {_VERSION}")
    if segment_bytes < 2 * SUPERBLOCK_BYTES or segment_bytes % 4096 or segment_bytes > 1 << 40:
        raise CorruptState(f"{name} names segments of {segment_bytes} bytes")
    return magic, version, segments, segment_bytes, identity, writer, oldest & (1 << _SEGMENT_BITS) - 1


def inspect(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """What a log folder holds: segments, epochs, records and bytes by type, the first bad record and why.

    Reads only; works while a writer is at it (the tail may then look torn). Raises `UsageError` if there is no log.
    """
    folder = Path(directory)
    while True:
        head = _read_head(folder)
        _, _, _, segment_bytes, identity, writer, oldest = _read_control(memoryview(head), str(folder / "control"))
        control = ctypes.create_string_buffer(head, CONTROL_BYTES)
        opened = _native.open_files(ctypes.addressof(control), str(folder), 1 << 30, False, False, None)
        if (
            _CONTROL.unpack_from(_read_head(folder))[-1] & (1 << _SEGMENT_BITS) - 1 == oldest
        ):  # else a writer released what was to be read
            break
    report: dict[str, Any] = opened.describe()
    if report["torn"] and opened.commit_behind():
        report["torn"] = False  # that epoch was whole once, or others follow it: this is damage
    digest = hashlib.sha256(report["manifest_text"]).digest()
    report["manifest_ok"] = not report["segments"] or digest == report["manifest"]
    report["manifest"] = report["manifest"].hex()
    report["manifest_text"] = report["manifest_text"].decode(errors="replace")
    report["log"] = identity.hex()
    report["owner_writer_epoch"] = writer
    report["oldest_segment"] = oldest
    report["segment_bytes"] = segment_bytes
    regions: dict[str, dict[str, int]] = {}
    keys = set()
    for record in map(Record._make, opened.records()):
        name = f"{record.region}/{TYPE_NAMES.get(record.type, record.type)}"
        row = regions.setdefault(name, {"records": 0, "bytes": 0})
        row["records"] += 1
        row["bytes"] += record.length
        keys.add(record.key)
    report["regions"] = regions
    report["keys"] = len(keys)
    known = {row["segment"] for row in report["segments"]}
    found = (_SEGMENT_NAME.fullmatch(path.name) for path in folder.iterdir())
    numbers = {int(match.group(1), 16) for match in found if match}
    # Below the oldest that counts: left by an interrupted release, and no part of the log any more.
    report["unread_segments"] = sorted(number for number in numbers - known if number >= oldest)
    return report


def _read_head(folder: Path) -> bytes:
    try:
        with (folder / "control").open("rb") as file:
            return file.read(CONTROL_BYTES)
    except OSError as error:
        raise UsageError(f"no log in {folder}", why=error.strerror or str(error), do="Give a log folder.") from error


def verify(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """`inspect` with a judgement: `ok` is True if every byte up to a clean end was read and every check held.

    A torn last epoch is what a crash leaves; it is harmless, is reported as `torn`, and does not make `ok` False.
    """
    report = inspect(directory)
    last = report["segments"][-1]["segment"] if report["segments"] else 0
    # A crash leaves an epoch without COMMIT in the last segment, or a segment that was created and not begun.
    begun = report["stop_segment"] == last and not report["unread_segments"]
    created = report["unread_segments"] == [report["stop_segment"]] and report["stop_segment"] == last + 1
    torn = bool(report["torn"]) and (begun or created)
    report["ok"] = report["manifest_ok"] and (torn or (report["stop"] == "" and not report["unread_segments"]))
    report["first_bad"] = (
        None
        if report["stop"] == ""
        else {"segment": report["stop_segment"], "offset": report["stop_offset"], "why": report["stop"]}
    )
    return report
