"""Arguments of matrix products.

Most numbers are multiples of a quarter, so that sums of products are exact and any order of summation has to give
eager's bits; the rest are positive, so that nothing cancels and the tolerance of one element holds for a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from strategies import FLOATS, INTEGERS, Draw, broadcast_to, tensors

Sample = tuple[tuple[Any, ...], dict[str, Any]]
SIZES = st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 65])
DTYPES = st.sampled_from([torch.float32, torch.float32, *FLOATS, *INTEGERS])


def operand(
    draw: Draw, dtype: torch.dtype, shape: tuple[int, ...], *, exact: bool, special: bool = False
) -> torch.Tensor:
    """A tensor of any layout; `special` puts a NaN or an infinity somewhere into a floating-point one."""
    if not dtype.is_floating_point:
        return tensors(draw, [dtype], shape)
    made = tensors(draw, [dtype], shape, low=-2.0 if exact else 0.1, high=2.0)
    elements = torch.empty(0, dtype=dtype).set_(made.untyped_storage())  # all of them, whatever the strides
    if exact:
        elements.mul_(4).round_().div_(4)
    if special and elements.numel() > 0:
        elements[draw(st.integers(0, elements.numel() - 1))] = draw(
            st.sampled_from([float("nan"), float("inf"), float("-inf")])
        )
    return made


def scales(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """beta and alpha, or neither."""
    if draw(st.booleans()):
        return {}
    numbers = [1, 1, 2, -3, 0] if not dtype.is_floating_point else [1, 1.0, 0.5, -2, 0, 0.25]
    return {"beta": draw(st.sampled_from(numbers)), "alpha": draw(st.sampled_from(numbers))}


def product(
    dims: str, *, added: str = "", scaled: bool = False, dtypes: Any = DTYPES, broadcast: bool = True
) -> Callable[[Draw], Sample]:
    """A sampler for operands with dimensions named like "mk kn"; `added` are those of what the product is added to."""

    def sample(draw: Draw) -> Sample:
        dtype = draw(dtypes)
        size = {name: draw(SIZES) for name in "bmnk"}
        size["b"] = draw(st.sampled_from([0, 1, 2, 3]))
        exact, special = draw(st.booleans()), draw(st.integers(0, 5)) == 0
        operands = [
            operand(draw, dtype, tuple(size[name] for name in one), exact=exact, special=special)
            for one in dims.split()
        ]
        if added:
            shape = tuple(size[name] for name in added)
            shape = broadcast_to(draw, shape) if broadcast and draw(st.booleans()) else shape
            operands.insert(0, operand(draw, dtype, shape, exact=exact))
        return tuple(operands), scales(draw, dtype) if scaled else {}

    return sample


def activation(draw: Draw) -> Sample:
    args, kwargs = product("mk kn", added="mn", scaled=True, dtypes=st.sampled_from(FLOATS))(draw)
    if not draw(st.booleans()):
        return args, kwargs
    # Eager's gelu of infinity is infinity or NaN, depending on how many elements there are.
    finite = tuple(one.nan_to_num(0.5, 2.0, -2.0).clamp(-9, 9) for one in args)
    return finite, kwargs | {"use_gelu": True}


SAMPLES: dict[str, Callable[[Draw], Sample]] = {
    "aten::mm": product("mk kn"),
    "aten::addmm": product("mk kn", added="mn", scaled=True),
    "aten::_addmm_activation": activation,
    "aten::bmm": product("bmk bkn"),
    "aten::baddbmm": product("bmk bkn", added="bmn", scaled=True),
    # addbmm_ and addmv.out of a smaller tensor resize it, which a plan refuses; test_matmul_kernels.py broadcasts these
    "aten::addbmm": product("bmk bkn", added="mn", scaled=True, broadcast=False),
    "aten::mv": product("mk k"),
    "aten::addmv": product("mk k", added="m", scaled=True, broadcast=False),
    "aten::dot": product("k k"),
    "aten::vdot": product("k k"),
    "aten::addr": product("m n", added="mn", scaled=True),
}
