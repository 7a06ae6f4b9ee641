"""Kernels of the family matmul.

Integers are multiplied as unsigned numbers: the low bits of sums and products are the same, and overflow is defined.
"""

from __future__ import annotations

from . import DTYPES, FLOATS, INTEGERS, Kernel

_UNSIGNED = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t"}

KERNELS: list[Kernel] = [
    Kernel(f"matmul_{form}_{dtype}", "matmul.h", "ol_matmul_args", f"ol_matmul_{form}<{DTYPES[dtype][1]}>")
    for form in ("dot", "outer")
    for dtype in FLOATS
] + [
    Kernel(f"matmul_whole_{dtype}", "matmul.h", "ol_matmul_args", f"ol_matmul_whole<{_UNSIGNED[DTYPES[dtype][2]]}>")
    for dtype in INTEGERS
]
