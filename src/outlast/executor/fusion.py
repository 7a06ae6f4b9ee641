"""Fusion: one generated operator in place of several pointwise steps that follow each other over the same elements.

The generated source takes every expression from the table of functions (kernels.pointwise), in the order of the steps,
and rounds after each as memory would; so a fused plan gives the results of an unfused one bit for bit. What only the
group itself reads is never stored. Numbers are operands and lengths are arguments: the source depends on the structure
of the chain alone, is compiled once (JIT cache), and serves every shape.

Operands are dense over all elements, one element throughout, one row that repeats, or one element per row. Functions
that call the C library would keep the loop from being vectorised and stay steps of their own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.core import jit
from outlast.core.errors import NotPossibleHere
from outlast.executor import _native
from outlast.executor.kernels import DTYPES
from outlast.executor.kernels.pointwise import COMPUTE, FUNCTIONS, compute_class
from outlast.executor.planner import External, Plan, Step, flat, pack
from outlast.executor.values import Value

if TYPE_CHECKING:
    from outlast.executor.runtime import Executor

MAX_OPERANDS = 64  #: OL_FUSED_OPERANDS
MAX_STEPS = 128  #: of a group: 96 operators compile in about a second
_SYMBOL = "outlast_fused"
_SHARE = 1 << 15  #: elements that make a part of their own worth while

#: what the C library computes element by element, in either class and in double alone
_CALLS = (
    "exp2", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh",
    "erfc", "fmod", "atan2", "hypot", "pow", "remainder", "floor_divide",
)  # fmt: skip
_CALLS_IN_DOUBLE = (
    "exp", "expm1", "log", "log1p", "tanh", "erf", "sigmoid", "silu", "softplus", "mish", "gelu", "gelu_tanh",
    "gelu_backward", "gelu_tanh_backward", "silu_backward", "softplus_backward", "mish_backward", "logaddexp",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fused:
    """A generated operator, compiled. `name` is unique to its source."""

    name: str
    source: str
    path: Path

    def operator(self, executor: Executor) -> int:
        """Its index in the executor's table, registered on first use. Raises `Refused` when the table is full."""
        known = executor.operators.get(self.name)
        if known is None:
            known = executor.register(self.name, jit.load(self.path, _SYMBOL))
        return known.index


def fuse_plan(plan: Plan, *, required: bool) -> None:
    """Replace groups of pointwise steps of `plan` by generated operators.

    Without a C++ compiler the plan stays as it is, or `NotPossibleHere` is raised if `required`. Raises `JitError` if
    generated code does not compile.
    """
    wanted = _Wanted(plan)
    groups = list(_groups(plan, wanted))
    if not groups:
        return
    try:
        _cache().compiler  # noqa: B018 - found here or not at all
    except NotPossibleHere:
        if required:
            raise
        return
    steps: list[Step | External] = []
    after = 0
    for group in groups:
        steps += plan.steps[after : group.first]
        after = group.first + group.count
        steps.append(group.step(wanted))
    plan.steps[:] = steps + plan.steps[after:]


@cache
def _cache() -> jit.JitCache:
    return jit.JitCache()


@cache
def compile_source(source: str) -> Fused:
    """The operator of a generated source, from the JIT cache or compiled now."""
    isa = _native.isa()
    flags = ["-fno-trapping-math", "-fopenmp-simd"]  # as the shipped operators: loops vectorise
    if isa == "avx512":
        flags.append("-mprefer-vector-width=512")
    # Shipped operators of the generic build have no fused multiply-add; what is generated must round as they do.
    defines = {"OL_SIMD": 1} | ({"OL_NO_FMA": 1} if isa == "generic" else {})
    path = _cache().compile(source, name="fused", native=True, flags=flags, defines=defines)
    name = "fused-" + hashlib.sha256(source.encode()).hexdigest()[:24]
    return Fused(name, source, path)


class _Wanted:
    """Which temporaries are read after a step, or returned."""

    def __init__(self, plan: Plan) -> None:
        self.last: dict[int, int] = {}
        for index, step in enumerate(plan.steps):
            for value in step.reads:
                self.last[id(value.buffer)] = index
        for one in flat(plan.outputs):
            if isinstance(one, Value):
                self.last[id(one.buffer)] = len(plan.steps)

    def after(self, value: Value, step: int) -> bool:
        """Whether anything past step number `step` sees it."""
        return value.buffer.kind != "temporary" or self.last.get(id(value.buffer), -1) > step


