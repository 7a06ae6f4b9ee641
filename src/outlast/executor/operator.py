"""Operators of one's own: described by a typed object, compiled, tried against a reference, published while tasks run.

    spec = OperatorSpec(
        name="scale",
        signature=Signature((Array("x", "float32", ("n",)), Array("y", "float32", ("n",), "out"),
                             Scalar("n", "int64"), Scalar("factor", "float32"))),
        source='''
            OL_OPERATOR(scale, scale_args, a) {
                const ol_share w = ol_share_of(a->n, blockIdx, gridDim);
                for (int64_t i = w.begin; i < w.end; i += w.step) a->y[i] = a->factor * a->x[i];
                return OL_OK;
            }''',
        reference=lambda x, y, n, factor: np.multiply(x, np.float32(factor), out=y),
        canary=lambda: [(np.arange(5, dtype=np.float32), np.zeros(5, np.float32), 5, 2.0)],
        splittable=True,
    )
    scale = executor.define(spec)
    executor.call(scale, x, y, len(x), 3.0)

The source is the dialect of native/include/outlast/dialect.h. What stands before it is generated: the headers and the
struct `NAME_args` with one member per argument; `ol_data<T>(tensor)` gives a tensor's elements.

What is guaranteed of a new operator: it compiles, its ABI is that of the executor, and on the canary's examples it ends
in time, does not trap, writes nothing but its outputs, and agrees with its reference. Only then it is published; else
what was active stays active. What the examples do not reach is not checked.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from outlast.core.errors import UsageError
from outlast.core.jit import JitCache, JitError, Library
from outlast.executor import canary as canaries
from outlast.executor.signature import Array, Scalar, Signature, Tensor

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.executor.runtime import Executor, Operator

__all__ = ["Array", "OperatorSpec", "Scalar", "Signature", "Tensor", "call", "compile_operator", "define", "replace"]

#: Relative and absolute tolerance against the reference, unless a specification has its own: a few roundings.
_TOLERANCES = {"float16": (2e-3, 1e-4), "bfloat16": (1.6e-2, 1e-3), "float32": (1e-5, 1e-6), "float64": (1e-12, 1e-14)}

_PROLOGUE = """\
#include "outlast/dialect.h"
#include "outlast/tensor.h"
template <class T> OL_DEVICE T *ol_data(const ol_tensor &t) {{ return reinterpret_cast<T *>(t.data); }}
{declaration}
#line 1 "{name}"
{source}
#line 1 "after {name}"
OL_UNIT;
"""


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """An operator as its author describes it."""

    name: str  #: a C identifier: the function's name in `source`, and the name in the executor's table
    signature: Signature
    source: str
    #: Called with the arguments of an example, arrays as numpy arrays; writes its outputs into them, in place.
    reference: Callable[..., object]
    #: Examples: argument lists of arrays (numpy, or anything with a buffer) and numbers. Few, small, with odd sizes.
    canary: Sequence[Sequence[Any]] | Callable[[], Sequence[Sequence[Any]]]
    splittable: bool = False  #: parts (`blockIdx`, `gridDim`) are independent of each other
    tolerance: tuple[float, float] | None = None  #: relative and absolute, for floating-point outputs
    defines: Mapping[str, int | str] = field(default_factory=dict)
    native: bool = True  #: compile for this machine's CPU
    canary_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", self.name):
            raise UsageError(f"operator name {self.name!r}", why="it is not a C identifier of at most 64 letters")

    def tolerance_of(self, dtype: str) -> tuple[float, float]:
        """Relative and absolute tolerance for outputs of a dtype; (0, 0) = equal."""
        if dtype not in _TOLERANCES:
            return (0.0, 0.0)
        return self.tolerance or _TOLERANCES[dtype]

    def text(self) -> str:
        """The whole source, as it is compiled; lines of `source` keep their numbers in messages."""
        return _PROLOGUE.format(
            declaration=self.signature.declaration(f"{self.name}_args"),
            name=self.name,
            source=textwrap.dedent(self.source.removeprefix("\n")),
        )


def compile_operator(spec: OperatorSpec, cache: JitCache | None = None) -> Path:
    """Path of the shared object. Raises `JitError` whose `why` names lines of the operator's own source."""
    try:
        return (cache or JitCache()).compile(spec.text(), name=spec.name, defines=spec.defines, native=spec.native)
    except JitError as error:
        raise JitError(
            error.what,
            why="\n" + own_lines(spec.name, error.output),
            do=f"Lines count from the start of its source. The whole text is kept at {error.source}",
            command=error.command,
            output=error.output,
            source=error.source,
        ) from error


