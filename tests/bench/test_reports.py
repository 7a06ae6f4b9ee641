"""Benchmarks and demo: reports are whole, and a wrong stream makes them fail. Nothing is timed here.

What kills engines uses the built-in model: the tiny one is so quick that an engine has done all its work before the
client reads of it, and there is nothing left to kill.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outlast import cli
from outlast.bench import append, demo, recovery, scan
from outlast.bench.rounds import Kill
from outlast.bench.transcripts import Received, Transcript
from outlast.bench.trial import Trial

COST = {
    "overhead_pct": 0.4, "overhead_interval": [0.1, 0.7], "bytes_per_token": 100,
    "step_ms_off": {"n": 1}, "step_ms_on": {"n": 1},
}  # fmt: skip


def stream() -> Transcript:
    return Transcript([Received(i, f"{i} ", -1.0, 1, float(i)) for i in range(20)], "length", 20)


def trial() -> Trial:
    kill = Kill(0.0, 0.0, 1, 1, 0, {0: 5, 1: 5}, {0: 50.0, 1: 60.0})
    return Trial([stream(), stream()], [[stream(), stream()]], [kill])


def baseline() -> Trial:
    return Trial([], [[stream(), stream()]], [Kill(0.0, 0.0, 2, 1, 0, {0: 5}, {0: 5500.0})])


def test_report_of_streams_that_went_on_is_identical() -> None:
    report = demo.assess(trial(), baseline(), COST)
    assert (report["identical"], report["contradicted"], report["tokens"], report["kills"]) == (True, 0, 40, 1)
    assert (report["recovery_ms_median"], report["recovery_ms_max"]) == (55.0, 60.0)
    assert (report["restart_ms_median"], report["speedup"]) == (5500.0, 100.0)
    assert report["baseline_identical"]


def _change(streams: list[Transcript]) -> None:
    streams[1].tokens[7] = replace(streams[1].tokens[7], token=99)


def _repeat(streams: list[Transcript]) -> None:
    streams[1].tokens.insert(7, streams[1].tokens[6])


def _cut(streams: list[Transcript]) -> None:
    del streams[1].tokens[15:]


@pytest.mark.parametrize("tamper", [_change, _repeat, _cut])
def test_tampered_stream_is_not_identical_and_the_command_fails(
    tamper: Callable[[list[Transcript]], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = trial()
    tamper(killed.rounds[0])
    report = demo.assess(killed, baseline(), COST)
    assert not report["identical"]
    assert report["contradicted"] > 0
    assert "stream 1" in report["differences"][0]
    monkeypatch.setattr(demo, "run", lambda arguments: report)
    assert cli.main(["demo", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["identical"] is False


def test_command_succeeds_only_with_nothing_contradicted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = demo.assess(trial(), baseline(), COST)
    monkeypatch.setattr(demo, "run", lambda arguments: report)
    assert cli.main(["demo", "--json"]) == 0
    monkeypatch.setattr(demo, "run", lambda arguments: report | {"contradicted": 1})
    assert cli.main(["demo", "--json"]) == 1


def test_table_shows_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    report = demo.assess(trial(), baseline(), COST) | {"context": 1000, "machine": "a machine", "load": [0.5]}
    demo.show(report)
    said = capsys.readouterr().out
    assert "identical to an uninterrupted run" in said
    assert "100x" in said
    demo.show(report | {"identical": False, "differences": ["round 1, stream 0: token 3: [1] instead of 2"]})
    said = capsys.readouterr().out
    assert "NO" in said
    assert "token 3: [1] instead of 2" in said


def test_table_of_an_engine_without_a_figure_for_its_log_leaves_it_out(capsys: pytest.CaptureFixture[str]) -> None:
    report = demo.assess(trial(), baseline(), dict.fromkeys(demo._COST))
    demo.show(report | {"context": 1000, "machine": "m", "load": [0.0], "engine": "transformers"})
    out = capsys.readouterr().out
    assert "identical" in out
    assert "checkpoint" not in out


@pytest.mark.faults
@pytest.mark.model
def test_demo_kills_real_engines_and_its_report_has_every_key(
    builtin_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_OVERHEAD_QUADS", 3)
    words = ["--kills", "2", "--streams", "2", "--tokens", "150", "--context", "64", "--model", str(builtin_model)]
    code = cli.main(["demo", "--json", *words])
    report = json.loads(capsys.readouterr().out)
    assert (report["identical"], report["contradicted"], report["differences"]) == (True, 0, [])
    assert code == 0
    assert (report["kills"], report["streams"]) == (2, 2)
    assert report["tokens"] == report["rounds"] * 300
    # An engine's epoch is on every chunk, so this proves that the streams outlived their engines.
    assert report["engines"] >= 3
    assert report["baseline_identical"]
    for key in ("recovery_ms_median", "recovery_ms_max", "restart_ms_median", "speedup"):
        assert report[key] > 0
    assert math.isfinite(report["overhead_pct"])
    assert report["bytes_per_token"] > 30 * 2 * 3 * 64 * 4  # layers, K and V, heads, head size, bytes of a float
    assert {"spread", "context", "machine", "versions", "load"} <= report.keys()


@pytest.mark.faults
@pytest.mark.model
def test_recovery_benchmark_reports_ratio_and_phases(builtin_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--streams", "1,2", "--kills", "1", "--tokens", "100", "--context", "64", "--model", str(builtin_model)]
    assert cli.main(["bench", "recovery", "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["identical"], report["contradicted"], report["lost"], report["hung"]) == (True, 0, 0, 0)
    assert report["ratio"] > 0
    assert set(report["by_streams"]) == {"1", "2"}
    for streams in ("1", "2"):
        assert report["by_streams"][streams]["kills"] == 1
        assert set(report["phases_ms_by_streams"][streams]) == {
            "detection", "fence", "scan", "apply", "requests", "handover", "first_step", "delivery",
        }  # fmt: skip


def test_recovery_benchmark_fails_when_a_stream_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = trial()
    _change(killed.rounds[0])
    trials = iter([killed, baseline()])
    monkeypatch.setattr(recovery, "run_trial", lambda *args, **options: next(trials))
    monkeypatch.setattr(recovery, "requests_for", lambda *args, **options: [])
    assert cli.main(["bench", "recovery", "--json", "--streams", "2"]) == 1
    assert json.loads(capsys.readouterr().out)["contradicted"] == 1


def test_checkpoint_benchmark_has_every_key(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append, "_BYTES_PER_SIZE", 8 << 20)
    words = ["--quads", "3", "--region-mib", "4", "--epochs", "3", "--model", str(tiny_model)]
    assert cli.main(["bench", "checkpoint", "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    for key in ("append_vs_memcpy", "scan_vs_compare", "hash_vs_compare"):
        assert report[key] > 0
    assert math.isfinite(report["overhead_pct"])
    assert report["source"] in ("userfaultfd", "hash")
    assert report["dirty_pages"] == 10
    assert len(report["append_by_size"]) == len(append.SIZES)
    assert {"machine", "versions", "load", "append_spread", "overhead_by_context"} <= report.keys()


def test_checkpoint_benchmark_runs_one_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "checkpoint", "--json", "--only", "scan", "--region-mib", "2", "--epochs", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "scan_vs_compare" in report
    assert "append_vs_memcpy" not in report


def test_scan_refuses_a_baseline_that_finds_other_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan.CopyAndCompare, "changed", lambda self: [])
    with pytest.raises(scan.OutlastError, match="differ"):
        scan.measure(size=1 << 20, epochs=1)


def test_decode_benchmark_without_torch_says_so_and_has_no_ratio(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)  # makes `import torch` an ImportError
    words = ["--tokens", "3", "--rounds", "1", "--threads", "1", "--model", str(tiny_model)]
    assert cli.main(["bench", "decode", "--json", *words]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert report["decode_vs_transformers"] is None
    assert report["baseline"].startswith("none: ")
    assert report["decode_tok_s"] > 0
    assert "NO BASELINE" in said.err


@pytest.mark.torch
def test_decode_benchmark_computes_the_same_tokens_on_both_sides(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    words = ["--tokens", "8", "--rounds", "1", "--threads", "1", "--model", str(tiny_model)]
    assert cli.main(["bench", "decode", "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["same_tokens"]
    assert report["decode_vs_transformers"] > 0


@pytest.mark.parametrize("words", [["--kills", "0"], ["--streams", "0"], ["--tokens", "3"], ["--context", "1"]])
def test_numbers_without_meaning_are_usage_errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--json", *words]) == 2
    assert words[0] in capsys.readouterr().err


def test_demo_defaults_kill_three_engines() -> None:
    parser = argparse.ArgumentParser()
    demo.configure(parser)
    defaults: Any = parser.parse_args([])
    assert (defaults.kills, defaults.engine) == (3, "native")
    assert defaults.tokens >= 100
