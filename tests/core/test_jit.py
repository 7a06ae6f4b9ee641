"""The JIT cache: what it builds, keeps, shares and refuses."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outlast.core import compiler as compiler_module
from outlast.core import jit, layout
from outlast.core.errors import NotPossibleHere, OutlastError, TimedOut, UsageError
from outlast.core.jit import Compiler, JitCache, JitError, Library

ADD = """
#include "outlast/task.h"
#ifndef BIAS
#define BIAS 0
#endif
extern "C" __attribute__((visibility("default"))) int add(int a, int b) { return a + b + BIAS; }
extern "C" __attribute__((visibility("default"))) unsigned abi() { return OL_ABI_VERSION; }
"""


@pytest.fixture
def counted(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes OUTLAST_CXX a driver that writes a line to the returned file for each compilation."""
    count = tmp_path / "compilations"
    count.touch()
    driver = tmp_path / "driver"
    driver.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *-o*) echo "$$" >> {count}; [ -z "$SLOW" ] || sleep "$SLOW";; esac\n'
        f'exec {" ".join(compiler.command)} "$@"\n'
    )
    driver.chmod(0o755)
    monkeypatch.setenv("OUTLAST_CXX", str(driver))
    return count


@pytest.fixture
def cache(counted: Path, tmp_path: Path) -> JitCache:
    return JitCache(tmp_path / "cache")


def compilations(count: Path) -> int:
    return len(count.read_text().splitlines())


def call(path: Path, name: str, *arguments: int) -> int:
    library = Library(path)
    try:
        return int(ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int] * len(arguments))(library.symbol(name))(*arguments))
    finally:
        library.close()


def test_cold_compile_gives_a_loadable_object_that_sees_the_shared_headers(cache: JitCache) -> None:
    path = cache.compile(ADD, name="add")
    assert call(path, "add", 2, 3) == 5
    assert call(path, "abi") == layout.abi_version()
    assert (path.parent / "add.cpp").read_text() == ADD
    facts = json.loads((path.parent / "entry.json").read_text())
    assert facts["compiler"] == cache.compiler.version


def test_warm_compile_runs_no_compiler_in_this_or_another_cache_object(cache: JitCache, counted: Path) -> None:
    path = cache.compile(ADD, name="add")
    assert cache.compile(ADD, name="add") == path
    assert JitCache(cache.directory).compile(ADD, name="add") == path
    assert compilations(counted) == 1


def test_everything_that_decides_the_bits_is_in_the_key(cache: JitCache) -> None:
    paths = [
        cache.compile(ADD, name="add"),
        cache.compile(ADD + "\n", name="add"),
        cache.compile(ADD, name="add", defines={"BIAS": 7}),
        cache.compile(ADD, name="add", defines={"BIAS": 70}),
        cache.compile(ADD, name="add", flags=["-O1"]),
        cache.compile(ADD, name="add", native=True),
    ]
    assert len(set(paths)) == len(paths)
    assert [call(path, "add", 1, 1) for path in paths] == [2, 2, 9, 72, 2, 2]


