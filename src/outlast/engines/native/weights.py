"""Repacked weights: the model in the layout the kernels read, in a buffer that other processes map.

The buffer (usually a memfd that outlives its writer) holds everything a decoder needs, so that a second process maps it
and never opens the model file:

    offset  size  content
         0     8  magic "OLWEIGHT"
         8     8  ready word: 0 while being written, `_READY` afterwards; stored last, with release ordering
        16     4  layout version
        20     4  bytes of the description
        24     8  bytes of the whole buffer
        32    32  SHA-256 of the model file
        64     4  CRC-32 of the description
        72     -  description, JSON: the configuration and the tensors' names, types, shapes and offsets
     then         tensors, each at a multiple of 64 bytes; matrices as in native/engine/model.h, vectors as floats
"""

from __future__ import annotations

import json
import mmap
import struct
import threading
import zlib
from dataclasses import asdict, dataclass
from typing import TypeAlias

from outlast.core.errors import CorruptState, UsageError
from outlast.engines.native import _native
from outlast.engines.native.architecture import (
    ModelConfig,
    check_rope_freqs,
    may_lack,
    model_config,
    pairs_from_halves,
    tensor_shapes,
    turning_heads,
)
from outlast.engines.native.gguf import BLOCK, F32, Gguf, Tensor, UnsupportedModel

Buffer: TypeAlias = bytearray | memoryview | mmap.mmap

LAYOUT_VERSION = 2  #: raised whenever the bytes of a repacked matrix change meaning

_MAGIC = b"OLWEIGHT"
_READY = 0x5944_4145_5257_4C4F
_HEADER = struct.Struct("<8sQIIQ32sI4x")
_READY_OFFSET = 8
_ALIGN = 64
_PAGE = 4096
_MAX_DESCRIPTION = 1 << 22


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor in the buffer. `rows` 0 = a vector of `columns` floats."""

    name: str
    type: int
    rows: int
    columns: int
    offset: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each tensor of a model goes. `size` is what the buffer must hold."""

    config: ModelConfig
    tensors: tuple[Placed, ...]
    description: bytes
    size: int


