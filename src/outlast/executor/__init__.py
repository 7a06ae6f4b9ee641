"""A persistent executor: tasks in a ring, operators in a table, new operators injected while it runs.

The layout and the protocol of ring and table stand in native/include/outlast/task.h. A thread that waits runs tasks
itself (caller assist), so a call costs no hand-over between threads when nobody else is there to take it.
"""

from __future__ import annotations

from outlast.executor.runtime import (
    ABI_VERSION,
    DEFAULT_CAPACITY,
    MAX_PARTS,
    Executor,
    Operator,
    failure,
)
from outlast.executor.stats import ExecutorStats, OperatorStats

__all__ = [
    "ABI_VERSION",
    "DEFAULT_CAPACITY",
    "MAX_PARTS",
    "Executor",
    "ExecutorStats",
    "Operator",
    "OperatorStats",
    "failure",
]
