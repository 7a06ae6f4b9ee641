"""Extras are read from the metadata, wherever the package runs from."""

from __future__ import annotations

import pytest

from outlast.cli import extras
from outlast.core.errors import NotPossibleHere


def test_an_extra_holds_the_packages_of_those_it_includes() -> None:
    found = extras.extras()
    assert {"serve", "demo", "jit", "bench", "test"} <= set(found)
    assert set(found["serve"]) < set(found["demo"]) < set(found["test"])
    assert "outlast" not in found["test"]


def test_source_tree_and_installed_metadata_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = extras._source_tree()
    installed = extras._installed()
    if not tree or not installed:
        pytest.skip("runs from only one of the two")
    found = extras.extras()
    monkeypatch.setattr(extras, "_installed", dict)
    assert extras.extras() == found


def test_missing_names_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_source_tree", lambda: {"odd": ["no-such-package-here>=1", "pytest", "outlast[more]"],
                                                         "more": ["outlast[odd]", "another_missing[x]>2"]})  # fmt: skip
    monkeypatch.setattr(extras, "_installed", dict)
    assert extras.missing("odd") == ["another_missing", "no-such-package-here"]
    with pytest.raises(NotPossibleHere, match=r"pip install 'outlast\[odd\]'"):
        extras.require("odd")
