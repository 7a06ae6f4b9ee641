"""Arguments for the operators of the family reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from strategies import ALL, FLOATS, INTEGERS, dims_of, shapes, tensors

Sample = tuple[tuple[Any, ...], dict[str, Any]]
SAMPLES: dict[str, Callable[[DrawFn], Sample]] = {}
#: eager rounds intermediate results of half precision, sums in it by parts, or takes another order of products
TOLERANCES: dict[str, tuple[float, float]] = {}
WIDE = (torch.float32, torch.float64)


def sample(*names: str) -> Callable[[Callable[[DrawFn], Sample]], Callable[[DrawFn], Sample]]:
    """Register a sample for overloads."""

    def register(function: Callable[[DrawFn], Sample]) -> Callable[[DrawFn], Sample]:
        for name in names:
            SAMPLES[f"aten::{name}"] = function
        return function

    return register


def content(tensor: torch.Tensor) -> torch.Tensor:
    """All memory of a tensor, also where several indices share an element."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def summable(draw: DrawFn, dtypes: Sequence[torch.dtype], shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Values whose sum is the same in every order but for a relative rounding error.

    Whole numbers with infinities and NaN, whose sums are exact; or positive numbers, in which nothing cancels.
    """
    x = tensors(draw, dtypes, shape, low=-6, high=6)
    if not x.dtype.is_floating_point:
        return x
    if draw(st.booleans()):
        content(x).abs_().add_(0.25)
        return x
    flat = content(x).round_()
    for special in draw(st.lists(st.sampled_from([float("nan"), float("inf"), float("-inf"), -0.0]), max_size=2)):
        if flat.numel():
            flat[draw(st.integers(0, flat.numel() - 1))] = special
    return x


def long_shapes(draw: DrawFn) -> tuple[int, ...]:
    """Mostly small shapes; sometimes ones that reach every block of the kernels."""
    if draw(st.integers(0, 5)):
        return shapes(draw)
    return draw(
        st.sampled_from([(5000,), (2, 600), (600, 2), (600, 33), (3, 700, 5), (1100, 4, 2), (4, 1030), (9000, 1)])
    )


def several_dims(draw: DrawFn, x: torch.Tensor) -> list[int]:
    """Different dimensions, some counted from the end; perhaps none."""
    rank = x.dim()
    picked = draw(st.lists(st.integers(0, max(rank, 1) - 1), unique=True, max_size=max(rank, 1)))
    return [dim - max(rank, 1) if draw(st.booleans()) else dim for dim in picked]


@sample("sum")
def _sum(draw: DrawFn) -> Sample:
    x = summable(draw, ALL, long_shapes(draw))
    return (x,), {"dtype": draw(st.sampled_from([None, None, torch.float64, torch.int32, torch.int64, torch.float32]))}


@sample("sum.dim_IntList")
def _sum_dims(draw: DrawFn) -> Sample:
    x = summable(draw, ALL, long_shapes(draw))
    dims = draw(st.sampled_from([None, several_dims(draw, x)]))
    return (x, dims, draw(st.booleans())), {"dtype": draw(st.sampled_from([None, None, torch.float64, torch.int16]))}


@sample("nansum")
def _nansum(draw: DrawFn) -> Sample:
    x = summable(draw, (*WIDE, *INTEGERS), long_shapes(draw))
    return (x, draw(st.sampled_from([None, several_dims(draw, x)])), draw(st.booleans())), {}


@sample("mean")
def _mean(draw: DrawFn) -> Sample:
    return (summable(draw, FLOATS, long_shapes(draw)),), {"dtype": draw(st.sampled_from([None, torch.float64]))}


@sample("mean.dim")
def _mean_dim(draw: DrawFn) -> Sample:
    x = summable(draw, FLOATS, long_shapes(draw))
    return (x, draw(st.sampled_from([None, several_dims(draw, x)])), draw(st.booleans())), {}


@sample("prod")
def _prod(draw: DrawFn) -> Sample:
    return (tensors(draw, (*WIDE, *INTEGERS, torch.bool), shapes(draw, largest=300), low=0.6, high=1.6),), {}


@sample("prod.dim_int")
def _prod_dim(draw: DrawFn) -> Sample:
    x = tensors(draw, (*WIDE, *INTEGERS, torch.bool), shapes(draw, largest=300), low=0.6, high=1.6)
    return (x, dims_of(draw, x), draw(st.booleans())), {}


@sample("trace")
def _trace(draw: DrawFn) -> Sample:
    shape = draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    return (summable(draw, (*WIDE, torch.int64, torch.int32), shape),), {}


@sample("amax", "amin")
def _extremum(draw: DrawFn) -> Sample:
    x = tensors(draw, ALL, long_shapes(draw))
    return (x, several_dims(draw, x), draw(st.booleans())), {}


@sample("max", "min", "median")
def _extremum_of_all(draw: DrawFn) -> Sample:
    return (tensors(draw, ALL, long_shapes(draw)),), {}


@sample("aminmax")
def _aminmax(draw: DrawFn) -> Sample:
    x = tensors(draw, ALL, long_shapes(draw))
    return (x,), {"dim": draw(st.sampled_from([None, dims_of(draw, x)])), "keepdim": draw(st.booleans())}


@sample("max.dim", "min.dim")
def _with_index(draw: DrawFn) -> Sample:
    x = tensors(draw, ALL, long_shapes(draw))
    return (x, dims_of(draw, x), draw(st.booleans())), {}


@sample("argmax", "argmin")
def _index(draw: DrawFn) -> Sample:
    x = tensors(draw, ALL, long_shapes(draw))
    return (x, draw(st.sampled_from([None, dims_of(draw, x)])), draw(st.booleans())), {}


@sample("any", "all", "count_nonzero")
def _count(draw: DrawFn) -> Sample:
    return (_mostly_equal(draw),), {}


@sample("any.dim", "all.dim")
def _count_dim(draw: DrawFn) -> Sample:
    x = _mostly_equal(draw)
    return (x, dims_of(draw, x), draw(st.booleans())), {}


@sample("any.dims", "all.dims")
def _count_dims(draw: DrawFn) -> Sample:
    x = _mostly_equal(draw)
    return (x, draw(st.sampled_from([None, several_dims(draw, x)])), draw(st.booleans())), {}


@sample("count_nonzero.dim_IntList")
def _count_list(draw: DrawFn) -> Sample:
    x = _mostly_equal(draw)
    return (x, several_dims(draw, x)), {}


def _mostly_equal(draw: DrawFn) -> torch.Tensor:
    """All 0, none 0, or something between, with NaN and -0."""
    x = tensors(draw, ALL, long_shapes(draw))
    kind = draw(st.integers(0, 3))
    if kind == 0:
        content(x).zero_()
    elif kind == 1:
        content(x).fill_(1)
    if kind < 2 and content(x).numel():
        special = draw(st.sampled_from([0.0, -0.0, 1.0, float("nan") if x.dtype.is_floating_point else 1]))
        content(x)[draw(st.integers(0, content(x).numel() - 1))] = special
    return x


@sample("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
def _var(draw: DrawFn) -> Sample:
    x = tensors(draw, WIDE, long_shapes(draw), low=-3, high=9)
    dims = draw(st.sampled_from([None, several_dims(draw, x)]))
    return (x, dims), {"correction": draw(st.sampled_from([None, 0, 1, 2])), "keepdim": draw(st.booleans())}


for _name in ("var", "std", "var_mean", "std_mean"):
    TOLERANCES[f"aten::{_name}.correction"] = (1e-5, 2e-6)


@sample("linalg_vector_norm")
def _norm(draw: DrawFn) -> Sample:
    # Eager adds up what is not contiguous one after the other: only short ones are accurate.
    plain = draw(st.integers(0, 3)) == 0
    shape = long_shapes(draw) if plain else shapes(draw, largest=600)
    x = tensors(draw, FLOATS, shape, low=-3, high=3, strided=not plain)
    order = draw(st.sampled_from([0, 1, 2, 2.0, 3, 2.5, float("inf"), float("-inf")]))
    dims = draw(st.sampled_from([None, several_dims(draw, x)]))
    return (x, order, dims, draw(st.booleans())), {}


@sample("logsumexp")
def _logsumexp(draw: DrawFn) -> Sample:
    x = tensors(draw, (*WIDE, torch.int64), long_shapes(draw))
    return (x, several_dims(draw, x), draw(st.booleans())), {}


# --- losses


def _likelihoods(draw: DrawFn, shape: tuple[int, ...]) -> Sample:
    x = tensors(draw, WIDE, shape, low=-8, high=0)
    classes = shape[1] if len(shape) > 1 else shape[0]
    places = () if len(shape) == 1 else (shape[0], *shape[2:])
    target = tensors(draw, (torch.int64,), places, low=0, high=classes - 1, overlapping=False)
    ignored = draw(st.sampled_from([-100, 0, 1]))
    weight = draw(st.sampled_from([None, tensors(draw, (x.dtype,), (classes,), low=0.25, high=2.0)]))
    return (x, target, weight, draw(st.integers(0, 2)), ignored), {}


@sample("nll_loss_forward")
def _nll(draw: DrawFn) -> Sample:
    return _likelihoods(draw, draw(st.sampled_from([(3,), (1, 1), (4, 5), (17, 3), (0, 3)])))


@sample("nll_loss2d_forward")
def _nll_places(draw: DrawFn) -> Sample:
    return _likelihoods(draw, draw(st.sampled_from([(2, 3, 4, 1), (1, 5, 3, 3), (3, 2, 1, 7)])))


def _with_gradient(draw: DrawFn, forward: Any, given: Sample) -> Sample:
    losses, total = forward(*given[0])
    grad = tensors(draw, (losses.dtype,), tuple(losses.shape), low=-2, high=2)
    return (grad, *given[0], total), {}


@sample("nll_loss_backward")
def _nll_backward(draw: DrawFn) -> Sample:
    return _with_gradient(draw, torch.ops.aten.nll_loss_forward, _nll(draw))


@sample("nll_loss2d_backward")
def _nll_places_backward(draw: DrawFn) -> Sample:
    return _with_gradient(draw, torch.ops.aten.nll_loss2d_forward, _nll_places(draw))
