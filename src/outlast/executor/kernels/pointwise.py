"""Kernels of the family pointwise."""

from __future__ import annotations

from . import Kernel

KERNELS: list[Kernel] = []
