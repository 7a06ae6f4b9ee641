"""Where an executor can run: the CPU's threads, or a CUDA device.

The backends have one interface: `outlast.executor.runtime.Executor` and `outlast.executor.backends.cuda.CudaExecutor`.
None is chosen silently: the caller names one, and `available` says what works on this machine.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from outlast.core.errors import NotPossibleHere, OutlastError

__all__ = ["Availability", "available"]


@dataclass(frozen=True, slots=True)
class Availability:
    """One backend on this machine."""

    backend: str
    works: bool
    detail: str  #: what was found, or why it does not work
    advice: str = ""  #: what to do about it
    compiles: bool = False  #: operators can be built for it here, device or not


def available() -> list[Availability]:
    """Every backend, tried just now. Starts the CUDA driver if there is one, but makes no context."""
    return [_cpu(), _cuda()]


def _cpu() -> Availability:
    from outlast.core.compiler import Compiler

    try:
        native = importlib.import_module("outlast.executor._native")
    except ImportError as error:
        return Availability("cpu", False, f"outlast.executor._native: {error}", "Build it: pip install -e .")
    detail = f"shipped operators for {native.isa()}"
    try:
        return Availability("cpu", True, f"{detail}; {Compiler.find().version}", compiles=True)
    except NotPossibleHere as error:
        return Availability("cpu", True, f"{detail}; others can not be compiled: {error.why}", error.do)


def _cuda() -> Availability:
    from outlast.executor.backends import driver, nvrtc

    compiles, tools = False, ""
    try:
        tools = f"; {nvrtc.toolkit().version}"
        compiles = True
        return Availability("cuda", True, driver.probe() + tools, compiles=True)
    except OutlastError as error:
        detail = f"{error.what}: {error.why}" if error.why else error.what
        return Availability("cuda", False, detail + tools, error.do, compiles)
