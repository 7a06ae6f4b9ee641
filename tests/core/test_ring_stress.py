"""Ring, slot table and plans under load: native/tests/ring_stress.cpp, with and without ThreadSanitizer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from outlast.core.jit import Compiler

ROOT = Path(__file__).resolve().parent.parent.parent
NATIVE = ROOT / "native"
SOURCES = (NATIVE / "tests" / "ring_stress.cpp", NATIVE / "core" / "executor.cpp")


def _build(compiler: Compiler, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*compiler.command, "-std=c++20", "-g", "-pthread", f"-I{NATIVE / 'include'}", *flags]
    command += [*map(str, SOURCES), "-o", str(folder / "stress")]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def plain(compiler: Compiler, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stress")
    built = _build(compiler, folder, "-O2")
    assert built.returncode == 0, built.stderr
    return folder / "stress"


@pytest.fixture(scope="module")
def sanitized(compiler: Compiler, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stress-tsan")
    built = _build(compiler, folder, "-O1", "-fsanitize=thread")
    if built.returncode != 0:
        pytest.skip(f"no ThreadSanitizer with this compiler: {built.stderr.strip()[-300:]}")
    return folder / "stress"


def _run(program: Path, seed: int, scale: int) -> None:
    done = subprocess.run([program, str(seed), str(scale)], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip(f"ThreadSanitizer does not run on this kernel: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert done.stdout.endswith("ok\n"), done.stdout


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 6])
def test_protocol_holds_under_thread_sanitizer(sanitized: Path, seed: int) -> None:
    _run(sanitized, seed, 1)


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_protocol_holds_at_full_speed(plain: Path, seed: int) -> None:
    _run(plain, seed, 20)
