"""Serve a model over the OpenAI API; streams go on when the engine dies.

Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics. SIGTERM or Ctrl-C drains: running
streams may finish, new requests are refused.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from outlast.core.paths import default_log_dir
from outlast.serve.settings import ENGINES, Settings

#: setting -> (metavar or choices, help). Defaults and ranges stand in `Settings`.
_OPTIONS: dict[str, tuple[Any, str]] = {
    "model": ("NAME|PATH", "a name of `outlast model list`, a GGUF file or, with --engine transformers, a Hugging "
              "Face folder"),
    "host": ("ADDRESS", "address to listen on"),
    "port": ("N", "port to listen on; 0 takes a free one"),
    "durability": (("process", "gpu", "host"), "what may be lost without losing a token: the engine process, the "
                   "GPU as well, or the whole host (log files are flushed)"),
    "allow_degrade": (None, "go on at the next lower durability when this one fails, for example on a full disk"),
    "log_dir": ("DIR", "folder for log files, used with durability host"),
    "log_capacity": ("BYTES", "most log memory, taken as it is used; 0: by the KV pool"),
    "checkpoint": (None, "log every step (--no-checkpoint: an engine's death costs a prefill)"),
    "recovery": (("log", "reprefill"), "how a spare takes over; reprefill is the benchmarks' baseline"),
    "spares": ("N", "loaded engines that wait"),
    "threads": ("N", "threads of an engine; 0 lets it decide"),
    "fast": (None, "8-bit activations: up to twice the throughput of many streams, less exact; another manifest"),
    "kv_tokens": ("N", "tokens that the KV pool holds, of all requests together; each takes layers x KV heads x head "
                  "dimension x 8 bytes (45 KiB with the built-in model, 256 KiB with Llama 3 8B), and the log "
                  "up to twice that; 0: by the model's context and the memory"),
    "hang_timeout": ("S", "seconds without a heartbeat after which an engine is fenced"),
    "start_timeout": ("S", "seconds until a starting engine must be ready"),
    "recovery_timeout": ("S", "seconds of silence allowed in a takeover"),
    "wait_timeout": ("S", "seconds a request waits while there is no engine"),
    "max_requests": ("N", "live sequences; more are refused"),
    "max_waiting": ("N", "sequences accepted while there is no engine"),
    "max_body": ("BYTES", "size of a request body"),
    "default_max_tokens": ("N", "tokens generated when a request names no limit"),
    "drain": ("S", "seconds that running streams have to finish after SIGTERM"),
    "keepalive": ("S", "seconds between SSE comments while nothing else is sent"),
    "send_timeout": ("S", "seconds after which a client that takes nothing counts as gone"),
}  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    """One option per setting."""
    parser.add_argument(
        "--engine", choices=tuple(ENGINES), default="native",
        help="what computes: the native engine (GGUF models), or transformers (extra hf; slower, more models) "
        "(default: native)",
    )  # fmt: skip
    for field in dataclasses.fields(Settings):
        if field.name not in _OPTIONS:
            continue
        shape, text = _OPTIONS[field.name]
        shown = default_log_dir() if field.name == "log_dir" else field.default
        keywords: dict[str, Any] = {"default": field.default, "help": f"{text} (default: {shown})"}
        if isinstance(field.default, bool):
            keywords["action"] = argparse.BooleanOptionalAction
        elif isinstance(shape, tuple):
            keywords["choices"] = shape
        else:
            keywords |= {"metavar": shape, "type": type(field.default) if field.default is not None else str}
        parser.add_argument("--" + field.name.replace("_", "-"), **keywords)
    parser.add_argument(
        "--engine-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        type=_pair,
        help="an option of the engine; an unknown one names those there are",
    )


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def settings(arguments: argparse.Namespace) -> Settings:
    """What was asked for. Raises `UsageError` for a value out of range."""
    values = {name: getattr(arguments, name) for name in _OPTIONS if hasattr(arguments, name)}
    if values["durability"] == "host" and values["log_dir"] is None:
        values["log_dir"] = str(default_log_dir())
    return Settings(assembly=ENGINES[arguments.engine], engine_options=tuple(arguments.engine_option), **values)


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to end."""
    from outlast.cli.extras import require

    chosen = settings(arguments)
    require("serve")
    if arguments.engine == "transformers":
        require("hf")
    from outlast.serve import run as serve

    return serve(chosen)
