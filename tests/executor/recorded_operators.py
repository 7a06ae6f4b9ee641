"""What the recording driver runs in place of the operators of test_backends.py: functions of the same meaning.

Each gets the eight words at arg[0], the task, and the defines that its module was compiled with.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from outlast.executor.backends.ring import structure


def count(words: Any, task: Any, defines: dict[str, Any]) -> tuple[int, str]:
    words[0] += 1
    return (-words[1], f"number {words[2]} of many") if words[1] else (0, "")


def hold(words: Any, task: Any, defines: dict[str, Any]) -> tuple[int, str]:
    words[0] = 1
    while words[1] == 0:
        time.sleep(20e-6)
    return 0, ""


def scale(words: Any, task: Any, defines: dict[str, Any]) -> tuple[int, str]:
    words[0] += int(defines.get("SCALE", 2)) * words[1]
    return 0, ""


def shares(words: Any, task: Any, defines: dict[str, Any]) -> tuple[int, str]:
    words[3 + task.part] += task.parts
    return 0, ""


def spread(words: Any, task: Any, defines: dict[str, Any]) -> tuple[int, str]:
    out = (ctypes.c_uint64 * words[1]).from_address(words[2])
    for index in range(task.part, words[1], task.parts):
        out[index] += index + 1
    return 0, ""


def sequence(words: Any, task: Any, defines: dict[str, Any]) -> tuple[int, str]:
    plan: Any = structure("ol_sequence").from_address(task.arg[0])
    plan.runs += 1
    return 0, ""


PROGRAMS: dict[str, Callable[[Any, Any, dict[str, Any]], tuple[int, str]]] = {
    one.__name__: one for one in (count, hold, scale, shares, spread, sequence)
}
