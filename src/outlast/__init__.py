"""outlast keeps long-running LLM agents running: inference state that survives a killed engine, and what builds on it.

Importing this package is cheap and needs nothing but the standard library: the public names below are imported from
their modules when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # the only place: the build reads it from here

if TYPE_CHECKING:
    from outlast.core.errors import NotPossibleHere as NotPossibleHere
    from outlast.core.errors import OutlastError as OutlastError
    from outlast.core.jit import JitCache as JitCache
    from outlast.core.memory import Memory as Memory
    from outlast.executor.replay import capture as capture

#: public name -> module that defines it
_HOMES = {
    "JitCache": "outlast.core.jit",
    "Memory": "outlast.core.memory",
    "NotPossibleHere": "outlast.core.errors",
    "OutlastError": "outlast.core.errors",
    "capture": "outlast.executor.replay",
}

__all__ = ["JitCache", "Memory", "NotPossibleHere", "OutlastError", "__version__", "capture"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'outlast' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
