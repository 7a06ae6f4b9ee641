"""Shipped kernels called directly, outside any executor, for each instruction set that this CPU runs."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from outlast.checkpoint.handlers import call
from outlast.core import layout
from outlast.executor import _native

_ALL = ("generic", "avx2", "avx512")
#: from the least capable to the one in use
INSTRUCTION_SETS = _ALL[: _ALL.index(_native.isa()) + 1] if _native.isa() in _ALL else (_native.isa(),)


def run(kernel: str, struct: str, members: dict[str, Any], *, isa: str, parts: int = 1) -> None:
    """Run all parts of a kernel, one after the other; `members` are those of its argument struct."""
    args = np.zeros(1, layout.dtype(struct))
    for name, value in members.items():
        args[name] = value
    argument = (ctypes.c_char * args.nbytes).from_buffer(args)
    for part in range(parts):
        call(_native.operators(isa)[kernel], argument, part=part, parts=parts)
