"""What every figure is told with: progress, machine, versions, load, and the spread behind a median."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import outlast
from outlast.core import machine


def say(text: str) -> None:
    """One line of progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def conditions(*packages: str) -> dict[str, Any]:
    """Machine, versions (of this package, Python, the kernel and installed `packages`) and load, for a report."""
    cpu, cores, memory = machine.processor(), machine.cores(), machine.memory()
    versions = {
        "outlast": outlast.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "libc": "-".join(platform.libc_ver()),
    }
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "machine": f"{cpu.detail}; cores {cores.detail}; {memory.detail}",
        "versions": versions,
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def median(values: Sequence[float]) -> float | None:
    """The median, rounded to five digits; None of nothing."""
    return significant(statistics.median(values)) if values else None


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Number, minimum, quartiles and maximum."""
    if not values:
        return {"n": 0}
    ordered = sorted(values)

    def at(share: float) -> float:
        return significant(ordered[min(len(ordered) - 1, int(share * len(ordered)))])

    return {
        "n": len(ordered), "min": at(0), "p25": at(0.25), "median": significant(statistics.median(ordered)),
        "p75": at(0.75), "max": significant(ordered[-1]),
    }  # fmt: skip


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median, from order statistics: it assumes nothing of the distribution.

    Ranks n/2 -+ 0.98 sqrt(n), the normal approximation of the binomial. Needs at least one value.
    """
    ordered = sorted(values)
    half, reach = len(ordered) / 2, 0.98 * math.sqrt(len(ordered))
    low, high = max(0, math.floor(half - reach)), min(len(ordered) - 1, math.ceil(half + reach))
    return ordered[low], ordered[high]


def significant(value: float, digits: int = 5) -> float:
    """`value` rounded to significant digits: a report does not pretend to more."""
    return float(f"{value:.{digits}g}")
