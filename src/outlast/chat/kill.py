"""Killing the engine under one's own chat, to see that the answer goes on."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from outlast.chat.client import Client
from outlast.core.errors import NotPossibleHere, OutlastError


@dataclass(frozen=True, slots=True)
class Victim:
    """An engine that was killed."""

    pid: int
    engine: int | None  #: its number, as chunks of a stream name it
    spare: bool  #: whether another was ready to take over


def kill_engine(client: Client) -> Victim:
    """SIGKILL the engine that serves now. Raises OutlastError if there is none.

    Only a process of this user on this machine that is an engine of outlast is killed, whatever the server says.
    """
    if not client.is_local:
        raise NotPossibleHere("the engine is not killed", why=f"{client.host} is another machine")
    engines = client.health().get("engines")
    rows = [row for row in engines if isinstance(row, dict)] if isinstance(engines, list) else []
    active = next((row for row in rows if row.get("role") == "active"), {})
    pid, number = active.get("pid"), active.get("writer_epoch")
    if type(pid) is not int or pid <= 1:
        raise OutlastError("there is no engine to kill", why="the server names none that is active")
    if not _is_engine(pid):
        raise NotPossibleHere(f"process {pid} is not killed", why="it is no engine of outlast, or not yours")
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        raise OutlastError(f"process {pid} is not killed", why=error.strerror or str(error)) from None
    spare = any(row.get("role") == "spare" for row in rows)
    return Victim(pid, number if type(number) is int else None, spare)


def _is_engine(pid: int) -> bool:
    """Whether the process holds a control page, as each engine does."""
    try:
        links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(link.startswith("/memfd:outlast-control") for link in links)
