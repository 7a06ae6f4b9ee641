"""Lowerings of the negative log likelihood and its gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from outlast.executor.lowering import Meta, Planner, Unsupported, Value, lowers
from outlast.executor.values import contiguous_strides


def _places(x: Value) -> Value:
    """[rows, classes, places] of a tensor [classes], [rows, classes] or [rows, classes, height, width]."""
    if len(x.shape) == 1:
        x = x.unsqueeze(0)
    return x.unsqueeze(2) if len(x.shape) == 2 else x.view([*x.shape[:2], math.prod(x.shape[2:])])


def _targets(p: Planner, target: Value) -> Value:
    """[rows, places] of the targets [], [rows] or [rows, height, width]."""
    if target.dtype != "i64":
        target = p.cast(target, "i64")
    target = p.contiguous(target)
    rows = target.shape[0] if target.shape else 1
    return target.view([rows, target.numel // rows if rows else 1])


def _weights(weight: Value | None) -> dict[str, Any]:
    return {"weight": weight, "weight_stride": weight.stride[0]} if weight is not None else {}


@lowers("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def nll_loss_forward(
    p: Planner, out: tuple[Meta, Meta], x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int
) -> Any:
    """Negative log likelihood and the total weight of what counts."""
    losses, total = p.like(out[0]), p.like(out[1])
    if x.numel == 0 or target.numel == 0:
        raise Unsupported("a loss without elements")
    if len(x.shape) == 1:
        reduction = reduction or 2  # the loss of one row is its sum
    inputs, targets = _places(p.contiguous(x)), _targets(p, target)
    each = replace(losses, shape=targets.shape, stride=contiguous_strides(targets.shape))
    if reduction == 0 and not losses.is_contiguous:
        raise Unsupported("losses that are not contiguous")
    if reduction == 0:
        p.copy(total, p.scalar(0, out[1].dtype))
    members: dict[str, Any] = _weights(weight) | {"in": inputs} | ({} if reduction == 0 else {"total": total})
    p.step(
        f"nll_{x.dtype}",
        writes=(losses,) if reduction == 0 else (losses, total),
        work=targets.numel * 5.0,
        **members,
        target=targets,
        out=losses,
        rows=inputs.shape[0], classes=inputs.shape[1], places=inputs.shape[2],
        in_row=inputs.stride[0], in_class=inputs.stride[1], in_place=inputs.stride[2],
        target_row=targets.stride[0], target_place=targets.stride[1],
        out_row=each.stride[0], out_place=each.stride[1],
        ignored=ignore_index,
        reduction=reduction,
    )  # fmt: skip
    return losses, total


@lowers("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def nll_loss_backward(
    p: Planner, out: Meta, grad: Value, x: Value, target: Value, weight: Value | None, reduction: int,
    ignore_index: int, total: Value,
) -> Value:  # fmt: skip
    """Gradient of the input: 0 but for the targets."""
    result = p.like(out)
    if x.numel == 0 or target.numel == 0 or not result.is_contiguous:
        raise Unsupported("a loss without elements, or a gradient that is not contiguous")
    p.copy(result, p.scalar(0, out.dtype))
    outputs, targets = _places(result), _targets(p, target)
    grads = p.contiguous(grad)
    step = contiguous_strides(targets.shape) if reduction == 0 else (0, 0)
    p.step(
        f"nll_{x.dtype}",
        writes=(result,),
        work=targets.numel * 5.0,
        **_weights(weight),
        target=targets,
        out=result,
        total=total,
        grad=grads,
        rows=outputs.shape[0], classes=outputs.shape[1], places=outputs.shape[2],
        target_row=targets.stride[0], target_place=targets.stride[1],
        out_row=outputs.stride[0], out_class=outputs.stride[1], out_place=outputs.stride[2],
        grad_row=step[0], grad_place=step[1],
        ignored=ignore_index,
        reduction=reduction,
        backward=1,
    )  # fmt: skip
    return result