def own_lines(name: str, output: str) -> str:
    """The messages about the operator's own lines, or all of them if there are none."""
    kept: list[str] = []
    own = False
    for line in output.splitlines():
        located = re.match(r"([^\s:][^:]*):\d+", line)
        if located:
            own = located.group(1) in (name, f"after {name}")
        elif not line.startswith((" ", "\t")):
            own = False
        if own:
            kept.append(line)
    return "\n".join(kept) if any("error" in line for line in kept) else output


def define(executor: Executor, spec: OperatorSpec, *, canary: Literal["process", "here"] = "process") -> Operator:
    """Compile, check, register. See `Executor.define`."""
    if spec.name in executor.operators:
        raise UsageError(f"operator {spec.name!r} exists", do="Use replace to publish new code for it.")
    library = _checked(spec, canary)
    try:
        operator = executor.register(spec.name, library.symbol(spec.name), library=library)
    except BaseException:
        library.close()
        raise
    operator.spec = spec
    return operator


def replace(
    executor: Executor,
    operator: Operator,
    spec: OperatorSpec,
    *,
    canary: Literal["process", "here"] = "process",
    timeout: float = 10.0,
) -> int:
    """Compile, check, publish. See `Executor.replace`."""
    if operator.spec is not None and operator.spec.signature != spec.signature:
        raise UsageError(
            f"operator {operator.name!r} can not be replaced by one with another signature",
            why="tasks in the ring carry arguments of the present one",
            do="Define it under another name.",
        )
    library = _checked(spec, canary)
    try:
        return executor.swap(operator, library.symbol(spec.name), library=library, spec=spec, timeout=timeout)
    except BaseException:
        library.close()
        raise


def _checked(spec: OperatorSpec, canary: Literal["process", "here"]) -> Library:
    """The operator's library, loaded only after its canary has passed."""
    path = compile_operator(spec)
    canaries.check(spec, path, canary)
    return Library(path)


def call(
    executor: Executor, operator: Operator, args: Sequence[Any], *, parts: int = 1, timeout: float, assist: bool
) -> None:
    """Run an operator on values. See `Executor.call`."""
    import ctypes
    import time

    from outlast.executor.runtime import MAX_PARTS

    spec = operator.spec
    if spec is None:
        raise UsageError(f"operator {operator.name!r} has no signature", do="Define it, or submit addresses.")
    if not 1 <= parts <= MAX_PARTS:
        raise UsageError(f"operator {operator.name!r} in {parts} parts", why=f"there are 1 to {MAX_PARTS}")
    if parts > 1 and not spec.splittable:
        raise UsageError(f"operator {operator.name!r} in {parts} parts", why="it is not splittable")
    packed, _ = spec.signature.pack(args)
    memory = (ctypes.c_char * max(8, len(packed))).from_buffer(packed + bytes(8))
    address = ctypes.addressof(memory)
    deadline = time.monotonic() + timeout
    keep = (memory, args)  # a task that outlives the deadline still points at them
    tickets = [
        executor.submit(operator, address, part=part, parts=parts, timeout=timeout, keep=keep) for part in range(parts)
    ]
    for ticket in tickets:
        executor.wait(ticket, timeout=max(0.0, deadline - time.monotonic()), assist=assist)
