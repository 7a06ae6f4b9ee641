"""Trying an operator before it is published: its canary examples, run beside the ring, against its reference.

Each example runs on copies of its arrays. Afterwards the outputs must equal what the reference wrote, within the
tolerance; the inputs, the bytes between elements and 64 guard bytes on both sides must be as they were.

With "process" the code runs in a child process (about 50 ms), so that a trap or a loop is refused like any other
failure. It is no sandbox: the child has the rights of its user. With "here" the code runs in this process: quicker, and
a trap ends it.
"""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outlast.core.errors import NotPossibleHere, Refused, UsageError
from outlast.core.jit import Library
from outlast.executor import canary_child
from outlast.executor.canary_child import GUARD
from outlast.executor.runtime import ABI_VERSION
from outlast.executor.signature import Memory, span, view

if TYPE_CHECKING:
    import numpy as np

    from outlast.executor.operator import OperatorSpec

_PARTS = 3  # a splittable operator is tried in so many parts as well: a prime, so that few sizes divide evenly


@dataclass(slots=True)
class Example:
    """One example, laid out: the struct, and for each array a copy of its memory with guards."""

    number: int  #: from 1, as in the specification
    parts: int
    values: Sequence[Any]
    memories: list[Memory | None]
    arguments: bytes
    addresses: list[tuple[int, int, int]]  #: (offset in the struct, buffer, offset in it)
    buffers: list[bytes]
    starts: dict[int, tuple[int, int]]  #: argument -> (its buffer, byte of element [0, 0, ...])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call left behind."""

    status: int
    text: str
    buffers: list[bytes]


def check(spec: OperatorSpec, path: Path, where: Literal["process", "here"]) -> None:
    """Run the canary of the object at `path`. Raises `Refused` with the first difference or failure."""
    if where not in ("process", "here"):
        raise UsageError(f"canary={where!r}", why='it is neither "process" nor "here"')
    examples = examples_of(spec)
    outcomes = _run_in_child(spec, path, examples) if where == "process" else _run_here(spec, path, examples)
    judge(spec, examples, outcomes)


def judge(spec: OperatorSpec, examples: list[Example], outcomes: list[Outcome]) -> None:
    """Compare what calls left behind with what the reference does. Raises `Refused` with the first difference."""
    for example, outcome in zip(examples, outcomes, strict=True):
        name = f"example {example.number}" + (f" in {example.parts} parts" if example.parts > 1 else "")
        if outcome.status != 0:
            raise refusal(spec, f"{name}: it failed with status {outcome.status}: {outcome.text}")
        compare(spec, name, example, outcome)


def refusal(spec: OperatorSpec, why: str) -> Refused:
    """The error for code that was not published."""
    return Refused(f"operator {spec.name!r} was refused", why=why, do="What was active before stays active.")


def examples_of(spec: OperatorSpec) -> list[Example]:
    """The examples of a specification, laid out; those of a splittable operator in one part and in several."""
    given = spec.canary() if callable(spec.canary) else spec.canary
    if not given:
        raise UsageError(f"operator {spec.name!r} has no canary", why="nothing would be checked before it is published")
    laid_out = []
    for number, values in enumerate(given, 1):
        if not isinstance(values, Sequence):
            raise UsageError(
                f"example {number} of operator {spec.name!r} is a {type(values).__name__}",
                why="an example is a list of the arguments of one call",
            )
        try:
            laid_out.append(lay_out(spec, number, values, 1))
        except UsageError as error:
            raise UsageError(f"example {number} of operator {spec.name!r}", why=str(error)) from error
        if spec.splittable:
            laid_out.append(lay_out(spec, number, values, _PARTS))
    return laid_out


def lay_out(spec: OperatorSpec, number: int, values: Sequence[Any], parts: int) -> Example:
    """One call, with a copy of the memory of each array. Raises `UsageError` for what does not fit the signature."""
    packed, memories = spec.signature.pack(values)
    offsets, _ = spec.signature.offsets()
    example = Example(number, parts, values, memories, bytes(packed), [], [], {})
    for index, (memory, offset) in enumerate(zip(memories, offsets, strict=True)):
        if memory is None:
            continue
        before, behind = span(memory)
        # The element must be aligned in the copy as it is in the original.
        start = GUARD + before + -(GUARD + before) % 64
        raw = ctypes.string_at(memory.address - before, before + behind)
        fill = bytes([0xA5])
        buffer = fill * (start - before) + raw + fill * GUARD
        example.addresses.append((offset, len(example.buffers), start))
        example.starts[index] = (len(example.buffers), start)
        example.buffers.append(buffer)
    return example


def _run_here(spec: OperatorSpec, path: Path, examples: list[Example]) -> list[Outcome]:
    library = Library(path)
    try:
        abi = ctypes.c_uint32.from_address(library.symbol("outlast_abi")).value
        _check_abi(spec, abi)
        outcomes = []
        for example in examples:
            buffers = [ctypes.create_string_buffer(raw, len(raw)) for raw in example.buffers]
            status, text = canary_child.run(
                library.symbol(spec.name), example.arguments, example.addresses, buffers, example.parts
            )
            outcomes.append(Outcome(status, text, [buffer.raw for buffer in buffers]))
        return outcomes
    finally:
        library.close()


