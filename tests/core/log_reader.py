"""The log format read once more, in plain Python: slow, independent of the native reader, written from log.h."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CONTROL = struct.Struct("<8sIIQ16sQQ")
SUPERBLOCK = struct.Struct("<8sII16sQQQQII32s")
RECORD = struct.Struct("<IHHIIQQIIQIIII")
COMMIT_PAYLOAD = struct.Struct("<QII")
PAGE = 4096
MAGIC = 0x4C52434F
BEGIN, COMMIT, END, DATA = 1, 2, 3, 16


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def crc32c(data: bytes, crc: int = 0) -> int:
    """CRC-32C, a byte at a time."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


class Row(NamedTuple):
    """What a writer is given for a record."""

    type: int
    region: int
    generation: int
    key: int
    offset: int
    count: int
    payload: bytes


def marked(number: int) -> int:
    """`ol_log_control.oldest` for a segment number."""
    return number | (crc32c(number.to_bytes(8, "little")) & 0xFFFFFF) << 40


def padded(length: int) -> int:
    return -(-length // 64) * 64


def arena_segments(memory: bytes) -> tuple[bytes, list[tuple[int, bytes]]]:
    """The control page and the segments (number, bytes) of a log in memory, by number."""
    control = memory[:PAGE]
    _, _, places, size, _, _, _ = CONTROL.unpack_from(control)
    found = []
    for place in range(places):
        segment = memory[PAGE + place * size : PAGE + (place + 1) * size]
        if segment[:8] == b"OLSEGM1\0":
            found.append((SUPERBLOCK.unpack_from(segment)[4], segment))
    return control, sorted(found)


def folder_segments(folder: Path) -> tuple[bytes, list[tuple[int, bytes]]]:
    """The same for a log in a folder."""
    paths = sorted(folder.glob("segment-*.ologs"))
    return (folder / "control").read_bytes(), [(int(path.name[8:24], 16), path.read_bytes()) for path in paths]


def read(control: bytes, segments: list[tuple[int, bytes]]) -> list[tuple[int, list[Row]]]:
    """(epoch, records) of every committed epoch."""
    _, _, _, size, uuid, _, oldest = CONTROL.unpack_from(control)
    out: list[tuple[int, list[Row]]] = []
    oldest, check = oldest & (1 << 40) - 1, oldest >> 40
    if crc32c(oldest.to_bytes(8, "little")) & 0xFFFFFF != check:
        return out
    expected, sequence, epoch, writer, manifest = oldest, -1, 0, 0, b""
    for number, data in segments:
        if number < oldest:
            continue
        if number != expected or len(data) < size:
            break
        magic, version, crc, identity, named, length, opener, first_epoch, first, text, digest = SUPERBLOCK.unpack_from(
            data
        )
        head = data[:12] + bytes(4) + data[16 : SUPERBLOCK.size]
        if (magic, version, identity, named, length) != (b"OLSEGM1\0", 1, uuid, number, size) or crc32c(head) != crc:
            break
        if sequence >= 0 and (first != sequence or first_epoch <= epoch or digest != manifest or opener < writer):
            break
        assert hashlib.sha256(data[128 : 128 + text]).digest() == digest
        sequence, manifest, writer = first, digest, opener
        ended = False
        for following, by, found, rows in _epochs(data, first, epoch if out else first_epoch - 1, opener):
            sequence, writer = following, by
            if rows is None:
                ended = True
            else:
                epoch = found
                out.append((epoch, rows))
        if not ended:
            break
        expected = number + 1
    return out


def _epochs(data: bytes, sequence: int, last: int, writer: int) -> Iterator[tuple[int, int, int, list[Row] | None]]:
    """(next sequence, writer epoch, epoch, records) of whole epochs; records None for END."""
    at, rows, digest, opened, total = PAGE, [], 0, None, 0
    while at + RECORD.size <= len(data):
        head = data[at : at + 64]
        fields = RECORD.unpack(head)
        magic, kind, _, header_crc, payload_crc, by, epoch, region, generation, key, offset, count, length, number = (
            fields
        )
        if magic != MAGIC or number != sequence or crc32c(head[:8] + bytes(4) + head[12:]) != header_crc:
            return
        if at + 64 + padded(length) > len(data) or by < writer or (opened is not None and by != opened[0]):
            return
        payload = data[at + 64 : at + 64 + length]
        if crc32c(payload) != payload_crc:
            return
        sequence += 1
        at += 64 + padded(length)
        if kind == END:
            if opened is None:
                yield sequence, by, epoch, None
            return
        if kind == BEGIN:
            if opened is not None or epoch <= last:
                return
            opened, rows, total, digest = (by, epoch), [], 0, crc32c(head)
        elif opened is None or epoch != opened[1]:
            return
        elif kind == COMMIT:
            if COMMIT_PAYLOAD.unpack(payload) != (total, len(rows), digest):
                return
            yield sequence, by, epoch, rows
            opened, last, writer = None, epoch, by
        else:
            rows.append(Row(kind, region, generation, key, offset, count, payload))
            total += length
            digest = crc32c(head, digest)
