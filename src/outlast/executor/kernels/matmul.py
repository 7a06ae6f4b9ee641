"""Kernels of the family matmul."""

from __future__ import annotations

from . import Kernel

KERNELS: list[Kernel] = []
