"""Kernels of the family rows."""

from __future__ import annotations

from . import Kernel

KERNELS: list[Kernel] = []
