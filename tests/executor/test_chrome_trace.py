"""A replay on a time line: every step is an event inside the call, and the caller's tensors stay as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from outlast.core.errors import OperatorFailed, Refused
from outlast.executor import capture

pytestmark = pytest.mark.torch


def events(trace: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [one for one in trace["traceEvents"] if one.get("cat") == category]


def test_every_step_is_an_event_in_order_and_inside_the_call(tmp_path: Path) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ y, -1).sum(0)

    x, y = torch.randn(8, 8), torch.randn(8, 8)
    with torch.no_grad():
        replay = capture(function, x, y, fuse=False)
        trace = replay.trace(x, y, path=tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace
    (call,), kernels = events(trace, "call"), events(trace, "kernel")
    assert len(kernels) == replay.report().steps == 3
    assert ["softmax" in one["name"] for one in kernels] == [False, True, False]
    at = call["ts"]
    for one in kernels:
        assert one["ph"] == "X"
        assert at <= one["ts"] <= one["ts"] + one["dur"] <= call["ts"] + call["dur"] + 1e-6
        at = one["ts"]
        assert {"step", "level", "reads", "writes", "elements"} <= one["args"].keys()
    assert kernels[1]["args"]["reads"] == ["f32[8, 8]"]
    assert [one["args"]["level"] for one in kernels] == [0, 1, 2]


def test_what_pytorch_runs_is_an_event_with_its_reason() -> None:
    x = torch.eye(4)
    with torch.no_grad():
        replay = capture(lambda x: torch.linalg.det(x * 2) + 1, x, fuse=False)
        trace = replay.trace(x)
    (left,) = events(trace, "PyTorch")
    assert "det" in left["name"]
    assert "not in the table" in left["args"]["reason"]
    assert len(events(trace, "kernel")) == 2


def test_arguments_and_what_the_function_changes_besides_them_stay_as_they_are() -> None:
    count = torch.zeros(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        count.add_(x)
        return x * 2

    x = torch.ones(3)
    with torch.no_grad():
        replay = capture(function, x, fuse=False)
        replay.trace(x)
    assert x.tolist() == [1.0] * 3
    assert count.tolist() == [0.0] * 3


def test_a_failing_step_raises_and_numbers_among_arguments_are_refused() -> None:
    table = torch.randn(4, 2)
    with torch.no_grad():
        replay = capture(lambda i: torch.index_select(table, 0, i), torch.tensor([1]))
        with pytest.raises((OperatorFailed, IndexError)):
            replay.trace(torch.tensor([9]))
        with pytest.raises(Refused, match="no tensors"):
            replay.trace(torch.tensor([1]), 3)
