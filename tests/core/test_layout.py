"""The numpy view of the shared headers equals what the C++ compiler makes of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from outlast.core import layout
from outlast.core.errors import OutlastError, UsageError
from outlast.core.jit import Compiler, include_dir


def ask(compiler: Compiler, include: Path, folder: Path) -> dict[str, dict[str, list[int]]]:
    """What the compiler says: struct -> member -> [offset, size]; "" is the struct itself, "#" the constants."""
    lines = []
    for struct in layout.structs().values():
        lines.append(f'row("{struct.name}", "", alignof({struct.name}), sizeof({struct.name}));')
        lines += [
            f'row("{struct.name}", "{m.name}", offsetof({struct.name}, {m.name}), sizeof({struct.name}::{m.name}));'
            for m in struct.members
        ]
    lines += [f'row("#", "{name}", (long long)({name}), 0);' for name in layout.constants()]
    source = "\n".join(
        [
            "#include <cstddef>",
            "#include <cstdint>",
            "#include <cstdio>",
            *(f'#include "outlast/{header.name}"' for header in sorted((include / "outlast").glob("*.h"))),
            "static void row(const char *s, const char *m, long long a, long long b) {",
            '  std::printf("[\\"%s\\", \\"%s\\", %lld, %lld]\\n", s, m, a, b);',
            "}",
            "int main() {",
            *lines,
            "}",
        ]
    )
    (folder / "layout.cpp").write_text(source)
    build = [*compiler.command, "-std=c++20", "-I", str(include), "layout.cpp", "-o", "layout"]
    subprocess.run(build, cwd=folder, check=True, timeout=120)
    found: dict[str, dict[str, list[int]]] = {}
    for line in subprocess.run([folder / "layout"], capture_output=True, text=True, check=True).stdout.splitlines():
        struct_name, member, first, second = json.loads(line)
        found.setdefault(struct_name, {})[member] = [first, second]
    return found


def check_structs(truth: dict[str, dict[str, list[int]]]) -> None:
    """Compare every struct of the headers in use with the compiler's word."""
    for name, struct in layout.structs().items():
        dtype = layout.dtype.__wrapped__(name)
        assert dtype.fields is not None
        ours = {member: [offset, field.itemsize] for member, (field, offset, *_) in dtype.fields.items()}
        assert ours == {member: place for member, place in truth[name].items() if member}, name
        assert [struct.alignment, dtype.itemsize] == truth[name][""], name
        assert layout.sizeof(name) == dtype.itemsize


@pytest.fixture(scope="module")
def truth(compiler: Compiler, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[int]]]:
    return ask(compiler, include_dir(), tmp_path_factory.mktemp("layout"))


def test_every_member_lies_where_the_compiler_puts_it(truth: dict[str, dict[str, list[int]]]) -> None:
    assert {"ol_task", "ol_slot", "ol_env", "ol_record"} <= set(layout.structs())
    check_structs(truth)


INNER = "typedef struct ol_inner { char tag; double x; uint16_t y; } ol_inner;"
OUTER = """
#define OL_ODD 3u
typedef struct ol_outer { uint8_t a; ol_inner b; char c[OL_ODD]; float d[2][OL_ODD]; uint8_t e; } ol_outer;
"""


def test_padding_and_nesting_follow_the_compiler(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outlast").mkdir()
    (tmp_path / "outlast" / "a_inner.h").write_text(INNER)
    (tmp_path / "outlast" / "b_outer.h").write_text(OUTER)
    read = layout._read.__wrapped__
    monkeypatch.setattr(layout, "include_dir", lambda: tmp_path)
    monkeypatch.setattr(layout, "_read", read)
    assert layout.sizeof("ol_inner") == 24  # 7 bytes before x, 6 after y
    check_structs(ask(compiler, tmp_path, tmp_path))


def test_constants_have_the_compilers_values(truth: dict[str, dict[str, list[int]]]) -> None:
    assert layout.constants() == {name: value for name, (value, _) in truth["#"].items()}
    assert layout.abi_version() == layout.constants()["OL_ABI_VERSION"]


def test_arrays_and_nested_structs_are_addressable() -> None:
    task = np.zeros(1, dtype=layout.dtype("ol_task"))
    task["arg"][0, 3] = 7
    assert task.tobytes()[56:64] == (7).to_bytes(8, "little")
    emission = np.zeros((), dtype=layout.dtype("ol_emission"))
    emission["top"]["token"][1] = 5
    assert emission.tobytes()[24:28] == (5).to_bytes(4, "little")


def test_unknown_struct_names_those_there_are() -> None:
    with pytest.raises(UsageError, match="ol_task"):
        layout.dtype("ol_nothing")


@pytest.mark.parametrize(
    "text",
    [
        "typedef struct ol_x { uint32_t *p; } ol_x;",
        "typedef struct ol_x { unsigned a : 3; } ol_x;",
        "typedef struct ol_x { long a; } ol_x;",
        "typedef struct ol_x { uint8_t a; } __attribute__((packed)) ol_x;",
        "typedef struct { uint8_t a; } ol_x;",
        "typedef struct ol_x { struct { uint8_t a; } b; } ol_x;",
        "typedef struct ol_y { uint8_t a; } ol_x;",
        "typedef struct ol_x { ol_x a; } ol_x;",
    ],
)
def test_a_declaration_it_cannot_lay_out_is_an_error_and_not_a_guess(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outlast").mkdir()
    (tmp_path / "outlast" / "odd.h").write_text(text)
    monkeypatch.setattr(layout, "include_dir", lambda: tmp_path)
    with pytest.raises(OutlastError, match="cannot read"):
        layout._read.__wrapped__()
