"""Views need no step: shape, strides and sharing of memory are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import Draw, dims_of, shapes, tensors

from outlast.executor.replay import capture

pytestmark = pytest.mark.torch

Viewed = Callable[[Any], Any]
FLOAT = (torch.float32,)


def _x(draw: Draw, least: int = 1, most: int = 4) -> Any:
    return tensors(draw, FLOAT, shapes(draw, least=least, most=most, empty=False, largest=256), special=False)


def _permute(draw: Draw) -> tuple[Any, Viewed]:
    x = _x(draw)
    order = draw(st.permutations(range(x.dim())))
    return x, lambda t: t.permute(order)


def _transpose(draw: Draw) -> tuple[Any, Viewed]:
    x = _x(draw)
    a, b = dims_of(draw, x), dims_of(draw, x)
    return x, lambda t: t.transpose(a, b)


def _movedim(draw: Draw) -> tuple[Any, Viewed]:
    x = _x(draw)
    a, b = dims_of(draw, x), dims_of(draw, x)
    return x, lambda t: torch.movedim(t, a, b)


def _slice(draw: Draw) -> tuple[Any, Viewed]:
    x = _x(draw)
    dim, size = dims_of(draw, x), 9
    start, end, step = draw(st.integers(-size, size)), draw(st.integers(-size, size)), draw(st.integers(1, 3))
    return x, lambda t: torch.ops.aten.slice.Tensor(t, dim, start, end, step)


def _select(draw: Draw) -> tuple[Any, Viewed]:
    x = _x(draw)
    dim = dims_of(draw, x)
    index = draw(st.integers(-x.shape[dim], x.shape[dim] - 1))
    return x, lambda t: t.select(dim, index)


def _narrow(draw: Draw) -> tuple[Any, Viewed]:
    x = _x(draw)
    dim = dims_of(draw, x)
    start = draw(st.integers(0, x.shape[dim] - 1))
    length = draw(st.integers(0, x.shape[dim] - start))
    return x, lambda t: t.narrow(dim, start, length)


def _unsqueeze(draw: Draw) -> tuple[Any, Viewed]:
    x = _x(draw, 0)
    dim = draw(st.integers(-x.dim() - 1, x.dim()))
    return x, lambda t: t.unsqueeze(dim)


def _diagonal(draw: Draw) -> tuple[Any, Viewed]:
    x = _x(draw, 2)
    a, b = draw(st.permutations(range(x.dim())))[:2]
    offset = draw(st.integers(-3, 3))
    return x, lambda t: torch.diagonal(t, offset, a, b)


def _view(draw: Draw) -> tuple[Any, Viewed]:
    x = tensors(draw, FLOAT, shapes(draw, least=1, empty=False, largest=256), special=False, strided=False)
    shape = draw(st.sampled_from([[-1], [1, -1], [*x.shape, 1], [x.shape[0], -1], [-1, x.shape[-1]]]))
    return x, lambda t: t.view(shape)


def _reshape(draw: Draw) -> tuple[Any, Viewed]:
    """A view where that is possible, else a copy, which shares nothing."""
    x = _x(draw)
    shape = draw(st.sampled_from([[-1], [1, -1], [*x.shape, 1], [x.shape[0], -1]]))
    return x, lambda t: t.reshape(shape)


def _as_strided(draw: Draw) -> tuple[Any, Viewed]:
    x = tensors(draw, FLOAT, (4, 5), special=False, strided=False)
    offset = draw(st.integers(0, 5))
    return x, lambda t: t.as_strided((3, 2), (5, 2), offset)


def _unfold(draw: Draw) -> tuple[Any, Viewed]:
    x = _x(draw)
    dim = dims_of(draw, x)
    size = draw(st.integers(1, x.shape[dim]))
    return x, lambda t: t.unfold(dim, size, size)


def _pieces(make: Callable[[Any, int, int], Any]) -> Callable[[Draw], tuple[Any, Viewed]]:
    def drawn(draw: Draw) -> tuple[Any, Viewed]:
        x = _x(draw)
        dim, n = dims_of(draw, x), draw(st.integers(1, 5))
        return x, lambda t: make(t, n, dim)[-1]

    return drawn


VIEWS: dict[str, Callable[[Draw], tuple[Any, Viewed]]] = {
    "permute": _permute,
    "transpose": _transpose,
    "movedim": _movedim,
    "slice": _slice,
    "select": _select,
    "narrow": _narrow,
    "squeeze": lambda draw: (_x(draw, 0), lambda t: t.squeeze()),
    "unsqueeze": _unsqueeze,
    "diagonal": _diagonal,
    "view": _view,
    "reshape": _reshape,
    "flatten": lambda draw: (_x(draw, 0), lambda t: t.flatten()),
    "contiguous": lambda draw: (_x(draw, 0), lambda t: t.contiguous()),
    "t": lambda draw: (_x(draw, 0, 2), lambda t: t.t()),
    "as_strided": _as_strided,
    "unfold": _unfold,
    "detach": lambda draw: (_x(draw, 0), lambda t: t.detach()),
    "split": _pieces(lambda t, n, dim: t.split(n, dim)),
    "chunk": _pieces(lambda t, n, dim: t.chunk(n, dim)),
    "unbind": _pieces(lambda t, n, dim: t.unbind(dim)),
    "slice of a view of a slice": lambda draw: (
        tensors(draw, FLOAT, (4, 6, 3), special=False, overlapping=False),
        lambda t: t[1:, ::2].transpose(0, 1)[1:].unsqueeze(1),
    ),
}


def _agree(call: Callable[[Any], Any], x: Any) -> None:
    """Eager and replay give the same results and leave the same argument behind."""
    ours, eager = _again(x), _again(x)
    replay = capture(call, ours)
    got, wanted = replay(ours), call(eager)
    for a, b in zip((*got, ours), (*wanted, eager), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert b.numel() == 0 or a.stride() == b.stride()
        assert torch.equal(a, b)
    assert not replay.report().fallbacks


def _again(x: Any) -> Any:
    """The same layout over memory of its own."""
    storage = x.untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.shape, x.stride())


def _overlaps(x: Any) -> bool:
    return any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))


@pytest.mark.parametrize("name", VIEWS)
@settings(
    max_examples=25,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(data=st.data())
def test_a_view_has_eagers_shape_strides_and_sharing(name: str, data: Any) -> None:
    x, view = data.draw(_drawn(name))

    _agree(lambda t: (view(t) + 1, view(t)), x)
    if _overlaps(x):
        return

    def through_the_view(t: Any) -> Any:
        y = t + 0.5
        part = view(y)
        part.mul_(3)
        return (y, part)

    def of_the_argument(t: Any) -> Any:
        view(t).add_(2)
        return (t * 2,)

    def seen_through_the_view(t: Any) -> Any:
        y = t + 0.5
        part = view(y)
        y.sub_(4)
        return (part + 0,)

    for call in (through_the_view, of_the_argument, seen_through_the_view):
        _agree(call, x)


def _drawn(name: str) -> Any:
    return st.composite(lambda draw: VIEWS[name](draw))()


@pytest.mark.parametrize("name", ["permute", "slice", "select", "narrow", "diagonal", "view", "split"])
@settings(max_examples=5, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_view_alone_takes_no_step(name: str, data: Any) -> None:
    x, view = data.draw(_drawn(name))
    assert capture(view, x).report().steps == 0


def test_an_expanded_result_keeps_its_strides_of_zero() -> None:
    x = torch.arange(3.0).reshape(3, 1)
    got = capture(lambda t: t.expand(3, 4), x)(x)
    assert got.stride() == (1, 0)
    assert torch.equal(got, x.expand(3, 4))
