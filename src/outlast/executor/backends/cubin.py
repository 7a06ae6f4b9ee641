"""Reads cubins: functions with what they need, entry variables and what fills them, shared and constant memory.

A cubin is 64-bit little-endian ELF for machine 190. Sections with resource facts (`.nv.info`, `.nv.info.FUNCTION`)
are lists of records: format byte, attribute byte, then 16 bits of value or of length. Only what the gates need is read;
sizes are checked before they are trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from outlast.core.errors import CorruptState

_MACHINE_CUDA = 190
_RELOCATABLE, _EXECUTABLE = 1, 2  # ELF header, e_type
_SYMTAB, _RELA, _NOBITS, _REL = 2, 4, 8, 9  # section header, sh_type
_FUNCTION = 2  # symbol, type in the low half of st_info
_KIND_KERNEL, _KIND_SHARED, _KIND_CONSTANT = 0x10, 0x40, 0x80  # symbol, bits of st_other
_REGCOUNT, _FRAME_SIZE, _NUM_BARRIERS = 0x2F, 0x11, 0x4C  # attributes of .nv.info
_FORMAT_WORDS, _FORMAT_BYTES = (2, 3), 4  # value in the record itself; record followed by `length` bytes
_RELOCATION_64 = 2  # R_CUDA_64: the whole address, filled in by the loader
_SECTIONS_MAX = 1 << 16

#: low 12 bits of an instruction
OPCODE_CALL_ABSOLUTE = 0x343
OPCODE_CALL_RELATIVE = 0x344
_INSTRUCTION_BYTES = 16


@dataclass(slots=True)
class Function:
    """A function or kernel and what it needs."""

    name: str
    kernel: bool
    code: bytes
    registers: int = 0  #: per thread; 0 = the cubin does not say
    frame_bytes: int = 0  #: of stack per thread, without what it calls
    barriers: int = 0  #: named barriers 0 ... n - 1 are used

    def opcodes(self) -> set[int]:
        """The low 12 bits of each instruction."""
        words = struct.unpack(f"<{len(self.code) // 2}H", self.code[: len(self.code) // 2 * 2])
        return {word & 0xFFF for word in words[:: _INSTRUCTION_BYTES // 2]}


@dataclass(slots=True)
class Cubin:
    """What one cubin holds."""

    architecture: int  #: 90 for sm_90; 0 = not known
    executable: bool  #: linked, and not an object that still is to be
    functions: dict[str, Function] = field(default_factory=dict)
    #: variable -> function whose address the loader will put there, None if it is a plain number
    pointers: dict[str, str | None] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)  #: variables in shared memory
    constants: list[str] = field(default_factory=list)  #: sections of constant memory, kernels' parameters left out


@dataclass(slots=True)
class _Section:
    name: str
    kind: int
    link: int
    info: int
    data: bytes


def read(image: bytes) -> Cubin:
    """Read a cubin; raises `CorruptState` if it is none or is cut short."""
    try:
        return _read(image)
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise CorruptState("a cubin can not be read", why=str(error) or "it is cut short") from error


def _read(image: bytes) -> Cubin:
    if len(image) < 64 or image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it is no 64-bit little-endian ELF file")
    kind, machine = struct.unpack_from("<HH", image, 16)
    if machine != _MACHINE_CUDA or kind not in (_RELOCATABLE, _EXECUTABLE):
        raise ValueError(f"it is ELF of machine {machine} and type {kind}")
    flags = struct.unpack_from("<I", image, 48)[0]
    # ABI 8, which 13.0 writes, has the architecture in the second byte; before it was the first.
    result = Cubin((flags >> 8) & 0xFF if image[8] >= 8 else flags & 0xFF, kind == _EXECUTABLE)
    sections = list(_sections(image))
    symbols = _symbols(sections)
    for name, bound, info, other, index, value, size in symbols:
        if name.startswith(".nv.reservedSmem"):
            continue  # the driver's own
        if info & 0xF == _FUNCTION and 0 < index < len(sections):
            code = sections[index].data[value : value + size]
            result.functions[name] = Function(name, bool(other & _KIND_KERNEL), code)
        elif other & _KIND_SHARED:
            result.shared.append(name)
        elif bound and index != 0 and size == 8 and not other & _KIND_CONSTANT:
            result.pointers[name] = _filled_by(sections, symbols, index, value)
    for section in sections:
        if section.name.startswith(".nv.info"):
            _facts(section, symbols, result)
        elif section.name.startswith((".nv.shared", ".nv_debug.shared")) and section.data and not result.shared:
            result.shared.append(section.name)
        elif section.name.startswith(".nv.constant") and not section.name.startswith(".nv.constant0."):
            result.constants.append(section.name)
    return result


def _sections(image: bytes) -> Iterator[_Section]:
    offset, _, _, _, _, entry, count, names_at = struct.unpack_from("<QIHHHHHH", image, 40)
    if entry != 64 or count > _SECTIONS_MAX or offset + 64 * count > len(image):
        raise ValueError("its section table is cut short")
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, offset + 64 * i) for i in range(count)]
    names = _content(image, headers[names_at])
    for header in headers:
        yield _Section(_text(names, header[0]), header[1], header[6], header[7], _content(image, header))


def _content(image: bytes, header: tuple[int, ...]) -> bytes:
    kind, offset, size = header[1], header[4], header[5]
    if kind == 0:
        return b""
    if kind == _NOBITS:
        return b"\0" if size else b""  # nothing is stored; callers ask only whether there is something
    if offset + size > len(image):
        raise ValueError("a section is cut short")
    return image[offset : offset + size]


def _text(table: bytes, at: int) -> str:
    end = table.index(b"\0", at)
    return table[at:end].decode()


def _symbols(sections: list[_Section]) -> list[tuple[str, bool, int, int, int, int, int]]:
    """(name, global or weak, st_info, st_other, section, value, size) of each symbol, by its number."""
    table = next((section for section in sections if section.kind == _SYMTAB), None)
    if table is None:
        return []
    names = sections[table.link].data
    found = []
    for name, info, other, index, value, size in struct.iter_unpack("<IBBHQQ", table.data):
        found.append((_text(names, name), info >> 4 != 0, info, other, index, value, size))
    return found


def _filled_by(
    sections: list[_Section], symbols: list[tuple[str, bool, int, int, int, int, int]], index: int, value: int
) -> str | None:
    """Name of the function whose address is put at `value` of a section; None if nothing is."""
    for section in sections:
        if section.kind not in (_RELA, _REL) or section.info != index:
            continue
        # Before sm_90 records have no addend of their own: it stands in the variable.
        for record in struct.iter_unpack("<QQq" if section.kind == _RELA else "<QQ", section.data):
            offset, info = record[:2]
            stored = int.from_bytes(sections[index].data[value : value + 8], "little")
            addend = record[2] if section.kind == _RELA else stored
            if offset == value and info & 0xFFFFFFFF == _RELOCATION_64 and addend == 0:
                symbol = symbols[info >> 32]
                return symbol[0] if symbol[2] & 0xF == _FUNCTION else None
    return None


def _facts(section: _Section, symbols: list[tuple[str, bool, int, int, int, int, int]], result: Cubin) -> None:
    at, data = 0, section.data
    own = section.name.removeprefix(".nv.info.")
    while at + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _FORMAT_BYTES:
            if attribute in (_REGCOUNT, _FRAME_SIZE):
                symbol, amount = struct.unpack_from("<II", data, at)
                function = result.functions.get(symbols[symbol][0])
                if function is not None and attribute == _REGCOUNT:
                    function.registers = amount
                elif function is not None:
                    function.frame_bytes = amount
            at += value
        elif form in _FORMAT_WORDS and attribute == _NUM_BARRIERS and own in result.functions:
            result.functions[own].barriers = value & 0xFF
    if at > len(data):
        raise ValueError("a record of .nv.info is cut short")
