"""The GGUF container: header, metadata and tensor table, read from a memory map (versions 2 and 3, little endian).

Nothing is copied or decoded before it is asked for: arrays of strings (a vocabulary has some 50,000) are only skipped,
which keeps opening a model in the range of milliseconds. Every length and offset comes from an untrusted file and is
compared with fixed limits and with the file's size before it is used.
"""

from __future__ import annotations

import array
import hashlib
import math
import mmap
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from outlast.core.errors import OutlastError

F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, BF16 = 0, 1, 2, 3, 8, 12, 14, 30
BLOCK = 32  #: a matrix must have a multiple of so many columns
SUPER_BLOCK = 256  #: columns of a block of Q4_K and Q6_K

#: name of each tensor type number, for error messages
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
#: type -> (columns of a block, bytes of a block)
SUPPORTED_TYPES = {
    F32: (1, 4), F16: (1, 2), BF16: (1, 2), Q4_0: (BLOCK, 18), Q4_1: (BLOCK, 20), Q8_0: (BLOCK, 34),
    Q4_K: (SUPER_BLOCK, 144), Q6_K: (SUPER_BLOCK, 210),
}  # fmt: skip

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4), 6: ("f", 4), 7: ("?", 1),
    10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip

# Limits far above any real model, so that a hostile file costs bounded time and memory.
_MAX_TENSORS = 1 << 16
_MAX_KEYS = 1 << 14
_MAX_NAME = 1 << 10
_MAX_STRING = 1 << 22
_MAX_ELEMENTS = 1 << 24
_MAX_ARRAYS_ELEMENTS = 1 << 25  #: over all arrays of a file
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20

Scalar = bool | int | float | str


class ModelFileError(OutlastError):
    """The model file is damaged, truncated or not a model file."""


class UnsupportedModel(ModelFileError):
    """The file is sound, but its architecture, tokenizer or tensor type is not one this engine runs."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of the tensor table. `shape` as in the file: columns first (the fastest dimension)."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int  #: of the data, from the start of the file

    @property
    def type_name(self) -> str:
        """The type's name in the GGUF documentation."""
        return TYPE_NAMES.get(self.type, f"type {self.type}")

    @property
    def nbytes(self) -> int:
        """Bytes of the data. Raises `UnsupportedModel` for a type this engine does not know the size of."""
        if self.type not in SUPPORTED_TYPES:
            raise UnsupportedModel(
                f"Tensor {self.name} has type {self.type_name}",
                why=f"this engine runs {', '.join(TYPE_NAMES[kind] for kind in SUPPORTED_TYPES)}",
                do="Use a file quantized to one of these",
            )
        columns, size = SUPPORTED_TYPES[self.type]
        return math.prod(self.shape) // columns * size


@dataclass(frozen=True, slots=True)
class Array:
    """An array in the metadata, not decoded yet."""

    kind: int
    count: int
    start: int  #: offset of the first element in the file
    end: int


