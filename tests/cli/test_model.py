"""`outlast model`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outlast import cli
from outlast.engines.native import models


def test_list_shows_whether_a_model_is_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTLAST_CACHE_DIR", str(tmp_path))
    assert cli.main(["model", "list", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["builtin"]
    assert row["path"] is None
    assert row["licence"] == "Apache-2.0"
    assert cli.main(["model", "list"]) == 0
    assert "not fetched" in capsys.readouterr().out


def test_fetch_prints_the_path_alone_on_stdout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(name: str, progress: models.Progress) -> Path:
        progress("working")
        return tmp_path / name

    monkeypatch.setattr(models, "fetch", fetch)
    assert cli.main(["model", "fetch"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'builtin'}\n"
    assert said.err == "working\n"
