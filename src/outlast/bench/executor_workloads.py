"""What `outlast bench executor` runs: small programs in PyTorch, and the first of them in numpy as well.

The list of 96 operators is that of the issue: element-wise, of ten kinds, on 64 floats. The second list has the same
length with means, maxima and broadcasts between, so that it can not become one loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

WIDTH = 64  #: elements of the lists' tensors; width of the MLP; head dimension of attention
OPERATORS = 96


def elementwise(x: Any, a: Any, b: Any) -> Any:
    """96 operators, each on the result of the one before. x, a, b: float32[64]; a in (0, 1)."""
    import torch

    for _ in range(8):
        x = x * a
        x = x + b
        x = torch.relu(x)
        x = x - a
        x = torch.abs(x)
        x = torch.maximum(x, b)
        x = x + 0.5
        x = torch.minimum(x, a)
        x = x * x
        x = -x
        x = x + b
        x = x * 0.25
    return x


def elementwise_numpy(x: Any, a: Any, b: Any) -> Callable[[], Any]:
    """The same list on numpy arrays, without an allocation: every result goes to `out`."""
    import numpy as np

    out, zero = np.empty_like(x), np.float32(0)
    half, quarter = np.float32(0.5), np.float32(0.25)
    multiply, add, subtract, absolute = np.multiply, np.add, np.subtract, np.absolute
    maximum, minimum, negative = np.maximum, np.minimum, np.negative

    def run() -> Any:
        y = x
        for _ in range(8):
            multiply(y, a, out=out)
            add(out, b, out=out)
            maximum(out, zero, out=out)
            subtract(out, a, out=out)
            absolute(out, out=out)
            maximum(out, b, out=out)
            add(out, half, out=out)
            minimum(out, a, out=out)
            multiply(out, out, out=out)
            negative(out, out=out)
            add(out, b, out=out)
            multiply(out, quarter, out=out)
            y = out
        return out

    return run


def reducing(x: Any, a: Any, b: Any) -> Any:
    """96 operators on [8, 8] with reductions and broadcasts. x: float32[8, 8], a, b: float32[8]."""
    for _ in range(12):
        x = x * a
        x = x - x.mean(-1, keepdim=True)
        x = x + b
        x = x / (x.abs().amax(0, keepdim=True) + 1.0)
    return x


def mlp() -> Any:
    """Three layers of width 64 with ReLU between; parameters require grad, as those of a real model do."""
    from torch import nn

    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
    ).eval()


def attention(q: Any, k: Any, v: Any) -> Any:
    """One decode step: q [1, heads, 1, 64], k and v [1, heads, context, 64]."""
    import torch

    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def lengths(x: Any, scale: Any, shift: Any) -> Any:
    """Rows of any number, normalised and averaged. x: float32[length, 16], scale, shift: float32[16]."""
    import torch

    y = torch.relu(x * scale + shift)
    y = y / (1.0 + y.sum(-1, keepdim=True))
    return y.mean(0)


def large(kind: str) -> tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]:
    """A function on tensors of 1 M elements, and the shapes of its arguments."""
    import torch

    flat, rows = (1 << 20,), (1 << 10, 1 << 10)
    known: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
        "add": (lambda x, y: x + y, (flat, flat)),
        "mul, add, relu": (lambda x, y: torch.relu(x * y + x), (flat, flat)),
        "gelu": (torch.nn.functional.gelu, (flat,)),
        "sum": (torch.sum, (flat,)),
        "softmax of rows": (lambda x: torch.softmax(x, -1), (rows,)),
        "layer_norm of rows": (lambda x: torch.nn.functional.layer_norm(x, (1 << 10,)), (rows,)),
    }
    return known[kind]


LARGE = ("add", "mul, add, relu", "gelu", "sum", "softmax of rows", "layer_norm of rows")


def matmul(x: Any, y: Any) -> Any:
    """Where a tuned library is the better choice. x, y: float32[512, 512]."""
    return x @ y
