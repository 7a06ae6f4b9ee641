"""Arguments for the operators of the family rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from samples_reduce import WIDE, Sample, content, long_shapes, summable
from strategies import ALL, FLOATS, INTEGERS, dims_of, shapes, tensors

SAMPLES: dict[str, Callable[[DrawFn], Sample]] = {}
TOLERANCES: dict[str, tuple[float, float]] = {}


def sample(*names: str) -> Callable[[Callable[[DrawFn], Sample]], Callable[[DrawFn], Sample]]:
    """Register a sample for overloads."""

    def register(function: Callable[[DrawFn], Sample]) -> Callable[[DrawFn], Sample]:
        for name in names:
            SAMPLES[f"aten::{name}"] = function
        return function

    return register


@sample("_softmax", "_log_softmax")
def _softmax(draw: DrawFn) -> Sample:
    x = tensors(draw, FLOATS, long_shapes(draw))
    return (x, dims_of(draw, x), False), {}


@sample("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(draw: DrawFn) -> Sample:
    grad = tensors(draw, WIDE, shapes(draw), low=0.1, high=2)
    dim = dims_of(draw, grad)
    output = tensors(draw, (grad.dtype,), tuple(grad.shape), low=-2, high=0)
    return (grad, output, dim, grad.dtype), {}


@sample("_softmax.out", "_log_softmax.out")
def _softmax_out(draw: DrawFn) -> Sample:
    (x, dim, _), _ = _softmax(draw)
    return (x, dim, False), {"out": torch.empty(x.shape, dtype=x.dtype)}


@sample("_softmax_backward_data.out")
def _softmax_backward_out(draw: DrawFn) -> Sample:
    args, _ = _softmax_backward(draw)
    return args, {"grad_input": torch.empty(args[0].shape, dtype=args[0].dtype)}


@sample("_log_softmax_backward_data.out")
def _log_softmax_backward_out(draw: DrawFn) -> Sample:
    args, _ = _softmax_backward(draw)
    return args, {"out": torch.empty(args[0].shape, dtype=args[0].dtype)}


# --- scans


@sample("cumsum")
def _cumsum(draw: DrawFn) -> Sample:
    x = summable(draw, ALL, long_shapes(draw))
    return (x, dims_of(draw, x)), {"dtype": draw(st.sampled_from([None, None, torch.float64, torch.int32]))}


@sample("cumprod")
def _cumprod(draw: DrawFn) -> Sample:
    x = tensors(draw, (*WIDE, *INTEGERS, torch.bool), shapes(draw, largest=300), low=0.6, high=1.6)
    return (x, dims_of(draw, x)), {}


@sample("logcumsumexp")
def _logcumsumexp(draw: DrawFn) -> Sample:
    x = tensors(draw, WIDE)
    return (x, dims_of(draw, x)), {}


@sample("cummax", "cummin")
def _cummax(draw: DrawFn) -> Sample:
    x = tensors(draw, ALL)
    return (x, dims_of(draw, x)), {}


# --- order


def distinct(draw: DrawFn, dtypes: Sequence[torch.dtype], shape: tuple[int, ...]) -> torch.Tensor:
    """No two elements are equal, so that eager has one possible answer."""
    x = tensors(draw, dtypes, shape, overlapping=False)
    flat = content(x)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    flat.copy_(torch.randperm(flat.numel(), generator=generator) - flat.numel() // 2)
    if x.dtype.is_floating_point and flat.numel() and draw(st.booleans()):
        flat[draw(st.integers(0, flat.numel() - 1))] = draw(
            st.sampled_from([float("nan"), float("inf"), -float("inf")])
        )
    return x


def _sorted_shapes(draw: DrawFn) -> tuple[int, ...]:
    return draw(st.sampled_from([shapes(draw, largest=1024), (1000,), (3, 300), (300, 3), (2, 65)]))


_EXACT = (torch.float32, torch.float64, torch.int64, torch.int32)


@sample("sort")
def _sort(draw: DrawFn) -> Sample:
    x = distinct(draw, _EXACT, _sorted_shapes(draw))
    return (x, dims_of(draw, x), draw(st.booleans())), {}


@sample("sort.stable")
def _sort_stable(draw: DrawFn) -> Sample:
    x = tensors(draw, ALL, _sorted_shapes(draw))
    return (x,), {"stable": True, "dim": dims_of(draw, x), "descending": draw(st.booleans())}


@sample("topk")
def _topk(draw: DrawFn) -> Sample:
    x = distinct(draw, _EXACT, draw(st.sampled_from([_sorted_shapes(draw), (2, 5000), (3000, 2)])))
    dim = dims_of(draw, x)
    n = x.shape[dim] if x.dim() else 1
    return (x, min(n, draw(st.sampled_from([0, 1, 2, 5, 17, 50, 200, 512]))), dim, draw(st.booleans())), {}


@sample("kthvalue")
def _kthvalue(draw: DrawFn) -> Sample:
    x = distinct(draw, _EXACT, _sorted_shapes(draw))
    dim = dims_of(draw, x)
    return (x, draw(st.integers(1, max(1, x.shape[dim] if x.dim() else 1))), dim, draw(st.booleans())), {}


@sample("median.dim")
def _median(draw: DrawFn) -> Sample:
    x = distinct(draw, _EXACT, _sorted_shapes(draw))
    return (x, dims_of(draw, x), draw(st.booleans())), {}


# --- normalisations


def _parameter(draw: DrawFn, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
    return draw(st.sampled_from([None, tensors(draw, (dtype,), shape, low=-2, high=2)]))


def _normalised(draw: DrawFn) -> tuple[torch.Tensor, list[int]]:
    """An input and the trailing dimensions that are normalised.

    They are not all equal: the variance would be 0, and what is divided by it nothing but eager's rounding errors.
    """
    some = shapes(draw, least=1, empty=False)
    shape = draw(st.sampled_from([some, (3, 64), (2, 5, 33), (2, 600), (1, 5000), (7, 2, 8)]))
    x = tensors(draw, FLOATS, shape, low=-4, high=6, overlapping=False)
    inside = list(shape[-draw(st.integers(1, len(shape))) :])
    if len(inside) < len(shape) and draw(st.integers(0, 3)) == 0:
        x = x[:1].expand(shape)
    return x, inside


def _eps(draw: DrawFn, elements: int) -> float:
    """Large where the variance may be small by chance."""
    return draw(st.sampled_from([1e-5, 1e-3, 1e-12])) if elements > 32 else 0.5


@sample("native_layer_norm")
def _layer_norm(draw: DrawFn) -> Sample:
    x, inside = _normalised(draw)
    weight, bias = _parameter(draw, x.dtype, tuple(inside)), _parameter(draw, x.dtype, tuple(inside))
    return (x, inside, weight, bias, _eps(draw, torch.Size(inside).numel())), {}


@sample("native_layer_norm_backward")
def _layer_norm_backward(draw: DrawFn) -> Sample:
    shape = draw(st.sampled_from([(3, 64), (2, 5, 33), (40, 9), (2, 700), (5, 300)]))
    x = tensors(draw, WIDE, shape, low=-4, high=6, overlapping=False)
    inside = list(shape[-1:])
    grad = tensors(draw, (x.dtype,), shape, low=-1, high=2)
    weight = _parameter(draw, x.dtype, tuple(inside))
    bias = _parameter(draw, x.dtype, tuple(inside)) if weight is not None else None
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, inside, weight, bias, 1e-5)
    mask = [draw(st.booleans()), weight is not None and draw(st.booleans()), bias is not None and draw(st.booleans())]
    return (grad, x, inside, mean, rstd, weight, bias, mask if any(mask) else [True, False, False]), {}


TOLERANCES["aten::native_layer_norm_backward"] = (2e-5, 2e-5)


@sample("rms_norm")
def _rms_norm(draw: DrawFn) -> Sample:
    x, inside = _normalised(draw)
    return (x, inside, _parameter(draw, x.dtype, tuple(inside)), draw(st.sampled_from([None, 1e-5]))), {}


@sample("_fused_rms_norm")
def _fused_rms_norm(draw: DrawFn) -> Sample:
    x, inside = _normalised(draw)
    return (x, inside, _parameter(draw, x.dtype, tuple(inside)), draw(st.sampled_from([None, 1e-5]))), {}


@sample("native_group_norm")
def _group_norm(draw: DrawFn) -> Sample:
    batch, groups, each = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    inside = draw(st.sampled_from([(), (7,), (5, 3), (33,)]))
    channels, places = groups * each, int(torch.Size(inside).numel())
    x = tensors(draw, FLOATS, (batch, channels, *inside), low=-4, high=6, overlapping=False)
    weight, bias = _parameter(draw, x.dtype, (channels,)), _parameter(draw, x.dtype, (channels,))
    return (x, weight, bias, batch, channels, places, groups, _eps(draw, each * places)), {}


def _channels(draw: DrawFn) -> tuple[Any, ...]:
    channels = draw(st.integers(1, 9))
    shape = (draw(st.integers(1, 5)), channels, *draw(st.sampled_from([(), (7,), (5, 3), (33,)])))
    x = tensors(draw, FLOATS, shape, low=-4, high=6)
    weight, bias = _parameter(draw, x.dtype, (channels,)), _parameter(draw, x.dtype, (channels,))
    mean = tensors(draw, (x.dtype,), (channels,), low=-2, high=2)
    var = tensors(draw, (x.dtype,), (channels,), low=0.3, high=2)
    return x, weight, bias, mean, var


@sample("native_batch_norm")
def _batch_norm(draw: DrawFn) -> Sample:
    return (*_channels(draw), False, 0.1, 1e-5), {}


@sample("_native_batch_norm_legit_no_training")
def _batch_norm_no_training(draw: DrawFn) -> Sample:
    return (*_channels(draw), 0.1, 1e-5), {}
