"""Random arguments for the overloads that pick or write elements by index."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from samples_movement import Sample, indices
from strategies import ALL, FLOATS, INTEGERS, Draw, dims_of, shapes, tensors

SAMPLES: dict[str, Sample] = {}

#: sums in the narrow float types keep every intermediate in range, so that only their rounding can differ
MILD = {"low": -3, "high": 3}


def sample(*overloads: str) -> Any:
    """Register arguments for overloads and for those of their in-place forms that have a lowering of their own."""

    def register(draw_one: Sample) -> Sample:
        SAMPLES.update(dict.fromkeys(overloads, draw_one))
        return draw_one

    return register


def written(*overloads: str) -> Any:
    """As `sample`, for overloads that write through an index: also the in-place form."""
    forms = []
    for name in overloads:
        head, _, kind = name.partition(".")
        forms += [name, f"{head}_.{kind}" if kind else f"{head}_"]
    return sample(*forms)


def _reach(draw: Draw, shape: tuple[int, ...], dim: int, *, at_most: bool) -> tuple[int, ...]:
    """Shape of an index tensor for a tensor of `shape`: as it likes along `dim`, not beyond it elsewhere."""
    if not shape:
        return ()
    made = [draw(st.integers(0 if n == 0 else 1, n)) if at_most else n for n in shape]
    made[dim] = draw(st.sampled_from([0, 1, 2, 5])) if shape[dim] else 0
    return tuple(made)


@sample("aten::gather")
def _(draw: Draw) -> Any:
    x = tensors(draw, shape=shapes(draw, largest=512))
    dim = dims_of(draw, x)
    limit = x.shape[dim] if x.dim() else 1
    shape = _reach(draw, tuple(x.shape), dim, at_most=True)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    index = torch.randint(0, max(limit, 1), shape, generator=generator)
    return (x, dim, index.int() if draw(st.integers(0, 3)) == 0 else index), {}


@sample("aten::take")
def _(draw: Draw) -> Any:
    x = tensors(draw, shape=shapes(draw, empty=False))
    return (x, indices(draw, x.numel(), shapes(draw, most=2, largest=32), negative=True, narrow=False)), {}


def _scattered(draw: Draw, dtypes: Any = ALL, **options: Any) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]:
    x = tensors(draw, dtypes, shapes(draw, largest=512), overlapping=False, **options)
    dim = dims_of(draw, x)
    limit = x.shape[dim] if x.dim() else 1
    shape = _reach(draw, tuple(x.shape), dim, at_most=True)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    index = torch.randint(0, max(limit, 1), shape, generator=generator)
    larger = tuple(n + draw(st.integers(0, 1)) for n in shape)
    return x, dim, index, tensors(draw, (x.dtype,), larger, **options)


@written("aten::scatter.src")
def _(draw: Draw) -> Any:
    return _scattered(draw), {}


@written("aten::scatter.value")
def _(draw: Draw) -> Any:
    x, dim, index, _src = _scattered(draw)
    return (x, dim, index, draw(st.sampled_from([0, 1, 2.5, True]))), {}


@written("aten::scatter.reduce")
def _(draw: Draw) -> Any:
    return _scattered(draw, **MILD), {"reduce": draw(st.sampled_from(["add", "multiply"]))}


@written("aten::scatter.value_reduce")
def _(draw: Draw) -> Any:
    x, dim, index, _src = _scattered(draw, **MILD)
    return (x, dim, index, draw(st.sampled_from([0, 1, 2]))), {"reduce": draw(st.sampled_from(["add", "multiply"]))}


@written("aten::scatter_add")
def _(draw: Draw) -> Any:
    return _scattered(draw, **MILD), {}


@written("aten::scatter_reduce.two")
def _(draw: Draw) -> Any:
    reduce = draw(st.sampled_from(["sum", "prod", "amax", "amin"]))
    options = MILD if reduce in ("sum", "prod") else {}
    return (*_scattered(draw, **options), reduce), {"include_self": draw(st.booleans())}


def _sliced(
    draw: Draw, dtypes: Any = ALL, *, unique: bool = False, negative: bool = False, narrow: bool = False, **options: Any
) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]:
    x = tensors(draw, dtypes, shapes(draw, largest=512), overlapping=False, **options)
    dim = dims_of(draw, x)
    limit = x.shape[dim] if x.dim() else 1
    count = 1 if x.dim() == 0 else draw(st.sampled_from([0, 1, 2, 5]))
    index = indices(draw, limit, (count,), unique=unique, negative=negative, narrow=narrow)
    shape = list(x.shape)
    if shape:
        shape[dim] = index.numel()
    return x, dim, index, tensors(draw, (x.dtype,), tuple(shape), **options)


@written("aten::index_add")
def _(draw: Draw) -> Any:
    sample = _sliced(draw, narrow=True, **MILD)
    whole = not sample[0].dtype.is_floating_point
    alphas = [1, True] if sample[0].dtype == torch.bool else [1, 2, -3] if whole else [1, 2, -0.5]
    return sample, {"alpha": draw(st.sampled_from(alphas))}


@written("aten::index_copy")
def _(draw: Draw) -> Any:
    return _sliced(draw), {}


@written("aten::index_fill.int_Scalar")
def _(draw: Draw) -> Any:
    x, dim, index, _source = _sliced(draw, negative=True)
    return (x, dim, index, draw(st.sampled_from([0, 1, 2.5, True]))), {}


@written("aten::index_fill.int_Tensor")
def _(draw: Draw) -> Any:
    x, dim, index, _source = _sliced(draw, negative=True)
    return (x, dim, index, tensors(draw, ALL, ())), {}


@written("aten::index_reduce")
def _(draw: Draw) -> Any:
    reduce = draw(st.sampled_from(["prod", "amax", "amin"]))
    options = MILD if reduce == "prod" else {}
    return (*_sliced(draw, (*FLOATS, *INTEGERS), **options), reduce), {"include_self": draw(st.booleans())}


@sample("aten::embedding_dense_backward")
def _(draw: Draw) -> Any:
    rows, width = draw(st.integers(1, 9)), draw(st.sampled_from([1, 3, 8, 65]))
    shape = shapes(draw, most=2, largest=32)
    index = indices(draw, rows, shape, narrow=True)
    return (tensors(draw, FLOATS, (*shape, width), **MILD), index, rows, draw(st.integers(-1, rows)), False), {}


# --- several dimensions at once


def _chosen(draw: Draw, x: torch.Tensor, *, unique: bool = False) -> list[torch.Tensor | None]:
    """Index tensors that broadcast with each other, for some dimensions of `x`."""
    used = [d for d in range(x.dim()) if x.shape[d] and draw(st.booleans())][:4]
    if not used:
        used = [d for d in range(x.dim()) if x.shape[d]][:1]
    common = shapes(draw, least=0, most=2, largest=32, empty=not unique)
    if unique:
        common = (min((x.shape[d] for d in used), default=1),)
    made: list[torch.Tensor | None] = []
    for d in range(max(used, default=-1) + 1):
        if d not in used:
            made.append(None)
            continue
        shape = common if unique else tuple(1 if draw(st.integers(0, 3)) == 0 else n for n in common)
        made.append(indices(draw, x.shape[d], shape, negative=not unique, unique=unique, narrow=True))
    return made


def _indexable(draw: Draw, dtypes: Any = ALL, **options: Any) -> torch.Tensor:
    x = tensors(draw, dtypes, shapes(draw, least=1, largest=512), **options)
    return x if x.numel() else tensors(draw, dtypes, (3, 4), **options)


@sample("aten::index.Tensor", "aten::_unsafe_index.Tensor")
def _(draw: Draw) -> Any:
    x = _indexable(draw)
    return (x, _chosen(draw, x)), {}


@written("aten::index_put", "aten::_index_put_impl")
def _(draw: Draw) -> Any:
    """What is written over stands for one value per place: eager says no order for the others."""
    accumulate = draw(st.booleans())
    options = {"overlapping": False, **(MILD if accumulate else {})}
    x = _indexable(draw, **options)
    chosen = _chosen(draw, x, unique=not accumulate)
    shape = list(x[tuple(slice(None) if one is None else one for one in chosen)].shape)
    for d in range(len(shape)):
        if draw(st.integers(0, 3)) == 0:
            shape[d] = 1
    shape = shape[draw(st.integers(0, len(shape))) if draw(st.booleans()) else 0 :]
    options.pop("overlapping")
    return (x, chosen, tensors(draw, (x.dtype,), tuple(shape), **options), accumulate), {}


SAMPLES["aten::_unsafe_index_put"] = SAMPLES["aten::index_put"]


@written("aten::put")
def _(draw: Draw) -> Any:
    x = tensors(draw, shape=shapes(draw, empty=False, largest=256), overlapping=False, **MILD)
    accumulate = draw(st.booleans())
    count = draw(st.integers(0, min(5, x.numel())))
    index = indices(draw, x.numel(), (count,), negative=accumulate, unique=not accumulate, narrow=False)
    return (x, index, tensors(draw, (x.dtype,), tuple(index.shape), **MILD), accumulate), {}


# --- masks and sorted rows


@written("aten::masked_scatter")
def _(draw: Draw) -> Any:
    x = tensors(draw, overlapping=False)
    shape = tuple(1 if draw(st.integers(0, 3)) == 0 else n for n in x.shape)
    source = tensors(draw, (x.dtype,), (x.numel() + draw(st.integers(0, 3)),))
    return (x, tensors(draw, (torch.bool,), shape), source), {}


def _ascending(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return tensors(draw, (dtype,), shape, overlapping=False, **MILD).sort(-1).values


SEARCHED = (*FLOATS, *INTEGERS)


def _flags(draw: Draw) -> dict[str, Any]:
    return {"right": draw(st.booleans()), "out_int32": draw(st.booleans())}


@sample("aten::searchsorted.Tensor")
def _(draw: Draw) -> Any:
    dtype = draw(st.sampled_from(SEARCHED))
    lead = shapes(draw, most=2, largest=16)
    sequence = _ascending(draw, (*(lead if draw(st.booleans()) else ()), draw(st.integers(0, 17))), dtype)
    values = tensors(draw, (dtype,), (*lead, draw(st.integers(0, 5))), **MILD)
    return (sequence, values), _flags(draw)


@sample("aten::searchsorted.Scalar")
def _(draw: Draw) -> Any:
    sequence = _ascending(draw, (draw(st.integers(0, 17)),), draw(st.sampled_from(SEARCHED)))
    return (sequence, draw(st.sampled_from([-2, 0, 1, 99]))), _flags(draw)


@sample("aten::bucketize.Tensor")
def _(draw: Draw) -> Any:
    dtype = draw(st.sampled_from(SEARCHED))
    return (tensors(draw, (dtype,), **MILD), _ascending(draw, (draw(st.integers(0, 17)),), dtype)), _flags(draw)


@sample("aten::bucketize.Scalar")
def _(draw: Draw) -> Any:
    dtype = draw(st.sampled_from(SEARCHED))
    return (draw(st.sampled_from([-2, 0, 1, 99])), _ascending(draw, (draw(st.integers(0, 17)),), dtype)), _flags(draw)
