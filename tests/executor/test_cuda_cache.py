"""The cache of device modules: what is built again and what is not, damage, and errors of the compiler."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from outlast.core.errors import NotPossibleHere, OutlastError, Refused, UsageError
from outlast.core.jit import JitError
from outlast.executor.backends import cubin, nvrtc

SOURCE = """#include "outlast/dialect.h"
struct words { uint64_t v[8]; };
#ifndef STEP
#define STEP 1
#endif
OL_OPERATOR(op, words, a) { const_cast<words *>(a)->v[0] += STEP; return OL_OK; }
OL_UNIT;
"""


class CountingToolkit(nvrtc.Toolkit):
    """The toolkit, and how often it compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = 0

    def compile(self, *arguments: object, **more: object) -> nvrtc.Compiled:
        self.compiled += 1
        return super().compile(*arguments, **more)  # type: ignore[arg-type]


@pytest.fixture
def tools(toolkit: nvrtc.Toolkit) -> CountingToolkit:
    return CountingToolkit()


@pytest.fixture
def cache(tmp_path: Path, tools: CountingToolkit) -> nvrtc.CubinCache:
    return nvrtc.CubinCache(tmp_path / "cubin", tools=tools)


def entries(cache: nvrtc.CubinCache) -> list[Path]:
    return [path.parent for path in cache.directory.glob("*/entry.json")]


def test_the_same_source_is_compiled_once(cache: nvrtc.CubinCache, tools: CountingToolkit) -> None:
    first = cache.cubin(SOURCE, name="op", architecture=90)
    assert nvrtc.CubinCache(cache.directory, tools=tools).cubin(SOURCE, name="op", architecture=90) == first
    assert tools.compiled == 1
    assert cubin.read(first).executable


@pytest.mark.parametrize("change", ["architecture", "defines", "source", "compiler"])
def test_whatever_decides_the_bits_is_part_of_the_key(
    cache: nvrtc.CubinCache, tools: CountingToolkit, change: str
) -> None:
    cache.cubin(SOURCE, name="op", architecture=90)
    if change == "compiler":
        tools.version += ", another build"
    cache.cubin(
        SOURCE + "// " if change == "source" else SOURCE,
        name="op",
        architecture=80 if change == "architecture" else 90,
        defines={"STEP": 2} if change == "defines" else None,
    )
    assert tools.compiled == 2
    assert len(entries(cache)) == 2


def test_a_changed_header_is_another_module(
    cache: nvrtc.CubinCache, tools: CountingToolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from outlast.core import jit

    cache.cubin(SOURCE, name="op", architecture=90)
    copy = tmp_path / "include"
    shutil.copytree(jit.include_dir(), copy)
    monkeypatch.setattr(jit, "include_dir", lambda: copy)
    cache.cubin(SOURCE, name="op", architecture=90)
    assert tools.compiled == 1  # the same text at another place
    kernel = copy / "outlast" / "cuda" / "persistent.cu"
    kernel.write_text(kernel.read_text() + "\n")
    cache.cubin(SOURCE, name="op", architecture=90)
    assert tools.compiled == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_entry_is_built_again(cache: nvrtc.CubinCache, tools: CountingToolkit, damage: str) -> None:
    good = cache.cubin(SOURCE, name="op", architecture=90)
    (entry,) = entries(cache)
    path = entry / "operator.cubin"
    if damage == "flip":
        path.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    elif damage == "cut":
        path.write_bytes(good[:-1])
    else:
        path.unlink()
    assert cache.cubin(SOURCE, name="op", architecture=90) == good
    assert tools.compiled == 2
    assert path.read_bytes() == good


def test_an_entry_says_how_it_was_made(cache: nvrtc.CubinCache, tools: CountingToolkit) -> None:
    cache.cubin(SOURCE, name="op", architecture=90)
    (entry,) = entries(cache)
    facts = json.loads((entry / "entry.json").read_text())
    assert facts["compiler"] == tools.version
    assert "-rdc=true" in facts["options"]
    assert "-maxrregcount=128" in facts["options"]
    assert (entry / "op.cu").read_text() == SOURCE
    assert [path.name for path in cache.directory.iterdir() if path.name.startswith(".build-")] == []


def test_the_compilers_message_has_the_operators_line_and_the_source_is_kept(cache: nvrtc.CubinCache) -> None:
    with pytest.raises(JitError, match=r"op\.cu\(6\)") as caught:
        cache.cubin(SOURCE.replace("return OL_OK", "retrn OL_OK"), name="op", architecture=90)
    assert "retrn" in caught.value.output
    assert "retrn" in caught.value.source.read_text()
    assert entries(cache) == []


def test_the_linkers_message_names_what_is_missing(cache: nvrtc.CubinCache) -> None:
    source = SOURCE.replace("OL_OPERATOR", 'extern "C" __device__ int elsewhere();\nOL_OPERATOR')
    with pytest.raises(OutlastError, match="elsewhere"):
        cache.cubin(source.replace("+= STEP", "+= elsewhere()"), name="op", architecture=90)
    assert entries(cache) == []


def test_what_a_gate_refuses_is_not_kept(cache: nvrtc.CubinCache) -> None:
    source = SOURCE.replace("const_cast", "__shared__ int s[8]; s[threadIdx.x % 8] = 1; __syncthreads(); const_cast")
    with pytest.raises(Refused, match="shared memory"):
        cache.cubin(source.replace("+= STEP", "+= s[a->v[0] % 8]"), name="op", architecture=90)
    assert entries(cache) == []


def test_a_cache_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    if os.geteuid() == folder.stat().st_uid:
        with pytest.raises(OutlastError, match="other users can write"):
            nvrtc.CubinCache(folder)


def test_a_name_that_could_leave_the_folder_is_refused(cache: nvrtc.CubinCache) -> None:
    with pytest.raises(UsageError, match="operator name"):
        cache.cubin(SOURCE, name="../op", architecture=90)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    real = importlib.import_module

    def absent(name: str, package: str | None = None) -> object:
        if name.startswith("cuda.bindings"):
            raise ModuleNotFoundError("No module named 'cuda'", name="cuda")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(NotPossibleHere, match=r"pip install 'outlast\[cuda\]'"):
        nvrtc.Toolkit()


def test_compiling_leaves_the_single_characters_of_python_alone(cache: nvrtc.CubinCache) -> None:
    """NVRTC writes its log into a bytes object; those of length 1 are shared by the whole process."""
    cache.cubin(SOURCE, name="op", architecture=90)
    assert [bytes([value])[0] for value in range(256)] == list(range(256))
