"""What the extras of this package are, and which of their packages are missing here."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

from outlast.core.errors import NotPossibleHere


def extras() -> dict[str, list[str]]:
    """Extra -> names of the packages it brings, those of extras it includes as well.

    Read from the installed metadata, or from pyproject.toml where the package runs from a source tree.
    """
    direct = _installed() or _source_tree()
    return {extra: sorted(_closure(extra, direct, set())) for extra in direct}


def missing(extra: str) -> list[str]:
    """Packages of an extra that are not installed."""
    return [name for name in extras().get(extra, []) if not _present(name)]


def require(extra: str) -> None:
    """Raise `NotPossibleHere`, naming the command that helps, unless all packages of the extra are installed."""
    lacking = missing(extra)
    if lacking:
        raise NotPossibleHere(
            f"the extra {extra!r} is not installed",
            why=f"missing: {', '.join(lacking)}",
            do=f"Run: pip install 'outlast[{extra}]'",
        )


def _present(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _installed() -> dict[str, list[str]]:
    """Extra -> requirements, as pip recorded them; empty if the package is not installed."""
    try:
        about = importlib.metadata.metadata("outlast")
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {extra: [] for extra in about.get_all("Provides-Extra") or []}
    for requirement in about.get_all("Requires-Dist") or []:
        marker = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", requirement)
        if marker:
            found.setdefault(marker.group(1), []).append(requirement)
    return found


def _source_tree() -> dict[str, list[str]]:
    path = Path(__file__).resolve().parents[3] / "pyproject.toml"
    try:
        found: dict[str, list[str]] = tomllib.loads(path.read_text())["project"]["optional-dependencies"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return {}
    return found


def _closure(extra: str, direct: dict[str, list[str]], seen: set[str]) -> set[str]:
    """Package names of an extra; a requirement on outlast itself stands for the extras it names."""
    if extra in seen:
        return set()
    seen.add(extra)
    names: set[str] = set()
    for requirement in direct.get(extra, []):
        name = re.match(r"[A-Za-z0-9_.-]+", requirement)
        if name is None:
            continue
        if name.group() == "outlast":
            inner = re.match(r"outlast\[([^\]]*)\]", requirement)
            for other in inner.group(1).split(",") if inner else []:
                names |= _closure(other.strip(), direct, seen)
        else:
            names.add(name.group())
    return names