def _groups(plan: Plan, wanted: _Wanted) -> Iterator[_Group]:
    """Groups of at least two steps, in order."""
    group: _Group | None = None
    for index, step in enumerate(plan.steps):
        if group is not None and isinstance(step, Step) and group.take(step, wanted):
            continue
        if group is not None and group.count > 1:
            yield group
        group = _Group(index)
        if not (isinstance(step, Step) and group.take(step, wanted)):
            group = None
    if group is not None and group.count > 1:
        yield group


def fusable(step: Step) -> bool:
    """Whether a step can be part of a generated operator at all."""
    if step.pointwise is None:
        return False
    name, operands = step.pointwise
    function, compute = FUNCTIONS[name], compute_class(name, [value.dtype for value in operands])
    if compute is None or (function.refuses and compute == "i64"):
        return False
    called = set(re.findall(r"\bol_(\w+)\(", function.code(compute)))
    return not called & set(_CALLS) and not (compute == "f64" and called & set(_CALLS_IN_DOUBLE))


@dataclass(slots=True)
class _Operand:
    value: Value
    kind: str  #: "dense", "one", "row" (repeats for every row) or "column" (one element per row)


def _place(value: Value) -> tuple[object, ...]:
    """Equal for values that name the same elements in the same order."""
    return id(value.buffer), value.offset, value.dtype, *_space(value)


