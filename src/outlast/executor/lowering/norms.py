"""Lowerings of layer_norm with its gradient, rms_norm, group_norm, and batch_norm by given statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outlast.executor.kernels import FLOATS
from outlast.executor.lowering import Meta, Planner, Unsupported, Value, lowers
from outlast.executor.lowering.dims import rows_of


def _flat_rows(p: Planner, x: Value, lead: int) -> tuple[Value, int]:
    """`x` (copied if need be) whose dimensions from `lead` on are contiguous, and the stride of a row."""
    inside = replace(x, shape=x.shape[lead:], stride=x.stride[lead:])
    path = rows_of((*x.shape[:lead], 1), (*x.stride[:lead], 1), lead)
    if not inside.is_contiguous or path is None:
        x = p.contiguous(x)
        return x, math.prod(x.shape[lead:])
    return x, path[0]


def _same_type(kernel: str, x: Value, *others: Value | None) -> None:
    if x.dtype not in FLOATS or any(other is not None and other.dtype != x.dtype for other in others):
        raise Unsupported(f"{kernel} of operands of different types")


def _operands(p: Planner, source: Value, **values: Value | None) -> dict[str, Any]:
    """Members for the input and for the parameters that are given."""
    return {"in": source} | {name: p.contiguous(value) for name, value in values.items() if value is not None}


def _into(p: Planner, meta: Meta) -> tuple[Value, Value]:
    """A result, and contiguous memory to write: the result itself where it is contiguous."""
    result = p.like(meta)
    return result, result if result.is_contiguous else p.empty(meta.dtype, meta.shape)


@lowers("aten::native_layer_norm")
def layer_norm(
    p: Planner, out: tuple[Meta, Meta, Meta], x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None,
    eps: float,
) -> Any:  # fmt: skip
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions."""
    _same_type("layer_norm", x, weight, bias)
    if any(meta.dtype != x.dtype for meta in out):
        raise Unsupported("layer_norm with statistics of another type")
    results = [_into(p, meta) for meta in out]
    n = math.prod(shape)
    if x.numel == 0:
        raise Unsupported("layer_norm of nothing")
    source, row = _flat_rows(p, x, len(x.shape) - len(shape))
    rows = x.numel // n
    p.step(
        f"layer_norm_{x.dtype}",
        writes=[written for _, written in results],
        shares=max(1, min(rows, x.numel >> 14)),
        work=x.numel * 0.5,
        **_operands(p, source, weight=weight, bias=bias),
        out=results[0][1], mean=results[1][1], rstd=results[2][1],
        rows=rows, n=n, in_row=row, out_row=n, eps=eps,
    )  # fmt: skip
    for result, written in results:
        if result is not written:
            p.copy(result, written)
    return tuple(result for result, _ in results)


