"""Servers over the scripted engine, with everything they may leave behind checked at the end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # workers import scripted_engine by name

from scripted_engine import ByteTokenizer, ScriptedLog

from outlast.serve.assembly import Assembly
from outlast.serve.log_owner import EngineSpec
from outlast.serve.server import Server
from outlast.serve.settings import Settings
from outlast.serve.text import ModelInfo

MODEL = "scripted"
CONTEXT = 2048

StartServer = Callable[..., Server]


def scripted_assembly(**options: Any) -> Assembly:
    model = ModelInfo(MODEL, CONTEXT, ByteTokenizer(), "fp-scripted")
    spec = EngineSpec("scripted_engine:create", options)
    return Assembly(model, spec, ScriptedLog(), close=lambda: None)


def children() -> set[int]:
    """Pids of this process's children, zombies included."""
    out: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        out.update(int(pid) for pid in (task / "children").read_text().split())
    return out


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Start servers that are closed at the end of the test; no process, no descriptor, no shared memory may be left."""
    before = children(), set(os.listdir("/dev/shm"))
    servers: list[Server] = []

    def start(*, wait: bool = True, options: dict[str, Any] | None = None, **settings: Any) -> Server:
        base = Settings(model=MODEL, port=0, hang_timeout=1.0, drain=2.0, wait_timeout=20.0)
        assembly = scripted_assembly(**(options or {}))
        server = Server(replace(base, **settings), assembly, wait=wait)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()
    assert children() - before[0] == set(), "worker processes are left"
    assert set(os.listdir("/dev/shm")) - before[1] == set(), "shared memory is left"


@pytest.fixture
def server(start_server: StartServer) -> Server:
    return start_server()


def client_of(server: Server, **more: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60, **more)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 15.0) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError(f"{what} did not happen within {seconds} s")
