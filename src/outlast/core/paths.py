"""Where files of this user live when nobody says otherwise (XDG base directory specification)."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """What can be made again: compiled operators and fetched models. `OUTLAST_CACHE_DIR`, else the XDG cache folder."""
    chosen = os.environ.get("OUTLAST_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return _xdg("XDG_CACHE_HOME", ".cache") / "outlast"


def state_dir() -> Path:
    """What should outlive a program's run and cannot be made again: logs, the history of `outlast chat`."""
    return _xdg("XDG_STATE_HOME", ".local/state") / "outlast"


def default_log_dir() -> Path:
    """Where `outlast serve` keeps its log and journal, and where `outlast log` looks."""
    return state_dir() / "log"


def make_private(folder: Path) -> None:
    """Make a folder and the parents it lacks, each with mode 0700 whatever the umask; what exists stays as it is.

    Raises `OSError`, also when `folder` is something else than a folder.
    """
    lacking = [parent for parent in folder.parents if not parent.exists()]
    for path in (*reversed(lacking), folder):
        path.mkdir(mode=0o700, exist_ok=True)  # exist_ok: another process may make it at the same moment


def _xdg(variable: str, below_home: str) -> Path:
    """An absolute folder from the environment; relative values are ignored, as the specification asks."""
    value = os.environ.get(variable, "")
    return Path(value) if value.startswith("/") else Path.home() / below_home
