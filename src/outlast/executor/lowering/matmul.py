"""Lowerings of matrix products: mm, addmm, bmm, mv, dot and their relatives, for small sizes.

Every product is [batch, m, k] times [batch, k, n]; vectors are matrices of one row or column. The form of the kernel is
a matter of the operands' strides (see `_forms`), so that for given strides a row's result does not depend on how many
rows there are.
"""

from __future__ import annotations

from math import prod
from typing import Any

from outlast.executor.kernels import FLOATS, INTEGERS
from outlast.executor.lowering import Meta, Planner, Unsupported, Value, lowers

Number = int | float

RELU = 1  #: OL_ACT_RELU

#: Multiply-adds above which PyTorch's own kernel is at least as fast as ours, its overhead of 2.5 us or more included:
#: (with up to FEW_ROWS rows, with more). Measured against MKL and oneDNN (torch 2.13, two threads of a Zen 4 CPU) with
#: square weights: of float32, 16 x 1024 x 1024 took 306 us against 530, 64 x 128 x 128 took 22 us against 18 to 24.
#: float16 and integers have no fast path there at all.
LIMITS: dict[str, tuple[int, int]] = {
    "f32": (1 << 24, 1 << 20),
    "f64": (1 << 19, 1 << 17),
    "bf16": (1 << 19, 1 << 17),
    "f16": (1 << 26, 1 << 26),
} | dict.fromkeys(INTEGERS, (1 << 26, 1 << 26))
FEW_ROWS = 16  #: up to here the weights are read about once, and packing them does not pay

#: multiply-adds per nanosecond (AVX-512, measured at 64 x 64), for the estimate of a step's work
_SPEED = {"f32": 40.0, "f64": 18.0, "f16": 25.0, "bf16": 16.0}
#: a part is worth another worker from this much work on: on a busy core that worker starts tens of microseconds late
_PART_NS = 25000.0


def _swap(value: Value) -> Value:
    return value.permute((0, 2, 1))


def _forms(p: Planner, a: Value, b: Value) -> tuple[str, Value, Value]:
    """(form of the kernel, a, b), copied where no form takes the strides.

    `dot` wants both contiguous along k, `outer` wants b contiguous along n.
    """
    _, m, depth = a.shape
    columns = b.shape[2]
    along_k = depth <= 1 or b.stride[1] == 1
    along_n = columns > 1 and b.stride[2] == 1
    if along_k and (depth <= 1 or a.stride[2] == 1) and not (depth <= 1 and along_n):
        return "dot", a, b
    if along_n:
        return "outer", a, b
    if (along_k and m <= columns) or columns == 1:
        return "dot", p.contiguous(a), b if along_k else _swap(p.contiguous(_swap(b)))
    return "outer", a, p.contiguous(b)