def _run_in_child(spec: OperatorSpec, path: Path, examples: list[Example]) -> list[Outcome]:
    request = {
        "path": str(path),
        "symbol": spec.name,
        "abi": ABI_VERSION,
        "examples": [
            {
                "buffers": [len(raw) for raw in example.buffers],
                "arguments": example.arguments.hex(),
                "addresses": example.addresses,
                "parts": example.parts,
            }
            for example in examples
        ],
    }
    blobs = b"".join(raw for example in examples for raw in example.buffers)
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(canary_child.__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what the operator prints, without bound
        )
    except (OSError, TypeError) as error:
        raise NotPossibleHere(
            "cannot try an operator in a process of its own", why=str(error), do='Pass canary="here".'
        ) from error
    try:
        answer, _ = child.communicate(json.dumps(request).encode() + b"\n" + blobs, spec.canary_timeout_s)
    except subprocess.TimeoutExpired:
        raise refusal(spec, f"its canary did not end within {spec.canary_timeout_s:g} s") from None
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()
    outcomes = _read(spec, examples, answer)
    if len(outcomes) < len(examples):
        ended = f"its process ended with {child.returncode}"
        if child.returncode < 0:
            ended = f"it ended with {_signal_name(-child.returncode)}"
        raise refusal(spec, f"example {examples[len(outcomes)].number}: {ended}")
    return outcomes


def _signal_name(number: int) -> str:
    """SIGSEGV and the like; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read(spec: OperatorSpec, examples: list[Example], answer: bytes) -> list[Outcome]:
    """The whole outcomes in what the child wrote, which may have been cut short."""
    outcomes: list[Outcome] = []
    at = 0
    for example in examples:
        end = answer.find(b"\n", at)
        lengths = [len(raw) for raw in example.buffers]
        head = json.loads(answer[at:end]) if end >= 0 else {}
        if "error" in head:
            raise refusal(spec, head["error"])
        if end < 0 or end + 1 + sum(lengths) > len(answer):
            break
        _check_abi(spec, head["abi"])
        at, buffers = end + 1, []
        for length in lengths:
            buffers.append(answer[at : at + length])
            at += length
        outcomes.append(Outcome(int(head["status"]), str(head["text"]), buffers))
    return outcomes


def _check_abi(spec: OperatorSpec, abi: int) -> None:
    if abi != ABI_VERSION:
        raise refusal(spec, f"it was built for ABI version {abi} and this is {ABI_VERSION}")


def compare(spec: OperatorSpec, name: str, example: Example, outcome: Outcome) -> None:
    """Raise `Refused` at the first argument that is not as the reference leaves it."""
    import numpy as np

    expected = [np.frombuffer(bytearray(raw), dtype=np.uint8) for raw in example.buffers]
    arrays: list[Any] = list(example.values)
    for index, (buffer, start) in example.starts.items():
        memory = example.memories[index]
        assert memory is not None
        arrays[index] = view(memory, expected[buffer].data, start)
    spec.reference(*arrays)
    for index, (buffer, start) in example.starts.items():
        argument, memory = spec.signature.arguments[index], example.memories[index]
        assert memory is not None
        found = bytearray(outcome.buffers[buffer])
        got = view(memory, found, start).copy()
        original = bytearray(example.buffers[buffer])
        # What lies outside the elements is compared by putting the original elements back.
        view(memory, found, start)[...] = view(memory, original, start)
        if found != original:
            at = next(i for i, (a, b) in enumerate(zip(found, original, strict=True)) if a != b)
            raise refusal(
                spec, f"{name}, argument {argument.name!r}: it wrote outside the elements, {at - start:+d} bytes off"
            )
        mode = getattr(argument, "mode", "in")
        wanted = view(memory, original, start) if mode == "in" else arrays[index]
        rtol, atol = (0.0, 0.0) if mode == "in" else spec.tolerance_of(memory.dtype)
        _compare_elements(spec, f"{name}, argument {argument.name!r}", got, wanted, memory.dtype, rtol, atol)


def _compare_elements(
    spec: OperatorSpec,
    what: str,
    got: np.ndarray[Any, Any],
    wanted: np.ndarray[Any, Any],
    dtype: str,
    rtol: float,
    atol: float,
) -> None:
    import numpy as np

    if got.dtype.kind == "f":
        with np.errstate(all="ignore"):
            equal = np.isclose(got.astype(np.float64), wanted.astype(np.float64), rtol=rtol, atol=atol, equal_nan=True)
    elif dtype == "bfloat16" and (rtol or atol):
        wide = [(a.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for a in (got, wanted)]
        equal = np.isclose(wide[0], wide[1], rtol=rtol, atol=atol, equal_nan=True)
        got, wanted = wide
    elif dtype == "bool":
        equal = got.view(np.uint8) == wanted.view(np.uint8)  # a bool that is neither 0 nor 1 is an error
        got, wanted = got.view(np.uint8), wanted.view(np.uint8)
    else:
        equal = got == wanted
    if np.all(equal):
        return
    place = tuple(int(i) for i in np.argwhere(~equal)[0]) if got.ndim else ()
    raise refusal(
        spec,
        f"{what} at {list(place)}: {got[place]} instead of {wanted[place]} "
        f"({int(np.sum(~equal))} of {got.size} elements differ)",
    )
