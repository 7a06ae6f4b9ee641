"""SIGKILL at each step of an append and of a recovery: tokens, logprobs and KV bytes equal an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import engine_driver
import pytest
import tiny_model

from outlast.core import _native as core
from outlast.core.log import LogOwner
from outlast.engines.native.sequences import encode_request
from outlast.engines.protocol import EngineRequest, SamplingParams

pytestmark = pytest.mark.faults

STOP_AT = 30
#: Points that a short run passes; those of segments need the small segments that `roomy` has not.
POINTS = core.kill_points()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", kind="Q8_0")


def requests() -> list[EngineRequest]:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=11, top_logprobs=2),
        SamplingParams(temperature=0.9, seed=5, top_p=0.8, presence_penalty=0.7, frequency_penalty=0.2),
    ]
    return [EngineRequest(key + 1, tuple(range(3 + key, 40 + 30 * key)), 200, params=p) for key, p in enumerate(params)]


class Run:
    """One or more processes that continue one another over one log, and what they reported."""

    def __init__(self, model: Path, owner: LogOwner | None) -> None:
        self.model = model
        self.owner = owner
        self.seen: dict[int, list[tuple[Any, ...]]] = {}
        self.repeated = 0
        self.last: dict[str, Any] = {}
        self.deaths = 0

    def go(self, **orders: Any) -> bool:
        """Run a process to its end; True if it finished, False if it died by SIGKILL."""
        wishes = requests()
        order = engine_driver.Orders(
            model=str(self.model),
            log=dict(self.owner.spec()) if self.owner else None,
            writer_epoch=self.owner.fence() if self.owner else 1,
            requests=[encode_request(r).decode() for r in wishes],
            delivered={key: [row[0] for row in rows] for key, rows in self.seen.items()} if self.deaths else {},
            stop_at=STOP_AT,
            **orders,
        )
        done = subprocess.run(
            [sys.executable, str(Path(engine_driver.__file__))],
            input=json.dumps(asdict(order)),
            capture_output=True,
            text=True,
            pass_fds=self.owner.fds() if self.owner else (),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=120,
        )
        for line in done.stdout.splitlines():
            if not line.endswith("}"):
                continue  # it died in the middle of a line
            row = json.loads(line)
            for key, index, token, logprob, top in row.get("tokens", ()):
                self.take(key, index, (token, logprob, tuple(map(tuple, top))))
            if "kv" in row:
                self.last = row
        if done.returncode == -signal.SIGKILL:
            self.deaths += 1
            for r in wishes:
                self.seen.setdefault(r.key, [])
            return False
        assert done.returncode == 0, done.stderr
        return True

    def take(self, key: int, index: int, value: tuple[Any, ...]) -> None:
        rows = self.seen.setdefault(key, [])
        assert index <= len(rows), f"request {key}: token {index} came, {len(rows)} were known"
        if index < len(rows):
            assert rows[index] == value, "a repeated token differs"
            self.repeated += 1
        else:
            rows.append(value)


@pytest.fixture(scope="module")
def undisturbed(tiny: Path) -> Mapping[str, Any]:
    run = Run(tiny, None)
    assert run.go()
    return {"seen": run.seen, "kv": run.last["kv"], "computed": run.last["computed"]}


def compare(run: Run, undisturbed: Mapping[str, Any]) -> None:
    for key, rows in undisturbed["seen"].items():
        got = run.seen[key]
        shared = min(len(got), len(rows))
        assert shared >= STOP_AT
        assert got[:shared] == rows[:shared]
    # All requests step together, so the same number of steps gives the same number of rows where no request lagged.
    for key, count in undisturbed["computed"].items():
        if run.last["computed"][key] == count:
            assert run.last["kv"][key] == undisturbed["kv"][key], f"KV bytes of request {key} differ"


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
