"""What the assemblies of all engines have in common: the log's owner and size, the pool's size."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from outlast.core.errors import NotPossibleHere, UsageError
from outlast.core.log import LogOwner as EpochLog
from outlast.core.machine import memory_limit
from outlast.serve.log_owner import LogOwner
from outlast.serve.settings import Settings

_logger = logging.getLogger("outlast.serve")

#: Contexts that the KV pool holds when nobody says. Four full conversations, or some thirty short ones.
_CONTEXTS = 4
#: At most this share of the memory goes to the pool when nobody says; the log may take twice as much.
_MEMORY_SHARE = 8
#: This much of it for the sake of one whole context.
_CONTEXT_SHARE = 4
#: A smaller pool has no room for a chat's template, a question and an answer.
LEAST_TOKENS = 256
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


def pool_tokens(kv_tokens: int, context: int, token_bytes: int, weights: int = 0) -> int:
    """Tokens that the KV pool holds: `kv_tokens`, or if that is 0, as many as suit the model and the memory.

    `token_bytes`: of one position in the pool; `weights`: bytes that the model takes beside it. Raises `UsageError` for
    a pool too small for any request, `NotPossibleHere` for one larger than the memory. Says so when it is smaller than
    the model's context.
    """
    limit = memory_limit()
    free = max(0, limit.size - weights)
    if kv_tokens and kv_tokens < LEAST_TOKENS:
        raise UsageError(
            f"--kv-tokens {kv_tokens}",
            why=f"that is the room for all requests together, prompts and answers; at least {LEAST_TOKENS} are needed",
            do="Give more, or 0 to have the number chosen.",
        )
    tokens = kv_tokens
    if not tokens:
        tokens = min(_CONTEXTS * context, free // _MEMORY_SHARE // token_bytes)
        # The log may come to take twice as much, so this is three quarters of what the weights leave.
        tokens = max(tokens, min(context, free // _CONTEXT_SHARE // token_bytes))
    if tokens * token_bytes > free or tokens < min(LEAST_TOKENS, context):
        raise NotPossibleHere(
            f"a KV pool of {tokens} tokens",
            why=f"it takes {mebibytes(tokens * token_bytes)}, the weights {mebibytes(weights)}, and the limit is "
            f"{mebibytes(limit.size)} ({limit.source})",
            do="Give fewer --kv-tokens, or 0 to have them chosen." if kv_tokens else "Use a smaller model.",
        )
    _logger.info("KV pool: %d tokens of %d bytes, %s", tokens, token_bytes, mebibytes(tokens * token_bytes))
    if tokens < context:
        _logger.warning(
            "the KV pool holds %d tokens (%s; %s has %s), the model's context is %d: longer requests are refused. "
            "--kv-tokens sets it, %d bytes each; the log may take twice as much beside it",
            tokens, mebibytes(tokens * token_bytes), limit.source, mebibytes(limit.size), context, token_bytes,
        )  # fmt: skip
    return tokens


def mebibytes(size: int) -> str:
    """For people."""
    return f"{size >> 20:,} MiB"


def open_log(settings: Settings, kv_tokens: int, token_bytes: int) -> LogOwner:
    """The log for a pool of `kv_tokens` tokens. Raises `UsageError` for one that is too small for its pool."""
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
