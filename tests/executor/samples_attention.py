"""Arguments of scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from strategies import FLOATS, Draw, tensors

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def heads(draw: Draw, dtype: torch.dtype, batch: int, count: int, length: int, dim: int) -> torch.Tensor:
    """[batch, count, length, dim], as models make it: contiguous, or with heads and positions exchanged in memory."""
    if draw(st.booleans()):
        return tensors(draw, [dtype], (batch, count, length, dim), low=-2.0, high=2.0)
    return tensors(draw, [dtype], (batch, length, count, dim), low=-2.0, high=2.0).transpose(1, 2)


def flash(draw: Draw) -> Sample:
    dtype = draw(st.sampled_from([torch.float32, *FLOATS]))
    batch, shared, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 4]))
    queries = draw(st.sampled_from([1, 1, 1, 2, 3, 4, 5, 9]))
    keys = draw(st.sampled_from([1, 2, 3, 7, 15, 16, 17, 33, 65, 255, 256, 257, 300]))
    dim = draw(st.sampled_from([1, 3, 8, 16, 17, 64, 65, 128, 256]))
    query = heads(draw, dtype, batch, shared * group, queries, dim)
    key, value = heads(draw, dtype, batch, shared, keys, dim), heads(draw, dtype, batch, shared, keys, dim)
    kwargs: dict[str, Any] = {}
    args: tuple[Any, ...] = (query, key, value)
    if draw(st.integers(0, 2)) == 0:
        args = (*args, 0.0, True)
    elif draw(st.booleans()):
        kwargs["attn_mask"] = mask(draw, dtype, batch, shared * group, queries, keys)
    if draw(st.integers(0, 3)) == 0:
        kwargs["scale"] = draw(st.sampled_from([1.0, 0.3, -0.2, 0.0]))
    return args, kwargs


def mask(draw: Draw, dtype: torch.dtype, batch: int, count: int, queries: int, keys: int) -> torch.Tensor:
    """Added to the scores; parts of it, or all of a query, are -infinity."""
    shape = draw(
        st.sampled_from([(queries, keys), (1, keys), (batch, 1, queries, keys), (batch, count, queries, keys)])
    )
    kind = torch.float64 if dtype == torch.float64 else draw(st.sampled_from([torch.float32, dtype]))
    made = tensors(draw, [kind], shape, low=-3.0, high=3.0)
    elements = torch.empty(0, dtype=kind).set_(made.untyped_storage())
    hidden = draw(st.sampled_from([0.0, 0.3, 0.9]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    elements[torch.rand(elements.shape, generator=generator) < hidden] = float("-inf")
    return made


SAMPLES: dict[str, Callable[[Draw], Sample]] = {"aten::_scaled_dot_product_flash_attention_for_cpu": flash}

#: The logsumexp of float16 and bfloat16 queries is float32, but PyTorch sums exponentials good to 2e-5 for them; the
#: accuracy of each type is tested in test_attention_kernels.py.
TOLERANCES = {"aten::_scaled_dot_product_flash_attention_for_cpu": (1.6e-2, 1.6e-2)}
