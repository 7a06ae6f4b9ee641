"""Servers for the chat: the real one over a scripted engine, and one that says whatever a test wants."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))  # tests and workers import these by name
sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
sys.path.insert(0, str(Path(__file__).parent))

from saying_server import SayingServer
from serve_harness import MODEL, StartServer, scripted_assembly
from tiny_model import write_tiny_model

from outlast.serve.server import Server
from outlast.serve.settings import Settings


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    servers: list[Server] = []

    def start(*, options: dict[str, Any] | None = None, **settings: Any) -> Server:
        base = Settings(model=MODEL, port=0, hang_timeout=1.0, drain=0.2, wait_timeout=20.0)
        servers.append(Server(replace(base, **settings), scripted_assembly(**(options or {}))))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def saying() -> Iterator[SayingServer]:
    with SayingServer() as server:
        yield server


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")
