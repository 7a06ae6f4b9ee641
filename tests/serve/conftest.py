"""Servers that must leave nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests and workers import the harness and the engine by name

from serve_harness import MODEL, StartServer, children, scripted_assembly, shared_memory

from outlast.serve.server import Server
from outlast.serve.settings import Settings


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Start servers that are closed when the test ends; no process and no shared memory may be left."""
    before = children(), shared_memory()
    servers: list[Server] = []

    def start(*, wait: bool = True, options: dict[str, Any] | None = None, **settings: Any) -> Server:
        base = Settings(model=MODEL, port=0, hang_timeout=1.0, drain=0.2, wait_timeout=20.0)
        server = Server(replace(base, **settings), scripted_assembly(**(options or {})), wait=wait)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()
    assert children() - before[0] == set(), "worker processes are left"
    assert shared_memory() - before[1] == set(), "shared memory is left"


@pytest.fixture
def server(start_server: StartServer) -> Server:
    return start_server()
