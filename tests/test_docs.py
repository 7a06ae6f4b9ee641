"""The documentation speaks of things that exist."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from outlast import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_every_option_in_the_reference_exists() -> None:
    text = (ROOT / "docs" / "reference" / "cli.md").read_text()
    for section in text.split("\n## ")[1:]:
        verb = section.split("\n")[0].removeprefix("outlast ")
        if verb not in cli.VERBS:
            continue
        parser = argparse.ArgumentParser()
        importlib.import_module(cli.VERBS[verb]).configure(parser)
        known = " ".join([parser.format_help(), *(_helps(parser))])
        for option in re.findall(r"(?<!-)--[a-z][a-z-]+", section):
            assert option in known, f"outlast {verb} {option}"
    assert set(cli.VERBS) <= set(re.findall(r"^## outlast (\w+)$", text, re.MULTILINE))


def _helps(parser: argparse.ArgumentParser) -> list[str]:
    """Help texts of a verb's actions."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [sub.format_help() for group in groups for sub in group.choices.values()]


def test_example_of_the_jit_cache_runs_as_it_stands(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "JitCache" in block]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True)
    assert done.stdout == "6\n"
