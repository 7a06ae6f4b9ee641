"""A persistent executor: tasks in a ring, operators in a table, new operators injected while it runs.

The layout and the protocol of ring and table stand in native/include/outlast/task.h. A thread that waits runs tasks
itself (caller assist), so a call costs no hand-over between threads when nobody else is there to take it.

`capture` turns a function of PyTorch tensors into a `Replay`; `dispatch` runs the operators of any PyTorch code;
`torch.compile(backend="outlast")` needs no import at all. PyTorch is imported when one of them is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outlast.executor.runtime import (
    ABI_VERSION,
    DEFAULT_CAPACITY,
    MAX_PARTS,
    Executor,
    Operator,
    failure,
)
from outlast.executor.stats import ExecutorStats, OperatorStats, PlanStats

if TYPE_CHECKING:
    from outlast.executor.interception import dispatch as dispatch
    from outlast.executor.replay import Replay as Replay
    from outlast.executor.replay import capture as capture
    from outlast.executor.shared import default_executor as default_executor
    from outlast.executor.trace import DataDependent as DataDependent

#: public name -> module that defines it; imported when first used
_HOMES = {
    "DataDependent": "outlast.executor.trace",
    "Replay": "outlast.executor.replay",
    "capture": "outlast.executor.replay",
    "default_executor": "outlast.executor.shared",
    "dispatch": "outlast.executor.interception",
}

__all__ = [
    "ABI_VERSION", "DEFAULT_CAPACITY", "MAX_PARTS", "DataDependent", "Executor", "ExecutorStats",
    "Operator", "OperatorStats", "PlanStats", "Replay", "capture", "default_executor", "dispatch", "failure",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