def _space(value: Value) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides without dimensions of size 1."""
    kept = [(n, s) for n, s in zip(value.shape, value.stride, strict=True) if n != 1]
    return tuple(n for n, _ in kept), tuple(s for _, s in kept)


@dataclass(slots=True)
class _Group:
    """Steps that follow each other and run over the same elements; grows by `take`."""

    first: int
    count: int = 0
    space: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    n: int = 0  #: elements of a row; 0 = no operand has asked for rows yet
    operands: list[_Operand] = field(default_factory=list)
    known: dict[tuple[object, ...], str] = field(default_factory=dict)  #: place -> variable that holds it now
    written: dict[tuple[object, ...], Value] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)  #: generated functions by name
    lines: list[str] = field(default_factory=list)  #: of the loop's body
    work: float = 0.0

    def take(self, step: Step, wanted: _Wanted) -> bool:
        """Make `step`, the next one of the plan, part of the group if it can be; False leaves the group as it was."""
        if self.count == MAX_STEPS or not fusable(step):
            return False
        assert step.pointwise is not None
        name, (out, *inputs) = step.pointwise
        if not out.is_dense or out.numel < 2:
            return False
        space = _space(out)
        if self.count and space != self.space:
            return False
        fresh: list[_Operand] = []
        rows = self.n
        for value in inputs:
            if _place(value) in self.known or any(_place(value) == _place(o.value) for o in fresh):
                continue
            if any(value.may_overlap(other) for other in self.written.values()):
                return False  # another view of what the group writes
            kind, length = _kind(value, space)
            if kind == "" or (length and rows and length != rows):
                return False
            rows = length or rows
            fresh.append(_Operand(value, kind))
        seen = [o.value for o in (*self.operands, *fresh)] + list(self.written.values())
        if any(out.may_overlap(other) and _place(other) != _place(out) for other in seen):
            return False  # would change elements before all that read them are computed
        stored = sum(wanted.after(value, self.first + self.count) for value in self.written.values())
        if len(self.operands) + len(fresh) + stored + 1 > MAX_OPERANDS:
            return False
        self.space, self.n = space, rows
        for operand in fresh:
            self._load(operand)
        self._compute(name, out, inputs)
        self.count += 1
        self.work += step.work
        return True

    def _load(self, operand: _Operand) -> None:
        k = len(self.operands)
        self.operands.append(operand)
        self.known[_place(operand.value)] = f"in{k}"
        if operand.kind in ("dense", "row"):
            self.lines.append(f"const auto in{k} = ol_load(p{k} + i);")

    def _compute(self, name: str, out: Value, inputs: Sequence[Value]) -> None:
        compute = compute_class(name, [out.dtype, *(value.dtype for value in inputs)])
        assert compute is not None
        function = FUNCTIONS[name]
        types = {"x": COMPUTE[compute], "p": COMPUTE[compute], "b": "bool"}
        called = f"f_{name}_{compute}"
        if called not in self.functions:
            given = ", ".join(f"{types[kind]} {letter}" for letter, kind in zip("xyzw", function.inputs, strict=False))
            self.functions[called] = (
                f"OL_DEVICE {types[function.result]} {called}({given}) "
                f"{{ using C [[maybe_unused]] = {COMPUTE[compute]}; return {function.code(compute)}; }}"
            )
        passed = ", ".join(
            f"ol_as<{types[kind]}>({self.known[_place(value)]})"
            for value, kind in zip(inputs, function.inputs, strict=True)
        )
        variable = f"v{self.count}"
        self.lines.append(f"const auto {variable} = ol_rounded<{DTYPES[out.dtype][1]}>({called}({passed}));")
        self.known[_place(out)] = variable
        self.written[_place(out)] = out

    def step(self, wanted: _Wanted) -> Step:
        """The generated operator as a step of the plan."""
        last = self.first + self.count - 1
        stored = [value for value in self.written.values() if wanted.after(value, last)]
        numel = stored[0].numel if stored else 0
        n = self.n or numel
        values = [operand.value for operand in self.operands] + stored
        args, pointers = pack("ol_fused_args", {"rows": numel // n if n else 0, "n": n, "data": values})
        return Step(
            "fused", args, pointers, tuple(stored), tuple(operand.value for operand in self.operands),
            shares=max(1, numel // _SHARE), work=self.work / 2, source=compile_source(self.code(stored)),
        )  # fmt: skip

    def code(self, stored: Sequence[Value]) -> str:
        """The C++ source. The variables of one row stand outside the loop over its elements."""
        whole: list[str] = []  # once
        row: list[str] = []  # once per row
        for k, operand in enumerate(self.operands):
            pointer = f"reinterpret_cast<const {DTYPES[operand.value.dtype][1]} *>(a->data[{k}])"
            if operand.kind == "one":
                whole.append(f"const auto in{k} = ol_load({pointer});")
            elif operand.kind == "column":
                row.append(f"const auto in{k} = ol_load({pointer} + r);")
            else:
                row.append(f"const auto *p{k} = {pointer}{' + r * n' if operand.kind == 'dense' else ''};")
        ends = []
        for k, value in enumerate(stored, start=len(self.operands)):
            row.append(f"auto *p{k} = reinterpret_cast<{DTYPES[value.dtype][1]} *>(a->data[{k}]) + r * n;")
            ends.append(f"ol_store(p{k} + i, {self.known[_place(value)]});")
        return "\n".join(
            [
                '#include "outlast/ops/pointwise.h"',
                "namespace OL_NAMESPACE {",
                *self.functions.values(),
                "OL_DEVICE int32_t fused(const ol_fused_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {",
                "    const int64_t n = a->n;",
                "    int64_t first = 0, rows = a->rows, begin = 0, end = n;",
                "    if (grid.x != 1) { // parts share out the rows, or the elements of a single one",
                "        const bool single = rows == 1;",
                "        const ol_share w = ol_share_of(single ? n : rows, block, grid);",
                "        (single ? begin : first) = w.begin;",
                "        (single ? end : rows) = w.end;",
                "    }",
                *(f"    {line}" for line in whole),
                "    for (int64_t r = first; r < rows; ++r) {",
                *(f"        {line}" for line in row),
                "        OL_INDEPENDENT for (int64_t i = begin; i < end; ++i) {",
                *(f"            {line}" for line in (*self.lines, *ends)),
                "        }",
                "    }",
                "    return OL_OK;",
                "}",
                "}",
                f"OL_INSTANCE({_SYMBOL}, ol_fused_args, fused)",
                "OL_UNIT;",
                "",
            ]
        )


def _kind(value: Value, space: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[str, int]:
    """How an operand of the group's shape lies: its kind and the length of a row that it asks for (0: any).

    "" if it has no such form.
    """
    shape, strides = _space(value)
    if shape != space[0]:
        return "", 0
    if all(stride == 0 for stride in strides):
        return "one", 0
    if strides == space[1]:
        return "dense", 0
    if not _row_major(shape, space[1]):
        return "", 0
    for cut in range(1, len(shape)):
        size = 1
        for one in shape[cut:]:
            size *= one
        if not any(strides[:cut]) and _row_major(shape[cut:], strides[cut:]):
            return "row", size
        if not any(strides[cut:]) and _row_major(shape[:cut], strides[:cut]):
            return "column", size
    return "", 0


def _row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != step:
            return False
        step *= size
    return True
