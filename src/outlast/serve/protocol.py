"""Messages between the supervisor and an engine worker: one JSON array per line over a unix stream socket.

Who sends what, and when:

    supervisor -> worker
        entry       one live request of the journal; any number, only before `activate` (so no line grows with load)
        activate    become the owner of the log under `writer_epoch` with the entries sent before; at most once
        submit      a new request; any time after `activate`
        cancel      forget a request, whatever its phase; unknown keys are ignored
        release     the finish of `key` was received: its logged state is no longer needed
        stop        finish the running step, close the engine, exit 0

    worker -> supervisor
        ready       once, when everything heavy is loaded: the worker is a spare
        active      once, after `activate`: the engine owns the log and has taken the entries over
        tokens      after each step that committed or advanced something; `advanced` names the keys that went on
                    (a token, or a part of the prompt)
        failed      a request ended by a fault of its own; its state is freed
        stats       about once a second while active
        fatal       the worker is about to exit with code 70; the text says why

Order is the order of the socket: a `submit` or `cancel` sent after `activate` is seen after the takeover, so the
supervisor needs no second queue. Everything the worker reports is committed. A line holds `[kind, field, field, ...]`
in the order of the dataclass, is ASCII and at most MAX_LINE bytes long, and is checked field by field on arrival: what
does not fit raises ProtocolError, and the receiver gives the peer up. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from outlast.core.errors import OutlastError
from outlast.engines.protocol import (
    Emission,
    EngineRequest,
    FinishReason,
    JournalEntry,
    RecoveryReport,
    SamplingParams,
)

#: A request with a 128k-token prompt and as many delivered tokens needs about 2 MiB of JSON.
MAX_LINE = 8 << 20
_U64 = (1 << 64) - 1
_U32 = (1 << 32) - 1
_MAX_TEXT = 64 << 10


class ProtocolError(OutlastError):
    """The peer sent something that is not a message."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One live request of the journal."""

    entry: JournalEntry


@dataclass(frozen=True, slots=True)
class Activate:
    """Own the log and take the entries over."""

    writer_epoch: int
    use_log: bool
    entries: int  #: how many `entry` messages came before


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget a request."""

    key: int


@dataclass(frozen=True, slots=True)
class Release:
    """The finish of a request has arrived."""

    key: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End in order."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Everything heavy is loaded."""

    pid: int
    seconds: float  #: from the start of the process to here


