"""Operators described by an `OperatorSpec` on a device: compiled, tried there, published; and calls on host arrays.

A call copies its arrays into pinned memory, with guard bytes around each, and its outputs back. That is what a canary
needs, and a convenience beyond it: for speed submit addresses that the device can reach.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outlast.core.errors import OutlastError, TimedOut, UsageError
from outlast.core.jit import JitError
from outlast.executor import canary as canaries
from outlast.executor.backends.driver import Block
from outlast.executor.backends.kernel import Module
from outlast.executor.backends.table import DeviceOperator
from outlast.executor.operator import OperatorSpec, own_lines
from outlast.executor.runtime import failure
from outlast.executor.signature import span, view

if TYPE_CHECKING:
    from outlast.executor.backends.cuda import CudaExecutor

_LINE = 64


class Trials:
    """Calls with copied memory. One at a time."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor
        self._lock = threading.Lock()
        self._arena: Block | None = None

    def run(self, operator: DeviceOperator, example: canaries.Example, timeout: float) -> canaries.Outcome:
        """Run one call, all of its parts. Raises `TimedOut`; its memory is then not used again."""
        executor, deadline = self._executor, time.monotonic() + timeout
        with self._lock:
            places, size = [], -(-max(8, len(example.arguments)) // _LINE) * _LINE
            for raw in example.buffers:
                places.append(size)
                size += -(-len(raw) // _LINE) * _LINE
            arena = self._arena
            if arena is None or arena.size < size:
                arena = executor.allocate(max(size, 1 << 16))
            self._arena = None  # a call that does not end keeps it
            arguments = bytearray(example.arguments)
            for offset, buffer, start in example.addresses:
                struct.pack_into("<Q", arguments, offset, arena.device + places[buffer] + start)
            ctypes.memmove(arena.host, bytes(arguments), len(arguments))
            for place, raw in zip(places, example.buffers, strict=True):
                ctypes.memmove(arena.host + place, raw, len(raw))
            parts = example.parts
            tickets = [
                executor.submit(operator, arena.device, part=part, parts=parts, timeout=timeout)
                for part in range(parts)
            ]
            found = [executor.settled(ticket, max(0.0, deadline - time.monotonic())) for ticket in tickets]
            buffers = [
                ctypes.string_at(arena.host + place, len(raw))
                for place, raw in zip(places, example.buffers, strict=True)
            ]
            self._arena = arena
            failed = next((one for one in found if one is not None), None)
            if failed is None:
                return canaries.Outcome(0, "", buffers)
            return canaries.Outcome(failed.status, failed.text, buffers)

    def call(self, operator: DeviceOperator, values: Sequence[Any], parts: int, timeout: float) -> None:
        """Run a defined operator on host arrays and numbers; outputs are copied back if it did not fail."""
        spec = operator.spec
        if spec is None:
            raise UsageError(f"operator {operator.name!r} has no signature", do="Define it, or submit addresses.")
        if parts > 1 and not spec.splittable:
            raise UsageError(f"operator {operator.name!r} in {parts} parts", why="it is not splittable")
        example = canaries.lay_out(spec, 0, values, parts)
        outcome = self.run(operator, example, timeout)
        if outcome.status != 0:
            raise failure(outcome.status, 0, outcome.text)
        for index, (buffer, start) in example.starts.items():
            memory = example.memories[index]
            if memory is None or getattr(spec.signature.arguments[index], "mode", "in") == "in":
                continue
            before, behind = span(memory)
            original = (ctypes.c_char * (before + behind)).from_address(memory.address - before)
            result = bytearray(outcome.buffers[buffer])
            view(memory, original, before)[...] = view(memory, result, start)

    def checked(self, spec: OperatorSpec, trial: DeviceOperator) -> Module:
        """The operator's module, after its canary has passed in the place `trial`. Raises `Refused`, `JitError`."""
        executor = self._executor
        examples = canaries.examples_of(spec)
        try:
            module = executor.compile(spec.text(), name=spec.name, defines=spec.defines)
        except JitError as error:
            located = re.sub(r"^(.+?)\((\d+)\): ", r"\1:\2: ", error.output, flags=re.MULTILINE)
            raise JitError(
                error.what,
                why="\n" + own_lines(spec.name, located),
                do=f"Lines count from the start of its source. The whole text is kept at {error.source}",
                command=error.command,
                output=error.output,
                source=error.source,
            ) from error
        try:
            executor.swap(trial, module.symbol(spec.name))
            canaries.judge(spec, examples, [self.run(trial, one, spec.canary_timeout_s) for one in examples])
        except TimedOut as error:  # it may run still: the module stays
            raise canaries.refusal(
                spec, f"its canary did not end within {spec.canary_timeout_s:g} s; its block stays taken"
            ) from error
        except OutlastError:
            module.close()
            raise
        return module
