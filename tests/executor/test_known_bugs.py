"""Bugs that public implementations of small-operator executors have had, one test each.

They are found in their sources and issue trackers; those of the ring itself are tested in test_executor.py.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from outlast.executor import Executor, capture, dispatch, metrics

pytestmark = pytest.mark.torch


def replayed(call: Callable[..., Any], *inputs: Any) -> Any:
    """What a replay gives for inputs of the same kind, after it was captured on others."""
    others = [torch.ones_like(one) for one in inputs]
    replay = capture(call, *others)
    result = replay(*inputs)
    assert not replay.report().fallbacks, replay.report().fallbacks
    return result


def same(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    assert got.stride() == wanted.stride()


# --- arithmetic


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("call", [torch.add, torch.sub, torch.rsub])
def test_alpha_is_not_ignored(call: Any, dtype: torch.dtype) -> None:
    a, b = torch.arange(1, 9).to(dtype), torch.arange(9, 17).to(dtype)
    same(replayed(lambda x, y: call(x, y, alpha=3), a, b), call(a, b, alpha=3))
    same(replayed(lambda x: x.add_(b, alpha=-2), a.clone()), a.add(b, alpha=-2))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool]
)
def test_division_by_zero_gives_infinities_and_nan(dtype: torch.dtype) -> None:
    a, b = torch.tensor([1, 0, -1, 5]).to(dtype), torch.tensor([0, 0, 0, 1]).to(dtype)
    wanted = a / b
    assert wanted[0].isinf()
    assert wanted[1].isnan()
    same(replayed(torch.true_divide, a, b), wanted)
    if dtype.is_floating_point:
        same(replayed(torch.remainder, a, b), torch.remainder(a, b))
        same(replayed(torch.floor_divide, a, b), torch.floor_divide(a, b))
        negative = -b
        same(replayed(torch.true_divide, a, negative), a / negative)  # the sign of zero decides the infinity's


def test_integer_division_by_zero_fails_as_eagers_does() -> None:
    a, zero = torch.tensor([4, 5]), torch.tensor([1, 0])
    replay = capture(torch.floor_divide, a, torch.ones_like(a))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        torch.floor_divide(a, zero)
    with pytest.raises(Exception, match=r"(?i)division by zero|ZeroDivision"):
        replay(a, zero)
    same(replay(a, a), torch.ones_like(a))


def test_large_integers_are_not_read_as_floats() -> None:
    a = torch.tensor([2**53 + 1, -(2**53) - 1, 2**62 + 1, 16777217])
    one = torch.ones(4, dtype=torch.int64)
    same(replayed(lambda x, y: (x + y) * 1, a, one), a + 1)
    same(replayed(lambda x, y: torch.maximum(x, y), a, one), torch.maximum(a, one))
    same(replayed(lambda x: x.sum(), a), a.sum())
    small = torch.tensor([16777217, 33554433], dtype=torch.int32)
    same(replayed(lambda x: x + x, small), small + small)


def test_integers_wrap_around_in_their_own_width() -> None:
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        most = torch.full((4,), torch.iinfo(dtype).max, dtype=dtype)
        same(replayed(lambda x: x + x, most), most + most)
        same(replayed(lambda x: x * x, most), most * most)


def test_float64_is_not_computed_in_float32() -> None:
    a = torch.tensor([1.0 + 2.0**-40, 1e300, 1e-300, 3.141592653589793], dtype=torch.float64)
    same(replayed(lambda x: x * 3, a), a * 3)
    same(replayed(lambda x: x.sum(), a[:1]), a[:1].sum())
    assert replayed(lambda x: x + 2.0**-50, a)[0] != a[0]


# --- layouts


def test_a_strided_result_is_not_written_as_contiguous() -> None:
    a = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    same(replayed(lambda x: x * 2, a), a * 2)
    room = torch.zeros(4, 2, 6)[..., ::2]
    replay = capture(lambda x, out: torch.add(x, 1, out=out), a, torch.zeros(4, 2, 6)[..., ::2])
    replay(a, room)
    assert torch.equal(room, a + 1)


def test_an_operation_in_place_on_a_view_leaves_the_rest_alone() -> None:
    a = torch.zeros(6, 6)
    part = a[1:5:2, ::3]
    replay = capture(lambda x: x.add_(1).mul_(5), part)
    assert a.abs().sum() == 0, "capturing puts back what it changed"
    replay(part)
    assert a.sum() == 5 * part.numel()
    assert (part == 5).all()


def test_strided_inputs_are_not_read_as_contiguous() -> None:
    a, b = torch.arange(12.0).reshape(3, 4).t(), torch.arange(24.0).reshape(4, 6)[:, ::2]
    same(replayed(torch.add, a, b), a + b)
    same(replayed(torch.matmul, a, b.t()), a @ b.t())
    same(replayed(lambda x: torch.softmax(x, 0), b), torch.softmax(b, 0))
    row = torch.arange(4.0)[:, None].expand(4, 3)
    same(replayed(torch.mul, row, b), row * b)


def test_an_argument_that_is_given_twice_is_read_before_it_is_written() -> None:
    def call(x: Any, y: Any) -> Any:
        x.add_(1)
        return x + y

    ours, eager = torch.zeros(4), torch.zeros(4)
    replay = capture(call, torch.zeros(4), torch.ones(4))
    same(replay(ours, ours), call(eager, eager))
    same(ours, eager)
    shifted, wanted = torch.arange(5.0), torch.arange(5.0)
    call(wanted[1:], wanted[:4])
    replay(shifted[1:], shifted[:4])
    same(shifted, wanted)


# --- memory and order


def test_inputs_may_be_freed_after_the_capture() -> None:
    """A pending task that holds an address and not the tensor reads what was allocated there next."""
    a = torch.full((1024,), 3.0)
    replay = capture(lambda x: x * 2, a)
    del a
    gc.collect()
    noise = [torch.full((1024,), float(i)) for i in range(50)]
    for i, one in enumerate(noise):
        assert (replay(one) == 2 * i).all()


def test_what_the_function_closes_over_lives_as_long_as_the_replay() -> None:
    def make() -> Any:
        weight = torch.full((512,), 7.0)
        return capture(lambda x: x * weight, torch.ones(512))

    replay = make()
    gc.collect()
    noise = [torch.full((512,), -1.0) for _ in range(50)]
    assert (replay(torch.ones(512)) == 7).all()
    assert len(noise) == 50


def test_results_outlive_the_replay_and_later_calls() -> None:
    replay = capture(lambda x: x + 1, torch.zeros(256))
    results = [replay(torch.full((256,), float(i))) for i in range(20)]
    del replay
    gc.collect()
    noise = [torch.full((256,), -1.0) for _ in range(50)]
    assert [one[0].item() for one in results] == [i + 1.0 for i in range(20)]
    assert len({one.data_ptr() for one in results}) == 20
    assert len(noise) == 50


def test_tensors_dropped_while_calls_are_queued_are_kept_until_they_ran() -> None:
    with torch.no_grad(), dispatch(batch=64, report=None):
        a = torch.full((1024,), 3.0)
        b = a * 2
        del a
        gc.collect()
        noise = [torch.full((1024,), -1.0) for _ in range(8)]
        c = b + 1
        del b
    assert (c == 7).all()
    assert len(noise) == 8


def left_to_pytorch(x: Any) -> Any:
    """An operator without a lowering."""
    return torch.special.bessel_j1(x)


def test_a_fallback_sees_what_earlier_steps_wrote() -> None:
    def call(x: Any) -> Any:
        y = x * 2 + 1
        z = left_to_pytorch(y)
        return z + y

    a = torch.linspace(-3, 3, 65)
    replay = capture(call, torch.zeros(65))
    torch.testing.assert_close(replay(a), call(a))
    assert any("bessel" in reason for reason in replay.report().fallbacks)


def test_a_fallback_sees_what_is_still_queued() -> None:
    a = torch.linspace(-3, 3, 65)
    wanted = left_to_pytorch(a * 2 + 1) + 1
    with torch.no_grad(), dispatch(batch=64, report=None):
        y = a * 2 + 1
        z = left_to_pytorch(y) + 1
    torch.testing.assert_close(z, wanted)


def test_the_returned_tensor_itself_holds_the_value() -> None:
    """Not a second tensor that a later flush fills."""
    with torch.no_grad(), dispatch(batch=64, report=None):
        a = torch.arange(8.0) + 1
        held = a
        total = float(a.sum())
        listed = held.tolist()
    assert total == 36.0
    assert listed == [float(i) for i in range(1, 9)]
    assert torch.equal(held, torch.arange(1.0, 9.0))
    out = torch.zeros(8)
    replay = capture(lambda x, out: torch.mul(x, 2, out=out), torch.zeros(8), torch.zeros(8))
    returned = replay(a, out)
    assert torch.equal(out, a * 2)
    assert returned.data_ptr() == out.data_ptr()


def test_a_replay_collected_while_plans_are_counted_does_not_block() -> None:
    """The garbage collector ran its finalizer in the thread that held the lock, which then waited for itself."""
    with Executor() as executor:
        replays = [capture(lambda x: x * 3, torch.ones(8), executor=executor, fuse=False)]
        replays[0](torch.ones(8))
        counts = metrics._counts[executor]
        before = sum(counts.totals().values())
        assert before == 1

        def collect() -> None:
            with counts._lock:
                replays.clear()
                gc.collect()

        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        assert sum(counts.totals().values()) == before, "what it ran is still counted"
        assert not counts._plans


@pytest.fixture
def crowded() -> Iterator[Executor]:
    with Executor(workers=3) as executor:
        yield executor


def test_a_long_chain_does_not_race_with_itself(crowded: Executor) -> None:
    """Longer than any batch, and with operands large enough to be shared out over the workers."""

    def chain(x: Any) -> Any:
        for i in range(600):
            x = (x + 1) if i % 2 else (x * 1.0078125)
        return x

    for length in (64, 1 << 17):
        a = torch.linspace(0, 1, length)
        replay = capture(chain, a, executor=crowded, fuse=False)
        wanted = chain(a)
        for _ in range(3):
            same(replay(a), wanted)


def test_nan_infinities_and_signed_zeros_pass_through() -> None:
    a = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-45])
    for call in (torch.relu, torch.abs, torch.neg, lambda x: x + 0.0, lambda x: torch.clamp(x, -1, 1), torch.sign):
        got, wanted = replayed(call, a), call(a)
        same(got, wanted)
        assert torch.equal(torch.signbit(got[3:5]), torch.signbit(wanted[3:5]))
