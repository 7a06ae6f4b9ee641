"""dispatch(): any PyTorch code gives what eager gives, whoever reads a tensor and when."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from outlast.core.errors import UsageError
from outlast.executor import capture, dispatch

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def twice(work: Callable[[], Any]) -> Any:
    """Calls of a new kind run as eager does while they are planned; from the second time on they are queued."""
    work()
    return work()


def test_a_model_gives_what_eager_gives_and_the_report_says_what_ran() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4), torch.nn.LayerNorm(4))
    x, report = torch.randn(3, 8), io.StringIO()
    with torch.no_grad():
        expected = model(x)
        with dispatch(report=report) as seen:
            actual = twice(lambda: model(x))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert seen.coverage.executed["aten::addmm"] == 4
    assert "aten::addmm" in report.getvalue()


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.numpy().copy(),
        lambda t: np.asarray(t).copy(),
        lambda t: np.array(t.tolist(), dtype=np.float32),
        lambda t: np.array([float(one) for one in t], dtype=np.float32),
        lambda t: np.from_dlpack(t).copy(),
        lambda t: t.clone().detach().view(-1).numpy().copy(),
        lambda t: np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * 4).from_address(t.data_ptr())).copy(),
    ],
    ids=["numpy", "array", "tolist", "item", "dlpack", "view", "data_ptr"],
)
def test_whoever_reads_a_queued_result_sees_its_content(read: Callable[[torch.Tensor], Any]) -> None:
    x = torch.randn(4)
    with torch.no_grad(), dispatch(report=None):
        actual = twice(lambda: read(x * 2 + 1))
    np.testing.assert_array_equal(actual, (x * 2 + 1).numpy())


def test_an_operator_left_to_pytorch_sees_what_is_queued_before_it() -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    with torch.no_grad(), dispatch(report=None) as seen:
        actual = twice(lambda: torch.nonzero(x * 2 > 0))
    assert actual.tolist() == [[0], [2]]
    assert any(name == "aten::nonzero" for name, _ in seen.coverage.fallbacks)


def test_a_replay_inside_sees_what_is_queued() -> None:
    x = torch.randn(4)
    with torch.no_grad():
        replay = capture(lambda a: a + 1, x, fuse=False)
        with dispatch(report=None):
            actual = twice(lambda: replay(x * 3))
    torch.testing.assert_close(actual, x * 3 + 1)


def test_inputs_may_be_dropped_and_their_memory_used_again_before_the_queue_runs() -> None:
    with torch.no_grad(), dispatch(report=None):

        def work() -> torch.Tensor:
            x = torch.full((1000,), 2.0)
            y = x * 3
            del x
            torch.full((1000,), 9.0)
            return y + 1

        actual = twice(work)
    torch.testing.assert_close(actual, torch.full((1000,), 7.0))


def test_in_place_changes_keep_their_order() -> None:
    with torch.no_grad(), dispatch(report=None):

        def work() -> tuple[torch.Tensor, torch.Tensor]:
            x = torch.ones(5)
            y = x + 1
            x.add_(10)
            z = x * y
            x.mul_(0)
            return z, x

        z, x = twice(work)
    assert z.tolist() == [22.0] * 5
    assert x.tolist() == [0.0] * 5


def test_tensors_that_require_grad_are_left_to_pytorch_with_the_reason() -> None:
    w = torch.randn(4, requires_grad=True)
    with dispatch(report=None) as seen:
        twice(lambda: w * 2).sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [2.0] * 4
    assert any("requires grad" in reason for _, reason in seen.coverage.fallbacks)


def test_a_failing_operator_raises_what_eager_raises_and_the_context_can_be_left() -> None:
    table, good, bad = torch.randn(4, 3), torch.tensor([1]), torch.tensor([9])

    def work() -> None:
        with torch.no_grad(), dispatch(report=None):
            torch.index_select(table, 0, good)
            torch.index_select(table, 0, bad).numpy()

    with pytest.raises(IndexError):
        work()
    assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]


def test_an_exception_of_the_caller_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), dispatch(report=None):
        1 / 0  # noqa: B018


def test_batch_of_one_and_senseless_batches() -> None:
    x = torch.randn(4)
    with torch.no_grad(), dispatch(batch=1, report=None) as seen:
        actual = twice(lambda: x * 2)
    torch.testing.assert_close(actual, x * 2)
    assert seen.coverage.flushes["the queue is full"] == 1
    with pytest.raises(UsageError, match="batch"):
        dispatch(batch=0)


@pytest.mark.parametrize(
    "look",
    [repr, str, lambda t: f"{t}", lambda t: format(t[0], ".2f"), bool, lambda t: copy.deepcopy(t).tolist(),
     lambda t: t.untyped_storage().tolist(), lambda t: pickle.loads(pickle.dumps(t)).tolist()],
    ids=["repr", "str", "f-string", "format", "bool", "deepcopy", "storage", "pickle"],
)  # fmt: skip
def test_printing_and_copying_a_queued_result_runs_the_queue_first(look: Callable[[torch.Tensor], Any]) -> None:
    x = torch.tensor([4.0]) if look is bool else torch.arange(8.0)
    expected = look(x * 2 + 1)
    with torch.no_grad(), dispatch(batch=1000, report=None):
        actual = twice(lambda: look(x * 2 + 1))
    assert actual == expected


@pytest.mark.parametrize("batch", [1, 2, 1000])
def test_views_reductions_and_several_results_are_right_for_every_length_of_the_queue(batch: int) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(x * 2 + 1)
        z = torch.softmax(y.reshape(2, -1).t(), -1) + y.mean()
        z[0].zero_()
        torch.add(z, 1, out=z)
        return z.sum(0), torch.cat([z, z * 3]), *z.max(0)

    x = torch.randn(4, 6)
    with torch.no_grad():
        expected = program(x)
        with dispatch(batch=batch, report=None):
            actual = twice(lambda: program(x))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_one_inside_another_gives_right_results() -> None:
    x = torch.randn(4)
    with torch.no_grad(), dispatch(batch=100, report=None):
        y = twice(lambda: x * 2)
        with dispatch(batch=100, report=None):
            z = twice(lambda: y + 1)
        w = z * y
    torch.testing.assert_close(w, (x * 2 + 1) * (x * 2))


def test_what_was_queued_before_an_exception_has_run_after_it() -> None:
    x = torch.ones(3)

    def work() -> None:
        with torch.no_grad(), dispatch(batch=1000, report=None):
            for _ in range(3):
                x.add_(1)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        work()
    assert x.tolist() == [4.0] * 3


def test_an_active_context_is_not_entered_again() -> None:
    mode = dispatch(report=None)
    with mode, pytest.raises(UsageError, match="active"):
        mode.__enter__()


def test_a_training_step_inside_has_eagers_gradients() -> None:
    model, x, target = torch.nn.Linear(4, 2), torch.randn(8, 4), torch.randn(8, 2)
    torch.nn.functional.mse_loss(model(x), target).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with dispatch(report=None):
        torch.nn.functional.mse_loss(model(x), target).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


def test_an_out_argument_that_is_resized() -> None:
    with torch.no_grad(), dispatch(report=None):
        for _ in range(3):
            x, out = torch.randn(4) * 2, torch.empty(0)
            torch.add(x, 1, out=out)
            assert torch.equal(out, x + 1)
