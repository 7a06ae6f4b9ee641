"""`outlast doctor`: every row is tried, and a lack is explained."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path

import pytest

from outlast import cli
from outlast.core import machine
from outlast.core.errors import NotPossibleHere
from outlast.core.jit import Compiler


def rows(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["outlast"]
    return {row["name"]: row for row in report["rows"]}


def test_report_covers_the_machine_and_explains_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys)
    wanted = {
        "python", "platform", "processor", "cores", "memory", "compiler", "memfd", "huge pages", "pidfd",
        "userfaultfd", "gpu", "durability host", "extensions", "model", "extra serve", "extra jit",
    }  # fmt: skip
    assert wanted <= set(found)
    for row in found.values():
        assert row["state"] in ("ok", "limited", "missing")
        assert row["detail"]
        assert row["state"] == "ok" or row["advice"]
    assert found["memfd"]["state"] == found["pidfd"]["state"] == "ok"


def test_table_shows_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    names = set(rows(capsys))
    assert cli.main(["doctor"]) == 0
    table = capsys.readouterr().out
    assert all(f"\n{name} " in table for name in names)


def test_compiler_row_runs_the_code_it_compiled(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTLAST_CACHE_DIR", str(tmp_path))
    assert machine.compiler().state == "ok"
    assert list((tmp_path / "jit").glob("probe-*/operator.so"))


def test_compiler_that_is_missing_or_wrong_is_not_called_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("OUTLAST_CXX", "/no/such/compiler")
    found = machine.compiler()
    assert found.state == "missing"
    assert "OUTLAST_CXX" in found.advice
    monkeypatch.setenv("OUTLAST_CXX", "/bin/true")
    assert machine.compiler().state == "missing"


def test_compiler_that_makes_wrong_code_is_not_called_ok(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "driver"
    driver.write_text(
        '#!/bin/sh\ncase "$*" in *-o*) sed -i s/42/41/ probe.cpp;; esac\n'
        + " ".join(["exec", *compiler.command, '"$@"\n'])
    )
    driver.chmod(0o755)
    monkeypatch.setenv("OUTLAST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OUTLAST_CXX", str(driver))
    found = machine.compiler()
    assert found.state == "missing"
    assert "returned 41" in found.advice


def test_cache_that_is_refused_shows_in_the_compiler_row(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("OUTLAST_CACHE_DIR", str(tmp_path / "cache"))
    found = machine.compiler()
    assert found.state == "missing"
    assert "other users can write" in found.detail


def test_userfaultfd_row_is_ok_only_if_a_real_write_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    if machine.userfaultfd().state != "ok":
        pytest.skip(machine.userfaultfd().detail)
    monkeypatch.setattr(machine, "_written_pages", lambda start, size: [])
    assert machine.userfaultfd().state == "limited"
    monkeypatch.setattr(machine, "_open_userfaultfd", lambda: "Operation not permitted")
    found = machine.userfaultfd()
    assert found.state == "missing"
    assert "unprivileged_userfaultfd" in found.advice


def test_userfaultfd_probe_leaves_no_descriptor_and_no_map() -> None:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    machine.userfaultfd()
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert "userfaultfd" not in Path("/proc/self/maps").read_text()


def test_huge_page_row_tries_to_map_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> None:
        raise NotPossibleHere("none", why="nr_hugepages is 0", do="Reserve them.")

    monkeypatch.setattr(machine.Memory, "hugetlb", refuse)
    assert machine.huge_pages() == machine.Finding("huge pages", "missing", "none: nr_hugepages is 0", "Reserve them.")


def test_gpu_row_needs_a_driver_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getattr__(self, name: str) -> object:
            return lambda *arguments: 100  # CUDA_ERROR_NO_DEVICE

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Broken())
    found = machine.gpu()
    assert found.state == "missing"
    assert "error 100" in found.detail


def test_durability_row_tells_a_disk_from_memory_and_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if machine._filesystem(shared) == "tmpfs":
        assert machine.durable_folder(shared / "outlast-no-such-folder").state == "limited"
        assert not (shared / "outlast-no-such-folder").exists()
    assert machine.durable_folder(Path("/proc/outlast")).state == "missing"
    assert machine._filesystem(Path("/proc/self")) == "proc"
