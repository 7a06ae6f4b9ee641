"""Lowerings of the family indexing: elements picked, written, or joined at places that index tensors name.

Writes go in the order of the index tensors' elements, so of two that name one place the last wins; eager PyTorch says
no order, and keeps this one for `scatter` and `index_copy` on a CPU. In-place forms write the operand itself: a cache
of keys and values is never copied.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outlast.executor.kernels import DTYPES
from outlast.executor.lowering import Meta, Planner, Unsupported, Value, lowers
from outlast.executor.lowering.movement import along, shares_of
from outlast.executor.lowering.views import cloned, filled, reshaped
from outlast.executor.planner import literal
from outlast.executor.values import MAX_DIMS

INDEX_TENSORS = 4  #: OL_INDEX_TENSORS
WHOLE_TENSOR = MAX_DIMS  #: ol_index_args.dim of a tensor that is taken as one row
INDEX_ERROR, RUNTIME_ERROR, INDEX_IGNORED = 0, 1, 2  #: OL_INDEX_ERROR, OL_RUNTIME_ERROR, OL_INDEX_IGNORED
NO_SKIP = -(1 << 63)


@dataclass(frozen=True, slots=True)
class Picked:
    """An index tensor, broadcast to the shape that is walked, and the dimension that it picks from."""

    index: Value
    limit: int  #: size of that dimension
    step: int  #: its stride
    dim: int  #: its number, for the text of an error


def indexed(
    p: Planner, kernel: str, data: Value, stride: Sequence[int], value: Value, picks: Sequence[Picked], *,
    negative: bool = False, error: int = INDEX_ERROR, factor: float | int = 1, skip: int = NO_SKIP,
) -> None:  # fmt: skip
    """One step of index_get, index_set, or index_add and its like; the shape that is walked is that of `value`.

    `data` is the whole indexed tensor and `stride` how its address moves along that shape (ol_index_args).
    """
    if value.numel == 0:
        return
    if len(picks) > INDEX_TENSORS:
        raise Unsupported(f"{len(picks)} index tensors (the most is {INDEX_TENSORS})")
    sizes, strides = merged(value.shape, [stride, value.stride, *(one.index.stride for one in picks)])
    if len(sizes) > MAX_DIMS:
        raise Unsupported(f"{len(sizes)} dimensions (the most is {MAX_DIMS})")
    reading = kernel == "index_get"
    p.step(
        kernel,
        writes=(value if reading else data,),
        shares=shares_of(value.numel, value.itemsize) if reading else 1,  # writes may meet, so they keep their order
        work=value.numel * 1.0,
        data=data
        if reading
        else replace(data),  # not the same object: what is not written over stays, so it is read too
        value=value,
        index=[one.index for one in picks],
        count=len(picks),
        dims=len(sizes),
        size=sizes,
        data_stride=strides[0],
        value_stride=strides[1],
        index_stride=[x for each in strides[2:] for x in (each + [0] * MAX_DIMS)[:MAX_DIMS]],
        limit=[one.limit for one in picks],
        step=[one.step for one in picks],
        skip=skip,
        factor=float(factor),
        whole=int(factor) if math.isfinite(factor) else 0,
        negative=int(negative),
        error=error,
        dtype=DTYPES[value.dtype][0],
        bytes=value.itemsize,
        dim=[one.dim for one in picks],
    )


def merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """The shape in the same order with dimensions merged that lie behind each other in all operands; at least one."""
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for d, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(mine[-1] == stride[d] * size for mine, stride in zip(kept, strides, strict=True)):
            sizes[-1] *= size
            for mine, stride in zip(kept, strides, strict=True):
                mine[-1] = stride[d]
        else:
            sizes.append(size)
            for mine, stride in zip(kept, strides, strict=True):
                mine.append(stride[d])
    return (sizes, kept) if sizes else ([1], [[0] for _ in strides])


def rounded(number: float | int, dtype: str) -> float | int:
    """A factor as PyTorch takes it: converted to the type of what it is multiplied with."""
    if dtype == "f16":
        return float(struct.unpack("<e", literal(number, "f16"))[0])
    if dtype == "bf16":
        return float(struct.unpack("<f", b"\0\0" + literal(number, "bf16"))[0])
    return number


def ranked(x: Value) -> Value:
    """A tensor of 0 dimensions counts as one element in a row."""
    return x if x.shape else x.view((1,))


def without(stride: Sequence[int], dim: int) -> tuple[int, ...]:
    """Strides that do not move along `dim`, whose place an index says."""
    return (*stride[:dim], 0, *stride[dim + 1 :])


# --- along one dimension, an index for each element


@lowers("aten::gather")
def _gather(p: Planner, out: Meta, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    to = p.like(out)
    x, places, value = ranked(x), ranked(p.cast(index, "i64")), ranked(to)
    dim %= len(x.shape)
    pick = Picked(places, x.shape[dim], x.stride[dim], dim)
    indexed(p, "index_get", x, without(x.stride, dim), value, [pick], error=RUNTIME_ERROR)
    return to


@lowers("aten::take")
def _take(p: Planner, out: Meta, x: Value, index: Value) -> Value:
    to = p.like(out)
    row = reshaped(p, x, (x.numel,))
    pick = Picked(p.cast(index, "i64"), x.numel, row.stride[0], WHOLE_TENSOR)
    indexed(p, "index_get", row, (0,) * len(to.shape), to, [pick], negative=True)
    return to


Write = Callable[..., None]


def writes(overload: str) -> Callable[[Write], Write]:
    """Register `write(p, target, *arguments)` for an overload and for its in-place form (`aten::NAME_`).

    `target` is a copy of the first operand, or that operand itself. Of the other operands those that share memory with
    it are copied first.
    """
    name, _, kind = overload.partition(".")
    in_place = f"{name}_.{kind}" if kind else f"{name}_"

    def register(write: Write) -> Write:
        @lowers(overload)
        def functional(p: Planner, out: Meta, x: Value, *args: Any, **kwargs: Any) -> Value:
            to = cloned(p, out, x)
            write(p, to, *args, **kwargs)
            return to

        @lowers(in_place)
        def itself(p: Planner, out: Meta, x: Value, *args: Any, **kwargs: Any) -> Value:
            if x.overlaps_itself:
                raise Unsupported("writes to a tensor whose elements share memory")
            write(p, x, *_apart(p, x, args), **_apart(p, x, kwargs))
            return x

        return write

    return register


def _apart(p: Planner, target: Value, given: Any) -> Any:
    if isinstance(given, Value):
        if not given.may_overlap(target):
            return given
        to = p.empty(given.dtype, given.shape)
        p.copy(to, given)
        return to
    if isinstance(given, dict):
        return {name: _apart(p, target, one) for name, one in given.items()}
    if isinstance(given, list | tuple):
        return type(given)(_apart(p, target, one) for one in given)
    return given


def _widened(p: Planner, kernel: str, target: Value, value: Value) -> tuple[Value, Value]:
    """Operands to join with: of narrow float types eager's scatter keeps sums and products in float32 to the end."""
    if target.dtype not in ("f16", "bf16") or kernel not in ("index_add", "index_mul"):
        return target, value
    return p.cast(target, "f32"), p.cast(value, "f32")


