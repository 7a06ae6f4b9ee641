"""Lowerings of sort, topk and selection by rank of short rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outlast.core import layout
from outlast.executor.lowering import Meta, Planner, Unsupported, Value, lowers
from outlast.executor.lowering.reduce import comparable
from outlast.executor.lowering.rows import row_step


def _order(
    p: Planner, kernel: str, out: tuple[Meta, Meta], x: Value, dim: int, k: int, descending: bool, **members: Any
) -> Any:
    source = comparable(p, x)
    outs = {"out": out[0], "second": out[1]}
    return row_step(
        p, kernel, dim, {"in": source}, outs, kernel_dtype=source.dtype, k=k, descending=int(descending), **members
    )


def _length(x: Value, dim: int) -> int:
    return x.shape[dim] if x.shape else 1


def _sortable(x: Value, dim: int) -> int:
    """Length of the rows; raises `Unsupported` if they are too long."""
    n, most = _length(x, dim), layout.constants()["OL_SORT_MAX"]
    if n > most:
        raise Unsupported(f"rows of {n} elements to sort (the most is {most})")
    return n


@lowers("aten::sort")
def sort(p: Planner, out: tuple[Meta, Meta], x: Value, dim: int = -1, descending: bool = False) -> Any:
    """Rows in order, NaN as the largest, and where each element was; equal elements keep their order."""
    return _order(p, "order", out, x, dim, _sortable(x, dim), descending)


@lowers("aten::sort.stable")
def sort_stable(
    p: Planner, out: tuple[Meta, Meta], x: Value, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> Any:
    """The same; stability is always kept."""
    return _order(p, "order", out, x, dim, _sortable(x, dim), descending)


@lowers("aten::topk")
def topk(
    p: Planner, out: tuple[Meta, Meta], x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    """The k largest or smallest in order; of equal elements the first."""
    if not x.shape:
        k = 1  # even if none is asked for
    most, n = layout.constants(), _length(x, dim)
    if n > most["OL_SORT_MAX"] and k > most["OL_TOPK_MAX"]:
        raise Unsupported(f"{k} elements of rows of {n}")
    if out[0].numel == 0:
        return p.like(out[0]), p.like(out[1])
    return _order(p, "order", out, x, dim, k, largest)


def _keeping(meta: Meta, x: Value, dim: int) -> Meta:
    """The meta of a result with the reduced dimension kept as 1."""
    if len(meta.shape) == len(x.shape):
        return meta
    dim %= len(x.shape)
    shape, stride = list(meta.shape), list(meta.stride)
    shape.insert(dim, 1)
    stride.insert(dim, 1)
    return Meta(meta.dtype, tuple(shape), tuple(stride))


def _select(p: Planner, out: tuple[Meta, Meta], x: Value, dim: int, k: int, nan_wins: bool) -> Any:
    kept = _keeping(out[0], x, dim), _keeping(out[1], x, dim)
    values, indices = _order(p, "select", kept, x, dim, k, False, nan_wins=int(nan_wins))
    return tuple(
        replace(value, shape=meta.shape, stride=meta.stride) for value, meta in zip((values, indices), out, strict=True)
    )


@lowers("aten::kthvalue")
def kthvalue(p: Planner, out: tuple[Meta, Meta], x: Value, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest of each row and where it is."""
    _sortable(x, dim)
    return _select(p, out, x, dim, k, nan_wins=False)


@lowers("aten::median.dim")
def median_dim(p: Planner, out: tuple[Meta, Meta], x: Value, dim: int, keepdim: bool = False) -> Any:
    """The lower median of each row and where it is; NaN if there is one."""
    n = _sortable(x, dim)
    return _select(p, out, x, dim, (n + 1) // 2, nan_wins=True)


@lowers("aten::median")
def median(p: Planner, out: Meta, x: Value) -> Value:
    """The lower median of all elements."""
    if x.numel == 0:
        raise Unsupported("the median of nothing")
    row = p.contiguous(x).view([x.numel])
    n = _sortable(row, 0)
    result: Value = row_step(
        p, "select", 0, {"in": comparable(p, row)}, {"out": replace(out, shape=(1,), stride=(1,))},
        kernel_dtype=comparable(p, row).dtype, k=(n + 1) // 2, nan_wins=1,
    )  # fmt: skip
    return replace(result, shape=(), stride=())
