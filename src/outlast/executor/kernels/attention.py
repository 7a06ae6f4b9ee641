"""Kernels of the family attention."""

from __future__ import annotations

from . import Kernel

KERNELS: list[Kernel] = []
