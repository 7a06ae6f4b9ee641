"""`outlast bench`: benchmarks are found by being there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import outlast.bench
from outlast import cli

MODULE = '''"""Count to a number."""


def configure(parser):
    parser.add_argument("--to", type=int, default=3)


def run(arguments):
    return {"counted": arguments.to, "machine": {"cores": 2}, "rows": [{"n": 1, "ok": True}]}
'''


@pytest.fixture(autouse=True)
def _a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "count_up.py").write_text(MODULE)
    (tmp_path / "shared_parts.py").write_text('"""No benchmark."""\n')
    monkeypatch.setattr(outlast.bench, "__path__", [str(tmp_path)])


def test_list_names_benchmarks_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--list"]) == 0
    assert capsys.readouterr().out == "count-up  Count to a number.\n"


@pytest.mark.parametrize("words", [["--json", "count-up"], ["count-up", "--json"]])
def test_json_is_one_object(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *words]) == 0
    assert json.loads(capsys.readouterr().out)["counted"] == 3


def test_benchmark_takes_options_of_its_own_and_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "count-up", "--to", "5"]) == 0
    assert capsys.readouterr().out.splitlines() == ["counted  5", "machine  cores=2", "rows", "  n  ok", "  1  yes"]


def test_unknown_benchmark_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "nothing"]) == 2
    assert "count-up" in capsys.readouterr().err
