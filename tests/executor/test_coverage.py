"""The table of supported overloads is made from what is registered, and the page in the docs is that table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from outlast.executor import coverage, lowering

pytestmark = pytest.mark.torch
ROOT = Path(__file__).resolve().parents[2]


def test_page_in_the_docs_is_current() -> None:
    page = ROOT / "docs" / "reference" / "operators.md"
    assert page.read_text().strip() == coverage.as_markdown(coverage.table()).strip(), (
        "run: python -m outlast.executor.coverage --markdown > docs/reference/operators.md"
    )


def test_count_is_of_overloads_that_run_here() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outlast.executor.coverage", "--json"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["supported"] >= 120
    rows = coverage.table()
    assert answer["supported"] == coverage.executed(rows) == sum(row.how != "view" for row in rows)
    assert {row.name for row in rows if row.how == "kernel"} <= set(lowering.registered())