@dataclass(frozen=True, slots=True)
class Active:
    """The takeover is done."""

    writer_epoch: int
    report: RecoveryReport


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one step committed."""

    writer_epoch: int
    emissions: tuple[Emission, ...]
    advanced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """A request ended by a fault of its own."""

    key: int
    reason: str
    refused: bool  #: the request can never fit, as opposed to a fault


@dataclass(frozen=True, slots=True)
class Stats:
    """Gauges of the engine."""

    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Fatal:
    """The worker is about to exit."""

    text: str


M = TypeVar("M")

ToWorker = Entry | Activate | Submit | Cancel | Release | Stop
ToSupervisor = Ready | Active | Tokens | Failed | Stats | Fatal
Message = ToWorker | ToSupervisor


# --- writing ----------------------------------------------------------------------------------------------------


def _request_fields(request: EngineRequest) -> list[Any]:
    p = request.params
    params = [
        p.temperature, p.top_p, p.top_k, p.min_p, p.seed, p.stream, p.presence_penalty, p.frequency_penalty,
        p.repetition_penalty, [list(pair) for pair in p.logit_bias], p.top_logprobs, p.typical_p,
        p.min_tokens,
    ]  # fmt: skip
    return [request.key, list(request.prompt), request.max_tokens, list(request.stop_tokens), params]


def _emission_fields(e: Emission) -> list[Any]:
    return [e.key, e.index, e.token, e.logprob, [list(pair) for pair in e.top], e.finish, e.cached]


def encode(message: Message) -> bytes:
    """The line of `message`, newline included. Raises ProtocolError if it would exceed MAX_LINE."""
    fields: list[Any]
    match message:
        case Tokens():
            kind = "tokens"
            fields = [message.writer_epoch, [_emission_fields(e) for e in message.emissions], list(message.advanced)]
        case Entry():
            kind = "entry"
            entry = message.entry
            fields = [_request_fields(entry.request), list(entry.delivered), entry.alone]
        case Activate():
            kind, fields = "activate", [message.writer_epoch, message.use_log, message.entries]
        case Submit():
            kind, fields = "submit", [_request_fields(message.request)]
        case Cancel():
            kind, fields = "cancel", [message.key]
        case Release():
            kind, fields = "release", [message.key]
        case Stop():
            kind, fields = "stop", []
        case Ready():
            kind, fields = "ready", [message.pid, message.seconds]
        case Active():
            r = message.report
            report = [r.restored, r.recomputed, r.tokens_restored, r.reason[:_MAX_TEXT], r.milliseconds]
            kind, fields = "active", [message.writer_epoch, report]
        case Failed():
            kind, fields = "failed", [message.key, message.reason[:_MAX_TEXT], message.refused]
        case Stats():
            kind, fields = "stats", [message.values]
        case Fatal():
            kind, fields = "fatal", [message.text[:_MAX_TEXT]]
    line = json.dumps([kind, *fields], separators=(",", ":")).encode("ascii") + b"\n"
    if len(line) > MAX_LINE:
        raise ProtocolError(
            f"a {kind} message has {len(line)} bytes", why=f"a line holds at most {MAX_LINE}", do="send less at once"
        )
    return line


# --- reading ----------------------------------------------------------------------------------------------------


def _bad(what: str, value: object) -> ProtocolError:
    return ProtocolError(f"bad message: {what} is {repr(value)[:80]}")


def _int(what: str, value: object, low: int = 0, high: int = _U64) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _bad(what, value)
    return value


def _bool(what: str, value: object) -> bool:
    if type(value) is not bool:
        raise _bad(what, value)
    return value


def _float(what: str, value: object) -> float:
    """Any number but NaN; minus infinity is a legal log probability."""
    if type(value) not in (int, float) or math.isnan(number := float(cast(float, value))):
        raise _bad(what, value)
    return number


def _str(what: str, value: object) -> str:
    if type(value) is not str or len(value) > _MAX_TEXT:
        raise _bad(what, value)
    return value


def _list(what: str, value: object, length: int | None = None) -> list[Any]:
    if type(value) is not list or (length is not None and len(value) != length):
        raise _bad(what, value)
    return value


def _ints(what: str, value: object, high: int = _U32) -> tuple[int, ...]:
    return tuple(_int(what, v, 0, high) for v in _list(what, value))


def _pairs(what: str, value: object) -> tuple[tuple[int, float], ...]:
    pairs = (_list(what, v, 2) for v in _list(what, value))
    return tuple((_int(what, a, 0, _U32), _float(what, b)) for a, b in pairs)


def _numbers(what: str, value: object) -> dict[str, float]:
    if type(value) is not dict:
        raise _bad(what, value)
    return {_str(what, k): _float(what, v) for k, v in value.items()}


def _read_request(value: object) -> EngineRequest:
    key, prompt, max_tokens, stop_tokens, params = _list("request", value, 5)
    p = _list("params", params, 13)
    return EngineRequest(
        key=_int("key", key, 1),
        prompt=_ints("prompt", prompt),
        max_tokens=_int("max_tokens", max_tokens, 0, _U32),
        stop_tokens=_ints("stop_tokens", stop_tokens),
        params=SamplingParams(
            temperature=_float("temperature", p[0]),
            top_p=_float("top_p", p[1]),
            top_k=_int("top_k", p[2], 0, _U32),
            min_p=_float("min_p", p[3]),
            seed=_int("seed", p[4]),
            stream=_int("stream", p[5], 0, _U32),
            presence_penalty=_float("presence_penalty", p[6]),
            frequency_penalty=_float("frequency_penalty", p[7]),
            repetition_penalty=_float("repetition_penalty", p[8]),
            logit_bias=_pairs("logit_bias", p[9]),
            top_logprobs=_int("top_logprobs", p[10], 0, 20),
            typical_p=_float("typical_p", p[11]),
            min_tokens=_int("min_tokens", p[12], 0, _U32),
        ),
    )


def _read_emission(value: object) -> Emission:
    key, index, token, logprob, top, finish, cached = _list("emission", value, 7)
    if finish not in (None, "stop", "length"):
        raise _bad("finish", finish)
    return Emission(
        _int("key", key, 1),
        _int("index", index, 0, _U32),
        _int("token", token, 0, _U32),
        _float("logprob", logprob),
        _pairs("top", top),
        cast("FinishReason | None", finish),
        _int("cached", cached, 0, _U32),
    )


def _read_report(value: object) -> RecoveryReport:
    restored, recomputed, tokens, reason, milliseconds = _list("report", value, 5)
    return RecoveryReport(
        _int("restored", restored),
        _int("recomputed", recomputed),
        _int("tokens_restored", tokens),
        _str("reason", reason),
        _numbers("milliseconds", milliseconds),
    )


def _read_tokens(f: Sequence[Any]) -> Tokens:
    emissions = tuple(_read_emission(e) for e in _list("emissions", f[1]))
    return Tokens(_int("writer_epoch", f[0]), emissions, _ints("advanced", f[2], _U64))


_TO_WORKER: dict[str, tuple[int, Callable[[Sequence[Any]], ToWorker]]] = {
    "entry": (
        3,
        lambda f: Entry(JournalEntry(_read_request(f[0]), _ints("delivered", f[1]), _bool("alone", f[2]))),
    ),
    "activate": (
        3,
        lambda f: Activate(_int("writer_epoch", f[0]), _bool("use_log", f[1]), _int("entries", f[2])),
    ),
    "submit": (1, lambda f: Submit(_read_request(f[0]))),
    "cancel": (1, lambda f: Cancel(_int("key", f[0], 1))),
    "release": (1, lambda f: Release(_int("key", f[0], 1))),
    "stop": (0, lambda f: Stop()),
}
_TO_SUPERVISOR: dict[str, tuple[int, Callable[[Sequence[Any]], ToSupervisor]]] = {
    "ready": (2, lambda f: Ready(_int("pid", f[0], 1, _U32), _float("seconds", f[1]))),
    "active": (2, lambda f: Active(_int("writer_epoch", f[0]), _read_report(f[1]))),
    "tokens": (3, _read_tokens),
    "failed": (3, lambda f: Failed(_int("key", f[0], 1), _str("reason", f[1]), _bool("refused", f[2]))),
    "stats": (1, lambda f: Stats(_numbers("values", f[0]))),
    "fatal": (1, lambda f: Fatal(_str("text", f[0]))),
}


def _decode(line: bytes, table: dict[str, tuple[int, Callable[[Sequence[Any]], M]]]) -> M:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("bad message: not JSON", why=str(error)[:120]) from None
    if type(value) is not list or not value or type(value[0]) is not str or value[0] not in table:
        raise _bad("kind", value)
    count, build = table[value[0]]
    if len(value) != count + 1:
        raise _bad(f"number of fields of {value[0]}", len(value) - 1)
    return build(value[1:])


def decode_for_worker(line: bytes) -> ToWorker:
    """A message of the supervisor. Raises ProtocolError for anything else."""
    return _decode(line, _TO_WORKER)


def decode_for_supervisor(line: bytes) -> ToSupervisor:
    """A message of a worker. Raises ProtocolError for anything else."""
    return _decode(line, _TO_SUPERVISOR)


class LineBuffer:
    """Cuts a byte stream into lines of at most MAX_LINE bytes; a torn last line stays inside and is never seen."""

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The whole lines that `data` completes, without their newlines."""
        start = len(self._rest)
        self._rest += data
        cut = self._rest.rfind(b"\n", start)
        lines: list[bytes] = []
        if cut >= 0:
            lines = bytes(self._rest[:cut]).split(b"\n")
            del self._rest[: cut + 1]
        if len(self._rest) > self._limit or any(len(line) > self._limit for line in lines):
            raise ProtocolError("bad message: line too long", why=f"a line holds at most {self._limit} bytes")
        return lines
