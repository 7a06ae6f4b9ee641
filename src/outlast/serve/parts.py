"""What the assemblies of all engines have in common: the log's owner and size, the pool's size, an engine's options."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from outlast.core.errors import NotPossibleHere, UsageError
from outlast.core.log import LogOwner as EpochLog
from outlast.serve.log_owner import LogOwner
from outlast.serve.settings import Settings

#: Contexts that the KV pool holds when nobody says. Four full conversations, or some thirty short ones.
_CONTEXTS = 4
#: At most this share of the machine's memory goes to the pool when nobody says; the log may take twice as much.
_MEMORY_SHARE = 8
#: The log holds what the pool holds, superseded records until their segment is emptied, and room to empty it into.
_LOG_PER_POOL = 2
#: A segment holds so many tokens: a step of the largest batch fits, and little dead state is read at a takeover.
_SEGMENT_TOKENS = 512
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


def pool_tokens(context: int, token_bytes: int) -> int:
    """Tokens that the KV pool holds when nobody says."""
    return max(context, min(_CONTEXTS * context, _machine_bytes() // _MEMORY_SHARE // token_bytes))


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def open_log(settings: Settings, kv_tokens: int, token_bytes: int) -> LogOwner:
    """The log for a pool of `kv_tokens` tokens.

    Raises `NotPossibleHere` for a pool larger than the machine, `UsageError` for a log that is too small for its pool.
    """
    if kv_tokens * token_bytes > _machine_bytes():
        raise NotPossibleHere(
            f"a KV pool of {kv_tokens} tokens",
            why=f"it takes {kv_tokens * token_bytes >> 20:,} MiB, and this machine has {_machine_bytes() >> 20:,}",
            do="Give fewer --kv-tokens, or 0 to have them chosen.",
        )
    segment = min(max(-(-_SEGMENT_TOKENS * token_bytes // _MIB) * _MIB, _MIB), 64 * _MIB)
    capacity = settings.log_capacity or _LOG_PER_POOL * kv_tokens * token_bytes + 8 * segment
    needed = kv_tokens * token_bytes * 5 // 4 + 4 * segment
    if settings.checkpoint and capacity < needed:
        raise UsageError(
            f"a log of {capacity} bytes",
            why=f"a KV pool of {kv_tokens} tokens needs {needed}: all of it may be live",
            do="Give more --log-capacity or fewer --kv-tokens.",
        )
    return _log(settings, capacity, segment)


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


def option_value(text: str) -> Any:
    """An engine option as typed on a command line: JSON where it is JSON, else text."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, dict | list):
        raise UsageError(f"engine option {text!r}", why="only numbers, true, false and text are taken")
    return value
