"""CRC32C: one value, whichever form computes it."""

from __future__ import annotations

import ctypes
import random

import log_reader
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.core import _native


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"123456789", 0xE3069283),  # check value of the CRC catalogue
        (bytes(32), 0x8A9136AA),  # RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ],
)
def test_known_values(data: bytes, value: int) -> None:
    assert _native.crc32c(data) == value
    assert _native.crc32c_table(data) == value
    assert log_reader.crc32c(data) == value


def test_all_forms_agree_at_every_small_length_and_alignment() -> None:
    rng = random.Random(1)
    data = ctypes.create_string_buffer(rng.randbytes(1500), 1500)
    base = ctypes.addressof(data)
    for alignment in range(33):
        for length in [*range(300), 511, 512, 513, 1023, 1024, 1025, 1400]:
            piece = data.raw[alignment : alignment + length]
            assert _native.crc32c_at(base + alignment, length) == _native.crc32c_table(piece), (alignment, length)


def test_all_forms_agree_around_the_widths_of_the_fast_ones() -> None:
    rng = random.Random(2)
    size = 70000
    data = ctypes.create_string_buffer(rng.randbytes(size), size)
    to = ctypes.create_string_buffer(size + 64)
    for around in (1360, 2720, 4080, 4096, 8160, 16320, 16384, 32640, 65536):
        for length in range(around - 9, around + 10):
            for alignment in (0, 1, 7, 32):
                piece = data.raw[alignment : alignment + length]
                expected = _native.crc32c_table(piece)
                assert _native.crc32c_at(ctypes.addressof(data) + alignment, length) == expected
                ctypes.memset(to, 0xEE, size + 64)
                copied = _native.crc32c_copy(ctypes.addressof(to) + 3, ctypes.addressof(data) + alignment, length)
                assert copied == expected
                assert to.raw[3 : 3 + length] == piece
                assert to.raw[:3] == b"\xee" * 3
                assert to.raw[3 + length : 3 + length + 61] == b"\xee" * 61  # not a byte too far


@given(parts=st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 2**32)), max_size=6))
def test_going_on_equals_computing_at_once(parts: list[tuple[int, int]]) -> None:
    pieces = [random.Random(seed).randbytes(length) for length, seed in parts]
    crc = table = 0
    for piece in pieces:
        crc = _native.crc32c(piece, crc)
        table = _native.crc32c_table(piece, table)
    assert crc == table == _native.crc32c(b"".join(pieces))


def test_copy_handles_every_small_length() -> None:
    rng = random.Random(3)
    source = ctypes.create_string_buffer(rng.randbytes(600), 600)
    to = ctypes.create_string_buffer(700)
    for length in range(520):
        for shift in (0, 1, 5, 8, 33):
            ctypes.memset(to, 0, 700)
            crc = _native.crc32c_copy(ctypes.addressof(to) + shift, ctypes.addressof(source) + 2, length)
            piece = source.raw[2 : 2 + length]
            assert (crc, to.raw[shift : shift + length]) == (_native.crc32c_table(piece), piece)
            assert to.raw[shift + length] == 0


@pytest.mark.parametrize("size", [1 << 20, (1 << 23) + 12345])
def test_large_copies_equal_the_source(size: int) -> None:
    """Large enough for stores that go past the caches."""
    source = ctypes.create_string_buffer(random.Random(size).randbytes(size), size)
    to = ctypes.create_string_buffer(size + 64)
    for shift in (0, 1, 32, 63):
        ctypes.memset(to, 0xEE, size + 64)
        crc = _native.crc32c_copy(ctypes.addressof(to) + shift, ctypes.addressof(source), size)
        assert crc == _native.crc32c_table(source.raw)
        assert to.raw[shift : shift + size] == source.raw
        assert to.raw[:shift] + to.raw[shift + size :] == b"\xee" * 64


def test_any_flipped_bit_changes_it() -> None:
    rng = random.Random(4)
    data = bytearray(rng.randbytes(5000))
    before = _native.crc32c(bytes(data))
    for _ in range(2000):
        at, bit = rng.randrange(len(data)), rng.randrange(8)
        data[at] ^= 1 << bit
        assert _native.crc32c(bytes(data)) != before
        data[at] ^= 1 << bit