def plan(gguf: Gguf) -> Plan:
    """Checks the model's tensors and lays them out. Raises `UnsupportedModel`, naming the tensor and its type."""
    config = model_config(gguf)
    expected = tensor_shapes(config)
    for name, tensor in gguf.tensors.items():
        if name not in expected:
            raise UnsupportedModel(
                f"{gguf.path} has a tensor {name}",
                why=f"the architecture {gguf.text('general.architecture')} as this engine runs it has none",
            )
        _check_shape(gguf, tensor, *expected[name])
    check_rope_freqs(gguf)
    missing = [name for name in expected if name not in gguf.tensors and not may_lack(gguf, name)]
    if missing:
        raise UnsupportedModel(f"{gguf.path} lacks the tensor {missing[0]}", why=f"{len(missing)} tensors are missing")

    def place(start: int) -> tuple[tuple[Placed, ...], int]:
        placed, offset = [], start
        for name, tensor in gguf.tensors.items():
            rows, columns = expected[name]
            placed.append(Placed(name, tensor.type, rows, columns, offset))
            size = columns * 4 if rows == 0 else _native.matrix_bytes(tensor.type, rows, columns)
            offset = (offset + size + _ALIGN - 1) // _ALIGN * _ALIGN
        return tuple(placed), offset

    # The description holds offsets and its own length moves them: leave room for the longest form.
    room = len(_describe(config, place(1 << 50)[0])) + _HEADER.size
    tensors, size = place((room + _PAGE - 1) // _PAGE * _PAGE)
    return Plan(config, tensors, _describe(config, tensors), size)


def _check_shape(gguf: Gguf, tensor: Tensor, rows: int, columns: int) -> None:
    _ = tensor.nbytes  # raises for an unsupported type
    shape = (columns,) if rows == 0 else (columns, rows)
    if tensor.shape != shape:
        raise UnsupportedModel(f"{gguf.path}: tensor {tensor.name} has shape {tensor.shape}", why=f"expected {shape}")
    if rows == 0 and tensor.type != F32:
        raise UnsupportedModel(
            f"{gguf.path}: vector {tensor.name} is {tensor.type_name}", why="only F32 vectors are read"
        )
    if rows and columns % BLOCK:
        raise UnsupportedModel(
            f"{gguf.path}: tensor {tensor.name} has {columns} columns", why=f"not a multiple of {BLOCK}"
        )


def _describe(config: ModelConfig, tensors: tuple[Placed, ...]) -> bytes:
    rows = [[t.name, t.type, t.rows, t.columns, t.offset] for t in tensors]
    return json.dumps({"config": asdict(config), "tensors": rows}, separators=(",", ":")).encode()


def repack(gguf: Gguf, plan: Plan, buffer: Buffer) -> Weights:
    """Writes the model into `buffer` (writable, at least `plan.size` bytes, aligned to 64) and marks it ready.

    Takes about 0.15 s for 135 million parameters, the file's digest included. Raises `UsageError` for a buffer that is
    too small. If this is interrupted, `Weights.open` refuses the buffer.
    """
    view = memoryview(buffer).cast("B")
    if view.nbytes < plan.size:
        raise UsageError(f"The weights need {plan.size} bytes, the buffer has {view.nbytes}")
    _native.publish_word(view, _READY_OFFSET, 0)
    digests: list[str | BaseException] = []

    def read() -> None:
        try:
            digests.append(gguf.digest())
        except BaseException as error:  # noqa: BLE001  raised below, in the thread that waits for it
            digests.append(error)

    # Beside the repacking, on another core: each takes about half of the time, and neither holds the interpreter.
    reader = threading.Thread(target=read, name="outlast-digest")
    reader.start()
    try:
        _write(gguf, plan, view)
    finally:
        reader.join()
    if isinstance(digests[0], BaseException):
        raise digests[0]
    digest = bytes.fromhex(digests[0])
    view[_HEADER.size : _HEADER.size + len(plan.description)] = plan.description
    _HEADER.pack_into(
        view, 0, _MAGIC, 0, LAYOUT_VERSION, len(plan.description), plan.size, digest, zlib.crc32(plan.description)
    )
    _native.publish_word(view, _READY_OFFSET, _READY)
    return Weights.open(view)


def _write(gguf: Gguf, plan: Plan, view: memoryview) -> None:
    """Every tensor to its place."""
    for placed in plan.tensors:
        tensor = gguf.tensors[placed.name]
        data: memoryview = gguf.data[tensor.offset : tensor.offset + tensor.nbytes]
        heads = turning_heads(placed.name, plan.config)
        if heads:
            data = memoryview(pairs_from_halves(data, heads, plan.config.head_dim))
        if placed.rows == 0:
            view[placed.offset : placed.offset + tensor.nbytes] = data
        else:
            _native.repack(data, 0, placed.type, placed.rows, placed.columns, view, placed.offset)


@dataclass(frozen=True, slots=True)
class Weights:
    """Repacked weights in a mapped buffer, which this object keeps alive."""

    config: ModelConfig
    tensors: tuple[Placed, ...]
    digest: str  #: SHA-256 of the model file they were made from, hex
    buffer: memoryview
    size: int

    @property
    def address(self) -> int:
        """Of the buffer's first byte in this process."""
        return _native.address(self.buffer)

    @classmethod
    def open(cls, buffer: Buffer) -> Weights:
        """Uses a buffer that `repack` filled, maybe in another process.

        Raises `CorruptState` if it is not ready, of another layout, shorter than it says or has a damaged description.
        """
        view = memoryview(buffer).cast("B")
        if view.nbytes < _PAGE or bytes(view[:8]) != _MAGIC:
            raise CorruptState("The weights buffer has no header", why="it was never written", do="Repack the model")
        if _native.read_word(view, _READY_OFFSET) != _READY:
            raise CorruptState(
                "The weights buffer is not ready", why="its writer has not finished", do="Repack the model"
            )
        _, _, version, length, size, digest, crc = _HEADER.unpack_from(view, 0)
        if version != LAYOUT_VERSION:
            raise CorruptState(
                f"The weights buffer has layout {version}", why=f"this build reads layout {LAYOUT_VERSION}"
            )
        if size > view.nbytes or length > min(_MAX_DESCRIPTION, size - _HEADER.size):
            raise CorruptState("The weights buffer is shorter than its header says", do="Repack the model")
        description = bytes(view[_HEADER.size : _HEADER.size + length])
        if zlib.crc32(description) != crc:
            raise CorruptState("The description in the weights buffer is damaged", do="Repack the model")
        try:
            content = json.loads(description)
            config = ModelConfig(**content["config"])
            tensors = tuple(Placed(*row) for row in content["tensors"])
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptState("The description in the weights buffer cannot be read", why=str(error)) from error
        return cls(config, tensors, digest.hex(), view, size)
