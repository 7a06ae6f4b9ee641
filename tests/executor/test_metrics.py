"""What is counted of an executor reaches Prometheus, `outlast top` and the time line of a replay."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("prometheus_client")

import torch

from outlast import cli
from outlast.core.errors import Refused
from outlast.executor import Executor, capture
from outlast.executor.metrics import ExecutorCollector, publish, published

pytestmark = pytest.mark.torch
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "executor-metrics.md"


def used(executor: Executor, calls: int) -> Any:
    """A replay with a step that is left to PyTorch, called a few times."""
    x = torch.randn(4)
    with torch.no_grad():
        replay = capture(lambda a: torch.nonzero(a + 1), x, executor=executor, fuse=False)
        for _ in range(calls):
            replay(x)
    return replay


def test_prometheus_has_the_documented_names_and_the_counts_of_steps() -> None:
    with Executor() as executor:
        replay = used(executor, 3)
        families = {family.name: family for family in ExecutorCollector({"mine": executor}).collect()}
        documented = PAGE.read_text()
        for name in families:
            assert name in documented, name
        calls = {s.labels["operator"]: s.value for s in families["outlast_executor_operator_calls"].samples}
        assert calls["add_f32"] == 3
        left = [s.labels["operator"] for s in families["outlast_executor_fallbacks"].samples]
        assert left == ["aten::nonzero"]
        assert families["outlast_executor_tasks"].samples[0].value == 3
        assert replay.report().calls == 3


def test_top_shows_what_a_process_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert published(tmp_path) == []
    with Executor() as executor:
        replay = used(executor, 2)
        publication = publish(executor, name="mine", seconds=60)
        assert cli.main(["top", "--json"]) == 0
        (one,) = json.loads(capsys.readouterr().out)["executors"]
        assert one["name"] == "mine"
        assert {row["name"]: row["calls"] for row in one["operators"]}["add_f32"] == 2
        assert cli.main(["top", "--once"]) == 0
        shown = capsys.readouterr().out
        assert "add_f32" in shown
        assert "nonzero" in shown
        assert replay.report().calls == 2
        publication.close()
    assert cli.main(["top", "--once"]) == 0
    assert "no executor is published" in capsys.readouterr().out


def test_what_a_dead_process_published_is_removed(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from outlast.executor import Executor\n"
        "from outlast.executor.metrics import publish\n"
        "publish(Executor(), name='gone', where=Path(sys.argv[1]), seconds=60); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert list(tmp_path.iterdir())
    assert published(tmp_path) == []
    assert not list(tmp_path.glob("*.json"))


def test_a_time_line_has_every_step_once_and_changes_nothing(tmp_path: Path) -> None:
    x = torch.ones(64)
    with Executor() as executor, torch.no_grad():
        replay = capture(lambda a: a.mul_(2).add(1).sum(), x, executor=executor, fuse=False)
        trace = replay.trace(x, path=tmp_path / "trace.json")
        assert x.tolist() == [1.0] * 64
        assert json.loads((tmp_path / "trace.json").read_text()) == trace
        names = [event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"]
        for kernel, count in replay.report().kernels.items():
            assert sum(kernel in name for name in names) == count
        assert all(event["dur"] >= 0 for event in trace["traceEvents"] if event.get("ph") == "X")
        with pytest.raises(Refused, match="no tensors"):
            replay.trace(3)  # type: ignore[arg-type]