class Gguf:
    """An open GGUF file. Use as a context manager, or `close` it; `data` stays valid until then."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Scalar | Array] = {}
        self.tensors: dict[str, Tensor] = {}
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < 24:
                    raise self._damaged("it is shorter than a header")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(f"Cannot open model file {path}", why=error.strerror or str(error)) from error
        self.data = memoryview(self._map)
        self.size = len(self._map)
        try:
            self._parse()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Gguf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file; views on `data` must be gone."""
        self.data.release()
        self._map.close()

    def digest(self) -> str:
        """SHA-256 of the whole file, in hex: the identity of the weights (about 0.1 s for 100 MB)."""
        return hashlib.sha256(self.data).hexdigest()

    # ---- metadata -----------------------------------------------------------------------------------------------

    def integer(self, key: str, default: int | None = None) -> int:
        """The value of an integer key. Raises `ModelFileError` if it is missing without a default, or no integer."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._missing(key, "an integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The value of a numeric key as a float."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._missing(key, "a number", value)
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """The value of a string key."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self._missing(key, "a string", value)
        return value

    def strings(self, key: str) -> list[str]:
        """Decodes an array of strings. Raises `ModelFileError` if a string is not UTF-8."""
        value = self.metadata.get(key)
        if not isinstance(value, Array) or value.kind != _STRING:
            raise self._missing(key, "an array of strings", value)
        try:
            return [str(part, "utf-8") for part in self._string_parts(value)]
        except UnicodeDecodeError as error:
            raise self._damaged(f"{key} holds a string that is not UTF-8") from error

    def integers(self, key: str) -> list[int]:
        """Decodes an array of integers."""
        value = self.metadata.get(key)
        if not isinstance(value, Array) or _SCALARS.get(value.kind, ("f", 4))[0] in "fd?":
            raise self._missing(key, "an array of integers", value)
        numbers = array.array(_SCALARS[value.kind][0].replace("I", "L" if array.array("I").itemsize != 4 else "I"))
        numbers.frombytes(self.data[value.start : value.end])
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist()

    def _string_parts(self, value: Array) -> Iterator[memoryview]:
        length_at = struct.Struct("<Q").unpack_from
        position = value.start
        for _ in range(value.count):
            (length,) = length_at(self.data, position)
            position += 8 + length
            yield self.data[position - length : position]

    # ---- parsing ------------------------------------------------------------------------------------------------

    def _parse(self) -> None:
        if bytes(self.data[:4]) != _MAGIC:
            raise self._damaged("it does not start with the GGUF magic")
        version, tensors, keys = struct.unpack_from("<IQQ", self.data, 4)
        if version not in _VERSIONS:
            raise UnsupportedModel(f"{self.path} is GGUF version {version}", why="versions 2 and 3 are read")
        if tensors > _MAX_TENSORS or keys > _MAX_KEYS:
            raise self._damaged(f"it claims {tensors} tensors and {keys} metadata keys")
        self._budget = _MAX_ARRAYS_ELEMENTS
        position = 24
        for _ in range(keys):
            key, position = self._string(position, _MAX_NAME)
            self.metadata[key], position = self._value(position)
        position = self._parse_tensors(position, tensors)

    def _parse_tensors(self, position: int, count: int) -> int:
        entries: list[tuple[str, int, tuple[int, ...], int]] = []
        for _ in range(count):
            name, position = self._string(position, _MAX_NAME)
            (dimensions,) = self._unpack("<I", position)
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise self._damaged(f"tensor {name} has {dimensions} dimensions")
            *extents, kind, offset = self._unpack(f"<{dimensions}QIQ", position + 4)
            position += 4 + 8 * dimensions + 12
            entries.append((name, kind, tuple(extents), offset))
        alignment = self.integer("general.alignment", 32)
        if not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._damaged(f"its alignment is {alignment}")
        start = (position + alignment - 1) // alignment * alignment
        for name, kind, shape, offset in entries:
            tensor = Tensor(name, kind, shape, start + offset)
            if name in self.tensors:
                raise self._damaged(f"tensor {name} stands twice in the table")
            if any(not 1 <= extent <= 1 << 40 for extent in shape) or math.prod(shape) > 1 << 44:
                raise self._damaged(f"tensor {name} has shape {shape}")
            if kind in SUPPORTED_TYPES:
                if shape[0] % SUPPORTED_TYPES[kind][0]:
                    raise self._damaged(f"tensor {name}: {shape[0]} columns are not whole blocks of {tensor.type_name}")
                if offset % alignment or tensor.offset + tensor.nbytes > self.size:
                    raise self._damaged(f"tensor {name} lies outside the file: truncated download?")
            self.tensors[name] = tensor
        return start

    def _value(self, position: int) -> tuple[Scalar | Array, int]:
        (kind,) = self._unpack("<I", position)
        position += 4
        if kind == _STRING:
            return self._string(position, _MAX_STRING)
        if kind == _ARRAY:
            element, count = self._unpack("<IQ", position)
            return self._array(position + 12, element, count)
        if kind not in _SCALARS:
            raise self._damaged(f"unknown metadata type {kind}")
        code, size = _SCALARS[kind]
        (value,) = self._unpack("<" + code, position)
        return value, position + size

    def _array(self, position: int, kind: int, count: int) -> tuple[Array, int]:
        if count > _MAX_ELEMENTS or count > self._budget:
            raise self._damaged(f"an array claims {count} elements")
        self._budget -= count
        if kind in _SCALARS:
            end = position + count * _SCALARS[kind][1]
            if end > self.size:
                raise self._damaged("an array runs past the end of the file")
            return Array(kind, count, position, end), end
        if kind != _STRING:
            raise self._damaged(f"an array of metadata type {kind}")
        return self._skip_strings(position, count)

    def _skip_strings(self, start: int, count: int) -> tuple[Array, int]:
        # The one hot loop, so no bounds check of its own: a length that leads outside makes the next read fail, and no
        # length leads backwards.
        length_at = struct.Struct("<Q").unpack_from
        data, position = self.data, start
        try:
            for _ in range(count):
                position += length_at(data, position)[0] + 8
        except (struct.error, OverflowError, ValueError) as error:
            raise self._damaged("a string runs past the end of the file") from error
        if position > self.size:
            raise self._damaged("a string runs past the end of the file")
        return Array(_STRING, count, start, position), position

    def _string(self, position: int, limit: int) -> tuple[str, int]:
        (length,) = self._unpack("<Q", position)
        end = position + 8 + length
        if length > limit or end > self.size:
            raise self._damaged(f"a string claims {length} bytes")
        try:
            return str(self.data[position + 8 : end], "utf-8"), end
        except UnicodeDecodeError as error:
            raise self._damaged("a string is not UTF-8") from error

    def _unpack(self, form: str, position: int) -> tuple[int, ...]:
        try:
            return struct.unpack_from(form, self.data, position)
        except struct.error as error:
            raise self._damaged("it ends in the middle of its header") from error

    def _damaged(self, why: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is not a usable GGUF file", why=why, do="Fetch the file again")

    def _missing(self, key: str, wanted: str, value: object) -> ModelFileError:
        why = f"metadata key {key} is missing" if value is None else f"metadata key {key} is not {wanted}"
        return ModelFileError(f"{self.path} is not a usable model", why=why)