def test_native_code_for_another_cpu_is_not_used(
    cache: JitCache, counted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.compile(ADD, name="add", native=True)
    cache.compile(ADD, name="add")
    monkeypatch.setattr(jit, "_cpu", lambda: "another")
    cache.compile(ADD, name="add", native=True)
    assert compilations(counted) == 3
    cache.compile(ADD, name="add")
    assert compilations(counted) == 3  # the portable object is still good


def test_changed_header_or_compiler_invalidates(
    cache: JitCache, counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = (jit.include_dir() / "outlast" / "task.h").read_text()
    folder = tmp_path / "include" / "outlast"
    folder.mkdir(parents=True)
    (folder / "task.h").write_text(header)
    monkeypatch.setattr(jit, "include_dir", lambda: folder.parent)
    first = cache.compile(ADD, name="add")
    assert cache.compile(ADD, name="add") == first
    (folder / "task.h").write_text(header.replace("#define OL_ABI_VERSION 1u", "#define OL_ABI_VERSION 77u"))
    assert call(cache.compile(ADD, name="add"), "abi") == 77
    assert compilations(counted) == 2
    newer = Compiler(cache.compiler.command, cache.compiler.family, "a newer release", "PATH")
    assert JitCache(cache.directory, compiler=newer).compile(ADD, name="add") != first
    assert compilations(counted) == 3


@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "remove", "no facts", "bad facts"])
def test_damaged_entry_is_built_again(cache: JitCache, counted: Path, damage: str) -> None:
    path = cache.compile(ADD, name="add")
    whole = path.read_bytes()
    facts = path.parent / "entry.json"
    if damage == "truncate":
        path.write_bytes(whole[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "flip":
        path.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    elif damage == "remove":
        path.unlink()
    else:
        facts.write_text("" if damage == "no facts" else "[1]")
    assert call(cache.compile(ADD, name="add"), "add", 2, 3) == 5
    assert path.read_bytes() == whole
    assert compilations(counted) == 2


@pytest.mark.parametrize("keep", [0, 3, 63, 64, 200, -1])
def test_object_cut_short_by_the_compiler_is_never_published(
    cache: JitCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    whole = tmp_path / "whole.so"
    whole.write_bytes(cache.compile(ADD, name="add").read_bytes()[:keep])
    liar = tmp_path / "liar"
    liar.write_text(f'#!/bin/sh\ncase "$*" in *-o*) cp {whole} operator.so;; *) echo liar 1.0;; esac\n')
    liar.chmod(0o755)
    monkeypatch.setenv("OUTLAST_CXX", str(liar))
    other = JitCache(tmp_path / "other")
    with pytest.raises(JitError, match=r"cut short|no ELF"):
        other.compile(ADD, name="add")
    assert not list(other.directory.glob("add-*"))


def test_compile_error_shows_the_message_and_keeps_the_source(cache: JitCache) -> None:
    with pytest.raises(JitError) as caught:
        cache.compile("int f() { return undeclared_thing; }", name="broken")
    error = caught.value
    assert "undeclared_thing" in str(error)
    assert "undeclared_thing" in error.output
    assert "-ffp-contract=off" in error.command
    assert error.source.read_text() == "int f() { return undeclared_thing; }"
    assert str(error.source) in str(error)
    assert not list(cache.directory.glob("broken-*"))
    assert not list(cache.directory.glob(".build-*"))


def test_compiler_that_does_not_end_is_stopped_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "driver"
    driver.write_text(
        f'#!/bin/sh\ncase "$*" in *-o*) sleep 600 & echo $! > {tmp_path}/child; wait;; *) echo slow 1.0;; esac\n'
    )
    driver.chmod(0o755)
    monkeypatch.setenv("OUTLAST_CXX", str(driver))
    started = time.monotonic()
    with pytest.raises(JitError, match=r"no result after 0\.5 s"):
        JitCache(tmp_path / "cache", time_limit=0.5).compile(ADD, name="add")
    assert time.monotonic() - started < 30
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while _alive(child):
        assert time.monotonic() < deadline, "the compiler's child lives on"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


BUILD = """
import sys, pathlib
from outlast.core.jit import JitCache
print(JitCache(sys.argv[1]).compile(pathlib.Path(sys.argv[2]).read_text(), name="add"))
"""


def builder(cache: JitCache, tmp_path: Path, **environment: str) -> subprocess.Popen[str]:
    """Another process that compiles ADD."""
    (tmp_path / "source.cpp").write_text(ADD)
    command = [sys.executable, "-c", BUILD, str(cache.directory), str(tmp_path / "source.cpp")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})


def test_concurrent_processes_compile_once_and_get_the_same_object(
    cache: JitCache, counted: Path, tmp_path: Path
) -> None:
    processes = [builder(cache, tmp_path, SLOW="0.5") for _ in range(4)]
    answers = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert len(answers) == 1
    assert call(Path(answers.pop()), "add", 2, 3) == 5
    assert compilations(counted) == 1


@pytest.mark.faults
def test_killed_builder_leaves_no_lock_and_no_half_entry(
    cache: JitCache, counted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = builder(cache, tmp_path, SLOW="60")
    deadline = time.monotonic() + 60
    while compilations(counted) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    compiling = int(counted.read_text().split()[0])
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        assert _alive(compiling)  # the orphaned compiler runs on, and must not keep the lock
        started = time.monotonic()
        with caplog.at_level(logging.INFO, "outlast.jit"):
            path = cache.compile(ADD, name="add")
        assert time.monotonic() - started < 30
    finally:
        os.killpg(compiling, signal.SIGKILL)
    assert call(path, "add", 2, 3) == 5
    assert "compiling operator add" in caplog.text  # said before the work, so that a wait is explained
    left = list(cache.directory.glob(".build-*"))
    assert len(left) == 1
    os.utime(left[0], (1, 1))
    cache.compile(ADD + "//", name="add")
    assert not list(cache.directory.glob(".build-*"))  # a killed builder's folder is removed in time


def test_waiting_for_another_builder_is_bounded_and_logged(
    cache: JitCache, counted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = builder(cache, tmp_path, SLOW="60")
    try:
        deadline = time.monotonic() + 60
        while compilations(counted) == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with caplog.at_level(logging.INFO, "outlast.jit"), pytest.raises(TimedOut, match=r"within 2\.4 s"):
            JitCache(cache.directory, time_limit=1.2).compile(ADD, name="add")
        assert "waiting for another process" in caplog.text
    finally:
        process.kill()
        process.communicate()
        os.killpg(int(counted.read_text().split()[0]), signal.SIGKILL)


def test_cache_is_made_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        cache = JitCache(tmp_path / "a" / "b")
    finally:
        os.umask(old)
    assert stat.S_IMODE(cache.directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_cache_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "loose"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(OutlastError, match="other users can write"):
        JitCache(folder)
    folder.chmod(0o755)
    JitCache(folder)


def test_cache_below_a_folder_that_others_can_write_is_refused_unless_it_is_sticky(tmp_path: Path) -> None:
    parent = tmp_path / "shared"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(OutlastError, match="other users can write"):
        JitCache(parent / "cache")
    parent.chmod(0o1777)
    JitCache(parent / "cache")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_cache_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(OutlastError, match="user 12345 owns"):
        JitCache(folder)


def test_cache_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutlastError, match="OUTLAST_CACHE_DIR"):
        JitCache(tmp_path / "file")


def test_default_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_CACHE_DIR", str(tmp_path / "own"))
    assert JitCache().directory == tmp_path / "own" / "jit"
    monkeypatch.delenv("OUTLAST_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert JitCache().directory == tmp_path / "xdg" / "outlast" / "jit"


@pytest.mark.parametrize("name", ["", "../up", "a/b", "-flag", ".hidden", "a" * 65, "a b"])
def test_name_that_is_no_file_name_is_refused(cache: JitCache, name: str) -> None:
    with pytest.raises(UsageError, match="operator name"):
        cache.compile(ADD, name=name)


def test_old_entries_are_removed_when_there_are_too_many(cache: JitCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_ENTRIES_MAX", 3)
    paths = [cache.compile(f"{ADD}\n// {i}", name="add") for i in range(3)]
    for age, path in enumerate(paths):
        os.utime(path.parent, (1000 - age, 1000 - age))  # the first is the youngest ...
    cache.compile(f"{ADD}\n// 2", name="add")  # ... and a use makes the last younger still
    cache.compile(f"{ADD}\n// 3", name="add")
    assert [path.exists() for path in paths] == [True, False, True]


def test_no_compiler_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUTLAST_CXX", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler_module.importlib.util, "find_spec", lambda name: None)
    compiler_module._find_compiler.cache_clear()
    try:
        with pytest.raises(NotPossibleHere, match=r"outlast\[jit\]") as caught:
            JitCache(tmp_path / "cache").compile(ADD, name="add")
        assert caught.value.exit_code == 3
    finally:
        compiler_module._find_compiler.cache_clear()


def test_compiler_named_by_a_variable_is_used_or_refused_but_never_passed_over(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OUTLAST_CXX", raising=False)
    monkeypatch.setenv("CXX", " ".join(compiler.command) + " -pipe")
    assert Compiler.find().command == (*compiler.command, "-pipe")
    monkeypatch.setenv("OUTLAST_CXX", str(tmp_path / "nothing"))
    with pytest.raises(NotPossibleHere, match="OUTLAST_CXX"):
        Compiler.find()


def test_library_is_unloaded_by_close(cache: JitCache) -> None:
    # A function-local static of an inline function is GNU_UNIQUE by default and would pin the object.
    source = """
inline int &counter() { static int value = 0; return value; }
extern "C" __attribute__((visibility("default"))) int tick() { return ++counter(); }
"""
    path = cache.compile(source, name="tick", flags=["-fvisibility=default"])
    library = Library(path)
    assert ctypes.CFUNCTYPE(ctypes.c_int)(library.symbol("tick"))() == 1
    assert str(path) in Path("/proc/self/maps").read_text()
    library.close()
    library.close()
    assert str(path) not in Path("/proc/self/maps").read_text()
    with pytest.raises(UsageError, match="unloaded"):
        library.symbol("tick")


def test_load_keeps_the_object_and_names_a_missing_symbol(cache: JitCache) -> None:
    path = cache.compile(ADD, name="add")
    address = jit.load(path, "add")
    assert jit.load(path, "add") == address
    assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)(address)(1, 2) == 3
    with pytest.raises(OutlastError, match="no symbol 'subtract'"):
        jit.load(path, "subtract")
    with pytest.raises(OutlastError, match="cannot load"):
        Library(path.with_name("none.so"))
