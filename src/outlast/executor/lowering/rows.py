"""Lowerings of the family rows: softmax, its gradient, and scans along a dimension."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from outlast.executor.kernels import FLOATS
from outlast.executor.lowering import Meta, Planner, Unsupported, Value, lowers
from outlast.executor.lowering.dims import rows_of
from outlast.executor.lowering.reduce import comparable, whole


@dataclass(slots=True)
class _Outputs:
    """Results of a step, and the memory that it writes where that is not the result itself."""

    results: list[Value]
    written: list[Value]

    def finish(self, p: Planner) -> Any:
        """Copy what was written elsewhere; the result or the tuple of results."""
        for result, written in zip(self.results, self.written, strict=True):
            if written.buffer is not result.buffer:
                p.copy(result, written)
        return self.results[0] if len(self.results) == 1 else tuple(self.results)


def row_step(
    p: Planner, kernel: str, dim: int, inputs: dict[str, Value], outs: dict[str, Meta], *,
    kernel_dtype: str | None = None, **members: Any,
) -> Any:  # fmt: skip
    """One step of a kernel with ol_rows_args along `dim`; operands that are not [outer, n, inner] go through copies.

    `kernel_dtype`: element type in which the inputs are given, if it is not that of the first result.
    """
    first = next(iter(inputs.values()))
    rank = len(first.shape)
    dim = dim % rank if rank else 0
    made = _Outputs([], [])
    for name, meta in outs.items():
        result = p.like(meta)
        wanted = meta.dtype
        if name == "out" and kernel_dtype not in (None, meta.dtype):
            wanted = kernel_dtype if kernel_dtype is not None else wanted
        plain = wanted == meta.dtype or (wanted == "u8" and meta.dtype == "bool")
        fits = rank == 0 or rows_of(meta.shape, result.stride, dim) is not None
        made.results.append(result)
        made.written.append(replace(result, dtype=wanted) if plain and fits else p.empty(wanted, meta.shape))
    if first.numel == 0:
        return made.finish(p)
    strides: dict[str, Any] = {}
    operands: dict[str, Any] = {}
    for name, value in (*inputs.items(), *zip(outs, made.written, strict=True)):
        path = rows_of(value.shape, value.stride, dim) if rank else (0, 0, 0)
        if path is None:
            value = p.contiguous(value)
            path = rows_of(value.shape, value.stride, dim)
        assert path is not None
        operands[name], strides[f"{name}_stride"] = value, path
    n = first.shape[dim] if rank else 1
    outer, inner = math.prod(first.shape[:dim]), math.prod(first.shape[dim + 1 :])
    p.step(
        f"{kernel}_{first.dtype}",
        writes=made.written,
        shares=max(1, min(outer * inner, first.numel >> 14)),
        work=first.numel * 1.0,
        outer=outer,
        n=n,
        inner=inner,
        **operands,
        **strides,
        **members,
    )
    return made.finish(p)


@lowers("aten::_softmax")
def softmax(p: Planner, out: Meta, x: Value, dim: int, half_to_float: bool = False) -> Value:
    """exp(x) / sum(exp(x)) along a dimension."""
    return _softmax(p, "softmax", out, x, dim)


@lowers("aten::_log_softmax")
def log_softmax(p: Planner, out: Meta, x: Value, dim: int, half_to_float: bool = False) -> Value:
    """Logarithm of softmax."""
    return _softmax(p, "log_softmax", out, x, dim)


def _softmax(p: Planner, kernel: str, out: Meta, x: Value, dim: int) -> Value:
    if out.dtype not in FLOATS:
        raise Unsupported(f"softmax of {x.dtype} as {out.dtype}")
    result: Value = row_step(p, kernel, dim, {"in": p.cast(x, out.dtype)}, {"out": out})
    return result


@lowers("aten::_softmax_backward_data")
def softmax_backward(p: Planner, out: Meta, grad: Value, output: Value, dim: int, input_dtype: Any) -> Value:
    """Gradient of softmax from its result."""
    return _softmax_backward(p, "softmax_backward", out, grad, output, dim)


@lowers("aten::_log_softmax_backward_data")
def log_softmax_backward(p: Planner, out: Meta, grad: Value, output: Value, dim: int, input_dtype: Any) -> Value:
    """Gradient of log_softmax from its result."""
    return _softmax_backward(p, "log_softmax_backward", out, grad, output, dim)


def _softmax_backward(p: Planner, kernel: str, out: Meta, grad: Value, output: Value, dim: int) -> Value:
    if not grad.dtype == output.dtype == out.dtype:
        raise Unsupported(f"gradient {grad.dtype} and result {output.dtype} of softmax differ in type")
    result: Value = row_step(p, kernel, dim, {"in": grad, "other": output}, {"out": out})
    return result


def _into_out(p: Planner, result: Value, target: Value) -> Value:
    """Copy into the operand `out`."""
    if not target.is_contiguous:
        raise Unsupported("an out that is not contiguous, which PyTorch's softmax writes as if it were")
    p.copy(target, result)
    return target


@lowers("aten::_softmax.out")
def softmax_out(p: Planner, meta: Meta, x: Value, dim: int, half_to_float: bool = False, *, out: Value) -> Value:
    """softmax into a given tensor."""
    return _into_out(p, _softmax(p, "softmax", out.meta(), x, dim), out)


@lowers("aten::_log_softmax.out")
def log_softmax_out(p: Planner, meta: Meta, x: Value, dim: int, half_to_float: bool = False, *, out: Value) -> Value:
    """log_softmax into a given tensor."""
    return _into_out(p, _softmax(p, "log_softmax", out.meta(), x, dim), out)


@lowers("aten::_softmax_backward_data.out")
def softmax_backward_out(
    p: Planner, meta: Meta, grad: Value, output: Value, dim: int, input_dtype: Any, *, grad_input: Value
) -> Value:
    """Gradient of softmax into a given tensor."""
    result = _softmax_backward(p, "softmax_backward", grad_input.meta(), grad, output, dim)
    return _into_out(p, result, grad_input)


@lowers("aten::_log_softmax_backward_data.out")
def log_softmax_backward_out(
    p: Planner, meta: Meta, grad: Value, output: Value, dim: int, input_dtype: Any, *, out: Value
) -> Value:
    """Gradient of log_softmax into a given tensor."""
    return _into_out(p, _softmax_backward(p, "log_softmax_backward", out.meta(), grad, output, dim), out)


def _scan(p: Planner, kernel: str, out: Meta, x: Value, dim: int) -> Value:
    if out.dtype == "bool":
        raise Unsupported("a running total as bool")
    kernel_dtype = out.dtype if out.dtype in FLOATS else "i64"
    source = p.cast(x, out.dtype) if out.dtype in FLOATS else whole(p, x, out.dtype)
    result: Value = row_step(p, kernel, dim, {"in": source}, {"out": out}, kernel_dtype=kernel_dtype)
    return result


@lowers("aten::cumsum")
def cumsum(p: Planner, out: Meta, x: Value, dim: int, *, dtype: Any = None) -> Value:
    """Running sum."""
    return _scan(p, "cumsum", out, x, dim)


@lowers("aten::cumprod")
def cumprod(p: Planner, out: Meta, x: Value, dim: int, *, dtype: Any = None) -> Value:
    """Running product."""
    return _scan(p, "cumprod", out, x, dim)


@lowers("aten::logcumsumexp")
def logcumsumexp(p: Planner, out: Meta, x: Value, dim: int) -> Value:
    """Running log of the sum of exponentials."""
    if out.dtype not in FLOATS:
        raise Unsupported(f"logcumsumexp as {out.dtype}")
    result: Value = row_step(p, "logcumsumexp", dim, {"in": x}, {"out": out})
    return result


def _running(p: Planner, kernel: str, out: tuple[Meta, Meta], x: Value, dim: int) -> Any:
    source = comparable(p, x)
    return row_step(
        p, kernel, dim, {"in": source}, {"out": out[0], "second": out[1]}, kernel_dtype=source.dtype
    )  # fmt: skip


@lowers("aten::cummax")
def cummax(p: Planner, out: tuple[Meta, Meta], x: Value, dim: int) -> Any:
    """The largest so far and where it last stood."""
    return _running(p, "cummax", out, x, dim)


@lowers("aten::cummin")
def cummin(p: Planner, out: tuple[Meta, Meta], x: Value, dim: int) -> Any:
    """The smallest so far and where it last stood."""
    return _running(p, "cummin", out, x, dim)
