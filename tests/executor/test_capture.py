"""Captured functions: every call gives what eager gives, whatever happens to arguments, parameters and results."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from outlast.core.errors import OutlastError, UsageError
from outlast.executor import DataDependent, Executor, capture

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def chain(x: Any, y: Any) -> Any:
    return torch.relu(x * y + 1.0) - y


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


# --- arguments


@pytest.mark.parametrize("fuse", [None, False])
def test_replay_gives_what_eager_gives(fuse: bool | None) -> None:
    x, y = torch.randn(8, 16), torch.randn(16)
    replay = capture(chain, x, y, fuse=fuse)
    for _ in range(3):
        x = torch.randn(8, 16)
        same(replay(x, y), chain(x, y))
    report = replay.report()
    assert (report.calls, report.captures, report.fallbacks, report.eager) == (3, 1, {}, {})


@pytest.mark.parametrize(
    "other",
    [
        lambda: (torch.randn(5), torch.randn(5)),
        lambda: (torch.randn(8, 4).t(), torch.randn(4, 8)),
        lambda: (torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)),
        lambda: (torch.randint(9, (4, 8)), torch.randn(4, 8)),
        lambda: (torch.randn(4, 16)[:, ::2], torch.randn(1, 8).expand(4, 8)),
        lambda: (torch.randn(0, 8), torch.randn(8)),
        lambda: (torch.tensor(2.0), torch.randn(3)),
    ],
)
def test_other_shapes_strides_and_dtypes_are_captured_when_they_come(other: Callable[[], tuple[Any, Any]]) -> None:
    replay = capture(chain, torch.randn(4, 8), torch.randn(4, 8))
    args = other()
    for _ in range(2):
        same(replay(*args), chain(*args))
    assert (replay.captures, replay.variants, replay.calls) == (2, 2, 1)


def test_arguments_that_differ_are_refused_by_option_and_the_message_shows_both() -> None:
    replay = capture(chain, torch.randn(4, 8), torch.randn(8), on_mismatch="error")
    with pytest.raises(UsageError, match=r"float32\[4, 9\].*captured.*\[4, 8\]"):
        replay(torch.randn(4, 9), torch.randn(9))
    with pytest.raises(UsageError, match="differ"):
        replay(torch.randn(8, 4).t(), torch.randn(8))
    x, y = torch.randn(4, 8), torch.randn(8)
    same(replay(x, y), chain(x, y))


def test_wrong_options_are_refused() -> None:
    x = torch.randn(2)
    with pytest.raises(UsageError, match="on_mismatch"):
        capture(chain, x, x, on_mismatch="maybe")
    with pytest.raises(UsageError, match="max_variants"):
        capture(chain, x, x, max_variants=0)


def test_keywords_are_refused() -> None:
    replay = capture(chain, torch.randn(2), torch.randn(2))
    with pytest.raises(TypeError, match="position"):
        replay(torch.randn(2), y=torch.randn(2))


def test_plans_are_bounded_and_one_that_went_is_made_again() -> None:
    replay = capture(lambda x: x + 1, torch.randn(1), max_variants=4)
    for _ in range(2):
        for n in range(1, 10):
            x = torch.randn(n)
            same(replay(x), x + 1)
            assert replay.variants <= 4
    assert replay.captures > 9


def test_numbers_and_flags_among_arguments_are_frozen_into_a_plan_of_their_own() -> None:
    def scaled(x: Any, factor: float, *, negate: bool = False) -> Any:
        return -(x * factor) if negate else x * factor

    replay = capture(scaled, torch.randn(4), 2.0)
    x = torch.randn(4)
    for factor in (2.0, 3.0, 2.0, -0.0):
        same(replay(x, factor), x * factor)


def test_tensors_in_lists_and_dicts_are_arguments_too() -> None:
    def total(parts: list[Any], named: dict[str, Any]) -> Any:
        return sum(parts) * named["scale"]

    replay = capture(total, [torch.randn(3), torch.randn(3)], {"scale": torch.randn(3)})
    parts, named = [torch.randn(3), torch.randn(3)], {"scale": torch.randn(3)}
    same(replay(parts, named), total(parts, named))


def test_the_same_tensor_twice_and_two_tensors_are_told_apart() -> None:
    def into(x: Any, y: Any) -> Any:
        x.add_(1)
        return x * y

    a, b = torch.randn(4), torch.randn(4)
    replay = capture(into, a, b)
    same(replay(a.clone(), b), into(a.clone(), b))
    one, other = a.clone(), a.clone()
    same(replay(one, one), into(other, other))
    same(one, other)
    same(replay(a.clone(), b), into(a.clone(), b))


def test_arguments_that_share_memory_give_what_eager_gives() -> None:
    def shifted(x: Any, y: Any) -> Any:
        x.mul_(2)
        y.add_(1)
        return x + y

    replay = capture(shifted, torch.randn(6), torch.randn(6))
    ours, theirs = torch.arange(8.0), torch.arange(8.0)
    same(replay(ours[:6], ours[2:]), shifted(theirs[:6], theirs[2:]))
    same(ours, theirs)


def test_shared_memory_that_is_only_read_needs_nothing_special() -> None:
    replay = capture(chain, torch.randn(6), torch.randn(6))
    base = torch.randn(8)
    same(replay(base[:6], base[2:]), chain(base[:6], base[2:]))
    assert replay.calls == 1


def test_inputs_may_be_dropped_before_the_next_call() -> None:
    replay = capture(chain, torch.randn(64), torch.randn(64))
    expected = []
    results = []
    for _ in range(50):
        x, y = torch.randn(64), torch.randn(64)
        expected.append(chain(x, y))
        results.append(replay(x, y))
        del x, y
        torch.full((64,), float("nan"))  # takes memory that was given back
    for result, wanted in zip(results, expected, strict=True):
        same(result, wanted)


def test_an_empty_tensor_and_an_unsupported_dtype_work() -> None:
    replay = capture(lambda x: (x + x).sum(), torch.randn(0))
    same(replay(torch.randn(0)), torch.tensor(0.0))
    x = torch.randn(3, dtype=torch.complex64)
    same(replay(x), (x + x).sum())
    assert any("complex64" in reason for reason in replay.report().eager)


def test_a_subclass_runs_as_it_is() -> None:
    class Mine(torch.Tensor):
        pass

    replay = capture(chain, torch.randn(3), torch.randn(3))
    x = torch.randn(3).as_subclass(Mine)
    y = torch.randn(3)
    result = replay(x, y)
    assert type(result) is Mine
    same(result.as_subclass(torch.Tensor), chain(x, y).as_subclass(torch.Tensor))
    assert any("Mine" in reason for reason in replay.report().eager)


# --- results


def test_results_outlive_the_replay() -> None:
    x, y = torch.randn(64), torch.randn(64)
    replay = capture(chain, x, y)
    first, second = replay(x, y), replay(y, x)
    del replay
    gc.collect()
    same(first, chain(x, y))
    same(second, chain(y, x))


def test_each_call_has_results_of_its_own() -> None:
    replay = capture(chain, torch.randn(8), torch.randn(8))
    x, y = torch.randn(8), torch.randn(8)
    first = replay(x, y)
    kept = first.clone()
    replay(y, x)
    same(first, kept)
    assert replay(x, y).data_ptr() != first.data_ptr()


def test_nested_results_keep_their_form() -> None:
    def nested(x: Any) -> Any:
        return {"a": x + 1, "b": [x * 2, (x, 7, None)]}

    replay = capture(nested, torch.randn(3))
    x = torch.randn(3)
    got = replay(x)
    assert list(got) == ["a", "b"]
    assert (type(got["b"]), type(got["b"][1]), got["b"][1][1:]) == (list, tuple, (7, None))
    same(got["a"], x + 1)
    same(got["b"][0], x * 2)
    assert got["b"][1][0].data_ptr() == x.data_ptr()


def test_results_that_are_views_share_memory_as_those_of_eager_do() -> None:
    def views(x: Any) -> Any:
        y = x * 2
        return y, y[1:], x.t()

    replay = capture(views, torch.randn(3, 4))
    x = torch.randn(3, 4)
    y, tail, turned = replay(x)
    y.zero_()
    assert tail.abs().sum() == 0
    assert turned.data_ptr() == x.data_ptr()
    assert turned.stride() == x.t().stride()


def test_in_place_changes_reach_the_argument_and_capture_itself_changes_nothing() -> None:
    def grow(x: Any) -> Any:
        x.add_(1)
        x[1:].mul_(2)
        return x

    example = torch.zeros(4)
    replay = capture(grow, example)
    same(example, torch.zeros(4))
    x = torch.arange(4.0)
    version = x._version
    result = replay(x)
    assert result is x or result.data_ptr() == x.data_ptr()
    same(x, grow(torch.arange(4.0)))
    assert x._version > version


# --- what a function closes over


def test_parameters_are_read_where_they_lie_at_each_call() -> None:
    layer = torch.nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with torch.no_grad():
        replay = capture(layer, x)
        layer.weight.mul_(3)
        same(replay(x), layer(x))
        layer.weight.data = torch.randn(4, 4)
        same(replay(x), layer(x))
        layer.bias.data = torch.randn(4)
        gc.collect()
        same(replay(x), layer(x))
        assert replay.calls == 3


def test_a_parameter_of_another_shape_is_noticed() -> None:
    layer = torch.nn.Linear(4, 4)
    with torch.no_grad():
        replay = capture(layer, torch.randn(2, 4))
        layer.weight.data = torch.randn(6, 4)
        layer.bias.data = torch.randn(6)
        x = torch.randn(2, 4)
        same(replay(x), layer(x))


def test_parameters_that_require_grad_run_in_eager_while_autograd_records() -> None:
    layer = torch.nn.Linear(4, 4)
    replay = capture(layer, torch.randn(2, 4))
    x = torch.randn(2, 4)
    result = replay(x)
    result.sum().backward()
    assert layer.weight.grad is not None
    assert any("grad" in reason for reason in replay.report().eager)
    with torch.no_grad():
        same(replay(x), layer(x))
    assert replay.calls == 1


def test_an_argument_that_requires_grad_gets_its_gradient() -> None:
    replay = capture(chain, torch.randn(3), torch.randn(3))
    x = torch.randn(3, requires_grad=True)
    replay(x, torch.randn(3)).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not replay(x, torch.randn(3)).requires_grad


def test_inference_mode_works_for_capture_and_call() -> None:
    with torch.inference_mode():
        x, y = torch.randn(4), torch.randn(4)
        replay = capture(chain, x, y)
        same(replay(x, y), chain(x, y))
        assert replay.calls == 1
    plain = torch.randn(4)
    same(replay(plain, plain + 1), chain(plain, plain + 1))


# --- what depends on content


def test_a_function_that_looks_at_content_is_refused() -> None:
    with pytest.raises(DataDependent, match="content"):
        capture(lambda x: x * x.sum().item(), torch.randn(3))
    with pytest.raises(DataDependent):
        capture(lambda x: x + 1 if x.sum() > 0 else x, torch.randn(3))


def test_a_shape_that_depends_on_content_ends_the_plan_there() -> None:
    def picked(x: Any) -> Any:
        y = x * 2 + 1
        return torch.nonzero(y > 0).float() + 1

    replay = capture(picked, torch.randn(16))
    for _ in range(4):
        x = torch.randn(16)
        same(replay(x), picked(x))
    assert any("content" in reason or "nonzero" in reason for reason in replay.report().fallbacks)


def test_what_is_not_supported_runs_in_pytorch_inside_the_call_and_is_named() -> None:
    def mixed(x: Any) -> Any:
        y = x @ x.t() + torch.eye(4)
        return torch.linalg.det(y) + y.sum()

    replay = capture(mixed, torch.randn(4, 4))
    for _ in range(3):
        x = torch.randn(4, 4)
        same(replay(x), mixed(x))
    (left,) = [name for name in replay.report().fallbacks if "det" in name]
    assert "not in the table" in left


def test_an_error_of_the_function_is_that_of_eager_and_restores_the_arguments() -> None:
    def fails(x: Any) -> Any:
        x.add_(1)
        return x @ torch.randn(7, 7)

    x = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match="shapes"):
        capture(fails, x)
    same(x, torch.zeros(3, 3))


def test_an_index_out_of_range_is_an_index_error_and_the_next_call_works() -> None:
    table = torch.randn(5, 3)
    replay = capture(lambda i: torch.index_select(table, 0, i), torch.tensor([0, 1]))
    with pytest.raises(IndexError):
        replay(torch.tensor([1, 9]))
    same(replay(torch.tensor([4, 2])), table[[4, 2]])


# --- threads and processes


def test_threads_that_call_one_replay_at_once_each_get_their_own_result() -> None:
    replay = capture(chain, torch.randn(64), torch.randn(64))
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(200):
            n = 64 if seed % 2 else int(torch.randint(1, 70, (), generator=generator))
            x, y = torch.randn(n, generator=generator), torch.randn(n, generator=generator)
            if not torch.allclose(replay(x, y), chain(x, y), rtol=1e-5, atol=1e-6):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_child_captures_and_replays_on_an_executor_of_its_own() -> None:
    x, y = torch.randn(8), torch.randn(8)
    same(capture(chain, x, y)(x, y), chain(x, y))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            replay = capture(chain, x, y, fuse=False)
            code = 0 if torch.allclose(replay(y, x), chain(y, x)) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_replay_of_a_closed_executor_says_so() -> None:
    with Executor() as executor:
        x = torch.randn(4)
        replay = capture(lambda a: a + 1, x, executor=executor)
        same(replay(x), x + 1)
    with pytest.raises(OutlastError, match="closed"):
        replay(x)


# --- in numbers


@pytest.mark.parametrize("count", [1, 96])
def test_report_counts_steps_and_kernels(count: int) -> None:
    def repeated(x: Any) -> Any:
        for _ in range(count):
            x = x * x
        return x

    report = capture(repeated, torch.rand(4), fuse=False).report()
    assert (report.steps, sum(report.kernels.values()), report.fused) == (count, count, 0)


# --- what a plan can not see


def test_a_result_behind_a_shape_that_depends_on_content_is_memory_of_its_own() -> None:
    def picked(x: Any) -> Any:
        y = x * 2 + 1
        return x.nonzero(), y.t()

    replay = capture(picked, torch.ones(3, 3))
    x = torch.full((3, 3), 2.0)
    result = replay(x)[1]
    replay(torch.full((3, 3), 7.0))
    same(result, (x * 2 + 1).t())


def test_python_that_reads_a_shape_that_depends_on_content_gets_todays() -> None:
    def mean(x: Any) -> Any:
        kept = x[x > 0]
        return kept.sum() / kept.shape[0], torch.ones(kept.numel())

    replay = capture(mean, torch.tensor([1.0, 2.0, -1.0]))
    for content in ([1.0, 2.0, 3.0], [4.0, 5.0, -3.0], [-1.0, -1.0, 6.0]):
        x = torch.tensor(content)
        same(replay(x), mean(x))

    def changing(x: Any) -> Any:
        x.add_(1)
        return x[x > 0] * 2

    replay = capture(changing, torch.tensor([1.0, 2.0, -3.0]))
    x = torch.tensor([1.0, 2.0, 3.0])
    same(replay(x), torch.tensor([4.0, 6.0, 8.0]))
    same(x, torch.tensor([2.0, 3.0, 4.0]))  # changed once


def test_a_replay_inside_a_captured_function_is_part_of_the_plan() -> None:
    inner = capture(lambda x: x * 2, torch.randn(4))
    outer = capture(lambda x: inner(x) + 1, torch.randn(4))
    for _ in range(2):
        x = torch.randn(4)
        same(outer(x), x * 2 + 1)
        same(inner(x), x * 2)


@pytest.mark.parametrize("leak", [lambda x: torch.from_numpy(x.numpy() * 2) + 1, lambda x: torch.tensor(x.tolist())])
def test_content_that_leaves_through_numpy_or_a_list_is_refused(leak: Callable[[Any], Any]) -> None:
    with pytest.raises(DataDependent, match="content"):
        capture(leak, torch.randn(4))


def test_hundreds_of_arguments_and_results_are_one_plan() -> None:
    tensors = [torch.randn(3) for _ in range(200)]
    replay = capture(lambda *all_of: [one + 1 for one in all_of], *tensors)
    for _ in range(3):
        same(replay(*tensors), [one + 1 for one in tensors])
    assert (replay.report().captures, replay.report().calls) == (1, 3)


def test_minus_zero_is_another_argument_and_nan_is_the_same_one() -> None:
    replay = capture(lambda x, number: x / number, torch.ones(2), 0.0)
    same(replay(torch.ones(2), -0.0), torch.full((2,), -float("inf")))
    same(replay(torch.ones(2), 0.0), torch.full((2,), float("inf")))
    for _ in range(3):
        replay(torch.ones(2), float("nan"))
    assert replay.report().captures == 3


def test_a_lazy_negation_is_no_plain_memory() -> None:
    replay = capture(lambda x: x * 2, torch.view_as_complex(torch.randn(4, 2)).imag)
    negated = torch.view_as_complex(torch.randn(4, 2)).conj().imag
    assert negated.is_neg()
    same(replay(negated), negated * 2)
    with pytest.raises(OutlastError, match="resolve_conj"):
        capture(lambda x: x * negated, torch.randn(4))


def test_complex_numbers_inside_are_left_to_pytorch() -> None:
    def spectrum(x: Any) -> Any:
        return torch.view_as_real(torch.fft.fft(x)) + 1, torch.fft.fft(x).real * 2

    replay = capture(spectrum, torch.randn(8))
    x = torch.randn(8)
    same(replay(x), spectrum(x))


@pytest.mark.parametrize("function", [lambda x, w: x * w, lambda x, w: torch.special.i1(x * w)])
def test_a_weight_that_comes_to_want_gradients_gets_them(function: Callable[[Any, Any], Any]) -> None:
    weight = torch.randn(3)
    replay = capture(lambda x: function(x, weight), torch.randn(3))
    assert not replay(torch.randn(3)).requires_grad
    weight.requires_grad_(True)
    assert replay(torch.randn(3)).requires_grad


def test_state_that_is_also_an_argument() -> None:
    state = torch.zeros(4)

    def step(x: Any) -> Any:
        state.add_(1)
        return x * 2

    replay = capture(step, torch.randn(4))
    same(replay(state), torch.full((4,), 2.0))
    same(state, torch.ones(4))
    replay = capture(lambda x: x + state, state)  # the closure is not taken for the argument
    same(replay(torch.zeros(4)), torch.ones(4))


def test_memory_replaced_behind_the_plan_is_refused() -> None:
    def replaced(x: Any) -> Any:
        y = x + 1
        y.data = x * 3
        return y * 2

    with pytest.raises(OutlastError, match="other memory"):
        capture(replaced, torch.randn(3))


def test_an_object_with_tensors_is_refused_as_a_result() -> None:
    class Both:
        def __init__(self, x: Any) -> None:
            self.x = x

    with pytest.raises(OutlastError, match="pytree"):
        capture(lambda x: Both(x + 1), torch.randn(3))


def test_a_transform_of_torch_func_runs_the_function() -> None:
    replay = capture(lambda x: x * 2, torch.randn(4))
    x = torch.randn(3, 4)
    same(torch.vmap(replay)(x), x * 2)
