"""SIGKILL of the transformers engine at each step of an append and of a recovery: tokens and bytes stay the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from engine_runs import Run, compare
from fork_server import ForkServer
from tiny_folder import write_tiny_folder

from outlast.core import _native as core
from outlast.core.log import LogOwner

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.faults, pytest.mark.torch]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def undisturbed(tiny: Path, forks: ForkServer) -> Mapping[str, Any]:
    run = Run(tiny, None, forks)
    assert run.go()
    return {"seen": run.seen, "kv": run.last["kv"], "computed": run.last["computed"]}


@pytest.mark.parametrize("point", core.kill_points())
def test_kill_at_each_point(tiny: Path, forks: ForkServer, undisturbed: Mapping[str, Any], point: str) -> None:
    # Segments so small that a run fills several: points of segments are passed too.
    owner = LogOwner.in_memory(20 << 16, segment_bytes=1 << 16)
    rng = random.Random(point)
    run = Run(tiny, owner, forks)
    if point.startswith(("recover", "open")):  # something must be there to recover
        assert not run.go(kill_point="commit.header", countdown=40)
    rare = point.startswith(("recover", "open", "segment", "release"))
    countdown = 1 if rare else rng.randrange(1, 40)
    died = not run.go(kill_point=point, countdown=countdown, churn=20 if point == "release" else 0)
    assert died, f"kill point {point} was not reached"
    while not run.go():
        pass
    compare(run, undisturbed)
    owner.close()


def test_kills_at_random_commits(tiny: Path, forks: ForkServer, undisturbed: Mapping[str, Any], tmp_path: Path) -> None:
    """Several deaths one after the other, with a log in files."""
    rng = random.Random(1)
    run = Run(tiny, LogOwner.in_directory(tmp_path / "log", 1 << 22, segment_bytes=1 << 20, durable=False), forks)
    points = ["commit", "commit.payload", "commit.header", "append.payload", "begin.written"]
    while run.deaths < 5:
        assert not run.go(kill_point=rng.choice(points), countdown=rng.randrange(3, 12))
    assert run.go()
    assert run.last["report"]["recomputed"] == 0
    compare(run, undisturbed)
