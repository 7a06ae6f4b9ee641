"""Kernels of the family movement."""

from __future__ import annotations

from . import Kernel

KERNELS: list[Kernel] = []
