"""A plan put into memory: where every buffer lies, which addresses are patched at a call, and who runs what.

Scratch memory of a plan is one arena; buffers whose lives do not meet share bytes. Steps are levelled over bytes, so
that sharing never lets two steps of one level touch the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outlast.core.errors import OutlastError
from outlast.executor import _native
from outlast.executor.planner import External, Plan, Step
from outlast.executor.runtime import Executor
from outlast.executor.values import Buffer, Value

ALIGNMENT = 64  #: bytes: a cache line, and the widest vector


@dataclass(slots=True)
class Stretch:
    """Steps that run as one submission, or one call that PyTorch runs."""

    first: int
    count: int
    external: External | None = None


@dataclass(slots=True)
class Output:
    """A result that is made anew for each call, and the views of it that the function returns."""

    buffer: Buffer
    value: Value  #: the view that decides dtype, shape and strides
    slot: int


@dataclass(slots=True)
class Program:
    """A plan ready to run on an executor. Slots: inputs, constants, outputs, results of external calls."""

    plan: Plan
    native: Any  #: _native.Program
    steps: list[Step]
    stretches: list[Stretch]
    outputs: list[Output]
    slots: dict[int, int]  #: id(buffer) -> slot
    arena: dict[int, int]  #: id(buffer) -> byte offset in the block, for scratch and literals
    arena_bytes: int

    @property
    def only_native(self) -> bool:
        """Whether PyTorch takes no part."""
        return not any(stretch.external for stretch in self.stretches)

    def kernels(self) -> list[str]:
        """Kernel of each step, for reports and errors."""
        return [step.kernel for step in self.steps]


def assemble(plan: Plan, executor: Executor) -> Program:
    """Lay a plan out in memory and register the kernels it needs."""
    inputs, constants = len(plan.trace.inputs), len(plan.trace.constants)
    outputs = _outputs(plan, inputs + constants)
    slots: dict[int, int] = {id(output.buffer): output.slot for output in outputs}
    next_slot = inputs + constants + len(outputs)
    for item in plan.steps:
        for value in _touched(item):
            buffer = value.buffer
            if buffer.kind == "input":
                slots[id(buffer)] = buffer.index
            elif buffer.kind == "constant":
                slots[id(buffer)] = inputs + buffer.index
            elif buffer.kind == "external" and id(buffer) not in slots:
                slots[id(buffer)] = next_slot
                next_slot += 1
    block = bytearray()
    steps = [item for item in plan.steps if isinstance(item, Step)]
    args_at = [_append(block, step.args) for step in steps]
    arena: dict[int, int] = {}
    for step in steps:
        for _, value in step.pointers:
            if value.buffer.kind == "literal" and id(value.buffer) not in arena:
                arena[id(value.buffer)] = _append(block, value.buffer.data, 8)
    start = _aligned(len(block), ALIGNMENT)
    size = _place(plan, slots, arena, start)
    patches = []
    for at, step in zip(args_at, steps, strict=True):
        for offset, value in step.pointers:
            slot = slots.get(id(value.buffer))
            if slot is None:
                patches.append((-1, at + offset, arena[id(value.buffer)] + value.offset))
            else:
                patches.append((slot, at + offset, value.offset))
    _level(plan, slots, arena)
    native = _native.Program(
        executor.native, executor.native.api, bytes(block), size,
        [(_operator(executor, step), step.level, at, step.shares) for step, at in zip(steps, args_at, strict=True)],
        patches, next_slot, sum(step.work for step in steps),
    )  # fmt: skip
    return Program(plan, native, steps, _stretches(plan), outputs, slots, arena, size - start)


def _operator(executor: Executor, step: Step) -> int:
    """Index of a step's kernel in the executor's table."""
    if step.source is not None:
        return step.source.operator(executor)  # type: ignore[no-any-return]
    return shipped_operator(executor, step.kernel)


def shipped_operator(executor: Executor, name: str) -> int:
    """Index of a shipped kernel in the executor's table, registered on first use."""
    known = executor.operators.get(name)
    if known is None:
        address = _addresses().get(name)
        if address is None:
            raise OutlastError(f"the build lacks the kernel {name}", do="Reinstall outlast, or build it again.")
        known = executor.register(name, address)
    return known.index


