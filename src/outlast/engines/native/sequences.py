"""The requests of an engine: what it knows of each, and their form in the log."""

from __future__ import annotations

import ctypes
import json
import struct
from dataclasses import asdict, dataclass, field

from outlast.core.errors import CorruptState
from outlast.engines.native.blocks import name_of
from outlast.engines.native.drafts import Drafts
from outlast.engines.protocol import EngineRequest, FinishReason, SamplingParams

_EMISSION = struct.Struct("<IfII")  # ol_emission without its tops
_TOP = struct.Struct("<If")  # ol_top


@dataclass(frozen=True, slots=True)
class Emitted:
    """One generated token."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def encode(self) -> bytes:
        """As `ol_emission`."""
        return _EMISSION.pack(self.token, self.logprob, len(self.top), 0) + b"".join(
            _TOP.pack(token, logprob) for token, logprob in self.top
        )

    @classmethod
    def decode(cls, data: bytes) -> Emitted:
        """From `ol_emission`; raises `CorruptState` if it is none."""
        if len(data) < _EMISSION.size:
            raise CorruptState(f"an emission record of {len(data)} bytes")
        token, logprob, tops, _ = _EMISSION.unpack_from(data)
        if len(data) != _EMISSION.size + tops * _TOP.size:
            raise CorruptState(f"an emission record of {len(data)} bytes", why=f"it names {tops} alternatives")
        top = tuple((t, lp) for t, lp in _TOP.iter_unpack(data[_EMISSION.size :]))
        return cls(token, logprob, top)


def encode_request(request: EngineRequest) -> bytes:
    """The payload of a REQUEST record."""
    return json.dumps(asdict(request), separators=(",", ":")).encode()


def decode_request(payload: bytes) -> EngineRequest:
    """The inverse; raises `CorruptState`."""
    try:
        fields = json.loads(payload)
        params = fields.pop("params")
        params["logit_bias"] = tuple((int(t), float(b)) for t, b in params["logit_bias"])
        fields["prompt"] = tuple(fields["prompt"])
        fields["stop_tokens"] = tuple(fields["stop_tokens"])
        return EngineRequest(params=SamplingParams(**params), **fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptState("a request record can not be read", why=str(error)) from error


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine."""

    request: EngineRequest
    order: int = 0  #: of arrival; the lowest never yields
    generation: int = 1  #: incarnation of its state; raised when its rows are computed anew
    emitted: list[Emitted] = field(default_factory=list)
    reported: int = 0  #: emitted tokens that the supervisor was told
    blocks: list[int] = field(default_factory=list)
    handle: int = -1  #: in the decoder; -1 = waiting
    recheck: bool = False  #: compute the last restored position again and compare
    alone: bool = False  #: on probation, see JournalEntry
    logged: bool = False  #: its REQUEST record is in the log, or queued
    rows_logged: int = 0  #: positions from 0 on whose rows are in the log
    parked: int = 0  #: while it waits: positions from 0 on that can be brought back from the log
    cached: int = 0  #: positions of the prompt whose rows another request had computed
    names: list[bytes] = field(default_factory=list)  #: of its full blocks, see blocks.py
    drafts: Drafts | None = None  #: if tokens are guessed
    published: int = 0  #: leading blocks that others can find
    _table: ctypes.Array[ctypes.c_uint32] | None = None

    @property
    def key(self) -> int:
        """Key of the request."""
        return self.request.key

    @property
    def total(self) -> int:
        """Positions it may come to occupy."""
        return len(self.request.prompt) + self.request.max_tokens

    @property
    def length(self) -> int:
        """Known tokens: prompt and generated."""
        return len(self.request.prompt) + len(self.emitted)

    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.request.prompt, *(e.token for e in self.emitted)]

    def slice(self, first: int, end: int) -> list[int]:
        """Tokens at positions [first, end)."""
        prompt = self.request.prompt
        if end <= len(prompt):
            return list(prompt[first:end])
        emitted = self.emitted[max(0, first - len(prompt)) : end - len(prompt)]
        return [*prompt[first:], *(e.token for e in emitted)]

    def name_blocks(self, root: bytes, block_tokens: int) -> list[bytes]:
        """Names of all blocks that its known tokens fill."""
        names = self.names
        while (len(names) + 1) * block_tokens <= self.length:
            first = len(names) * block_tokens
            names.append(name_of(names[-1] if names else root, self.slice(first, first + block_tokens)))
        return names

    def finish_at(self, index: int) -> FinishReason | None:
        """How the request ends with its generated token `index`, None if it goes on."""
        if self.emitted[index].token in self.request.stop_tokens:
            return "stop"
        return "length" if index + 1 >= self.request.max_tokens else None

    @property
    def finished(self) -> bool:
        """Nothing more will be generated."""
        return bool(self.emitted) and self.finish_at(len(self.emitted) - 1) is not None

    def table_address(self) -> int:
        """Address of its block table as uint32[], valid until the next call."""
        self._table = (ctypes.c_uint32 * max(1, len(self.blocks)))(*self.blocks)
        return ctypes.addressof(self._table)
