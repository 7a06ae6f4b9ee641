"""Lowerings of indexing with several dimensions at once (`x[i, :, j]`), of masks, and of search in sorted rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outlast.executor.kernels import DTYPES, INTEGERS
from outlast.executor.lowering import Meta, Planner, Unsupported, Value, lowers
from outlast.executor.lowering.indexing import WHOLE_TENSOR, Picked, indexed, writes
from outlast.executor.lowering.movement import pick, shares_of
from outlast.executor.lowering.views import cloned, reshaped

MASK = "a mask: how many elements it names depends on data"


@dataclass(frozen=True, slots=True)
class _Place:
    """How `x[i, j, None, k]` walks over its result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]  #: of x along that shape
    picks: tuple[Picked, ...]


def _place(p: Planner, x: Value, indices: Sequence[Value | None]) -> _Place:
    given = [(dim, one) for dim, one in enumerate(indices) if one is not None]
    if any(one.dtype in ("bool", "u8") for _, one in given):
        raise Unsupported(MASK)
    dims = [dim for dim, _ in given]
    rank = max(len(one.shape) for _, one in given)
    common = [1] * rank
    for _, one in given:
        for i, size in enumerate(one.shape, rank - len(one.shape)):
            common[i] = size if common[i] == 1 else common[i]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    before = [d for d in range(len(x.shape)) if d not in dims and adjacent and d < dims[0]]
    after = [d for d in range(len(x.shape)) if d not in dims and d not in before]
    shape = (*(x.shape[d] for d in before), *common, *(x.shape[d] for d in after))
    stride = (*(x.stride[d] for d in before), *([0] * rank), *(x.stride[d] for d in after))
    picks = []
    for dim, one in given:
        lined = p.cast(one, "i64").expand(common)
        for _ in after:
            lined = lined.unsqueeze(len(lined.shape))
        picks.append(Picked(lined.expand(shape), x.shape[dim], x.stride[dim], dim))
    return _Place(shape, stride, tuple(picks))


@lowers("aten::index.Tensor", "aten::_unsafe_index.Tensor")
def _index_tensor(p: Planner, out: Meta, x: Value, indices: Sequence[Value | None]) -> Value:
    to = p.like(out)
    given = [(dim, one) for dim, one in enumerate(indices) if one is not None]
    if len(given) == 1 and given[0][1].dtype in ("i64", "i32") and to.is_contiguous:
        dim, index = given[0]
        row = reshaped(p, index, (index.numel,))
        pick(p, to.view((*x.shape[:dim], index.numel, *x.shape[dim + 1 :])), x, dim, row, negative=True)
        return to
    place = _place(p, x, indices)
    indexed(p, "index_get", x, place.stride, to, place.picks, negative=True)
    return to


def _put(
    p: Planner, target: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False,
    unsafe: bool = False,
) -> None:  # fmt: skip
    given = [one for one in indices if one is not None]
    if len(given) == 1 and given[0].dtype in ("bool", "u8") and not accumulate:
        _put_where(p, target, indices, values)
        return
    place = _place(p, target, indices)
    try:
        value = values.expand(place.shape)
    except ValueError as why:
        raise Unsupported(str(why)) from None
    indexed(p, "index_add" if accumulate else "index_set", target, place.stride, value, place.picks, negative=True)


def _put_where(p: Planner, target: Value, indices: Sequence[Value | None], values: Value) -> None:
    """x[mask] = values where all elements that the mask names get the same: where(mask, values, x)."""
    dim, mask = next((dim, one) for dim, one in enumerate(indices) if one is not None)
    before, covered, after = target.shape[:dim], len(mask.shape), target.shape[dim + len(mask.shape) :]
    lead = len(before) + 1 + len(after) - len(values.shape)
    if 0 <= len(before) - lead < len(values.shape) and values.shape[len(before) - lead] != 1:
        raise Unsupported(MASK)
    try:
        value = values.expand((*before, 1, *after))
    except ValueError as why:
        raise Unsupported(str(why)) from None
    for _ in range(covered - 1):
        value = value.unsqueeze(dim)
    if covered == 0:
        value = value.select(dim, 0)
    where = p.cast(mask, "bool")
    for _ in after:
        where = where.unsqueeze(len(where.shape))
    p.pointwise("where", target, where.expand(target.shape), value.expand(target.shape), target)


