"""Every setting of the server, with its default, in one place."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from outlast.core.errors import UsageError

Durability = Literal["process", "gpu", "host"]

#: Engine as users name it -> what makes the parts of a server with it.
ENGINES = {"native": "outlast.serve.native:assemble", "transformers": "outlast.serve.hf:assemble"}


@dataclass(frozen=True, slots=True)
class Settings:
    """How to serve. The defaults are those of `outlast serve`."""

    assembly: str = ENGINES["native"]  #: "module:function" that makes an Assembly of these settings
    model: str = "builtin"  #: "builtin", the path of a GGUF file or, with transformers, of a model folder
    host: str = "127.0.0.1"
    port: int = 8321  #: 0 = any free port

    durability: Durability = "process"  #: what must be dead before a committed token can be lost
    allow_degrade: bool = False  #: go on at the next lower durability when the chosen one fails (disk full)
    log_dir: str | None = None  #: folder of segment files; needed for durability "host"
    log_capacity: int = 0  #: bytes of log memory, taken as it is used; 0 = twice the KV pool and some
    checkpoint: bool = True  #: False: nothing is logged, a death costs a prefill (baseline of the benchmarks)
    recovery: Literal["log", "reprefill"] = "log"  #: "reprefill": ignore the log (baseline of the benchmarks)

    spares: int = 1  #: engines that wait, loaded
    threads: int = 0  #: of an engine; 0 = it decides
    fast: bool = False  #: 8-bit activations: faster, less exact
    kv_tokens: int = 0  #: tokens that the KV pool holds; 0 = the engine decides
    engine_options: tuple[tuple[str, str], ...] = ()  #: further options of the engine, by name

    hang_timeout: float = 2.0  #: seconds without a heartbeat after which an active engine is fenced
    start_timeout: float = 120.0  #: seconds until a starting engine must be ready
    recovery_timeout: float = 30.0  #: seconds of silence allowed inside a takeover
    wait_timeout: float = 60.0  #: seconds a request waits while there is no engine
    max_requests: int = 256  #: live sequences (each of `n` counts); more are refused
    max_waiting: int = 128  #: of these, sequences accepted while there is no engine
    max_body: int = 4 << 20  #: bytes of a request body
    default_max_tokens: int = 1024  #: when the request names none; never past the context
    drain: float = 30.0  #: seconds that running streams have to finish after SIGTERM
    keepalive: float = 0.5  #: seconds between SSE comments while nothing else is sent
    send_timeout: float = 120.0  #: a client that takes nothing for this long counts as gone

    def __post_init__(self) -> None:
        positive = (
            "hang_timeout", "start_timeout", "recovery_timeout", "wait_timeout", "max_requests", "max_body",
            "default_max_tokens", "keepalive", "send_timeout",
        )  # fmt: skip
        for name in positive:
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}", why="it must be greater than 0")
        for name in ("spares", "threads", "kv_tokens", "log_capacity", "drain", "max_waiting"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}", why="it must not be negative")
        if self.threads > 256:
            raise UsageError(f"threads is {self.threads}", why="a step is cut into at most 256 parts")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port is {self.port}", why="it must be between 0 and 65535")
        if self.durability == "host" and self.log_dir is None:
            raise UsageError("durability host without a folder", why="it keeps segment files", do="Give --log-dir DIR")

    def to_json(self) -> str:
        """For `python -m outlast.serve`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The inverse of `to_json`. Raises UsageError for unknown names."""
        values: dict[str, Any] = json.loads(text)
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise UsageError(f"unknown settings: {', '.join(sorted(unknown))}")
        values["engine_options"] = tuple((str(k), str(v)) for k, v in values.get("engine_options", ()))
        return cls(**values)