@lowers("aten::native_layer_norm_backward")
def layer_norm_backward(
    p: Planner, out: tuple[Meta | None, ...], grad: Value, x: Value, shape: Sequence[int], mean: Value, rstd: Value,
    weight: Value | None, bias: Value | None, output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    """Gradients of input, weight and bias."""
    _same_type("layer_norm_backward", x, grad, mean, rstd, weight, bias)
    if x.numel == 0:
        raise Unsupported("layer_norm of nothing")
    n, lead = math.prod(shape), len(x.shape) - len(shape)
    source, row = _flat_rows(p, x, lead)
    grads, grad_row = _flat_rows(p, grad, lead)
    results = [p.like(meta) if meta is not None else None for meta in out]
    if any(result is not None and not result.is_contiguous for result in results):
        raise Unsupported("gradients that are not contiguous")
    members: dict[str, Any] = {
        "grad": grads, "rows": x.numel // n, "n": n, "in_row": row, "grad_row": grad_row, "out_row": n,
        **_operands(p, source, mean=mean, rstd=rstd, weight=weight),
    }  # fmt: skip
    if results[0] is not None:
        shares = max(1, min(x.numel // n, x.numel >> 14))
        p.step(
            f"layer_norm_backward_{x.dtype}", writes=(results[0],), shares=shares, work=x.numel * 1.0,
            out=results[0], **members,
        )  # fmt: skip
    sums: dict[str, Any] = {
        name: value for name, value in zip(("grad_weight", "grad_bias"), results[1:], strict=True) if value is not None
    }
    if sums:
        p.step(
            f"layer_norm_backward_weight_{x.dtype}", writes=tuple(sums.values()), shares=max(1, n >> 8),
            work=x.numel * 1.0, **members, **sums,
        )  # fmt: skip
    return tuple(results)


@lowers("aten::rms_norm")
def rms_norm(
    p: Planner, out: Meta, x: Value, shape: Sequence[int], weight: Value | None = None, eps: float | None = None
) -> Value:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimensions; eps is the machine's unless given."""
    return _rms_norm(p, out, None, x, shape, weight, eps)


@lowers("aten::_fused_rms_norm")
def fused_rms_norm(
    p: Planner, out: tuple[Meta, Meta], x: Value, shape: Sequence[int], weight: Value | None, eps: float | None
) -> Any:
    """The same with 1 / sqrt(mean + eps)."""
    rstd = p.like(out[1])
    return _rms_norm(p, out[0], rstd, x, shape, weight, eps), rstd


def _rms_norm(
    p: Planner, out: Meta, rstd: Value | None, x: Value, shape: Sequence[int], weight: Value | None, eps: float | None
) -> Value:
    _same_type("rms_norm", x, weight)
    if x.numel == 0 or out.dtype != x.dtype:
        raise Unsupported("rms_norm of nothing, or into another type")
    compute = "f64" if x.dtype == "f64" else "f32"
    if eps is None:
        eps = 2.0**-52 if x.dtype == "f64" else 2.0**-23  # of the type of computation
    if rstd is not None and (rstd.dtype != compute or not rstd.is_contiguous):
        raise Unsupported("rms_norm with statistics of another type")
    result, written = _into(p, out)
    n = math.prod(shape)
    source, row = _flat_rows(p, x, len(x.shape) - len(shape))
    p.step(
        f"rms_norm_{x.dtype}",
        writes=[written] if rstd is None else [written, rstd],
        shares=max(1, min(x.numel // n, x.numel >> 14)),
        work=x.numel * 0.5,
        **(_operands(p, source, weight=weight) | ({} if rstd is None else {"rstd": rstd})),
        out=written, rows=x.numel // n, n=n, in_row=row, out_row=n,
        eps=eps,
    )  # fmt: skip
    if written is not result:
        p.copy(result, written)
    return result


@lowers("aten::native_group_norm")
def group_norm(
    p: Planner, out: tuple[Meta, Meta, Meta], x: Value, weight: Value | None, bias: Value | None, batch: int,
    channels: int, places: int, groups: int, eps: float,
) -> Any:  # fmt: skip
    """Normalisation over groups of channels."""
    _same_type("group_norm", x, weight, bias)
    if any(meta.dtype != x.dtype for meta in out) or x.numel == 0:
        raise Unsupported("group_norm of nothing, or with statistics of another type")
    if not all(one is None or one.is_contiguous for one in (weight, bias)):
        raise Unsupported("parameters that are not contiguous, which PyTorch's group_norm reads as if they were")
    results = [_into(p, meta) for meta in out]
    p.step(
        f"group_norm_{x.dtype}",
        writes=[written for _, written in results],
        shares=max(1, min(batch * groups, x.numel >> 14)),
        work=x.numel * 0.5,
        **_operands(p, p.contiguous(x), weight=weight, bias=bias),
        out=results[0][1], mean=results[1][1], rstd=results[2][1],
        batch=batch, channels=channels, places=places, groups=groups, eps=eps,
    )  # fmt: skip
    for result, written in results:
        if result is not written:
            p.copy(result, written)
    return tuple(result for result, _ in results)


@lowers("aten::native_batch_norm")
def batch_norm(
    p: Planner, out: tuple[Meta, Meta, Meta], x: Value, weight: Value | None, bias: Value | None, mean: Value | None,
    var: Value | None, training: bool, momentum: float, eps: float,
) -> Any:  # fmt: skip
    """Normalisation by given statistics; with those of the batch (training) it is left to PyTorch."""
    if training or mean is None or var is None:
        raise Unsupported("batch_norm with the statistics of the batch")
    _same_type("batch_norm", x, weight, bias, mean, var)
    if x.numel == 0:
        raise Unsupported("batch_norm of nothing")
    result, written = _into(p, out[0])
    batch, channels = x.shape[:2]
    p.step(
        f"batch_norm_{x.dtype}",
        writes=(written,),
        shares=max(1, min(batch, x.numel >> 14)),
        work=x.numel * 0.3,
        **_operands(p, p.contiguous(x), weight=weight, bias=bias, mean=mean, rstd=var),
        out=written,
        batch=batch, channels=channels, places=math.prod(x.shape[2:]), eps=eps,
    )  # fmt: skip
    if written is not result:
        p.copy(result, written)
    return result, p.like(out[1]), p.like(out[2])


@lowers("aten::_native_batch_norm_legit_no_training")
def batch_norm_no_training(
    p: Planner, out: tuple[Meta, Meta, Meta], x: Value, weight: Value | None, bias: Value | None, mean: Value,
    var: Value, momentum: float, eps: float,
) -> Any:  # fmt: skip
    """The same, as torch.export writes it."""
    return batch_norm(p, out, x, weight, bias, mean, var, False, momentum, eps)