_table: dict[str, int] = {}


def _addresses() -> dict[str, int]:
    if not _table:
        _table.update(_native.operators(_native.isa()))
    return _table


def _outputs(plan: Plan, first: int) -> list[Output]:
    """Scratch buffers that leave the plan: each becomes a fresh tensor."""
    found: dict[int, Output] = {}
    for one in plan.outputs:
        if isinstance(one, Value) and one.buffer.kind in ("temporary", "literal"):
            known = found.get(id(one.buffer))
            if known is None:
                found[id(one.buffer)] = Output(one.buffer, one, first + len(found))
            elif one.numel > known.value.numel:
                known.value = one
    return list(found.values())


def _touched(item: Step | External) -> Sequence[Value]:
    if isinstance(item, Step):
        return [value for _, value in item.pointers]
    return [*item.reads, *item.writes, *(value for value in item.outs if value is not None)]


def _aligned(n: int, to: int) -> int:
    return -(-n // to) * to


def _append(block: bytearray, data: bytes | bytearray, to: int = 16) -> int:
    at = _aligned(len(block), to)
    block.extend(bytes(at - len(block)))
    block.extend(data)
    return at


def _place(plan: Plan, slots: dict[int, int], arena: dict[int, int], start: int) -> int:
    """Give each scratch buffer its bytes, first fit among those that live at the same time; the block's size."""
    lives: dict[int, tuple[Buffer, int, int]] = {}
    for at, item in enumerate(plan.steps):
        for value in _touched(item):
            buffer = value.buffer
            if id(buffer) in slots or id(buffer) in arena:
                continue
            first = lives[id(buffer)][1] if id(buffer) in lives else at
            lives[id(buffer)] = (buffer, first, at)
    size = start
    placed: list[tuple[int, int, int]] = []  # (byte, bytes, last use)
    for buffer, first, last in sorted(lives.values(), key=lambda life: life[1]):
        need = _aligned(max(len(buffer.data), buffer.size, 1), ALIGNMENT)
        placed = [one for one in placed if one[2] >= first]
        at = start
        for byte, length, _ in sorted(placed):
            if at + need <= byte:
                break
            at = max(at, byte + length)
        arena[id(buffer)] = at
        placed.append((at, need, last))
        size = max(size, at + need)
    return size


def _level(plan: Plan, slots: dict[int, int], arena: dict[int, int]) -> None:
    """Number the steps so that those of one level touch nothing that another of them writes.

    Different inputs may be the same memory, so all inputs count as one buffer once the plan changes any.
    """
    together = bool(plan.mutated)
    written: dict[Any, list[tuple[int, int, int]]] = {}
    read: dict[Any, list[tuple[int, int, int]]] = {}

    def place(value: Value) -> tuple[Any, int, int]:
        low, high = value.span
        buffer = value.buffer
        if id(buffer) in arena:
            return "block", arena[id(buffer)] + low, arena[id(buffer)] + high
        if together and buffer.kind in ("input", "constant", "external"):
            return "caller", -(1 << 62), 1 << 62
        return slots[id(buffer)], low, high

    def after(marks: list[tuple[int, int, int]], low: int, high: int) -> int:
        return max((level + 1 for a, b, level in marks if a < high and low < b), default=0)

    for item in plan.steps:
        level = 0
        reads, writes = [place(v) for v in item.reads], [place(v) for v in item.writes]
        if isinstance(item, External):
            writes += [place(v) for v in item.outs if v is not None]
        for key, low, high in reads:
            level = max(level, after(written.get(key, []), low, high))
        for key, low, high in writes:
            level = max(level, after(written.get(key, []), low, high), after(read.get(key, []), low, high))
        item.level = level
        for key, low, high in reads:
            read.setdefault(key, []).append((low, high, level))
        for key, low, high in writes:
            written.setdefault(key, []).append((low, high, level))


def _stretches(plan: Plan) -> list[Stretch]:
    found: list[Stretch] = []
    done = 0
    for item in plan.steps:
        if isinstance(item, External):
            found.append(Stretch(done, 0, item))
        else:
            if not found or found[-1].external is not None:
                found.append(Stretch(done, 0))
            found[-1].count += 1
            done += 1
    return found
