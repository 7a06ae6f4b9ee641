"""Kernels of the family reduce."""

from __future__ import annotations

from . import Kernel

KERNELS: list[Kernel] = []
