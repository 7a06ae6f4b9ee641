"""Views as values, and the operators that copy one, write into one, or send a gradient back through one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from outlast.executor.kernels import DTYPES
from outlast.executor.lowering import Meta, Planner, Unsupported, Value, lowers
from outlast.executor.values import Buffer, contiguous_strides


def sliced(x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Value:
    """x[..., start:end:step, ...] along `dim`, with the ends cut to the dimension as Python does."""
    dim %= len(x.shape)
    first, past, _ = slice(start, end, step).indices(x.shape[dim])
    length = max(0, -(-(past - first) // step))
    return x.narrow(dim, first if length else 0, length, step)


def diagonal(x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """The diagonal of two dimensions as the last dimension; `offset` > 0 is above the main one."""
    dim1, dim2 = dim1 % len(x.shape), dim2 % len(x.shape)
    rows, columns = x.shape[dim1], x.shape[dim2]
    length = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    row, column = max(0, -offset), max(0, offset)
    start = x if length == 0 else x.narrow(dim1, row, rows - row).narrow(dim2, column, columns - column)
    rest = [d for d in range(len(x.shape)) if d not in (dim1, dim2)]
    return replace(
        start,
        shape=(*(x.shape[d] for d in rest), length),
        stride=(*(x.stride[d] for d in rest), x.stride[dim1] + x.stride[dim2]),
    )


def flipped(x: Value, dims: Sequence[int]) -> Value:
    """Walked backwards along `dims`."""
    for dim in dims:
        size = x.shape[dim]
        x = x.narrow(dim, max(0, size - 1), size, -1)
    return x


def windows(x: Value, dim: int, size: int, step: int) -> Value:
    """Windows of `size` elements every `step` along `dim`; the place in the window is the last dimension."""
    if not x.shape:
        return replace(x, shape=(size,), stride=(1,))
    dim %= len(x.shape)
    count = (x.shape[dim] - size) // step + 1
    start = x.narrow(dim, 0, count, step)
    return replace(start, shape=(*start.shape, size), stride=(*start.stride, x.stride[dim]))


def transposed(x: Value, dim0: int, dim1: int) -> Value:
    """Two dimensions exchanged."""
    if not x.shape:
        return x
    order = list(range(len(x.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return x.permute([d % len(order) for d in order])


def reshaped(p: Planner, x: Value, shape: Sequence[int]) -> Value:
    """The same elements under another shape: a view where possible, else of a contiguous copy."""
    try:
        return x.view(shape)
    except ValueError:
        return p.contiguous(x).view(shape)


def filled(p: Planner, out: Meta, number: float | int | bool = 0) -> Value:
    """Fresh memory with the same number everywhere."""
    to = p.like(out)
    p.copy(to, p.scalar(number, out.dtype))
    return to


def cloned(p: Planner, out: Meta, x: Value) -> Value:
    """A fresh copy."""
    to = p.like(out)
    p.copy(to, x)
    return to


def literal(data: bytes, dtype: str, shape: Sequence[int]) -> Value:
    """Elements that are known while planning; to be read only."""
    return Value(Buffer("literal", size=len(data), data=data), dtype, tuple(shape), contiguous_strides(shape))


def _copies(overload: str, view: Callable[..., Value]) -> None:
    @lowers(overload)
    def lower(p: Planner, out: Meta, x: Value, *args: Any, **kwargs: Any) -> Value:
        seen = view(x, *args, **kwargs)
        if seen.shape != out.shape:  # a view by size may leave -1 to be worked out
            seen = reshaped(p, seen, out.shape)
        return cloned(p, out, seen)


def _same(x: Value, *_shape: Any, **_flags: Any) -> Value:
    return x


_copies("aten::view_copy", _same)
_copies("aten::_reshape_copy", _same)
_copies("aten::_reshape_alias_copy", _same)
_copies("aten::alias_copy", _same)
_copies("aten::detach_copy", _same)

_copies("aten::squeeze_copy", _same)
_copies("aten::squeeze_copy.dim", _same)
_copies("aten::squeeze_copy.dims", _same)
_copies("aten::unsqueeze_copy", _same)
_copies("aten::slice_copy.Tensor", sliced)
_copies("aten::select_copy.int", lambda x, dim, index: x.select(dim, index))
_copies("aten::permute_copy", lambda x, dims: x.permute(dims))
_copies("aten::transpose_copy.int", transposed)
_copies("aten::t_copy", lambda x: x.permute(tuple(reversed(range(len(x.shape))))))
_copies("aten::diagonal_copy", diagonal)
_copies("aten::unfold_copy", windows)


@lowers("aten::lift_fresh")
def _lift_fresh(p: Planner, out: Meta, x: Value) -> Value:
    """A tensor that Python made of numbers: new at each call, since the function may go on to change it."""
    return cloned(p, out, x)


@lowers("aten::expand_copy")
def _expand_copy(p: Planner, out: Meta, x: Value, size: Sequence[int], *, implicit: bool = False) -> Value:
    return cloned(p, out, x.expand(out.shape))


@lowers("aten::as_strided_copy")
def _as_strided_copy(
    p: Planner, out: Meta, x: Value, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Value:
    if storage_offset is not None and (x.buffer.kind == "input" or storage_offset != 0):
        raise Unsupported("an offset from the start of a storage, which a plan does not know")
    return cloned(p, out, replace(x, shape=tuple(size), stride=tuple(stride)))


@lowers("aten::split_copy.Tensor", "aten::split_with_sizes_copy")
def _split_copy(
    p: Planner, out: Meta | tuple[Meta, ...], x: Value, split: int | Sequence[int], dim: int = 0
) -> tuple[Value, ...]:
    parts, at = [], 0
    for meta in (out,) if isinstance(out, Meta) else out:
        parts.append(cloned(p, meta, x.narrow(dim, at, meta.shape[dim])))
        at += meta.shape[dim]
    return tuple(parts)


@lowers("aten::unbind_copy.int")
def _unbind_copy(p: Planner, out: Meta | tuple[Meta, ...], x: Value, dim: int = 0) -> tuple[Value, ...]:
    metas = (out,) if isinstance(out, Meta) else out
    return tuple(cloned(p, meta, x.select(dim, i)) for i, meta in enumerate(metas))


@lowers("aten::select_scatter")
def _select_scatter(p: Planner, out: Meta, x: Value, src: Value, dim: int, index: int) -> Value:
    to = cloned(p, out, x)
    p.copy(to.select(dim, index), src)
    return to


@lowers("aten::slice_scatter")
def _slice_scatter(
    p: Planner,
    out: Meta,
    x: Value,
    src: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    to = cloned(p, out, x)
    p.copy(sliced(to, dim, start, end, step), src)
    return to


@lowers("aten::diagonal_scatter")
def _diagonal_scatter(
    p: Planner, out: Meta, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    to = cloned(p, out, x)
    p.copy(diagonal(to, offset, dim1, dim2), src)
    return to


@lowers("aten::slice_backward")
def _slice_backward(
    p: Planner, out: Meta, grad: Value, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Value:
    to = filled(p, out)
    p.copy(sliced(to, dim, start, end, step), grad)
    return to


@lowers("aten::select_backward")
def _select_backward(p: Planner, out: Meta, grad: Value, input_sizes: Sequence[int], dim: int, index: int) -> Value:
    to = filled(p, out)
    p.copy(to.select(dim, index), grad)
    return to


@lowers("aten::diagonal_backward")
def _diagonal_backward(
    p: Planner, out: Meta, grad: Value, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Value:
    to = filled(p, out)
    p.copy(diagonal(to, offset, dim1, dim2), grad)
    return to


@lowers("aten::diag_embed")
def _diag_embed(p: Planner, out: Meta, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    to = filled(p, out)
    p.copy(diagonal(to, offset, dim1, dim2), x)
    return to


@lowers("aten::eye", "aten::eye.m")
def _eye(p: Planner, out: Meta, n: int, m: int | None = None, **_kind: Any) -> Value:
    to = filled(p, out)
    p.copy(diagonal(to), p.scalar(1, out.dtype))
    return to


def _triangle_indices(p: Planner, out: Meta, row: int, col: int, offset: int, *, upper: bool) -> Value:
    places = [(i, j) for i in range(row) for j in range(col) if (j - i >= offset if upper else j - i <= offset)]
    size = DTYPES[out.dtype][2]
    data = b"".join(one[k].to_bytes(size, "little", signed=True) for k in (0, 1) for one in places)
    return cloned(p, out, literal(data, out.dtype, out.shape))


@lowers("aten::tril_indices")
def _tril_indices(p: Planner, out: Meta, row: int, col: int, offset: int = 0, **_kind: Any) -> Value:
    return _triangle_indices(p, out, row, col, offset, upper=False)


@lowers("aten::triu_indices")
def _triu_indices(p: Planner, out: Meta, row: int, col: int, offset: int = 0, **_kind: Any) -> Value:
    return _triangle_indices(p, out, row, col, offset, upper=True)
