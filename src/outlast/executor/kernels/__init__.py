"""The operators that ship with the package, one module per family.

A `Kernel` is one entry of the operator table: a C++ function in the operators' dialect, made from a template in a
header under native/include/outlast/ops. The package is built with all of them compiled (native/executor/generate.py
reads this table); the same source compiles at run time for another target. These modules need the standard library
only, so that the build can read them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache

#: modules of this package that hold a list KERNELS
FAMILIES = ("pointwise", "movement", "reduce", "rows", "matmul", "attention")

#: element type -> (its number in outlast/tensor.h, its name in C++, bytes)
DTYPES: dict[str, tuple[int, str, int]] = {
    "bool": (0, "bool", 1),
    "u8": (1, "uint8_t", 1),
    "i8": (2, "int8_t", 1),
    "i16": (3, "int16_t", 2),
    "i32": (4, "int32_t", 4),
    "i64": (5, "int64_t", 8),
    "f16": (6, "ol_half", 2),
    "bf16": (7, "ol_bfloat", 2),
    "f32": (8, "float", 4),
    "f64": (9, "double", 8),
}
FLOATS = ("f16", "bf16", "f32", "f64")
INTEGERS = ("u8", "i8", "i16", "i32", "i64")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One shipped operator."""

    name: str  #: in the operator table, and of the C function; unique
    header: str  #: below outlast/ops/
    args: str  #: struct that arg[0] points to
    function: str  #: the template instance that does the work, as OL_INSTANCE takes it

    @property
    def source(self) -> str:
        """The lines that define it, after its header is included."""
        return f"OL_INSTANCE({self.name}, {self.args}, {self.function})\n"

    @property
    def unit(self) -> str:
        """A whole source file for the JIT cache or NVRTC."""
        return f'#include "outlast/ops/{self.header}"\n{self.source}OL_UNIT;\n'


@cache
def shipped() -> dict[str, Kernel]:
    """Every shipped kernel by name."""
    found: dict[str, Kernel] = {}
    for family in FAMILIES:
        for kernel in importlib.import_module(f"{__name__}.{family}").KERNELS:
            if kernel.name in found:
                raise ValueError(f"two kernels are called {kernel.name}")
            found[kernel.name] = kernel
    return found
