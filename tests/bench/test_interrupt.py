"""Ctrl-C in the middle of the demo: it ends at once, and every process that it started with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def parents() -> dict[int, int]:
    """Process -> parent, of processes that are not zombies."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            found[int(entry.name)] = int(parent)
    return found


def descendants(pid: int) -> set[int]:
    of = parents()
    out: set[int] = set()
    while fresh := {child for child, parent in of.items() if parent in {pid, *out}} - out:
        out |= fresh
    return out


@pytest.mark.faults
@pytest.mark.model
def test_interrupted_demo_leaves_no_process_behind(builtin_model: Path) -> None:
    words = ["demo", "--json", "--context", "200", "--model", str(builtin_model)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # A session of its own: the interrupt reaches the demo and its server as it does from a terminal. What a shell
    # starts in its background has the interrupt ignored, and a child inherits that: undo it.
    with subprocess.Popen(
        [sys.executable, "-m", "outlast", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as demo:  # fmt: skip
        assert demo.stderr is not None
        assert "uninterrupted" in demo.stderr.readline()
        started = descendants(demo.pid)
        assert len(started) >= 2  # server and engine
        os.killpg(demo.pid, signal.SIGINT)
        _, said = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "Traceback" not in said
    deadline = time.monotonic() + 5
    while (left := started & parents().keys()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
