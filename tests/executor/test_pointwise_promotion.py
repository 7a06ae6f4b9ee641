"""Type promotion against `torch.result_type`, over every combination of types and categories."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")

import torch

from outlast.executor.lowering.promotion import promote, result_type
from outlast.executor.trace import torch_dtypes
from outlast.executor.values import Buffer, Value

pytestmark = pytest.mark.torch

NAMES = list(torch_dtypes())


def operands(name: str) -> tuple[tuple[object, object], ...]:
    """A tensor with dimensions and one without, as PyTorch and a plan have them."""
    dtype = torch_dtypes()[name]
    return (
        (torch.ones(2, dtype=dtype), Value(Buffer("input"), name, (2,), (1,))),
        (torch.ones((), dtype=dtype), Value(Buffer("input"), name, (), ())),
    )


def test_two_types_promote_as_in_pytorch() -> None:
    for a, b in itertools.product(NAMES, NAMES):
        wanted = torch.promote_types(torch_dtypes()[a], torch_dtypes()[b])
        assert torch_dtypes()[promote(a, b)] == wanted, (a, b)


def test_tensors_numbers_and_tensors_without_dimensions_mix_as_in_pytorch() -> None:
    numbers = ((True, True), (3, 3), (0.5, 0.5))
    for name in NAMES:
        for theirs, ours in operands(name):
            for other in (*numbers, *(pair for second in NAMES for pair in operands(second))):
                wanted = torch.result_type(theirs, other[0])
                assert torch_dtypes()[result_type(ours, other[1])] == wanted, (name, other[0])
