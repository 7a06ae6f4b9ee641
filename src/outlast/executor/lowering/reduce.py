"""Lowerings of the family reduce: sums, extrema, counts, norms and variances over any dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outlast.executor.kernels import FLOATS
from outlast.executor.lowering import Meta, Planner, Unsupported, Value, lowers
from outlast.executor.lowering.dims import normal_dims, walk

# OL_FINISH_... of args_reduce.h
NONE, MEAN, ROOT, ANY, ALL = range(5)

_Dims = int | Sequence[int] | None


def _kept(dims: Sequence[int], x: Value, out: Meta | Value) -> list[int]:
    """Strides of a result for the kept dimensions, whether or not it keeps the reduced ones with size 1."""
    if len(out.shape) != len(x.shape):
        return list(out.stride)
    return [stride for dim, stride in enumerate(out.stride) if dim not in dims]


def _dims(x: Value, dim: _Dims, out: Meta) -> tuple[int, ...]:
    """The reduced dimensions. What an empty list means (all or none) differs between operators: `out` tells."""
    dims = normal_dims(dim, len(x.shape))
    if isinstance(dim, Sequence) and not dim and out.shape == x.shape:
        return ()
    return dims


def reduce_step(
    p: Planner,
    kernel: str,
    x: Value,
    dims: Sequence[int],
    out: Value | None,
    second: Value | None = None,
    **members: Any,
) -> None:
    """One reduction of `x` over `dims` into `out` and `second`, either of which may be left out."""
    base = out if out is not None else second
    assert base is not None
    if base.numel == 0:
        return
    into = second
    if second is not None and second.stride != base.stride:
        into = replace(p.empty(second.dtype, second.shape), stride=base.stride)
        if not base.is_contiguous:
            raise Unsupported("two results with different strides")
    path = walk(x.shape, x.stride, _kept(dims, x, base), dims)
    if path.length >= 1 << 31:
        raise Unsupported(f"{path.length} elements reduced into one")
    elements = path.count * path.length
    written = {"out": out, "second": into}
    operands: dict[str, Any] = {name: value for name, value in written.items() if value is not None}
    p.step(
        f"{kernel}_{x.dtype}",
        writes=tuple(operands.values()),
        shares=max(1, min(path.count, elements >> 15)),
        work=elements * 0.1,
        **(operands | {"in": x}),
        **path.members(),
        **members,
    )
    if into is not None and second is not None and into is not second:
        p.copy(second, into)


def comparable(p: Planner, x: Value) -> Value:
    """The same elements in a type that is compared by a kernel."""
    if x.dtype == "bool":
        return replace(x, dtype="u8")
    return p.cast(x, "i32") if x.dtype in ("i8", "i16") else x


def whole(p: Planner, x: Value, dtype: str) -> Value:
    """The elements as the integer type `dtype`, in 64 bits. What a NaN or a large float becomes depends on the type."""
    return p.cast(p.cast(x, dtype) if x.dtype in FLOATS else x, "i64")


def _extremum(p: Planner, kernel: str, out: Value, x: Value, dims: Sequence[int]) -> Value:
    """amax or amin of any element type into `out`."""
    source = comparable(p, x)
    if source.dtype == x.dtype or x.dtype == "bool":
        reduce_step(p, kernel, source, dims, replace(out, dtype=source.dtype))
        return out
    wide = p.empty(source.dtype, out.shape)
    reduce_step(p, kernel, source, dims, wide)
    p.copy(out, wide)
    return out


def _total(p: Planner, kernel: str, out: Meta, x: Value, dims: Sequence[int]) -> Value:
    """sum or prod in the type of the result; integers in 64 bits."""
    result = p.like(out)
    if out.dtype in FLOATS:
        reduce_step(p, kernel, p.cast(x, out.dtype), dims, result)
        return result
    if out.dtype == "bool":
        raise Unsupported("a sum or product as bool")
    wide = result if out.dtype == "i64" else p.empty("i64", out.shape)
    reduce_step(p, kernel, whole(p, x, out.dtype), dims, wide)
    if wide is not result:
        p.copy(result, wide)
    return result


@lowers("aten::sum", "aten::sum.dim_IntList")
def sum_(p: Planner, out: Meta, x: Value, dim: _Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    """Sum; bools and integers become i64."""
    return _total(p, "sum", out, x, _dims(x, dim, out))


@lowers("aten::prod", "aten::prod.dim_int")
def prod(p: Planner, out: Meta, x: Value, dim: _Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    """Product; bools and integers become i64."""
    return _total(p, "prod", out, x, _dims(x, dim, out))


@lowers("aten::nansum")
def nansum(p: Planner, out: Meta, x: Value, dim: _Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    """Sum of what is not NaN."""
    return _total(p, "nansum" if x.dtype in FLOATS and out.dtype in FLOATS else "sum", out, x, _dims(x, dim, out))


@lowers("aten::mean", "aten::mean.dim")
def mean(p: Planner, out: Meta, x: Value, dim: _Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    """Mean of floats."""
    if out.dtype not in FLOATS:
        raise Unsupported(f"a mean as {out.dtype}")
    result = p.like(out)
    reduce_step(p, "sum", p.cast(x, out.dtype), _dims(x, dim, out), result, finish=MEAN)
    return result


@lowers("aten::trace")
def trace(p: Planner, out: Meta, x: Value) -> Value:
    """Sum of the diagonal."""
    diagonal = replace(x, shape=(min(x.shape),), stride=(sum(x.stride),))
    return _total(p, "sum", out, diagonal, (0,))


@lowers("aten::amax", "aten::max")
def amax(p: Planner, out: Meta, x: Value, dim: _Dims = None, keepdim: bool = False) -> Value:
    """The largest; NaN if there is one."""
    return _extremum(p, "amax", p.like(out), x, _dims(x, dim, out))


@lowers("aten::amin", "aten::min")
def amin(p: Planner, out: Meta, x: Value, dim: _Dims = None, keepdim: bool = False) -> Value:
    """The smallest; NaN if there is one."""
    return _extremum(p, "amin", p.like(out), x, _dims(x, dim, out))


@lowers("aten::aminmax")
def aminmax(p: Planner, out: tuple[Meta, Meta], x: Value, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """Both."""
    dims = _dims(x, dim, out[0])
    return _extremum(p, "amin", p.like(out[0]), x, dims), _extremum(p, "amax", p.like(out[1]), x, dims)


def _with_index(p: Planner, kernel: str, out: tuple[Meta, Meta], x: Value, dim: int) -> tuple[Value, Value]:
    values, indices = p.like(out[0]), p.like(out[1])
    source = comparable(p, x)
    same = source.dtype == x.dtype or x.dtype == "bool"
    wide = replace(values, dtype=source.dtype) if same else p.empty(source.dtype, values.shape)
    reduce_step(p, kernel, source, normal_dims(dim, len(x.shape)), wide, indices)
    if not same:
        p.copy(values, wide)
    return values, indices


@lowers("aten::max.dim")
def max_dim(p: Planner, out: tuple[Meta, Meta], x: Value, dim: int, keepdim: bool = False) -> Any:
    """The largest along a dimension and where it is first."""
    return _with_index(p, "argmax", out, x, dim)


@lowers("aten::min.dim")
def min_dim(p: Planner, out: tuple[Meta, Meta], x: Value, dim: int, keepdim: bool = False) -> Any:
    """The smallest along a dimension and where it is first."""
    return _with_index(p, "argmin", out, x, dim)


def _index(p: Planner, kernel: str, out: Meta, x: Value, dim: int | None) -> Value:
    indices, source = p.like(out), comparable(p, x)
    if dim is None:
        row = p.contiguous(source).view([x.numel])
        reduce_step(p, kernel, row, (0,), None, replace(indices, shape=(), stride=()))
    else:
        reduce_step(p, kernel, source, normal_dims(dim, len(x.shape)), None, indices)
    return indices


@lowers("aten::argmax")
def argmax(p: Planner, out: Meta, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    """Where the largest is first."""
    return _index(p, "argmax", out, x, dim)


@lowers("aten::argmin")
def argmin(p: Planner, out: Meta, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    """Where the smallest is first."""
    return _index(p, "argmin", out, x, dim)


def _count(p: Planner, out: Meta, x: Value, dim: _Dims, finish: int) -> Value:
    result = p.like(out)
    reduce_step(p, "count", comparable(p, x), _dims(x, dim, out), result, finish=finish)
    return result


@lowers("aten::count_nonzero", "aten::count_nonzero.dim_IntList")
def count_nonzero(p: Planner, out: Meta, x: Value, dim: _Dims = None) -> Value:
    """How many are not 0; a NaN is not."""
    return _count(p, out, x, dim, NONE)


@lowers("aten::any", "aten::any.dim", "aten::any.dims")
def any_(p: Planner, out: Meta, x: Value, dim: _Dims = None, keepdim: bool = False) -> Value:
    """Whether one is not 0."""
    return _count(p, out, x, dim, ANY)


@lowers("aten::all", "aten::all.dim", "aten::all.dims")
def all_(p: Planner, out: Meta, x: Value, dim: _Dims = None, keepdim: bool = False) -> Value:
    """Whether none is 0."""
    return _count(p, out, x, dim, ALL)


def _variance(
    p: Planner, out: Meta, means: Meta | None, x: Value, dim: _Dims, correction: float | None, finish: int
) -> tuple[Value, Value | None]:
    if out.dtype not in FLOATS or x.dtype != out.dtype:
        raise Unsupported(f"a variance of {x.dtype} as {out.dtype}")
    result, second = p.like(out), p.like(means) if means is not None else None
    number = 1.0 if correction is None else float(correction)
    reduce_step(p, "var", x, _dims(x, dim, out), result, second, number=number, finish=finish)
    return result, second


@lowers("aten::var.correction")
def var(
    p: Planner, out: Meta, x: Value, dim: _Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Value:
    """Variance, with the divisor n - correction."""
    return _variance(p, out, None, x, dim, correction, NONE)[0]


@lowers("aten::std.correction")
def std(
    p: Planner, out: Meta, x: Value, dim: _Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Value:
    """Square root of the variance."""
    return _variance(p, out, None, x, dim, correction, ROOT)[0]


@lowers("aten::var_mean.correction")
def var_mean(
    p: Planner, out: tuple[Meta, Meta], x: Value, dim: _Dims = None, *, correction: float | None = None,
    keepdim: bool = False,
) -> Any:  # fmt: skip
    """Variance and mean."""
    return _variance(p, out[0], out[1], x, dim, correction, NONE)


@lowers("aten::std_mean.correction")
def std_mean(
    p: Planner, out: tuple[Meta, Meta], x: Value, dim: _Dims = None, *, correction: float | None = None,
    keepdim: bool = False,
) -> Any:  # fmt: skip
    """Standard deviation and mean."""
    return _variance(p, out[0], out[1], x, dim, correction, ROOT)


@lowers("aten::linalg_vector_norm")
def vector_norm(
    p: Planner, out: Meta, x: Value, ord: float = 2, dim: _Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    """p-norm of floats; of infinite order the largest or smallest magnitude."""
    if x.dtype not in FLOATS:
        raise Unsupported(f"a norm of {x.dtype}")
    result, dims, order = p.like(out), _dims(x, dim, out), float(ord)
    x = p.cast(x, out.dtype)
    if math.isinf(order):
        magnitudes = p.empty(x.dtype, x.shape)
        p.pointwise("abs", magnitudes, x)
        return _extremum(p, "amax" if order > 0 else "amin", result, magnitudes, dims)
    reduce_step(p, "norm", x, dims, result, number=order, finish=NONE if order in (0.0, 1.0) else ROOT)
    return result


@lowers("aten::logsumexp")
def logsumexp(p: Planner, out: Meta, x: Value, dim: _Dims, keepdim: bool = False) -> Value:
    """log of the sum of exponentials, without overflow."""
    result = p.like(out)
    reduce_step(p, "logsumexp", p.cast(x, out.dtype), _dims(x, dim, out), result)
    return result
