"""Random arguments for the overloads of the family movement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from strategies import ALL, FLOATS, Draw, dims_of, shapes, tensors

Sample = Callable[[Draw], tuple[tuple[Any, ...], dict[str, Any]]]

SAMPLES: dict[str, Sample] = {}


def sample(*overloads: str) -> Callable[[Sample], Sample]:
    """Register a way to draw the arguments of some overloads."""

    def register(draw_one: Sample) -> Sample:
        SAMPLES.update(dict.fromkeys(overloads, draw_one))
        return draw_one

    return register


def ranked(draw: Draw, least: int = 1, most: int = 4, **options: Any) -> torch.Tensor:
    """A tensor of at least `least` dimensions."""
    return tensors(draw, shape=shapes(draw, least=least, most=most), **options)


def small(draw: Draw, low: int = -4, high: int = 4) -> int:
    return draw(st.integers(low, high))


def indices(
    draw: Draw, limit: int, shape: tuple[int, ...], *, negative: bool = False, unique: bool = False, narrow: bool = True
) -> torch.Tensor:
    """An index tensor into a dimension of size `limit`, int64 or int32; empty if there is nothing to name."""
    if limit == 0:
        shape = (0,) if len(shape) < 2 else (0, *shape[1:])
    count = 1
    for size in shape:
        count *= size
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    if unique and len(shape) == 1:
        made = torch.randperm(limit, generator=generator)[:count]
    else:
        made = torch.randint(0, max(limit, 1), shape, generator=generator)
    if negative and draw(st.booleans()):
        made = torch.where(torch.rand(made.shape, generator=generator) < 0.5, made - limit, made)
    if narrow and draw(st.integers(0, 3)) == 0:
        made = made.int()
    kind = draw(st.sampled_from(["plain", "plain", "stepped", "transposed"]))
    if kind == "stepped" and made.dim():
        return torch.stack([made, made + 1000], -1)[..., 0]
    if kind == "transposed" and made.dim() == 2:
        return made.t().contiguous().t()
    return made


# --- joining and tiling


@sample("aten::cat")
def _(draw: Draw) -> Any:
    dtypes = ALL if draw(st.booleans()) else (draw(st.sampled_from(ALL)),)
    shape = shapes(draw, least=1, largest=512)
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    parts = []
    for _i in range(draw(st.sampled_from([1, 2, 2, 3, 5, 9, 17]))):
        one = list(shape)
        one[dim] = draw(st.integers(0, 5))
        parts.append(tensors(draw, dtypes, tuple(one)))
    if draw(st.integers(0, 5)) == 0:
        parts.insert(draw(st.integers(0, len(parts))), torch.empty(0, dtype=draw(st.sampled_from(dtypes))))
    return (parts, dim), {}


@sample("aten::stack")
def _(draw: Draw) -> Any:
    shape = shapes(draw, most=3, largest=512)
    dtypes = ALL if draw(st.booleans()) else (draw(st.sampled_from(ALL)),)
    parts = [tensors(draw, dtypes, shape) for _ in range(draw(st.sampled_from([1, 2, 3, 9])))]
    return (parts, draw(st.integers(-len(shape) - 1, len(shape)))), {}


@sample("aten::block_diag")
def _(draw: Draw) -> Any:
    return ([tensors(draw, shape=shapes(draw, most=2, largest=64)) for _ in range(draw(st.integers(1, 4)))],), {}


@sample("aten::repeat")
def _(draw: Draw) -> Any:
    x = tensors(draw, shape=shapes(draw, most=3, largest=256))
    more = draw(st.integers(0, 2))
    return (x, [draw(st.integers(0, 3)) for _ in range(x.dim() + more)]), {}


@sample("aten::flip")
def _(draw: Draw) -> Any:
    x = tensors(draw)
    dims = draw(st.lists(st.integers(0, x.dim() - 1), unique=True)) if x.dim() else []
    return (x, [d - x.dim() if draw(st.booleans()) else d for d in dims]), {}


@sample("aten::rot90")
def _(draw: Draw) -> Any:
    x = ranked(draw, 2)
    first, second = draw(st.permutations(range(x.dim())))[:2]
    return (x, small(draw), [first, second - x.dim()]), {}


@sample("aten::roll")
def _(draw: Draw) -> Any:
    x = tensors(draw)
    dims = draw(st.lists(st.integers(-x.dim(), x.dim() - 1), max_size=3)) if x.dim() and draw(st.booleans()) else []
    return (x, [small(draw, -20, 20) for _ in dims or (0,)], dims), {}


# --- padding


@sample("aten::constant_pad_nd")
def _(draw: Draw) -> Any:
    x = ranked(draw)
    pad = [small(draw, -1, 3) for _ in range(2 * draw(st.integers(1, x.dim())))]
    return (x, pad, draw(st.sampled_from([0, 1, 2.5, float("inf"), True]))), {}


def _edges(draw: Draw, spatial: int, mirror: bool) -> Any:
    sizes = [draw(st.integers(2, 9)) for _ in range(spatial)]
    lead = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 2)))]
    x = tensors(draw, (torch.float32, torch.float64, torch.bfloat16, torch.float16), (*lead, *sizes))
    pad = [small(draw, 0, size - 1 if mirror else 4) for size in reversed(sizes) for _ in range(2)]
    return (x, pad), {}


for _spatial in (1, 2, 3):
    sample(f"aten::reflection_pad{_spatial}d")(lambda draw, n=_spatial: _edges(draw, n, True))
    sample(f"aten::replication_pad{_spatial}d")(lambda draw, n=_spatial: _edges(draw, n, False))


@sample("aten::tril", "aten::triu")
def _(draw: Draw) -> Any:
    return (ranked(draw, 2), small(draw, -10, 10)), {}


@sample("aten::pixel_shuffle")
def _(draw: Draw) -> Any:
    r = draw(st.integers(1, 3))
    lead = shapes(draw, most=2, largest=4)
    return (tensors(draw, shape=(*lead, draw(st.integers(1, 2)) * r * r, small(draw, 1, 4), small(draw, 1, 4))), r), {}


@sample("aten::pixel_unshuffle")
def _(draw: Draw) -> Any:
    r = draw(st.integers(1, 3))
    lead = shapes(draw, most=2, largest=4)
    return (tensors(draw, shape=(*lead, 2, r * small(draw, 1, 3), r * small(draw, 1, 3))), r), {}


@sample("aten::channel_shuffle")
def _(draw: Draw) -> Any:
    groups = draw(st.integers(1, 3))
    return (tensors(draw, shape=(2, groups * small(draw, 1, 3), 3, small(draw, 1, 4))), groups), {}


# --- rows


@sample("aten::index_select")
def _(draw: Draw) -> Any:
    x = tensors(draw)
    dim = dims_of(draw, x)
    limit = x.shape[dim] if x.dim() else 1
    shape = () if x.dim() == 0 or (limit and draw(st.integers(0, 5)) == 0) else (draw(st.sampled_from([0, 1, 3, 9])),)
    return (x, dim, indices(draw, limit, shape)), {}


@sample("aten::embedding")
def _(draw: Draw) -> Any:
    rows, width = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 3, 8, 64, 65]))
    shape = shapes(draw, most=3, largest=32)
    return (tensors(draw, (*FLOATS, torch.int64), (rows, width)), indices(draw, rows, shape)), {}


# --- writes to a view, and copies of views


@sample("aten::select_scatter")
def _(draw: Draw) -> Any:
    x = tensors(draw, shape=shapes(draw, least=1, empty=False))
    dim = dims_of(draw, x)
    index = draw(st.integers(-x.shape[dim], x.shape[dim] - 1))
    return (x, tensors(draw, (x.dtype,), tuple(x.select(dim, 0).shape)), dim, index), {}


def _slice(draw: Draw, size: int) -> tuple[int | None, int | None, int]:
    start, end = (None if draw(st.integers(0, 3)) == 0 else small(draw, -size - 2, size + 2) for _ in range(2))
    return start, end, draw(st.integers(1, 3))


@sample("aten::slice_scatter")
def _(draw: Draw) -> Any:
    x = ranked(draw)
    dim = dims_of(draw, x)
    start, end, step = _slice(draw, x.shape[dim])
    part = torch.ops.aten.slice.Tensor(x, dim, start, end, step)
    return (x, tensors(draw, (x.dtype,), tuple(part.shape)), dim, start, end, step), {}


@sample("aten::diagonal_scatter")
def _(draw: Draw) -> Any:
    x = ranked(draw, 2)
    first, second = draw(st.permutations(range(x.dim())))[:2]
    offset = small(draw)
    part = torch.diagonal(x, offset, first, second)
    return (x, tensors(draw, (x.dtype,), tuple(part.shape)), offset, first, second - x.dim()), {}


@sample("aten::slice_backward")
def _(draw: Draw) -> Any:
    shape = shapes(draw, least=1)
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    step = draw(st.integers(1, 3))
    start = draw(st.integers(0, shape[dim]))
    end = draw(st.integers(start, shape[dim] + 2))
    part = torch.ops.aten.slice.Tensor(torch.empty(shape), dim, start, end, step)
    return (tensors(draw, FLOATS, tuple(part.shape)), list(shape), dim, start, end, step), {}


@sample("aten::select_backward")
def _(draw: Draw) -> Any:
    shape = shapes(draw, least=1, empty=False)
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    index = draw(st.integers(-shape[dim], shape[dim] - 1))
    return (tensors(draw, FLOATS, tuple(torch.empty(shape).select(dim, 0).shape)), list(shape), dim, index), {}


@sample("aten::diagonal_backward")
def _(draw: Draw) -> Any:
    shape = shapes(draw, least=2)
    first, second = draw(st.permutations(range(len(shape))))[:2]
    offset = small(draw)
    part = torch.diagonal(torch.empty(shape), offset, first, second)
    return (tensors(draw, FLOATS, tuple(part.shape)), list(shape), offset, first, second), {}


@sample("aten::diag_embed")
def _(draw: Draw) -> Any:
    x = ranked(draw, 1, 3)
    first, second = draw(st.permutations(range(x.dim() + 1)))[:2]
    return (x, small(draw), first, second - x.dim() - 1), {}


@sample("aten::eye", "aten::eye.m")
def _(draw: Draw) -> Any:
    return (small(draw, 0, 9),), {"dtype": draw(st.sampled_from(ALL))}


@sample("aten::eye.m")
def _(draw: Draw) -> Any:
    return (small(draw, 0, 9), small(draw, 0, 9)), {"dtype": draw(st.sampled_from(ALL))}


@sample("aten::tril_indices", "aten::triu_indices")
def _(draw: Draw) -> Any:
    kind = {"dtype": draw(st.sampled_from([torch.int64, torch.int32]))}
    return (small(draw, 0, 7), small(draw, 0, 7), small(draw, -8, 8)), kind


@sample("aten::view_copy", "aten::_reshape_copy")
def _(draw: Draw) -> Any:
    x = tensors(draw, strided=False)
    shape = draw(
        st.sampled_from([[x.numel()], [1, x.numel()], [*x.shape, 1], list(x.shape), [-1] if x.numel() else [0]])
    )
    return (x, shape), {}


@sample("aten::_reshape_alias_copy")
def _(draw: Draw) -> Any:
    x = tensors(draw, strided=False)
    return (x, [x.numel(), 1], [1, 1]), {}


@sample("aten::alias_copy", "aten::detach_copy", "aten::squeeze_copy", "aten::lift_fresh")
def _(draw: Draw) -> Any:
    return (tensors(draw),), {}


@sample("aten::squeeze_copy.dim")
def _(draw: Draw) -> Any:
    x = tensors(draw)
    return (x, dims_of(draw, x)), {}


@sample("aten::squeeze_copy.dims")
def _(draw: Draw) -> Any:
    x = tensors(draw)
    return (x, draw(st.lists(st.integers(0, max(0, x.dim() - 1)), unique=True))), {}


@sample("aten::unsqueeze_copy")
def _(draw: Draw) -> Any:
    x = tensors(draw)
    return (x, draw(st.integers(-x.dim() - 1, x.dim()))), {}


@sample("aten::slice_copy.Tensor")
def _(draw: Draw) -> Any:
    x = ranked(draw)
    dim = dims_of(draw, x)
    return (x, dim, *_slice(draw, x.shape[dim])), {}


@sample("aten::select_copy.int")
def _(draw: Draw) -> Any:
    x = tensors(draw, shape=shapes(draw, least=1, empty=False))
    dim = dims_of(draw, x)
    return (x, dim, draw(st.integers(-x.shape[dim], x.shape[dim] - 1))), {}


@sample("aten::permute_copy")
def _(draw: Draw) -> Any:
    x = tensors(draw)
    return (x, list(draw(st.permutations(range(x.dim()))))), {}


@sample("aten::transpose_copy.int")
def _(draw: Draw) -> Any:
    x = tensors(draw)
    return (x, dims_of(draw, x), dims_of(draw, x)), {}


@sample("aten::t_copy")
def _(draw: Draw) -> Any:
    return (tensors(draw, shape=shapes(draw, most=2)),), {}


@sample("aten::diagonal_copy")
def _(draw: Draw) -> Any:
    x = ranked(draw, 2)
    first, second = draw(st.permutations(range(x.dim())))[:2]
    return (x, small(draw), first, second - x.dim()), {}


@sample("aten::unfold_copy")
def _(draw: Draw) -> Any:
    x = tensors(draw, shape=shapes(draw, least=0, most=3))
    dim = dims_of(draw, x)
    size = draw(st.integers(0, x.shape[dim] if x.dim() else 1))
    return (x, dim, size, draw(st.integers(1, 3))), {}


@sample("aten::expand_copy")
def _(draw: Draw) -> Any:
    x = tensors(draw, shape=shapes(draw, most=3))
    return (x, [small(draw, 0, 3), *(-1 if n != 1 else small(draw, 1, 4) for n in x.shape)]), {}


@sample("aten::as_strided_copy")
def _(draw: Draw) -> Any:
    return (tensors(draw, shape=(4, 5), strided=False), [3, 2, 2], [5, 2, 1]), {}


@sample("aten::split_copy.Tensor")
def _(draw: Draw) -> Any:
    x = tensors(draw, shape=shapes(draw, least=1, empty=False, largest=17))
    return (x, draw(st.integers(1, 4)), dims_of(draw, x)), {}


@sample("aten::split_with_sizes_copy")
def _(draw: Draw) -> Any:
    x = ranked(draw)
    dim = dims_of(draw, x)
    first = draw(st.integers(0, x.shape[dim]))
    return (x, [first, x.shape[dim] - first], dim), {}


@sample("aten::unbind_copy.int")
def _(draw: Draw) -> Any:
    x = tensors(draw, shape=shapes(draw, least=1, most=3, empty=False, largest=17))
    return (x, dims_of(draw, x)), {}
