"""From traced calls to a plan: which kernels run on which memory, in which order, and what is left to PyTorch.

The planner asks the lowering of each call for steps. A call without one, or whose lowering says `Unsupported`, becomes
an `External`: PyTorch runs it, between two runs of the executor. A call that only makes a view becomes no step.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlast.core import layout
from outlast.executor.kernels import DTYPES, shipped
from outlast.executor.kernels.pointwise import form, select
from outlast.executor.trace import Call, TensorRef, Trace, overload_name
from outlast.executor.values import MAX_DIMS, Buffer, Meta, Unsupported, Value, contiguous_strides

_FORMATS = {
    "int8_t": "b", "uint8_t": "B", "int16_t": "h", "uint16_t": "H", "int32_t": "i", "uint32_t": "I", "int64_t": "q",
    "uint64_t": "Q", "float": "f", "double": "d",
}  # fmt: skip
_LITERAL = {
    "bool": "?", "u8": "B", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "f16": "e", "f32": "f", "f64": "d",
}  # fmt: skip


@dataclass(slots=True, eq=False)
class Step:
    """One call of a kernel. `args` is its argument struct; addresses in it are patched where `pointers` says."""

    kernel: str  #: in the operator table
    args: bytearray
    pointers: list[tuple[int, Value]]  #: (byte offset in args, what the 64-bit address there points to)
    writes: tuple[Value, ...]
    reads: tuple[Value, ...]
    shares: int = 1  #: parts it may usefully be split into
    work: float = 0.0  #: estimated nanoseconds, 0 = small
    level: int = 0
    source: Any = None  #: operator that was generated for this step; None = a shipped kernel
    pointwise: tuple[str, tuple[Value, ...]] | None = None  #: (function, operands with the output first), for fusion


@dataclass(slots=True, eq=False)
class External:
    """One call that PyTorch runs, with the reason."""

    call: Call
    args: tuple[Any, ...]  #: tensors are `Value`s
    kwargs: dict[str, Any]
    outs: tuple[Value | None, ...]  #: flat; each in a buffer of kind "external", a view of an operand's, or None
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]  #: operands that it changes
    reason: str
    level: int = 0


@dataclass(slots=True)
class Plan:
    """What to run, in order, and what comes out."""

    trace: Trace
    steps: list[Step | External]
    outputs: list[Any]  #: flat: a `Value`, or an object that is no tensor
    mutated: tuple[Buffer, ...]  #: inputs and constants that it changes
    fallbacks: Counter[tuple[str, str]] = field(default_factory=Counter)  #: (overload, reason) -> calls


class Planner:
    """Makes one plan. Lowerings get it as their first argument."""

    def __init__(self) -> None:
        self.steps: list[Step | External] = []
        self.values: dict[int, Value] = {}  #: by TensorRef.id
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        self._literals: dict[tuple[str, bytes], Value] = {}

    # --- for lowerings

    def empty(self, dtype: str, shape: Sequence[int]) -> Value:
        """Contiguous scratch memory; its content is undefined."""
        shape = tuple(shape)
        return self._dense(dtype, shape, contiguous_strides(shape))

    def like(self, meta: Meta) -> Value:
        """Fresh memory of the meta's dtype, shape and strides."""
        value = self._dense(meta.dtype, meta.shape, meta.stride)
        if min(meta.stride, default=0) < 0:
            raise Unsupported("a result with negative strides")
        return value

    def _dense(self, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Value:
        if len(shape) > MAX_DIMS:
            raise Unsupported(f"a tensor of {len(shape)} dimensions (the most is {MAX_DIMS})")
        buffer = Buffer("temporary")
        value = Value(buffer, dtype, shape, stride)
        buffer.size = value.span[1]
        return value

    def scalar(self, number: float | int | bool, dtype: str) -> Value:
        """A constant of 0 dimensions, rounded or wrapped to `dtype` as PyTorch converts a number."""
        data = literal(number, dtype)
        key = (dtype, data)
        if key not in self._literals:
            self._literals[key] = Value(Buffer("literal", size=len(data), data=data), dtype, (), ())
        return self._literals[key]

    def literal(self, numbers: Sequence[float | int | bool], dtype: str) -> Value:
        """Constant numbers in one dimension."""
        data = b"".join(literal(number, dtype) for number in numbers)
        return Value(Buffer("literal", size=len(data), data=data), dtype, (len(numbers),), (1,))

    def cast(self, value: Value, dtype: str) -> Value:
        """The same elements as `dtype` (contiguous scratch if that is another type)."""
        if value.dtype == dtype:
            return value
        if value.buffer.kind == "literal" and value.shape == () and value.dtype in _LITERAL:
            number = struct.unpack("<" + _LITERAL[value.dtype], value.buffer.data)[0]
            return self.scalar(number, dtype)
        to = self.empty(dtype, value.shape)
        self.copy(to, value)
        return to

    def copy(self, to: Value, value: Value) -> None:
        """Write `value`, broadcast and converted, into `to`."""
        self.pointwise("copy", to, value)

    def contiguous(self, value: Value) -> Value:
        """`value` itself if it is contiguous, else a contiguous copy."""
        if value.is_contiguous:
            return value
        to = self.empty(value.dtype, value.shape)
        self.copy(to, value)
        return to

    def pointwise(self, function: str, out: Value, *inputs: Value, work: float = 0.0) -> None:
        """A step out[i] = function(inputs[i] ...); inputs are broadcast to `out`.

        `function` is one of outlast.executor.kernels.pointwise.FUNCTIONS, which converts what it loads and stores as
        `select` there says. An output that overlaps an input other than exactly is written through scratch memory.
        """
        if out.numel == 0:
            return
        operands = (out, *(value.expand(out.shape) for value in inputs))
        if any(out.may_overlap(value) and not out.same_place(value) for value in operands[1:]):
            scratch = self.empty(out.dtype, out.shape)
            self.pointwise(function, scratch, *inputs, work=work)
            self.pointwise("copy", out, scratch)
            return
        dtypes = [value.dtype for value in operands]
        name = select(function, dtypes)
        if name is None:
            raise Unsupported(f"no kernel {function} for {' -> '.join([*dtypes[1:], dtypes[0]])}")
        shape, strides = collapse(operands)
        inner = [stride[-1] for stride in strides]
        members: dict[str, Any] = {
            "data": list(operands) + [0] * (5 - len(operands)),
            "n": shape[-1],
            "inner": inner,
            "outer": len(shape) - 1,
            "form": form(function, dtypes, len(shape) - 1, inner, shape[-1]),
            "dtype": [DTYPES[dtype][0] for dtype in dtypes],
            "size": list(reversed(shape[:-1])),
            "stride": [x for stride in strides for x in (list(reversed(stride[:-1])) + [0] * 7)[:7]],
        }
        self.step(
            name, writes=(out,), shares=max(1, out.numel >> 15), work=work or out.numel * 0.1,
            pointwise=(function, operands), **members,
        )  # fmt: skip

    def step(
        self,
        kernel: str,
        *,
        writes: Sequence[Value],
        shares: int = 1,
        work: float = 0.0,
        pointwise: tuple[str, tuple[Value, ...]] | None = None,
        **members: Any,
    ) -> None:
        """Append a call of `kernel`; `members` fill its argument struct.

        A `Value` fills an `ol_tensor` member with its descriptor and a uint64_t member with its address; every `Value`
        that is not in `writes` counts as read. Members that are left out are 0.
        """
        known = shipped().get(kernel)
        if known is None:
            raise Unsupported(f"no kernel {kernel}")
        args, pointers = pack(known.args, members)
        written = tuple(writes)
        reads = tuple(value for _, value in pointers if not any(value is w for w in written))
        self.steps.append(Step(kernel, args, pointers, written, reads, shares, work, pointwise=pointwise))

    # --- planning

    def plan(self, trace: Trace) -> Plan:
        """Lower all calls of a trace."""
        from outlast.executor import lowering

        for index, ref in enumerate(trace.inputs):
            self._bind(ref, Buffer("input", index))
        for index, (ref, _) in enumerate(trace.constants):
            self._bind(ref, Buffer("constant", index))
        for call in trace.calls:
            self._call(call, lowering.find(call.op))
        outputs = [self._returned(self.values[one.id]) if isinstance(one, TensorRef) else one for one in trace.outputs]
        mutated = {
            id(value.buffer): value.buffer
            for step in self.steps
            for value in step.writes
            if value.buffer.kind in ("input", "constant")
        }
        return Plan(trace, self.steps, outputs, tuple(mutated.values()), self.fallbacks)

    def _returned(self, value: Value) -> Value:
        """A constant of the plan leaves it as a copy."""
        if value.buffer.kind != "literal":
            return value
        out = self.empty(value.dtype, value.shape)
        self.copy(out, value)
        return out

    def _bind(self, ref: TensorRef, buffer: Buffer) -> None:
        meta = ref.meta
        self.values[ref.id] = Value(buffer, meta.dtype, meta.shape, meta.stride)

    def _call(self, call: Call, lower: Any) -> None:
        args, kwargs = self._resolve(call.args), {key: self._resolve(one) for key, one in call.kwargs.items()}
        before = len(self.steps)
        try:
            values: tuple[Value | None, ...] | None = self._views(call)
            if values is None and call.after_dynamic:
                raise Unsupported("a shape from here on depends on the content of a tensor")
            values = values or self._lowered(call, lower, args, kwargs)
        except Unsupported as why:
            del self.steps[before:]
            values = self._external(call, args, kwargs, str(why))
        for ref, value in zip(call.outs, values, strict=True):
            if ref is not None and value is not None:
                self.values[ref.id] = value

    def _lowered(self, call: Call, lower: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Value | None, ...]:
        if lower is None:
            raise Unsupported("not in the table of supported overloads")
        metas = tuple(ref.meta if ref is not None else None for ref in call.outs)
        for one in flat((args, kwargs)):
            if isinstance(one, Value) and (one.dtype not in DTYPES or len(one.shape) > MAX_DIMS):
                raise Unsupported(f"a tensor of type {one.dtype} with {len(one.shape)} dimensions")
        for meta in metas:
            if meta is not None and meta.dtype not in DTYPES:
                raise Unsupported(f"a result of type {meta.dtype}")
        result = lower(self, metas[0] if len(metas) == 1 else metas, *args, **kwargs)
        values = tuple(result) if isinstance(result, tuple | list) else (result,)
        for meta, value in zip(metas, values, strict=True):
            if meta is not None and (value is None or (value.dtype, value.shape) != (meta.dtype, meta.shape)):
                raise AssertionError(f"{overload_name(call.op)}: planned {value}, eager gave {meta}")
        return values

    def _views(self, call: Call) -> tuple[Value, ...] | None:
        """Results that alias an operand without changing it: no step at all."""
        if not call.view_of:
            return None
        values = []
        for ref, base in zip(call.outs, call.view_of, strict=True):
            assert ref is not None
            source, meta = self.values[base.id], ref.meta
            shift = meta.offset * meta.itemsize - base.meta.offset * base.meta.itemsize
            values.append(Value(source.buffer, meta.dtype, meta.shape, meta.stride, source.offset + shift))
        return tuple(values)

    def _external(self, call: Call, args: Any, kwargs: dict[str, Any], reason: str) -> tuple[Value | None, ...]:
        self.fallbacks[overload_name(call.op), reason] += 1
        reads = tuple(one for one in flat((args, kwargs)) if isinstance(one, Value))
        writes = tuple(self.values[ref.id] for ref in call.mutates)
        step = External(call, args, kwargs, (), reads, writes, reason)
        outs: list[Value | None] = []
        for ref in call.outs:
            if ref is None:
                outs.append(None)
            elif ref.id in self.values:  # it returned one of its operands
                outs.append(self.values[ref.id])
            else:
                meta = ref.meta
                outs.append(Value(Buffer("external", made_by=step), meta.dtype, meta.shape, meta.stride))
        step.outs = tuple(outs)
        self.steps.append(step)
        return step.outs

    def _resolve(self, tree: Any) -> Any:
        if isinstance(tree, TensorRef):
            return self.values[tree.id]
        if isinstance(tree, list | tuple):
            return type(tree)(self._resolve(one) for one in tree)
        return tree


def flat(tree: Any) -> Iterator[Any]:
    """The leaves of nested lists, tuples and dicts."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for one in tree:
            yield from flat(one)
    else:
        yield tree


def literal(number: float | int | bool, dtype: str) -> bytes:
    """Bytes of a number as an element of `dtype`."""
    if dtype == "bool":
        return struct.pack("<?", bool(number))
    if dtype in ("f16", "bf16", "f32", "f64"):
        value = float(number)
        if dtype == "f64":
            return struct.pack("<d", value)
        try:
            single = struct.pack("<f", value)
        except OverflowError:
            single = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
        if dtype == "f32":
            return single
        if dtype == "f16":
            try:
                return struct.pack("<e", struct.unpack("<f", single)[0])
            except OverflowError:
                return struct.pack("<e", float("inf") if value > 0 else float("-inf"))
        bits = struct.unpack("<I", single)[0]
        if bits & 0x7FFFFFFF > 0x7F800000:
            return struct.pack("<H", 0x7FC0)
        return struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    size = DTYPES[dtype][2]
    whole = int(number) % (1 << (8 * size))
    return whole.to_bytes(size, "little")


def collapse(operands: Sequence[Value]) -> tuple[list[int], list[list[int]]]:
    """One iteration space over operands of equal shape: sizes and, per operand, strides, outermost first.

    Dimensions are ordered by the first operand's strides and merged where they lie behind each other in all of them,
    so that the innermost loop is as long as it can be. At least one dimension remains.
    """
    shape = operands[0].shape
    dims = [d for d in range(len(shape)) if shape[d] != 1]
    # A result's strides decide the order; among equals (broadcast outputs do not occur) the given order stays.
    dims.sort(key=lambda d: [-abs(operand.stride[d]) for operand in operands])
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in operands]
    for d in dims:
        if sizes and all(
            mine[-1] == operand.stride[d] * shape[d] for mine, operand in zip(strides, operands, strict=True)
        ):
            sizes[-1] *= shape[d]
            for mine, operand in zip(strides, operands, strict=True):
                mine[-1] = operand.stride[d]
        else:
            sizes.append(shape[d])
            for mine, operand in zip(strides, operands, strict=True):
                mine.append(operand.stride[d])
    if not sizes:
        sizes = [1]
        strides = [[0] for _ in operands]
    return sizes, strides


def pack(struct_name: str, members: dict[str, Any]) -> tuple[bytearray, list[tuple[int, Value]]]:
    """An argument struct of the headers from its members, and where in it addresses are to be patched."""
    described = layout.structs()[struct_name]
    data, pointers = bytearray(described.size), []
    known = {member.name: member for member in described.members}
    for name, given in members.items():
        if name not in known:
            raise AssertionError(f"{struct_name} has no member {name}")
        member = known[name]
        count = 1
        for length in member.shape:
            count *= length
        each = list(given) if member.shape else [given]
        if len(each) > count:
            raise Unsupported(f"{len(each)} values for {struct_name}.{name}, which has {count}")
        width = member.size // count
        for i, one in enumerate(each):
            at = member.offset + i * width
            if member.type == "ol_tensor":
                if one is not None:
                    describe(data, at, one)
                    pointers.append((at, one))
            elif isinstance(one, Value):
                pointers.append((at, one))
            else:
                form = _FORMATS[member.type]
                if form in "fd":
                    struct.pack_into("<" + form, data, at, float(one))
                else:
                    whole = int(one)
                    struct.pack_into("<" + form, data, at, whole % (1 << (8 * width)) if form.isupper() else whole)
    return data, pointers


def describe(data: bytearray, at: int, value: Value) -> None:
    """Write the descriptor (`ol_tensor`) of `value`, without its address, at byte `at`."""
    dims = len(value.shape)
    struct.pack_into("<QII", data, at, 0, DTYPES[value.dtype][0], dims)
    struct.pack_into(f"<{dims}q", data, at + 16, *value.shape)
    struct.pack_into(f"<{dims}q", data, at + 16 + 8 * MAX_DIMS, *value.stride)