def _scatter(p: Planner, kernel: str, target: Value, dim: int, index: Value, src: Value) -> None:
    """`src` may be larger than `index`; what `index` does not reach is not used."""
    target, places, src = ranked(target), ranked(p.cast(index, "i64")), ranked(src)
    dim %= len(target.shape)
    value = replace(src, shape=places.shape)
    summed, value = _widened(p, kernel, target, value)
    pick = Picked(places, summed.shape[dim], summed.stride[dim], dim)
    indexed(p, kernel, summed, without(summed.stride, dim), value, [pick], error=RUNTIME_ERROR)
    if summed is not target:
        p.copy(target, summed)


def _everywhere(p: Planner, target: Value, index: Value, number: float | int | bool) -> Value:
    return p.scalar(number, target.dtype).expand(index.shape)


@writes("aten::scatter.src")
def _scatter_src(p: Planner, target: Value, dim: int, index: Value, src: Value) -> None:
    _scatter(p, "index_set", target, dim, index, src)


@writes("aten::scatter.value")
def _scatter_value(p: Planner, target: Value, dim: int, index: Value, value: float | int | bool) -> None:
    _scatter(p, "index_set", target, dim, index, _everywhere(p, target, index, value))


_SCATTER = {"add": "index_add", "multiply": "index_mul"}


@writes("aten::scatter.reduce")
def _scatter_joined(p: Planner, target: Value, dim: int, index: Value, src: Value, *, reduce: str) -> None:
    _scatter(p, _SCATTER[reduce], target, dim, index, src)


@writes("aten::scatter.value_reduce")
def _scatter_value_joined(
    p: Planner, target: Value, dim: int, index: Value, value: float | int | bool, *, reduce: str
) -> None:
    _scatter(p, _SCATTER[reduce], target, dim, index, _everywhere(p, target, index, value))


@writes("aten::scatter_add")
def _scatter_add(p: Planner, target: Value, dim: int, index: Value, src: Value) -> None:
    _scatter(p, "index_add", target, dim, index, src)