def _product(
    p: Planner,
    result: Value,
    a: Value,
    b: Value,
    c: Value | None = None,
    *,
    beta: Number = 1,
    alpha: Number = 1,
    activation: int = 0,
) -> None:
    """Step(s) result = activation(alpha * a b + beta * c); all of three dimensions, c broadcast by strides of 0."""
    dtype = result.dtype
    if dtype not in FLOATS and dtype not in INTEGERS:
        raise Unsupported(f"matrix products of {dtype}")
    if any(one.dtype != dtype for one in (a, b)) or (c is not None and c.dtype != dtype):
        raise Unsupported("operands of several types")
    if alpha == 0:
        raise Unsupported("alpha = 0: whether NaN comes through depends on PyTorch's choice of kernel")
    if result.numel == 0:
        return
    batch, m, n = result.shape
    depth = a.shape[2]
    work = batch * m * n * depth
    few, many = LIMITS[dtype]
    limit = few if min(m, n) <= FEW_ROWS else many
    if work > limit:
        raise Unsupported(f"{work} multiply-adds of {dtype}: from {limit} on PyTorch's kernel is faster")
    if beta == 0:
        c = None
    if n == 1 and m > 1:  # one column: its transpose is one row, which a kernel computes many elements of at once
        a, b, result = _swap(b), _swap(a), _swap(result)
        c = None if c is None else _swap(c)
        m, n = n, m
    scale: dict[str, Any]
    if dtype in INTEGERS:
        form = "whole"
        scale = {"whole_alpha": _wrapped(alpha), "whole_beta": _wrapped(beta)}
    else:
        form, a, b = _forms(p, a, b)
        scale = {"alpha": float(alpha), "beta": float(beta)}
    time = work / _SPEED.get(dtype, 1.0) + 20.0 * batch
    members: dict[str, Any] = {
        name: value
        for letter, matrix, row, column in (("a", a, "m", "k"), ("b", b, "k", "n"), ("out", result, "m", "n"))
        for name, value in _strides(letter, matrix, row, column).items()
    }
    if c is not None:
        members |= _strides("c", c, "m", "n")
    p.step(
        f"matmul_{form}_{dtype}",
        writes=(result,),
        shares=1 if m == n == 1 else max(1, min(batch * -(-m // 4) * -(-n // 64), int(time / _PART_NS))),
        work=time,
        batch=batch,
        m=m,
        n=n,
        k=depth,
        activation=activation,
        **scale,
        **members,
    )


def _strides(letter: str, matrix: Value, row: str, column: str) -> dict[str, Any]:
    batch, rows, columns = matrix.stride
    return {letter: matrix, f"{letter}_batch": batch, f"{letter}_{row}": rows, f"{letter}_{column}": columns}


def _wrapped(number: Number) -> int:
    """A whole number as int64, which wraps around."""
    return (int(number) + (1 << 63)) % (1 << 64) - (1 << 63)


def _matrix(value: Value) -> Value:
    return value.unsqueeze(0)


def _row(value: Value) -> Value:
    return value.unsqueeze(0).unsqueeze(0)


def _column(value: Value) -> Value:
    return value.unsqueeze(1).unsqueeze(0)


@lowers("aten::mm")
def mm(p: Planner, out: Meta, a: Value, b: Value) -> Value:
    """[m, k] times [k, n]."""
    result = p.like(out)
    _product(p, _matrix(result), _matrix(a), _matrix(b))
    return result


@lowers("aten::addmm")
def addmm(p: Planner, out: Meta, c: Value, a: Value, b: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    """beta * c + alpha * a b; c is broadcast to [m, n], and not read if beta is 0."""
    result = p.like(out)
    _product(p, _matrix(result), _matrix(a), _matrix(b), _matrix(c.expand(out.shape)), beta=beta, alpha=alpha)
    return result


@lowers("aten::_addmm_activation")
def addmm_activation(
    p: Planner, out: Meta, c: Value, a: Value, b: Value, *, beta: Number = 1, alpha: Number = 1, use_gelu: bool = False
) -> Value:
    """addmm, then relu or gelu."""
    if out.dtype not in FLOATS:
        raise Unsupported("activations of integers")
    result = p.like(out)
    added = _matrix(c.expand(out.shape))
    if not use_gelu:
        _product(p, _matrix(result), _matrix(a), _matrix(b), added, beta=beta, alpha=alpha, activation=RELU)
        return result
    _product(p, _matrix(result), _matrix(a), _matrix(b), added, beta=beta, alpha=alpha)
    p.pointwise("gelu", result, result)
    return result


@lowers("aten::bmm")
def bmm(p: Planner, out: Meta, a: Value, b: Value) -> Value:
    """[batch, m, k] times [batch, k, n]."""
    result = p.like(out)
    _product(p, result, a, b)
    return result


@lowers("aten::baddbmm")
def baddbmm(p: Planner, out: Meta, c: Value, a: Value, b: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    """beta * c + alpha * a b, for each of the batch."""
    result = p.like(out)
    _product(p, result, a, b, c.expand(out.shape), beta=beta, alpha=alpha)
    return result


@lowers("aten::addbmm")
def addbmm(p: Planner, out: Meta, c: Value, a: Value, b: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    """beta * c + alpha * the sum of a b over the batch: one product with the batch as part of k."""
    result = p.like(out)
    batch, m, depth = a.shape
    if prod(out.shape) != 0:
        wide = p.contiguous(a.permute((1, 0, 2))).view((1, m, batch * depth))
        tall = p.contiguous(b).view((1, batch * depth, b.shape[2]))
        _product(p, _matrix(result), wide, tall, _matrix(c.expand(out.shape)), beta=beta, alpha=alpha)
    return result


@lowers("aten::mv")
def mv(p: Planner, out: Meta, a: Value, x: Value) -> Value:
    """[m, k] times [k]."""
    result = p.like(out)
    _product(p, _column(result), _matrix(a), _column(x))
    return result


@lowers("aten::addmv")
def addmv(p: Planner, out: Meta, c: Value, a: Value, x: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    """beta * c + alpha * a x."""
    result = p.like(out)
    _product(p, _column(result), _matrix(a), _column(x), _column(c.expand(out.shape)), beta=beta, alpha=alpha)
    return result


@lowers("aten::dot", "aten::vdot")
def dot(p: Planner, out: Meta, x: Value, y: Value) -> Value:
    """The sum of products of two vectors (real ones: nothing is conjugated)."""
    result = p.like(out)
    _product(p, _row(result.unsqueeze(0)), _row(x), _column(y))
    return result


@lowers("aten::addr")
def addr(p: Planner, out: Meta, c: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    """beta * c + alpha * x[i] y[j]."""
    result = p.like(out)
    a, b = _column(x), _row(y)
    _product(p, _matrix(result), a, b, _matrix(c.expand(out.shape)), beta=beta, alpha=alpha)
    return result
