"""What the supervisor needs of the epoch log: it owns the memory, passes it on by descriptor, fences dead writers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class LogOwner(Protocol):
    """Owner of a log's memory. Called by the supervisor only, from one thread."""

    def fence(self) -> int:
        """Raise the writer epoch and return it.

        Called once before each activation, after the last writer's process was seen dead. From here on an append
        under an older epoch is refused. Must not block: it is on the way from a death to the next token.
        """

    def fds(self) -> tuple[int, ...]:
        """Descriptors that every worker inherits under the same numbers. The owner keeps them open until `close`."""

    def spec(self) -> Mapping[str, Any]:
        """JSON-able description from which a worker opens the log; it names the descriptors by their numbers.

        Empty: there is no log, and the worker is told `None`.
        """

    def used(self) -> int:
        """Bytes of log in use now, for /metrics."""

    def close(self) -> None:
        """Give the memory back. All workers have ended."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How a worker builds its engine: `factory(options, control=ControlPage) -> Engine`."""

    factory: str  #: "module:function"
    options: Mapping[str, Any] = field(default_factory=dict)  #: JSON-able
    fds: Mapping[str, int] = field(default_factory=dict)  #: by name, e.g. the weights' memory; see options["fds"]
