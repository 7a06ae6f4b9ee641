"""The benchmark of the native engine: the report is whole, missing baselines say so, checks see differences."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

from outlast import cli
from outlast.bench import engine, engine_checks, engine_sides, engine_speed
from outlast.bench.engine_speed import Measured, Rates, row
from outlast.core.memory import Memory
from outlast.engines.native.loading import open_weights, weights_bytes
from outlast.engines.native.weights import Weights

pytestmark = pytest.mark.torch
FAST_PARTS = ("decode", "batch", "prefill", "dispatch")


@pytest.fixture(scope="module")
def weights(tiny_model: Path) -> Weights:
    return open_weights(Memory.anonymous(weights_bytes(tiny_model)), tiny_model)


def test_report_has_every_figure_and_a_missing_baseline_is_null_and_says_so(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(path: Path) -> None:
        raise ImportError("No module named 'llama_cpp'")

    monkeypatch.setattr(engine, "LlamaModel", missing)
    words = [word for part in FAST_PARTS for word in ("--only", part)]
    given = ["bench", "engine", "--json", "--quick", "--model", str(tiny_model), "--contexts", "16", *words]
    assert cli.main(given) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(engine.FIGURES) <= report.keys()
    assert report["decode_vs_transformers"] > 0
    assert report["batch8_scaling"] > 0
    assert report["dispatch_pct"] > 0
    assert report["decode_vs_llamacpp"] is report["batch8_vs_llamacpp"] is report["prefill_vs_llamacpp"] is None
    assert report["bits_equal"] is None  # that part did not run
    absent = [line for line in report["rows"] if line["baseline"].startswith("llama.cpp")]
    assert absent
    assert all(line["baseline"] == "llama.cpp: not installed" and line["ratio"] is None for line in absent)
    assert all(line["cpu"] for line in report["rows"])


def test_ratio_is_of_medians_and_a_row_short_of_what_it_must_says_so() -> None:
    found = {"ours": Measured([[1.0, 3.0], [2.0, 2.0]]), "theirs": Measured([[4.0, 4.0], [4.0, 100.0]])}
    line = row("decode", 32, found, "ours", "theirs", Rates(8, must=3.0))
    assert (line["ratio"], line["outlast_tok_s"], line["baseline_tok_s"]) == (2.0, 4.0, 2.0)
    assert line["reached"] is False


def test_bits_are_equal_and_a_changed_logit_is_seen(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    text = [rng.randrange(weights.config.vocab) for _ in range(256)]
    mode = engine_sides.DEFAULT
    assert engine_checks.bits_equal(weights, mode, text) == {
        "batch": True, "threads_and_chunks": True, "chunks": True, "recovery": True,
    }  # fmt: skip
    step = engine_checks.Bench.step

    def disturbed(self: engine_checks.Bench, items: list[engine_checks.decoders.Item]) -> object:
        results, logits = step(self, items)
        if len(items) > 1 and logits:
            logits[0] = bytes(4) + logits[0][4:]
        return results, logits

    monkeypatch.setattr(engine_checks.Bench, "step", disturbed)
    found = engine_checks.bits_equal(weights, mode, text)
    assert not found["batch"]
    assert found["chunks"]


def test_accuracy_is_that_of_the_engine_against_the_same_weights_in_fp32(tiny_model: Path, weights: Weights) -> None:
    rng = random.Random(1)
    text = [rng.randrange(weights.config.vocab) for _ in range(40)]
    oracle = engine_sides.Transformers(tiny_model, 1).logits(text)
    modes = engine_sides.MODES
    report = engine_checks.accuracy(weights, text, oracle, modes, threads=1)
    found = report[modes[0]]
    assert report["tokens"] == 39
    assert found["top1_equal"] >= 37
    assert found["max_logit_difference"] < 0.02 * report["logit_deviation"] + 0.02
    wrong = engine_checks.accuracy(weights, text, oracle[::-1], modes[:1], threads=1)
    assert wrong[modes[0]]["top1_equal"] < 20


def test_dispatch_is_the_executors_own_count(weights: Weights) -> None:
    side = engine_sides.Native(weights, threads=1, mode=engine_sides.DEFAULT, streams=1, room=128)
    side.open(engine_speed.prompts_of(1, 16, weights.config.vocab))
    found = engine_speed.dispatch(side, plans=2, steps=100)
    side.close()
    assert 1 <= found["plans_timed"] <= 2
    assert found["tasks"] == 5 * weights.config.layers + 3
    assert 0 < found["dispatch_us"] < found["step_us"]
    assert found["wait_pct"] == 0


def test_prefill_is_measured_on_a_text_that_no_side_has_seen() -> None:
    seen: list[engine_sides.Prompts] = []

    class Side:
        def open(self, prompts: engine_sides.Prompts) -> float:
            seen.append(prompts)
            return 1.0

        def step(self) -> float:
            raise AssertionError

        def close(self) -> None:
            pass

    engine_speed.fill({"one": Side()}, 8, 1000, rounds=3)
    assert len({prompt for (prompt,) in seen}) == len(seen) == 4
