"""Order between tasks and the caller's CUDA streams.

A stream raises a *gate* word when it reaches a point (cuStreamWriteValue64, which makes what ran before visible first);
a gate task in the ring is claimed only then, and tickets behind it not before. The other way round the stream waits for
the word of a task's outcome (cuStreamWaitValue64). The host waits for neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outlast.core import layout
from outlast.core.errors import NotPossibleHere, Refused
from outlast.executor.backends.kernel import PersistentKernel
from outlast.executor.backends.ring import LINE

OP_GATE = layout.constants()["OL_OP_GATE"]
STREAMS = 64  #: streams of the caller that have tasks in flight at once


@dataclass(slots=True)
class Gate:
    """A word that one stream raises."""

    address: int
    value: int = 0
    ticket: int = 0  #: of the last gate task that waits for it


class Streams:
    """The gates of one executor. Its kernel's lock guards them."""

    def __init__(self, kernel: PersistentKernel) -> None:
        self._kernel = kernel
        self._gates: dict[int, Gate] = {}
        block = kernel.allocate(STREAMS * LINE)
        self._free = [block.device + LINE * i for i in range(STREAMS)]

    def submit(self, stream: Any, put: Callable[[int, tuple[int, ...]], int], task: Callable[[], int]) -> int:
        """Put a gate and a task between what `stream` was given before and what it is given after.

        `put(op, args)` and `task()` give tickets. `stream`: a CUstream, its address, or an object with `cuda_stream`.
        """
        kernel = self._kernel
        if not kernel.device.stream_values:
            raise NotPossibleHere(
                "tasks can not be ordered with a stream",
                why=f"{kernel.device.name} has no 64-bit stream memory operations",
                do="Synchronise the stream, submit without `stream`, and wait for the ticket.",
            )
        handle = getattr(stream, "cuda_stream", stream)
        # One lock over all four steps: two threads that use one stream must not cross over.
        with kernel.lock:
            kernel.check()
            gate = self._gate(int(handle))
            gate.value += 1
            with kernel.device.current():
                kernel.driver.call("cuStreamWriteValue64", handle, gate.address, gate.value, 0)
            gate.ticket = put(OP_GATE, (gate.address, gate.value))
            ticket = task()
            with kernel.device.current():
                at_least = int(kernel.driver.api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
                word = kernel.ring.outcome_word(ticket)
                kernel.driver.call("cuStreamWaitValue64", handle, word, ticket << 1, at_least)
            return ticket

    def _gate(self, stream: int) -> Gate:
        """The gate of a stream; one whose tasks are done is taken over when there are too many streams."""
        gate = self._gates.get(stream)
        if gate is None:
            if self._free:
                gate = Gate(self._free.pop())
            else:
                idle = [key for key, one in self._gates.items() if self._kernel.ring.is_done(one.ticket)]
                if not idle:
                    raise Refused("too many streams", why=f"{STREAMS} streams have tasks in flight")
                gate = self._gates.pop(idle[0])  # its word keeps its value: the new owner goes on from there
            self._gates[stream] = gate
        return gate
