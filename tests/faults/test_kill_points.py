"""SIGKILL at each step of an append and of a recovery: tokens, logprobs and KV bytes equal an undisturbed run."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from engine_runs import Run, compare

from outlast.core import _native as core
from outlast.core.log import LogOwner

pytestmark = pytest.mark.faults

POINTS = core.kill_points()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", kind="Q8_0")


@pytest.fixture(scope="module")
def undisturbed(tiny: Path) -> Mapping[str, Any]:
    run = Run(tiny, None)
    assert run.go()
    return {"seen": run.seen, "kv": run.last["kv"], "computed": run.last["computed"]}


def test_logging_changes_nothing(tiny: Path, undisturbed: Mapping[str, Any]) -> None:
    run = Run(tiny, LogOwner.in_memory(1 << 22, segment_bytes=1 << 20))
    assert run.go()
    assert run.last["kv"] == undisturbed["kv"]
    assert run.seen == undisturbed["seen"]


@pytest.mark.parametrize("medium", ["memory", "directory"])
@pytest.mark.parametrize("point", POINTS)
def test_kill_at_each_point(
    tiny: Path, undisturbed: Mapping[str, Any], tmp_path: Path, point: str, medium: str
) -> None:
    # Segments so small that a run fills several: points of segments are passed too.
    if medium == "memory":
        owner = LogOwner.in_memory(20 << 16, segment_bytes=1 << 16)
    else:
        owner = LogOwner.in_directory(tmp_path / "log", 20 << 16, segment_bytes=1 << 16, durable=False)
    rng = random.Random(point + medium)
    run = Run(tiny, owner)
    if point.startswith(("recover", "open")):  # something must be there to recover
        assert not run.go(kill_point="commit.header", countdown=12)
    rare = point.startswith(("recover", "open", "segment", "release"))
    countdown = 1 if rare else rng.randrange(1, 6)
    died = not run.go(kill_point=point, countdown=countdown, churn=20 if point == "release" else 0)
    assert died, f"kill point {point} was not reached"
    while not run.go():
        pass
    compare(run, undisturbed)
    owner.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_kills_at_random_commits(tiny: Path, undisturbed: Mapping[str, Any], threads: int) -> None:
    """Several deaths one after the other, with specialised handlers, at any thread count."""
    rng = random.Random(threads)
    run = Run(tiny, LogOwner.in_memory(1 << 22, segment_bytes=1 << 20))
    for _ in range(5):
        finished = run.go(
            kill_point=rng.choice(["commit", "commit.payload", "commit.header", "append.payload", "begin.written"]),
            countdown=rng.randrange(1, 8),
            threads=threads,
            specialise=True,
        )
        if finished:
            break
    assert run.deaths >= 3
    while not run.go(threads=threads):
        pass
    compare(run, undisturbed)


def test_an_operator_that_crashes_is_survived(tiny: Path, undisturbed: Mapping[str, Any], compiler: object) -> None:
    """A handler swapped in while the engine runs brings the process down in the middle of an epoch."""
    run = Run(tiny, LogOwner.in_memory(1 << 22, segment_bytes=1 << 20))
    assert not run.go(crash_at=9)
    assert run.died_of == signal.SIGSEGV
    assert run.go()
    compare(run, undisturbed)
    assert run.last["report"]["restored"] == 3
