"""What the tests of the server share: servers over the scripted engine, clients, raw event streams."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
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


def assemble(settings: Settings) -> Assembly:
    """For servers in a process of their own; options are numbers or text."""
    return scripted_assembly(**{name: float(value) for name, value in settings.engine_options})


def children() -> set[int]:
    """Pids of this process's children, zombies included."""
    out: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            out.update(int(pid) for pid in (task / "children").read_text().split())
    return out


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def alive(pid: int) -> bool:
    """Whether `pid` runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def client_of(server: Any, **more: Any) -> openai.OpenAI:
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


def _read_gauge(server: Any, name: str) -> list[float]:
    status, text = request(server, "GET", "/metrics")
    assert status == 200
    return [float(line.rpartition(" ")[2]) for line in text.decode().splitlines() if line.startswith(name + " ")]


def gauge(server: Any, name: str) -> float:
    """A figure of /metrics, without labels. An engine's appear with its first report, within a second."""
    found: list[float] = wait_for(lambda: _read_gauge(server, name), f"{name} is in /metrics", 5)
    return found[0]


def connect(server: Any, timeout: float = 60) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=timeout)


def request(server: Any, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    connection = connect(server)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def chat_body(content: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 40, "seed": 1, **more}


@dataclass
class Seen:
    """A raw event stream, as far as it was read."""

    status: int = 0
    chunks: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0
    after_terminal: int = 0  #: events that came after the terminal one
    closed: bool = False  #: the server ended the body cleanly

    @property
    def terminals(self) -> int:
        return self.done + len(self.errors)

    @property
    def text(self) -> str:
        return "".join(c["delta"].get("content", "") for chunk in self.chunks for c in chunk["choices"])

    @property
    def tokens(self) -> list[int]:
        return [t for chunk in self.chunks for t in chunk.get("outlast", {}).get("token_ids", [])]

    @property
    def finish(self) -> list[str]:
        return [c["finish_reason"] for chunk in self.chunks for c in chunk["choices"] if c["finish_reason"]]

    def take(self, line: str) -> None:
        if not line:
            return
        if self.terminals:
            self.after_terminal += 1
        if line.startswith(":"):
            self.comments.append(line[1:].strip())
        elif line == "data: [DONE]":
            self.done += 1
        else:
            assert line.startswith("data: "), line
            value = json.loads(line[6:])
            (self.errors if "error" in value else self.chunks).append(value)


def stream(server: Any, body: dict[str, Any], on_chunk: Callable[[Seen], None] = lambda _: None) -> Seen:
    """Read a chat stream to its end, line by line; `on_chunk` is called after each line."""
    seen = Seen()
    connection = connect(server)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}))
        answer = connection.getresponse()
        seen.status = answer.status
        if answer.status != 200:
            seen.errors.append(json.loads(answer.read()))
            return seen
        while line := answer.readline():
            seen.take(line.decode().rstrip("\n"))
            on_chunk(seen)
        seen.closed = True
        return seen
    finally:
        connection.close()


def whole_text(server: Any, body: dict[str, Any]) -> str:
    """The answer without streaming."""
    status, answer = request(server, "POST", "/v1/chat/completions", body)
    assert status == 200, answer
    return json.loads(answer)["choices"][0]["message"]["content"]
