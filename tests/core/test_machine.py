"""Limits of memory as the kernel's files name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.core.machine import memory_limit

GIB = 1 << 30


def files(root: Path, **texts: str) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: {8 * GIB >> 10} kB\n", **texts}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("texts", "size", "source"),
    [
        ({}, 8 * GIB, "this machine"),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 8 * GIB, "this machine"),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": f"{GIB}\n"}, GIB, "the cgroup's memory.max"),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": f"{4 * GIB}\n",
          "sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n"}, 2 * GIB, "the cgroup's memory.max"),
        ({"proc/self/cgroup": "0::/outside\n", "sys/fs/cgroup/memory.max": f"{3 * GIB}\n"}, 3 * GIB,
         "the cgroup's memory.max"),
        ({"proc/self/cgroup": "4:memory:/box\n0::/\n", "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{GIB}\n",
          "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, GIB,
         "the cgroup's memory.limit_in_bytes"),
        ({"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
         8 * GIB, "this machine"),
    ],
)  # fmt: skip
def test_the_smallest_limit_counts(tmp_path: Path, texts: dict[str, str], size: int, source: str) -> None:
    found = memory_limit(files(tmp_path, **texts))
    assert (found.size, found.source) == (size, source)
