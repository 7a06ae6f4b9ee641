"""torch.compile(backend="outlast"): inference, training, dynamic shapes and graph breaks give what eager gives."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch

from outlast.core.errors import UsageError
from outlast.executor import compile_backend

pytestmark = pytest.mark.torch
BACKEND = compile_backend.outlast


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))


def test_inference_runs_on_the_executor() -> None:
    net, x = model(), torch.randn(3, 8)
    fast = torch.compile(net, backend=BACKEND, options={"fuse": False})
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), net(x), rtol=1e-5, atol=1e-6)
    report = compile_backend.replays()[-1].report()
    assert report.calls == 2
    assert not report.fallbacks
    assert not report.eager


def test_training_steps_equal_eager() -> None:
    torch.manual_seed(1)
    net = model()
    torch.manual_seed(1)
    twin = model()
    fast = torch.compile(net, backend=BACKEND, options={"fuse": False})
    optimisers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (net, twin)]
    for _ in range(4):
        x, y = torch.randn(5, 8), torch.randn(5, 4)
        for forward, optimiser in zip((fast, twin), optimisers, strict=True):
            optimiser.zero_grad()
            torch.nn.functional.mse_loss(forward(x), y).backward()
            optimiser.step()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_dynamic_shapes_need_one_graph() -> None:
    fast = torch.compile(lambda x: (x * 2 + 1).relu().sum(-1), backend=BACKEND, dynamic=True, options={"fuse": False})
    before = len(compile_backend.replays())
    with torch.no_grad():
        for n in (5, 7, 9, 7, 5):
            torch.testing.assert_close(fast(torch.ones(n, 3)), torch.full((n,), 9.0))
    assert len(compile_backend.replays()) == before + 1


def test_python_that_looks_at_a_tensor_splits_the_graph() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y + 1 if y.sum() > 0 else y - 1

    fast = torch.compile(function, backend=BACKEND, options={"fuse": False})
    with torch.no_grad():
        assert fast(torch.ones(3)).tolist() == [3.0] * 3
        assert fast(-torch.ones(3)).tolist() == [-3.0] * 3


def test_unknown_options_are_refused() -> None:
    with pytest.raises(UsageError, match="speed"):
        BACKEND(torch.fx.symbolic_trace(lambda x: x), [torch.ones(1)], options={"speed": 11})


def test_backend_is_found_by_its_name() -> None:
    try:
        importlib.metadata.distribution("outlast")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("outlast is not installed, so that its entry points are unknown")
    assert "outlast" in torch._dynamo.list_backends(exclude_tags=())


def test_in_place_changes_reach_the_caller() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    x = torch.zeros(4)
    with torch.no_grad():
        assert torch.compile(function, backend=BACKEND, options={"fuse": False})(x).tolist() == [2.0] * 4
    assert x.tolist() == [1.0] * 4


def test_what_can_not_be_planned_runs_as_it_is() -> None:
    def negated(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).conj().imag * 2

    fast = torch.compile(negated, backend=BACKEND)
    for _ in range(2):
        x = torch.randn(8)
        torch.testing.assert_close(fast(x), negated(x))


def test_a_model_of_more_than_64_parameters_trains_on_one_plan_each_way() -> None:
    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(40)])
    fast = torch.compile(net, backend=BACKEND, options={"fuse": False})
    x = torch.randn(2, 4)
    for _ in range(3):
        fast(x).sum().backward()
    reports = [replay.report() for replay in compile_backend.replays()[-2:]]
    assert [(report.calls, report.captures) for report in reports] == [(2, 1), (2, 1)]
