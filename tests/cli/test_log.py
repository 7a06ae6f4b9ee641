"""`outlast log`: the exit code is the judgement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outlast import cli
from outlast.core import log
from outlast.core.paths import default_log_dir


def test_default_folder_is_the_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    asked: list[Path] = []
    monkeypatch.setattr(log, "inspect", lambda folder: asked.append(folder) or {})
    assert cli.main(["log", "inspect"]) == 0
    assert asked == [default_log_dir()] == [tmp_path / "outlast" / "log"]


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_verify_fails_if_the_log_is_not_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ok: bool, code: int
) -> None:
    report: dict[str, Any] = {"ok": ok, "segments": [{"segment": 1, "epochs": 2}], "first_bad": None}
    monkeypatch.setattr(log, "verify", lambda folder: report)
    assert cli.main(["log", "verify", "somewhere", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == report
    assert cli.main(["log", "verify", "somewhere"]) == code
    assert "segment  epochs\n" in capsys.readouterr().out


def test_folder_without_a_log_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["log", "inspect", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
