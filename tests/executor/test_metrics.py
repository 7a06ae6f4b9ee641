"""Counts of steps, Prometheus names, and what `outlast top` shows of another process."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from outlast import cli
from outlast.executor import Executor, capture, metrics

pytestmark = pytest.mark.torch


def thrice(x: torch.Tensor) -> torch.Tensor:
    return x + x + x + x


def calls(executor: Executor, operator: str) -> int:
    return next((row.calls for row in executor.stats().operators if row.name == operator), 0)


def test_steps_of_plans_count_as_calls_and_stay_counted_when_the_replay_is_gone() -> None:
    x = torch.ones(4)
    with Executor() as executor, torch.no_grad():
        replay = capture(thrice, x, fuse=False, executor=executor)
        for _ in range(5):
            replay(x)
        assert calls(executor, "add_f32") == 15
        other = capture(thrice, x, fuse=False, executor=executor)
        other(x)
        del replay
        gc.collect()
        assert calls(executor, "add_f32") == 18


def test_plans_that_are_dropped_stay_counted() -> None:
    with Executor() as executor, torch.no_grad():
        replay = capture(thrice, torch.ones(1), fuse=False, executor=executor, max_variants=2)
        for n in range(1, 8):
            for _ in range(2):
                replay(torch.ones(n))
        # The first call of each new length is eager's own, while it is traced.
        assert calls(executor, "add_f32") == 3 * (2 + 6)


def test_calls_of_pytorch_inside_a_plan_do_not_count_its_steps_twice() -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.det(x + x) + x.sum()

    x = torch.eye(3)
    with Executor() as executor, torch.no_grad():
        replay = capture(mixed, x, fuse=False, executor=executor)
        for _ in range(4):
            replay(x)
        assert calls(executor, "sum_f32") == 4
        left = metrics.fallbacks(executor)
        assert any("det" in name for name, _ in left)


def test_prometheus_names_and_values() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    x = torch.ones(4)
    with Executor() as executor, torch.no_grad():
        replay = capture(thrice, x, fuse=False, executor=executor)
        for _ in range(2):
            replay(x)
        registry = prometheus.CollectorRegistry()
        registry.register(metrics.ExecutorCollector({"mine": executor}))
        labels = {"executor": "mine", "operator": "add_f32"}
        assert registry.get_sample_value("outlast_executor_operator_calls_total", labels) == 6
        assert registry.get_sample_value("outlast_executor_operator_failures_total", labels) == 0
        for name in ("tasks_total", "refused_total", "queue_depth", "queue_capacity", "workers"):
            assert registry.get_sample_value(f"outlast_executor_{name}", {"executor": "mine"}) is not None


def test_a_published_executor_is_seen_until_it_is_closed(tmp_path: Path) -> None:
    with Executor() as executor:
        publication = metrics.publish(executor, name="mine", where=tmp_path, seconds=0.02)
        (one,) = metrics.published(tmp_path)
        assert (one["pid"], one["name"], one["capacity"]) == (os.getpid(), "mine", executor.native.capacity)
        assert publication.path.stat().st_mode & 0o077 == 0 or tmp_path.stat().st_mode & 0o077 == 0
    deadline = time.monotonic() + 10
    while publication.path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert metrics.published(tmp_path) == []


def test_files_of_processes_that_are_gone_or_of_others_are_not_shown(tmp_path: Path) -> None:
    with Executor() as executor:
        text = json.dumps(metrics.snapshot(executor, "mine") | {"started": 1})  # the pid was used again
    (tmp_path / "7-mine.json").write_text(text)
    (tmp_path / "8-torn.json").write_text(text[:40])
    (tmp_path / "9-list.json").write_text("[]")
    assert metrics.published(tmp_path) == []
    assert not (tmp_path / "7-mine.json").exists()


PROGRAM = """
import sys, torch, outlast
with torch.no_grad():
    replay = outlast.capture(lambda x: torch.linalg.det(x + x), torch.eye(3), fuse=False)
    for _ in range(10): replay(torch.eye(3))
print("ready", flush=True)
sys.stdin.read()
"""


def test_top_shows_another_process_that_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert cli.main(["top", "--once"]) == 0
    assert "OUTLAST_TOP=1" in capsys.readouterr().out
    environment = {**os.environ, "OUTLAST_TOP": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        found: dict[str, Any] = {}
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:  # it publishes once a second
            assert cli.main(["top", "--json", "--pid", str(child.pid)]) == 0
            (found,) = json.loads(capsys.readouterr().out)["executors"]
            if any(row["calls"] == 10 for row in found["operators"] if row["name"] == "add_f32"):
                break
            time.sleep(0.1)
        assert [row["calls"] for row in found["operators"] if row["name"] == "add_f32"] == [10]
        assert any("det" in row["operator"] for row in found["fallbacks"])
        assert cli.main(["top", "--once"]) == 0
        said = capsys.readouterr().out
        assert f"{child.pid} default" in said
        assert "add_f32" in said
        assert "left to PyTorch" in said
        assert cli.main(["top", "--once", "--pid", "1"]) == 0
        assert "no executor" in capsys.readouterr().out
        child.communicate("")
    assert metrics.published() == []
