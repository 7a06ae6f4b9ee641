"""Kernels of the family attention."""

from __future__ import annotations

from . import DTYPES, FLOATS, Kernel

KERNELS: list[Kernel] = [
    Kernel(f"attention_{dtype}", "attention.h", "ol_attention_args", f"ol_attention<{DTYPES[dtype][1]}>")
    for dtype in FLOATS
]
