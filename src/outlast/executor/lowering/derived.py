"""In-place and `out=` overloads, derived from the functional lowering: compute, then copy into the operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outlast.executor.planner import Planner
from outlast.executor.values import Meta, Unsupported, Value

Lowering = Callable[..., Any]


def derive(op: Any, table: dict[str, Lowering]) -> Lowering | None:
    """A lowering for an overload that changes operands, if the functional one is in `table`."""
    schema = op._schema
    changed = [arg.name for arg in schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    if not changed:
        return None
    functional = functional_overload(op)
    if functional is None or functional not in table:
        return None
    if len(changed) != len(schema.returns) and len(schema.returns) != 0:
        return None
    lower = table[functional]
    order = [arg.name for arg in schema.arguments]
    outs = {arg.name for arg in schema.arguments if arg.name in changed and arg.is_out}

    def lowered(p: Planner, out: Any, /, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(order, args, strict=False)) | kwargs
        targets = [given[name] for name in changed]
        for target in targets:
            if target.overlaps_itself:
                raise Unsupported("writes to a tensor whose elements share memory")
        passed = {name: one for name, one in given.items() if name not in outs}
        positional = [passed.pop(name) for name in order if name in passed and not _keyword_only(op, name)]
        metas = tuple(Meta(t.dtype, t.shape, t.stride) for t in targets)
        wanted = tuple(_result_meta(p, meta, targets) for meta in metas)
        results = lower(p, wanted[0] if len(wanted) == 1 else wanted, *positional, **passed)
        results = results if isinstance(results, tuple | list) else (results,)
        for target, result in zip(targets, results, strict=True):
            if not target.same_place(result):
                p.copy(target, result)
        return tuple(targets)

    return lowered


def _keyword_only(op: Any, name: str) -> bool:
    return any(arg.name == name and arg.kwarg_only for arg in op._schema.arguments)


def _result_meta(p: Planner, meta: Meta, targets: list[Value]) -> Meta:
    """The functional result that is copied into a target: its dtype and shape, contiguous."""
    from outlast.executor.values import contiguous_strides

    return Meta(meta.dtype, meta.shape, contiguous_strides(meta.shape))


def functional_overload(op: Any) -> str | None:
    """Name of the functional form of an in-place or `out=` overload, by schema: the same arguments, none changed."""
    import torch

    schema = op._schema
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
    base = schema.name.rstrip("_") if schema.name.endswith("_") else schema.name
    packet = getattr(torch.ops.aten, base.removeprefix("aten::"), None)
    if packet is None:
        return None
    for name in packet.overloads():
        other = getattr(packet, name)._schema
        if any(a.alias_info is not None for a in other.arguments):
            continue
        if [(a.name, str(a.type)) for a in other.arguments] == wanted:
            return f"{other.name}.{other.overload_name}" if other.overload_name else str(other.name)
    return None
