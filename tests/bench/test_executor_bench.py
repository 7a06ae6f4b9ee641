"""The benchmark of the executor: every arm computes the same, and the report is whole. Nothing is timed here."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from outlast import cli
from outlast.bench import executor, executor_rounds, executor_workloads
from outlast.bench.executor_rounds import Arm, Race, busy, race
from outlast.core.errors import OutlastError

pytestmark = pytest.mark.torch
CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children")  #: of the main thread


def test_quick_run_has_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "executor", "--json", "--quick", "--rounds", "2", "--no-inductor"]) == 0
    report = json.loads(capsys.readouterr().out)
    for key in (
        "replay96_vs_eager", "replay96_vs_eager_unfused", "replay96_vs_numpy", "mlp_vs_eager", "attention_vs_eager",
        "attention_vs_eager_median", "dynamic_vs_eager", "large_vs_eager", "ns_per_op", "matmul512_vs_eager",
    ):  # fmt: skip
        assert report[key] > 0, key
    assert report["ok"] is True
    assert report["swap_lost_tasks"] == 0
    assert report["swap_p99_ratio"] > 0
    assert report["swaps"] > 10
    assert isinstance(report["direct_overhead_pct"], float)
    assert report["replay96_vs_inductor"] is None  # not run, and not made up
    assert report["dynamic_recompilations"]["outlast"] == 0
    assert report["dynamic_plans"] >= report["dynamic_lengths"] == 20
    assert {"machine", "versions", "load", "rows", "loses", "not_reached", "waiting", "capture_ms"} <= report.keys()
    assert report["trouble"] == []


def test_table_for_people_names_the_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--rounds", "2", "--no-inductor", "--only", "attention"]
    assert cli.main(["bench", "executor", *words]) == 0
    said = capsys.readouterr().out
    assert "attention, 8 x 64, context 256" in said
    assert "baseline" in said


@pytest.mark.nightly
def test_inductor_is_measured_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--rounds", "2", "--only", "lists", "--only", "dynamic", "--only", "mlp"]
    assert cli.main(["bench", "executor", "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    for key in ("replay96_vs_inductor", "mlp_vs_inductor", "dynamic_vs_inductor", "inductor_compile_s"):
        assert report[key] > 0, key
    assert report["dynamic_recompilations"]["inductor"] >= 0


def test_without_a_compiler_there_is_no_inductor_and_the_rest_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTLAST_CXX", "/nowhere/c++")
    words = ["--quick", "--rounds", "2", "--only", "attention", "--only", "swap"]
    assert cli.main(["bench", "executor", "--json", *words]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert "NO INDUCTOR" in said.err
    assert report["swap_lost_tasks"] is None
    assert "/nowhere/c++" in report["trouble"][0]
    assert report["attention_vs_eager"] > 0


def test_without_torch_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # makes `import torch` an ImportError
    assert cli.main(["bench", "executor"]) == 3
    assert "PyTorch is not installed" in capsys.readouterr().err


def test_an_arm_that_computes_something_else_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_workloads, "elementwise_numpy", lambda x, a, b: lambda: x)
    with pytest.raises(OutlastError, match="something else than eager"):
        executor.Bench(1, True, inductor=False).lists()


def test_lost_tasks_fail_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lost = {"swap_lost_tasks": 1, "swap_p99_ratio": 1.0}
    monkeypatch.setattr(executor.Bench, "swap", lambda self: lost)
    assert cli.main(["bench", "executor", "--json", "--quick", "--only", "swap"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_lists_have_96_operators() -> None:
    from outlast.executor import capture

    with torch.no_grad():
        x = torch.randn(64)
        assert capture(executor_workloads.elementwise, x, x, x, fuse=False).report().steps == 96
        assert capture(executor_workloads.reducing, torch.randn(8, 8), x[:8], x[:8], fuse=False).report().steps == 96


def test_ratio_is_of_medians_against_the_fastest_arm_of_a_group() -> None:
    seconds = {"eager a": [4.0, 6.0, 8.0], "eager b": [3.0, 5.0, 9.0], "ours": [1.0, 2.0, 9.0]}
    found = Race(seconds, {"eager a": "eager", "eager b": "eager", "ours": "ours"})
    assert found.fastest("eager") == "eager b"
    assert found.ratio("eager", "ours") == 2.5
    row = found.row("w", "eager", "ours", must=3)
    assert (row["ratio"], row["of_minima"], row["reached"]) == (2.5, 3.0, False)


def test_a_group_named_like_one_of_its_arms_is_still_a_group() -> None:
    seconds = {"inductor": [9.0], "inductor, 1 thread": [3.0], "ours": [1.0]}
    found = Race(seconds, {"inductor": "inductor", "inductor, 1 thread": "inductor", "ours": "ours"})
    assert found.row("w", "inductor", "ours", must=None)["baseline"] == "inductor, 1 thread"


def test_one_thread_lasts_as_long_as_the_arm() -> None:
    before = torch.get_num_threads()
    with executor.Bench(1, True, inductor=False)._modes["no_grad, 1 thread"]():
        assert torch.get_num_threads() == 1
        assert not torch.is_grad_enabled()
    assert torch.get_num_threads() == before


def test_arms_run_in_turn_and_in_their_mode() -> None:
    order: list[tuple[str, bool]] = []
    arms = [
        Arm(name, lambda name=name: (order.append((name, torch.is_grad_enabled())), time.sleep(0.002)), (), mode)
        for name, mode in (("a", torch.no_grad), ("b", torch.enable_grad))
    ]
    found = race(arms, rounds=4, round_seconds=0.001)
    assert [len(times) for times in found.seconds.values()] == [4, 4]
    assert set(order) == {("a", False), ("b", True)}
    assert [name for name, _ in order[-8:]] == ["a", "b", "b", "a"] * 2


@pytest.mark.skipif(not CHILDREN.exists(), reason="this kernel does not list children")
def test_busy_processes_end_with_the_block() -> None:
    before = _children()
    with busy(2):
        assert len(_children() - before) == 2
    assert _children() == before
    assert executor_rounds.geometric([2.0, 8.0]) == 4.0


def _children() -> set[int]:
    return set(map(int, CHILDREN.read_text().split()))
