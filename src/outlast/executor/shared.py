"""The executor that captured functions share unless they are given one."""

from __future__ import annotations

import atexit
import os
import threading

from outlast.executor.runtime import Executor

#: More threads than this do not help operators of a size that one executor is for.
_MOST_WORKERS = 7
_lock = threading.Lock()
_executor: Executor | None = None
_owner = 0


def default_executor() -> Executor:
    """The process's executor: callers run tasks themselves, and one worker per further core takes shares of large ones.

    Made on first use, again in a forked child (threads do not survive a fork). With OUTLAST_TOP=1 in the environment
    `outlast top` shows it.
    """
    global _executor, _owner
    with _lock:
        if _executor is None or _owner != os.getpid():
            workers = min(len(os.sched_getaffinity(0)) - 1, _MOST_WORKERS)
            _executor, _owner = Executor(capacity=1024, workers=workers), os.getpid()
            atexit.register(_close, _executor, _owner)
            if os.environ.get("OUTLAST_TOP") == "1":
                from outlast.executor import metrics

                metrics.publish(_executor)
        return _executor


def _close(executor: Executor, owner: int) -> None:
    if owner == os.getpid():
        executor.close()
