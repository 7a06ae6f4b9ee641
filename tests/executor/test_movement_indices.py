"""Indices that lie outside: a replay raises what eager raises, and says which index, dimension and size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from outlast.core.errors import OperatorFailed
from outlast.executor.replay import capture

pytestmark = pytest.mark.torch

INSIDE = torch.tensor([0, 2])
ROWS = torch.arange(12.0).reshape(3, 4)
PART = torch.ones(2, 4)

#: name -> (call, the text of an index 7)
CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "index_select of dimension 0": (
        lambda i: ROWS.index_select(0, i),
        "index 7 is out of bounds for dimension 0 with size 3",
    ),
    "index_select of dimension 1": (
        lambda i: ROWS.index_select(1, i),
        "index 7 is out of bounds for dimension 1 with size 4",
    ),
    "embedding": (lambda i: torch.nn.functional.embedding(i, ROWS), "index 7 .* dimension 0 with size 3"),
    "gather": (lambda i: ROWS.gather(1, i[None]), "index 7 .* dimension 1 with size 4"),
    "take": (lambda i: ROWS.take(i * 3), "index 21 is out of bounds for a tensor of 12 elements"),
    "index by one tensor": (lambda i: ROWS[i], "index 7 .* dimension 0 with size 3"),
    "index by two tensors": (lambda i: ROWS[i, i], "index 7 .* dimension 0 with size 3"),
    "scatter": (lambda i: ROWS.scatter(0, i[None], PART), "index 7 .* dimension 0 with size 3"),
    "scatter_add": (lambda i: ROWS.scatter_add(0, i[None], PART), "index 7 .* dimension 0 with size 3"),
    "index_add": (lambda i: ROWS.index_add(0, i, PART), "index 7 .* dimension 0 with size 3"),
    "index_add of a vector": (lambda i: ROWS[0].index_add(0, i, PART[0, :2]), "index 7 .* dimension 0 with size 4"),
    "index_copy": (lambda i: ROWS.index_copy(0, i, PART), "index 7 .* dimension 0 with size 3"),
    "index_fill": (lambda i: ROWS.index_fill(0, i, 1.0), "index 7 .* dimension 0 with size 3"),
    "index_put": (lambda i: ROWS.index_put((i,), PART), "index 7 .* dimension 0 with size 3"),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_index_outside_raises_what_eager_raises(name: str) -> None:
    call, text = CALLS[name]
    replay = capture(call, INSIDE)
    outside = torch.tensor([0, 7])
    with pytest.raises((IndexError, RuntimeError)) as eager:
        call(outside)
    with pytest.raises(OperatorFailed, match=text) as ours:
        replay(outside)
    assert isinstance(ours.value, IndexError) == (eager.type is IndexError)
    assert isinstance(ours.value, RuntimeError) == (eager.type is RuntimeError)
    assert torch.equal(replay(INSIDE), call(INSIDE)), "the replay is of use afterwards"


@pytest.mark.parametrize("name", CALLS)
def test_a_negative_index_counts_from_the_end_where_eager_says_so(name: str) -> None:
    call, _text = CALLS[name]
    replay = capture(call, INSIDE)
    negative = torch.tensor([0, -1])
    try:
        wanted = call(negative)
    except (IndexError, RuntimeError):
        with pytest.raises(OperatorFailed, match="index -1"):
            replay(negative)
        return
    assert torch.equal(replay(negative), wanted)


def test_of_two_writes_to_one_place_the_last_wins() -> None:
    source = torch.arange(6.0).reshape(1, 6)
    same = torch.zeros(1, 6, dtype=torch.int64)
    call = lambda i: torch.zeros(1, 3).scatter(1, i, source)  # noqa: E731
    assert capture(call, same)(same)[0, 0] == 5.0
    copied = capture(lambda i: torch.zeros(3).index_copy(0, i, source[0]), same[0])(same[0])
    assert copied[0] == 5.0


def test_a_gradient_of_an_embedding_leaves_the_padding_row_out() -> None:
    grad, index = torch.ones(3, 2), torch.tensor([0, 1, 1])
    call = lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, 3, 0, False)  # noqa: E731
    replay = capture(call, grad, index)
    assert replay(grad, index).tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]
    assert not replay.report().fallbacks


def test_a_mask_that_writes_one_value_needs_no_fallback() -> None:
    mask = ROWS > 4

    def call(x: Any, mask: Any) -> Any:
        y = x.clone()
        y[mask] = -1.0
        y[:, mask[0]] = 2.0
        return y

    replay = capture(call, ROWS, mask)
    assert torch.equal(replay(ROWS, mask), call(ROWS, mask))
    other = ROWS > 100
    assert torch.equal(replay(ROWS, other), call(ROWS, other))
    assert not replay.report().fallbacks


def test_a_mask_that_picks_elements_is_left_to_pytorch_with_the_reason() -> None:
    replay = capture(lambda x, m: x[m] * 2, ROWS, ROWS > 4)
    assert torch.equal(replay(ROWS, ROWS > 8), ROWS[ROWS > 8] * 2)
    assert any("content of a tensor" in reason or "mask" in reason for reason in replay.report().fallbacks)


@pytest.mark.parametrize(
    "write",
    [
        lambda cache, at, row: cache.index_copy_(0, at, row),
        lambda cache, at, row: cache.index_put_((at,), row),
        lambda cache, at, row: cache.scatter_(0, at[:, None].expand(row.shape), row),
        lambda cache, at, row: cache[5:6].copy_(row),
    ],
)
def test_a_write_into_a_cache_touches_only_what_is_written(write: Callable[..., Any]) -> None:
    cache, at, row = torch.zeros(64, 8), torch.tensor([5]), torch.ones(1, 8)
    replay = capture(write, cache, at, row)
    replay(cache, at, row)
    assert cache.sum() == 8
    assert cache[5].sum() == 8
    assert replay.report().steps == 1, "one step, so the cache is not copied"


def test_rotating_half_of_each_head_takes_two_steps() -> None:
    def rotate_half(x: Any) -> Any:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    x = torch.randn(1, 4, 3, 64)
    replay = capture(rotate_half, x)
    assert torch.equal(replay(x), rotate_half(x))
    assert replay.report().steps == 2
