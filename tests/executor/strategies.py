"""Random tensors: dtypes, shapes, strides of every kind, and the values that break things."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ALL = (*FLOATS, *INTEGERS, torch.bool)
#: sizes that matter: none, one, odd ones, a vector and a bit more
SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 17, 65)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 3e38, 1e4, -1e4, 88.0)

Draw = st.DrawFn


def shapes(draw: Draw, *, least: int = 0, most: int = 4, largest: int = 4096, empty: bool = True) -> tuple[int, ...]:
    """A shape of `least` to `most` dimensions with at most `largest` elements."""
    dims = draw(st.integers(least, most))
    sizes = SIZES if empty else SIZES[1:]
    shape: list[int] = []
    count = 1
    for _ in range(dims):
        size = draw(st.sampled_from(sizes))
        if count * max(size, 1) > largest:
            size = 1
        count *= max(size, 1)
        shape.append(size)
    return tuple(shape)


def tensors(
    draw: Draw,
    dtypes: Sequence[torch.dtype] = ALL,
    shape: tuple[int, ...] | None = None,
    *,
    special: bool = True,
    low: float | None = None,
    high: float | None = None,
    strided: bool = True,
    overlapping: bool = True,
) -> torch.Tensor:
    """A tensor of one of `dtypes`; `shape` None draws one.

    `special` mixes in NaN, infinities, -0.0, subnormals; `low` and `high` bound the values (and leave those out);
    `strided` draws layouts: transposed, stepped, offset, and with `overlapping` expanded ones.
    """
    dtype = draw(st.sampled_from(list(dtypes)))
    shape = shapes(draw) if shape is None else shape
    layout = (
        draw(st.sampled_from(["plain", "plain", "transposed", "stepped", "offset", "expanded"])) if strided else "plain"
    )
    seed = draw(st.integers(0, 2**31 - 1))
    if layout == "transposed" and len(shape) >= 2:
        order = draw(st.permutations(range(len(shape))))
        base = _filled(tuple(shape[d] for d in order), dtype, seed, special, low, high)
        back = [order.index(d) for d in range(len(shape))]
        return base.permute(back)
    if layout == "stepped" and shape:
        dim = draw(st.integers(0, len(shape) - 1))
        step = draw(st.integers(2, 3))
        longer = (*shape[:dim], shape[dim] * step, *shape[dim + 1 :])
        base = _filled(longer, dtype, seed, special, low, high)
        return base[(*([slice(None)] * dim), slice(None, None, step))]
    if layout == "offset" and shape:
        base = _filled((shape[0] + 2, *shape[1:]), dtype, seed, special, low, high)
        return base[2:]
    if layout == "expanded" and overlapping and any(n > 1 for n in shape):
        dim = draw(st.sampled_from([d for d, n in enumerate(shape) if n > 1]))
        base = _filled((*shape[:dim], 1, *shape[dim + 1 :]), dtype, seed, special, low, high)
        return base.expand(shape)
    return _filled(shape, dtype, seed, special, low, high)


def broadcast_to(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to `shape`: leading dimensions left out, some sizes 1."""
    cut = draw(st.integers(0, len(shape))) if draw(st.booleans()) else 0
    return tuple(1 if draw(st.integers(0, 3)) == 0 else n for n in shape[cut:])


def pairs(draw: Draw, dtypes: Sequence[torch.dtype] = ALL, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors that broadcast with each other."""
    shape = shapes(draw)
    a = tensors(draw, dtypes, shape if draw(st.booleans()) else broadcast_to(draw, shape), **options)  # type: ignore[arg-type]
    b = tensors(draw, dtypes, broadcast_to(draw, shape), **options)  # type: ignore[arg-type]
    return (a, b) if draw(st.booleans()) else (b, a)


def dims_of(draw: Draw, tensor: torch.Tensor) -> int:
    """A dimension of a tensor, perhaps counted from the end (0 or -1 for one without dimensions)."""
    dims = max(tensor.dim(), 1)
    return draw(st.integers(-dims, dims - 1))


def _filled(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, special: bool, low: float | None, high: float | None
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    bounded = low is not None or high is not None
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        least = max(limits.min, -100) if low is None else int(low)
        most = min(limits.max, 100) if high is None else int(high)
        made = torch.randint(least, most + 1, shape, generator=generator, dtype=torch.int64).to(dtype)
        if special and not bounded and made.numel():
            where = torch.rand(shape, generator=generator) < 0.05
            made[where] = limits.max
            made[torch.rand(shape, generator=generator) < 0.05] = limits.min
        return made
    if bounded:
        least, most = -10.0 if low is None else low, 10.0 if high is None else high
        return (torch.rand(shape, generator=generator, dtype=torch.float64) * (most - least) + least).to(dtype)
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype)
    if special and made.numel():
        picked = torch.randint(0, len(SPECIAL) * 6, shape, generator=generator)
        for i, value in enumerate(SPECIAL):
            made[picked == i] = value
    return made
