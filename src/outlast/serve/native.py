"""The parts of a server with the native engine: a GGUF model, its tokenizer, memory for its weights, the epoch log."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import outlast
from outlast.core.errors import NotPossibleHere, UsageError
from outlast.core.log import LogOwner as EpochLog
from outlast.core.memory import Memory
from outlast.engines.native import models, weights
from outlast.engines.native.gguf import Gguf
from outlast.engines.native.loading import pool_geometry
from outlast.engines.native.tokenizer import Tokenizer
from outlast.serve.assembly import Assembly
from outlast.serve.log_owner import EngineSpec, LogOwner
from outlast.serve.settings import Settings
from outlast.serve.text import ModelInfo

FACTORY = "outlast.engines.native.engine:create"
#: Contexts that the KV pool holds when nobody says. Four full conversations, or some thirty short ones.
_CONTEXTS = 4
#: At most this share of the machine's memory goes to the pool when nobody says; the log may take twice as much.
_MEMORY_SHARE = 8
#: The log holds what the pool holds, superseded records until their segment is emptied, and room to empty it into.
_LOG_PER_POOL = 2
#: A segment holds so many tokens: a step of the largest batch fits, and little dead state is read at a takeover.
_SEGMENT_TOKENS = 512
_FLOAT_BYTES = 4
_MIB = 1 << 20


class NoLog:
    """Owner of no log: every takeover computes anew. The baseline of the benchmarks."""

    def __init__(self) -> None:
        self._epoch = 0

    def fence(self) -> int:
        """The next number; there is nothing to shut anyone out of."""
        self._epoch += 1
        return self._epoch

    def fds(self) -> tuple[int, ...]:
        """None."""
        return ()

    def spec(self) -> Mapping[str, Any]:
        """Empty: the worker gets no log."""
        return {}

    def used(self) -> int:
        """Nothing."""
        return 0

    def close(self) -> None:
        """Nothing to give back."""


def assemble(settings: Settings) -> Assembly:
    """Find the model, read its tokenizer, take memory. Raises OutlastError for what is missing or not supported."""
    path = models.find(settings.model)
    known = models.MODELS.get(settings.model)
    with Gguf(path) as gguf:
        plan = weights.plan(gguf)
        tokenizer = Tokenizer(gguf)
        digest = known.sha256 if known is not None else gguf.digest()
    config = plan.config
    token_bytes = config.layers * 2 * config.kv_heads * config.head_dim * _FLOAT_BYTES
    kv_tokens = settings.kv_tokens or _pool_tokens(config.context, token_bytes)
    segment = min(max(-(-_SEGMENT_TOKENS * token_bytes // _MIB) * _MIB, _MIB), 64 * _MIB)
    capacity = settings.log_capacity or _LOG_PER_POOL * kv_tokens * token_bytes + 8 * segment
    if kv_tokens * token_bytes > _machine_bytes():
        raise NotPossibleHere(
            f"a KV pool of {kv_tokens} tokens",
            why=f"it takes {kv_tokens * token_bytes >> 20:,} MiB, and this machine has {_machine_bytes() >> 20:,}",
            do="Give fewer --kv-tokens, or 0 to have them chosen.",
        )
    needed = kv_tokens * token_bytes * 5 // 4 + 4 * segment
    if settings.checkpoint and capacity < needed:
        raise UsageError(
            f"a log of {capacity} bytes",
            why=f"a KV pool of {kv_tokens} tokens needs {needed}: all of it may be live",
            do="Give more --log-capacity or fewer --kv-tokens.",
        )
    log = _log(settings, capacity, segment)
    with contextlib.ExitStack() as undo:
        undo.callback(log.close)
        memory = Memory.anonymous(plan.size, name="outlast-weights")
        undo.callback(memory.close)
        # Pages only: an engine never trusts what another left in them, but pages that were touched are quick to fill.
        pool = Memory.anonymous(pool_geometry(config, kv_tokens).pool_bytes, name="outlast-kv")
        undo.pop_all()
    options = {
        "model": str(path),
        "weights_fd": memory.fd,
        "kv_fd": pool.fd,
        "kv_tokens": kv_tokens,
        "threads": settings.threads,
        "allow_degrade": settings.allow_degrade,
        **{name: _value(text) for name, text in settings.engine_options},
    }

    def close() -> None:
        memory.close()
        pool.close()

    build = hashlib.sha256(f"{digest} {outlast.__version__}".encode()).hexdigest()
    info = ModelInfo(
        id=known.name if known is not None else path.stem,
        # A request must fit the pool as well as the context.
        context=min(config.context, kv_tokens),
        tokenizer=tokenizer,
        fingerprint=f"fp_{build[:12]}",
        created=int(path.stat().st_mtime),
    )
    return Assembly(info, EngineSpec(FACTORY, options, {"weights": memory.fd, "kv": pool.fd}), log, close)


def _pool_tokens(context: int, token_bytes: int) -> int:
    return max(context, min(_CONTEXTS * context, _machine_bytes() // _MEMORY_SHARE // token_bytes))


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _log(settings: Settings, capacity: int, segment: int) -> LogOwner:
    if not settings.checkpoint:
        return NoLog()
    if settings.log_dir is None:
        return EpochLog.in_memory(capacity, segment_bytes=segment)
    durable = settings.durability == "host"
    fallback = EpochLog.in_memory(capacity, segment_bytes=segment) if durable and settings.allow_degrade else None
    try:
        return EpochLog.in_directory(
            settings.log_dir, capacity, segment_bytes=segment, durable=durable, fallback=fallback
        )
    except BaseException:
        if fallback is not None:
            fallback.close()
        raise


def _value(text: str) -> Any:
    """An engine option as typed on a command line: JSON where it is JSON, else text."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, dict | list):
        raise UsageError(f"engine option {text!r}", why="only numbers, true, false and text are taken")
    return value
