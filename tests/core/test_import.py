"""`import outlast` is cheap: the package is a door, not a warehouse."""

from __future__ import annotations

import json
import subprocess
import sys

import outlast

HEAVY = (
    "torch",
    "numpy",
    "starlette",
    "tokenizers",
    "jinja2",
    "pydantic",
    "openai",
    "ctypes",
    "asyncio",
    "transformers",
)


def modules_after(statement: str) -> list[str]:
    """Names in sys.modules that `statement` adds to a fresh interpreter."""
    script = (
        f"import sys; before = set(sys.modules); {statement}; added = sorted(set(sys.modules) - before);"
        "import json; print(json.dumps(added))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names: list[str] = json.loads(done.stdout)
    return names


def test_import_brings_no_dependency_and_no_part_of_the_package() -> None:
    added = modules_after("import outlast")
    assert not set(added) & set(HEAVY)
    assert [name for name in added if name.startswith("outlast")] == ["outlast"]


def test_command_line_starts_without_heavy_libraries() -> None:
    added = modules_after("from outlast.cli import main")
    assert not set(added) & (set(HEAVY) - {"ctypes"})


def test_every_public_name_resolves() -> None:
    for name in outlast.__all__:
        assert getattr(outlast, name) is not None
        assert name in dir(outlast)


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(outlast, "no_such_name")
