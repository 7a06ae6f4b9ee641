"""The shared C layouts as numpy dtypes.

The headers under `native/include/outlast` are the only definition. They are plain C of a narrow kind (fixed-width
members, arrays, nested structs, natural alignment), which this module reads; tests compare every member's offset and
size, and every constant, with what the C compiler says. Anything it does not understand is an error, not a guess.
A layout is a `typedef struct`; other structs, as in the operators' dialect, are C++ and are passed over.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outlast.core.errors import OutlastError, UsageError
from outlast.core.jit import include_dir

if TYPE_CHECKING:
    import numpy as np

#: C type -> (numpy format, bytes); the alignment is the size, as on every 64-bit Linux ABI
_SCALARS = {
    "char": ("S1", 1),
    "int8_t": ("<i1", 1),
    "uint8_t": ("<u1", 1),
    "int16_t": ("<i2", 2),
    "uint16_t": ("<u2", 2),
    "int32_t": ("<i4", 4),
    "uint32_t": ("<u4", 4),
    "int64_t": ("<i8", 8),
    "uint64_t": ("<u8", 8),
    "float": ("<f4", 4),
    "double": ("<f8", 8),
}
_STRUCT = re.compile(r"typedef\s+struct\s+(\w+)\s*\{([^{}]*)\}\s*(\w+)\s*;")
_MEMBER = re.compile(r"(\w+)\s+(\w+)((?:\s*\[\s*\w+\s*\])*)")
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(OL_\w+)[ \t]+\(?(-?(?:0[xX][0-9a-fA-F]+|\d+))[uUlL]*\)?[ \t]*$", re.M)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a struct, as the C compiler lays it out."""

    name: str
    type: str
    shape: tuple[int, ...]  #: array dimensions, () for none
    offset: int  #: bytes
    size: int  #: bytes, of the whole array


@dataclass(frozen=True, slots=True)
class Struct:
    """One struct of the headers."""

    name: str
    header: str  #: file name, as in #include "outlast/NAME"
    members: tuple[Member, ...]
    size: int  #: bytes, tail padding included
    alignment: int  #: bytes


def structs() -> dict[str, Struct]:
    """All structs of the shared headers by name."""
    return _read()[0]


def constants() -> dict[str, int]:
    """All integer constants (`#define OL_...`) of the shared headers by name."""
    return _read()[1]


def abi_version() -> int:
    """`OL_ABI_VERSION`: what operators and the slot table must agree on."""
    return constants()["OL_ABI_VERSION"]


def sizeof(name: str) -> int:
    """Bytes of a struct."""
    return _struct(name).size


@functools.cache
def dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a struct, such as `dtype("ol_task")`; raises `UsageError` for an unknown name.

    Character arrays become bytes fields (numpy drops their trailing NULs when read), addresses are unsigned integers.
    """
    import numpy as np

    struct = _struct(name)
    formats: list[Any] = []
    for member in struct.members:
        if member.type == "char" and member.shape:
            formats.append((f"S{member.shape[-1]}", member.shape[:-1]))
        else:
            base = dtype(member.type) if member.type not in _SCALARS else np.dtype(_SCALARS[member.type][0])
            formats.append((base, member.shape) if member.shape else base)
    return np.dtype(
        {
            "names": [member.name for member in struct.members],
            "formats": formats,
            "offsets": [member.offset for member in struct.members],
            "itemsize": struct.size,
        }
    )


def _struct(name: str) -> Struct:
    found = structs().get(name)
    if found is None:
        raise UsageError(f"no shared layout {name!r}", why=f"the headers define {', '.join(structs())}")
    return found


@functools.cache
def _read() -> tuple[dict[str, Struct], dict[str, int]]:
    """Read all headers: constants first, since array lengths may use them, whatever header they stand in."""
    headers = sorted((include_dir() / "outlast").glob("*.h"))
    texts = {path.name: _COMMENT.sub(" ", path.read_text()) for path in headers}
    numbers = {key: int(value, 0) for text in texts.values() for key, value in _DEFINE.findall(text)}
    for header, text in texts.items():
        if len(_STRUCT.findall(text)) != len(re.findall(r"\btypedef\s+struct\b", text)):
            raise OutlastError(f"cannot read outlast/{header}", why="it declares a struct in a form that is not known")
    pending = [(header, *found) for header, text in texts.items() for found in _STRUCT.findall(text)]
    known: dict[str, Struct] = {}
    while pending:
        later = []
        for header, tag, body, name in pending:
            members = [line.strip() for line in body.split(";") if line.strip()]
            if any(member.split()[0] in {entry[1] for entry in pending} for member in members):
                later.append((header, tag, body, name))
            elif tag != name:
                raise OutlastError(f"cannot read struct {name} of outlast/{header}", why=f"its tag is {tag}")
            else:
                known[name] = _lay_out(name, header, members, known, numbers)
        if len(later) == len(pending):
            raise OutlastError("cannot read the shared headers", why=f"structs {later} contain each other")
        pending = later
    return known, numbers


def _lay_out(name: str, header: str, lines: list[str], known: dict[str, Struct], numbers: dict[str, int]) -> Struct:
    """Place members one after the other, each at a multiple of its alignment (System V ABI)."""
    members: list[Member] = []
    offset, widest = 0, 1
    for line in lines:
        found = _MEMBER.fullmatch(line)
        kind = found.group(1) if found else ""
        if found is None or (kind not in _SCALARS and kind not in known):
            raise OutlastError(f"cannot read struct {name} of outlast/{header}", why=f"member {line!r}")
        lengths = re.findall(r"\w+", found.group(3))
        shape = tuple(numbers[length] if length in numbers else int(length, 0) for length in lengths)
        if kind in _SCALARS:
            size = alignment = _SCALARS[kind][1]
        else:
            size, alignment = known[kind].size, known[kind].alignment
        for length in shape:
            size *= length
        offset = -(-offset // alignment) * alignment
        members.append(Member(found.group(2), kind, shape, offset, size))
        offset += size
        widest = max(widest, alignment)
    return Struct(name, header, tuple(members), -(-offset // widest) * widest, widest)
