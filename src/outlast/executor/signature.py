"""What an operator takes: typed arguments, the C struct that carries them, and how Python values are put into it.

The struct holds one member per argument, in order, aligned as C does: an `ol_tensor` for a `Tensor`, an address for an
`Array`, the number itself for a `Scalar`.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from outlast.core.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

Mode = Literal["in", "out", "inout"]
Shape = int | tuple[str | int, ...] | None  #: a rank, names or sizes of the dimensions, or None for any

MAX_DIMS = 8  # OL_MAX_DIMS

#: dtype -> (OL_ constant, C type, numpy type string, bytes). numpy has no bfloat16: its arrays are raw 16-bit words.
DTYPES = {
    "bool": ("OL_BOOL", "uint8_t", "|b1", 1),
    "uint8": ("OL_U8", "uint8_t", "|u1", 1),
    "int8": ("OL_I8", "int8_t", "|i1", 1),
    "int16": ("OL_I16", "int16_t", "<i2", 2),
    "int32": ("OL_I32", "int32_t", "<i4", 4),
    "int64": ("OL_I64", "int64_t", "<i8", 8),
    "float16": ("OL_F16", "uint16_t", "<f2", 2),
    "bfloat16": ("OL_BF16", "uint16_t", "<u2", 2),
    "float32": ("OL_F32", "float", "<f4", 4),
    "float64": ("OL_F64", "double", "<f8", 8),
}
#: type of a scalar -> (C type, struct format, bytes)
_SCALARS = {
    "int32": ("int32_t", "<i", 4),
    "uint32": ("uint32_t", "<I", 4),
    "int64": ("int64_t", "<q", 8),
    "uint64": ("uint64_t", "<Q", 8),
    "float32": ("float", "<f", 4),
    "float64": ("double", "<d", 8),
}
_TENSOR = struct.Struct("<QII8q8q")  # ol_tensor


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor argument, passed as an `ol_tensor`: address, dtype, sizes, strides.

    Dimensions of one name have one size in all arguments of a call.
    """

    name: str
    dtype: str
    shape: Shape = None
    mode: Mode = "in"
    contiguous: bool = True  #: False: any strides, which count elements in the operator


