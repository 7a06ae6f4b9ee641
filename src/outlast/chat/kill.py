"""Killing the engine under one's own chat, to see that the answer goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from outlast.chat.client import Client
from outlast.core.errors import NotPossibleHere, OutlastError


def kill_engine(client: Client) -> tuple[int, bool]:
    """SIGKILL the engine that serves now; (its pid, whether a spare was ready). Raises OutlastError if there is none.

    Only a process of this user on this machine that is an engine of outlast is killed, whatever the server says.
    """
    if not client.is_local:
        raise NotPossibleHere("the engine is not killed", why=f"{client.host} is another machine")
    engines = client.health().get("engines")
    pids = {role: _pid_of(engines, role) for role in ("active", "spare")}
    pid = pids["active"]
    if pid is None:
        raise OutlastError("there is no engine to kill", why="the server names none that is active")
    if not _is_engine(pid):
        raise NotPossibleHere(f"process {pid} is not killed", why="it is no engine of outlast, or not yours")
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        raise OutlastError(f"process {pid} is not killed", why=error.strerror or str(error)) from None
    return pid, pids["spare"] is not None


def _pid_of(engines: Any, role: str) -> int | None:
    for row in engines if isinstance(engines, list) else []:
        if isinstance(row, dict) and row.get("role") == role and type(row.get("pid")) is int and row["pid"] > 1:
            return int(row["pid"])
    return None


def _is_engine(pid: int) -> bool:
    """Whether the process holds a control page, as each engine does."""
    try:
        links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(link.startswith("/memfd:outlast-control") for link in links)