writes("aten::index_put")(_put)
writes("aten::_index_put_impl")(_put)


@lowers("aten::_unsafe_index_put")
def _unsafe_put(p: Planner, out: Meta, x: Value, *rest: Any) -> Value:
    to = cloned(p, out, x)
    _put(p, to, *rest)
    return to


@writes("aten::put")
def _put_flat(p: Planner, target: Value, index: Value, source: Value, accumulate: bool = False) -> None:
    row = reshaped(p, target, (target.numel,))  # a copy if it does not lie in one row
    value = reshaped(p, source, index.shape)
    pick = Picked(p.cast(index, "i64"), target.numel, row.stride[0], WHOLE_TENSOR)
    indexed(p, "index_add" if accumulate else "index_set", row, (0,) * len(index.shape), value, [pick], negative=True)
    if row.buffer is not target.buffer:
        p.copy(target, row.view(target.shape))


# --- masks and sorted rows


@writes("aten::masked_scatter")
def masked_scatter(p: Planner, target: Value, mask: Value, source: Value) -> None:
    """The source's elements go where the mask says, in order; fails when there are too few."""
    if target.numel == 0:
        return
    row = p.contiguous(target)
    p.step(
        "masked_scatter",
        writes=(row,),
        work=target.numel * 1.0,
        out=replace(row),
        mask=p.contiguous(mask.expand(target.shape)),
        count=target.numel,
        limit=source.numel,
        bytes=target.itemsize,
        source=p.contiguous(source),
    )
    if row.buffer is not target.buffer:
        p.copy(target, row)


def _search(p: Planner, out: Meta, sequence: Value, value: Value, *, right: bool) -> Value:
    to = p.like(out)
    if out.numel == 0:
        return to
    if value.dtype != sequence.dtype or not to.is_contiguous:
        raise Unsupported("values of another type than the sorted row, or a result that is not contiguous")
    length = sequence.shape[-1]
    p.step(
        "searchsorted",
        writes=(to,),
        shares=shares_of(to.numel, 64),
        work=to.numel * 10.0,
        out=to,
        sorted=p.contiguous(sequence),
        value=p.contiguous(value),
        rows=1 if len(sequence.shape) == 1 else math.prod(sequence.shape[:-1]),
        length=length,
        pitch=0 if len(sequence.shape) == 1 else length,
        count=to.numel if len(sequence.shape) == 1 else value.shape[-1],
        right=int(right),
        narrow=int(out.dtype == "i32"),
        dtype=DTYPES[value.dtype][0],
    )
    return to


@lowers("aten::searchsorted.Tensor")
def _searchsorted(
    p: Planner, out: Meta, sequence: Value, x: Value, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Value | None = None,
) -> Value:  # fmt: skip
    if sorter is not None:
        raise Unsupported("a row that is sorted by way of an index")
    return _search(p, out, sequence, x, right=right or side == "right")


@lowers("aten::searchsorted.Scalar")
def _searchsorted_number(p: Planner, out: Meta, sequence: Value, number: float | int, **kwargs: Any) -> Value:
    return _searchsorted(p, out, sequence, _number(p, number, sequence), **kwargs)


@lowers("aten::bucketize.Tensor")
def _bucketize(
    p: Planner, out: Meta, x: Value, boundaries: Value, *, out_int32: bool = False, right: bool = False
) -> Value:
    return _search(p, out, boundaries, x, right=right)


@lowers("aten::bucketize.Scalar")
def _bucketize_number(p: Planner, out: Meta, number: float | int, boundaries: Value, **kwargs: Any) -> Value:
    return _bucketize(p, out, _number(p, number, boundaries), boundaries, **kwargs)


def _number(p: Planner, number: float | int, sequence: Value) -> Value:
    if isinstance(number, float) and sequence.dtype in INTEGERS:
        raise Unsupported("a number with a fraction among integers")
    return p.scalar(number, sequence.dtype)