@dataclass(frozen=True, slots=True)
class Array:
    """A contiguous array of which only the address is passed, as a typed pointer."""

    name: str
    dtype: str
    shape: Shape = None
    mode: Mode = "in"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number: int32, uint32, int64, uint64, float32 or float64.

    One that is named like a dimension is that dimension's size: another value is refused, since an operator that counts
    to it would leave the arrays.
    """

    name: str
    type: str


Argument = Tensor | Array | Scalar


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a Python object's elements lie."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  #: in elements
    writable: bool


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of an operator, checked to make sense. Raises `UsageError`."""

    arguments: tuple[Argument, ...]

    def __post_init__(self) -> None:
        names = [argument.name for argument in self.arguments]
        for argument in self.arguments:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", argument.name) or names.count(argument.name) > 1:
                raise UsageError(f"argument {argument.name!r}", why="names are C identifiers, each used once")
            kind, known = (
                (argument.type, list(_SCALARS)) if isinstance(argument, Scalar) else (argument.dtype, list(DTYPES))
            )
            if kind not in known:
                raise UsageError(f"argument {argument.name!r} of type {kind!r}", why=f"known are {', '.join(known)}")
            if not isinstance(argument, Scalar):
                rank = argument.shape if isinstance(argument.shape, int) else len(argument.shape or ())
                if not 0 <= rank <= MAX_DIMS:
                    raise UsageError(f"argument {argument.name!r} has rank {rank}", why=f"at most {MAX_DIMS} fit")
                if argument.mode not in ("in", "out", "inout"):
                    raise UsageError(
                        f"argument {argument.name!r}", why=f"mode {argument.mode!r} is not in, out or inout"
                    )

    def declaration(self, name: str) -> str:
        """The struct in C."""
        members = []
        for argument in self.arguments:
            if isinstance(argument, Tensor):
                members.append(f"ol_tensor {argument.name};")
            elif isinstance(argument, Array):
                const = "const " if argument.mode == "in" else ""
                members.append(f"{const}{DTYPES[argument.dtype][1]} *{argument.name};")
            else:
                members.append(f"{_SCALARS[argument.type][0]} {argument.name};")
        return f"struct {name} {{ {' '.join(members)} }};"

    def offsets(self) -> tuple[list[int], int]:
        """Bytes from the struct's start to each member, and its size."""
        offsets, end = [], 0
        for argument in self.arguments:
            size = _TENSOR.size if isinstance(argument, Tensor) else 8
            if isinstance(argument, Scalar):
                size = _SCALARS[argument.type][2]
            end = -(-end // min(size, 8)) * min(size, 8)
            offsets.append(end)
            end += size
        return offsets, -(-end // 8) * 8

    def pack(self, values: Sequence[Any]) -> tuple[bytearray, list[Memory | None]]:
        """The struct for these values, and where the elements of each lie (None for a number).

        Raises `UsageError` that names the argument which does not fit. The struct does not keep the values alive.
        """
        if len(values) != len(self.arguments):
            expected = ", ".join(argument.name for argument in self.arguments)
            raise UsageError(f"{len(values)} arguments", why=f"the operator takes {len(self.arguments)}: {expected}")
        offsets, size = self.offsets()
        packed = bytearray(size)
        sizes: dict[str, tuple[int, str]] = {}
        memories: list[Memory | None] = []
        for argument, value, offset in zip(self.arguments, values, offsets, strict=True):
            if isinstance(argument, Scalar):
                memories.append(None)
                _pack_scalar(argument, value, packed, offset)
                continue
            memory = _memory_of(argument, value)
            _check(argument, memory, sizes)
            memories.append(memory)
            if isinstance(argument, Array):
                struct.pack_into("<Q", packed, offset, memory.address)
            else:
                rest = (0,) * (MAX_DIMS - len(memory.shape))
                _TENSOR.pack_into(
                    packed, offset, memory.address, _number(argument.dtype), len(memory.shape),
                    *memory.shape, *rest, *memory.strides, *rest,
                )  # fmt: skip
        for argument, value in zip(self.arguments, values, strict=True):
            if isinstance(argument, Scalar) and argument.name in sizes and value != sizes[argument.name][0]:
                size, source = sizes[argument.name]
                raise UsageError(f"argument {argument.name!r} is {value!r}", why=f"{source} says {size}")
        return packed, memories


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a dense array whose last dimension runs fastest."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def _number(dtype: str) -> int:
    from outlast.core import layout

    return layout.constants()[DTYPES[dtype][0]]


def _pack_scalar(argument: Scalar, value: Any, packed: bytearray, offset: int) -> None:
    try:
        struct.pack_into(_SCALARS[argument.type][1], packed, offset, value)
    except (struct.error, OverflowError, TypeError) as error:
        raise UsageError(f"argument {argument.name!r}: {value!r} is no {argument.type}", why=str(error)) from error


def _memory_of(argument: Tensor | Array, value: Any) -> Memory:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _memory_of_torch(argument, value)
    interface = getattr(value, "__array_interface__", None)
    if interface is None:
        import numpy as np

        try:
            interface = np.asarray(memoryview(value)).__array_interface__
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"argument {argument.name!r} is a {type(value).__name__}",
                why="it is neither an array, a torch tensor nor a buffer",
                do="Give it as one; a number can not be written to, and a list would have to be copied.",
            ) from error
    code = interface["typestr"]
    names = [name for name, (_, _, known, _) in DTYPES.items() if known == code]
    if len(names) != 1:
        raise UsageError(f"argument {argument.name!r} has elements of type {code!r}", why="operators do not know it")
    item = DTYPES[names[0]][3]
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is not None and any(stride % item for stride in strides):
        raise UsageError(f"argument {argument.name!r}", why="its strides are no whole numbers of elements")
    address, read_only = interface["data"]
    steps = contiguous_strides(shape) if strides is None else tuple(stride // item for stride in strides)
    return Memory(address, names[0], shape, steps, not read_only)


def _memory_of_torch(argument: Tensor | Array, value: Any) -> Memory:
    import torch

    trouble = ""
    if value.device.type != "cpu":
        trouble = f"it lies on {value.device}; this executor runs on the CPU"
    elif value.layout is not torch.strided:
        trouble = f"its layout is {value.layout}"
    elif value.requires_grad and torch.is_grad_enabled():
        trouble = "it requires grad, which an operator does not record; call it under torch.no_grad()"
    elif value.is_conj() or value.is_neg():
        trouble = "it is a lazy conjugate or negative; call .resolve_conj().resolve_neg()"
    dtype = str(value.dtype).removeprefix("torch.")
    if not trouble and dtype not in DTYPES:
        trouble = f"operators do not know elements of type {dtype}"
    if trouble:
        raise UsageError(f"argument {argument.name!r} is a tensor that can not be passed", why=trouble)
    return Memory(value.data_ptr(), dtype, tuple(value.shape), tuple(value.stride()), True)


def _check(argument: Tensor | Array, memory: Memory, sizes: dict[str, tuple[int, str]]) -> None:
    """Refuse memory that does not fit; `sizes` are the named dimensions so far, with the argument that set them."""
    what = f"argument {argument.name!r}"
    if memory.dtype != argument.dtype:
        raise UsageError(f"{what} has elements of type {memory.dtype}", why=f"the operator takes {argument.dtype}")
    rank = argument.shape if isinstance(argument.shape, int) else None
    names = argument.shape if isinstance(argument.shape, tuple) else None
    wanted = rank if names is None else len(names)
    if (wanted is not None and len(memory.shape) != wanted) or len(memory.shape) > MAX_DIMS:
        limit = f"rank {wanted}" if wanted is not None else f"at most rank {MAX_DIMS}"
        raise UsageError(f"{what} has rank {len(memory.shape)}", why=f"the operator takes {limit}")
    for dimension, (name, size) in enumerate(zip(names or (), memory.shape, strict=False)):
        expected, source = (name, "the signature") if isinstance(name, int) else sizes.setdefault(
            name, (size, f"{name} of argument {argument.name!r}")
        )  # fmt: skip
        if size != expected:
            raise UsageError(f"{what} has size {size} in dimension {dimension}", why=f"{source} says {expected}")
    dense = contiguous_strides(memory.shape)
    loose = any(s != d and n > 1 for s, d, n in zip(memory.strides, dense, memory.shape, strict=True))
    if loose and math.prod(memory.shape) > 1 and (isinstance(argument, Array) or argument.contiguous):
        raise UsageError(f"{what} is not contiguous", why=f"its strides are {memory.strides}", do="Pass a copy.")
    if argument.mode != "in":
        if not memory.writable:
            raise UsageError(f"{what} is read-only", why=f"the operator writes it (mode {argument.mode!r})")
        if any(s == 0 and n > 1 for s, n in zip(memory.strides, memory.shape, strict=True)):
            raise UsageError(
                f"{what} repeats its elements", why="a stride of 0 can not be written to", do="Pass a copy."
            )
    if memory.address % DTYPES[argument.dtype][3] != 0:
        raise UsageError(f"{what} is not aligned", why=f"its address is no multiple of {DTYPES[argument.dtype][3]}")


def span(memory: Memory) -> tuple[int, int]:
    """Bytes before `address` and from it on that the elements cover."""
    item = DTYPES[memory.dtype][3]
    if math.prod(memory.shape) == 0:
        return 0, 0
    low = sum((n - 1) * s for n, s in zip(memory.shape, memory.strides, strict=True) if s < 0)
    high = sum((n - 1) * s for n, s in zip(memory.shape, memory.strides, strict=True) if s > 0)
    return -low * item, (high + 1) * item


def view(memory: Memory, buffer: Any, start: int) -> np.ndarray[Any, Any]:
    """The elements of `memory` as they lie in a copy: `buffer`, with element [0, 0, ...] at byte `start`."""
    import numpy as np

    item = DTYPES[memory.dtype][3]
    return np.ndarray(
        memory.shape, DTYPES[memory.dtype][2], buffer, start, tuple(stride * item for stride in memory.strides)
    )