#: way to reduce -> (kernel, what an element starts from that is not included: a number, the least or the greatest one)
_REDUCE: dict[str, tuple[str, int | str]] = {
    "sum": ("index_add", 0), "prod": ("index_mul", 1),
    "amax": ("index_max", "least"), "amin": ("index_min", "greatest"),
}  # fmt: skip


def _neutral(dtype: str, which: int | str) -> float | int | bool:
    """The number that joining leaves out of account."""
    if isinstance(which, int):
        return which
    if dtype == "bool":
        return which == "greatest"
    size = 8 * DTYPES[dtype][2]
    if dtype == "u8":
        return 0 if which == "least" else 255
    if dtype.startswith("i"):
        return -(1 << (size - 1)) if which == "least" else (1 << (size - 1)) - 1
    return -math.inf if which == "least" else math.inf


def _reduction(reduce: str) -> tuple[str, int | str]:
    if reduce not in _REDUCE:
        raise Unsupported(f"reduction {reduce!r}")
    return _REDUCE[reduce]


@writes("aten::scatter_reduce.two")
def _scatter_reduce(
    p: Planner, target: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True
) -> None:
    kernel, neutral = _reduction(reduce)
    if not include_self:
        _scatter_value(p, target, dim, index, _neutral(target.dtype, neutral))
    _scatter(p, kernel, target, dim, index, src)


# --- along one dimension, an index for each slice


def _by_slice(
    p: Planner, kernel: str, target: Value, dim: int, index: Value, source: Value, *,
    negative: bool = False, error: int = INDEX_ERROR, factor: float | int = 1, skip: int = NO_SKIP,
) -> None:  # fmt: skip
    target, source = ranked(target), ranked(source)
    dim %= len(target.shape)
    places = along(reshaped(p, p.cast(index, "i64"), (index.numel,)), dim, source.shape)
    pick = Picked(places, target.shape[dim], target.stride[dim], dim)
    indexed(p, kernel, target, without(target.stride, dim), source, [pick],
            negative=negative, error=error, factor=factor, skip=skip)  # fmt: skip


@writes("aten::index_add")
def _index_add(p: Planner, target: Value, dim: int, index: Value, source: Value, *, alpha: float | int = 1) -> None:
    """Eager takes its scatter for more than one dimension without a factor, which shows in sums of narrow floats."""
    error = RUNTIME_ERROR if len(target.shape) > 1 else INDEX_ERROR
    summed = target
    if len(target.shape) > 1 and alpha == 1:
        summed, source = _widened(p, "index_add", target, source)
    _by_slice(p, "index_add", summed, dim, index, source, error=error, factor=rounded(alpha, target.dtype))
    if summed is not target:
        p.copy(target, summed)


@writes("aten::index_copy")
def _index_copy(p: Planner, target: Value, dim: int, index: Value, source: Value) -> None:
    _by_slice(p, "index_set", target, dim, index, source)


def _filled_slices(target: Value, dim: int, index: Value, value: Value) -> Value:
    shape = list(target.shape or (1,))
    shape[dim] = index.numel
    return value.expand(shape)


@writes("aten::index_fill.int_Scalar")
def _index_fill(p: Planner, target: Value, dim: int, index: Value, value: float | int | bool) -> None:
    number = p.scalar(value, target.dtype)
    _by_slice(p, "index_set", target, dim, index, _filled_slices(target, dim, index, number), negative=True)


@writes("aten::index_fill.int_Tensor")
def _index_fill_tensor(p: Planner, target: Value, dim: int, index: Value, value: Value) -> None:
    number = p.cast(value, target.dtype)
    _by_slice(p, "index_set", target, dim, index, _filled_slices(target, dim, index, number), negative=True)


@writes("aten::index_reduce")
def _index_reduce(
    p: Planner, target: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> None:
    kernel, neutral = _reduction(reduce)
    if not include_self:
        _index_fill(p, target, dim, index, _neutral(target.dtype, neutral))
    _by_slice(p, kernel, target, dim, index, source)


@lowers("aten::embedding_dense_backward")
def _embedding_dense_backward(
    p: Planner, out: Meta, grad: Value, indices: Value, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Value:
    if scale_grad_by_freq:
        raise Unsupported("gradients scaled by how often an index occurs")
    to = filled(p, out)
    rows = reshaped(p, grad, (indices.numel, out.shape[1]))
    skip = padding_idx if padding_idx >= 0 else NO_SKIP
    _by_slice(p, "index_add", to, 0, indices, rows, error=INDEX_IGNORED, skip=skip)
    return to
