"""Fused chains against the same plan unfused: bit for bit, over random expressions, types and layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from outlast.core.errors import NotPossibleHere
from outlast.core.jit import Compiler
from outlast.executor import Executor, fusion
from outlast.executor.replay import Replay

pytestmark = pytest.mark.torch

UNARY: list[Callable[[Any], Any]] = [
    torch.relu, torch.sigmoid, torch.tanh, torch.exp, torch.neg, torch.abs, torch.sqrt, torch.log1p, torch.floor,
    torch.nn.functional.silu, torch.nn.functional.gelu, torch.sin, lambda x: x.clamp(-1, 2), lambda x: x * 0.3 + 1,
    lambda x: x > 0.5, lambda x: x.to(torch.float16), lambda x: x.to(torch.int32), lambda x: x.to(torch.bfloat16),
]  # fmt: skip
BINARY: list[Callable[[Any, Any], Any]] = [
    torch.add, torch.mul, torch.maximum, lambda x, y: x - y if x.dtype != torch.bool else x & y.bool(), torch.div,
    lambda x, y: torch.where(x > y, x, y), lambda x, y: torch.add(x, y, alpha=3), torch.eq,
]  # fmt: skip
DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32)


@pytest.fixture(scope="module")
def executor(compiler: Compiler) -> Iterator[Executor]:
    with Executor(workers=0, operators=4096) as one:
        yield one


def replay(function: Callable[..., Any], fuse: bool, executor: Executor, *args: Any) -> Replay:
    made = Replay(function, fuse, "recapture", executor, 16, 60.0)
    made.prepare(*args)
    return made


def same_bits(a: Any, b: Any) -> bool:
    """Equal, NaNs with any payload, and -0 unlike 0."""
    if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
        return False
    if not a.dtype.is_floating_point:
        return bool(torch.equal(a, b))
    numbers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    both_nan = a.isnan() & b.isnan()
    return bool(((a.contiguous().view(numbers) == b.contiguous().view(numbers)) | both_nan).all())


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], tuple[Any, ...]]:
    """Instructions (operator, operand, operand) over numbered values, and the inputs: dense, rows, columns, single."""
    rows, n = draw(st.sampled_from(((4, 16), (3, 5), (2, 65))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    inputs = []
    for _ in range(draw(st.integers(2, 4))):
        shape = draw(st.sampled_from(((rows, n), (rows, n), (n,), (rows, 1), ())))
        content = torch.randn(shape, generator=generator, dtype=torch.float64) * 4
        content[torch.rand(shape, generator=generator) < 0.1] = draw(
            st.sampled_from((0.0, -0.0, float("inf"), float("nan")))
        )
        dtype = draw(st.sampled_from(DTYPES))
        inputs.append((content if dtype.is_floating_point else content.nan_to_num(posinf=3)).to(dtype))
    inputs[0] = inputs[0].expand(rows, n).contiguous()
    steps = []
    for i in range(draw(st.integers(2, 12))):
        known = len(inputs) + i
        steps.append(
            (
                draw(st.integers(0, len(UNARY) + len(BINARY) - 1)),
                draw(st.integers(0, known - 1)),
                draw(st.integers(0, known - 1)),
            )
        )
    return steps, tuple(inputs)


def run(steps: list[tuple[int, int, int]], inputs: tuple[Any, ...]) -> list[Any]:
    values = list(inputs)
    for operator, a, b in steps:
        try:
            if operator < len(UNARY):
                values.append(UNARY[operator](values[a]))
            else:
                values.append(BINARY[operator - len(UNARY)](values[a], values[b]))
        except (RuntimeError, NotImplementedError):  # an operator that PyTorch lacks for the type
            values.append(values[a] + 1)
    return values[-2:]


@settings(
    max_examples=30,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(program=programs())
def test_fused_equals_unfused_bit_for_bit(program: tuple[Any, Any], executor: Executor) -> None:
    steps, inputs = program
    with torch.no_grad():
        plain = replay(lambda *given: run(steps, given), False, executor, *inputs)
        fused = replay(lambda *given: run(steps, given), True, executor, *inputs)
        for a, b in zip(fused(*inputs), plain(*inputs), strict=True):
            assert same_bits(a, b), f"{steps}\nfused {a}\nunfused {b}"


def chain(x: Any, y: Any) -> Any:
    for _ in range(32):
        x = torch.relu(x * 1.01 + y)
    return x


def test_a_chain_of_96_becomes_one_step_and_gives_what_eager_gives(executor: Executor) -> None:
    x, y = torch.randn(64), torch.randn(64)
    with torch.no_grad():
        fused = replay(chain, True, executor, x, y)
        assert fused.report().steps == 1
        assert torch.equal(fused(x, y), chain(x, y))


def test_another_length_compiles_nothing(executor: Executor) -> None:
    with torch.no_grad():
        fused = replay(chain, True, executor, torch.randn(64), torch.randn(64))
        built = fusion.compile_source.cache_info().misses
        for n in (2, 3, 17, 100, 4096, 100_003):
            x, y = torch.randn(n), torch.randn(n)
            assert torch.equal(fused(x, y), chain(x, y))
        assert fusion.compile_source.cache_info().misses == built


def test_what_is_changed_in_place_is_stored_and_temporaries_are_not(executor: Executor) -> None:
    def change(x: Any, y: Any) -> Any:
        z = x * y + 1
        x.add_(z)
        return x * 2

    x, y = torch.randn(5, 7), torch.randn(7)
    with torch.no_grad():
        fused = replay(change, True, executor, x, y)
        wanted = x.clone()
        result = change(wanted, y)
        assert torch.equal(fused(x, y), result)
        assert torch.equal(x, wanted)
        (step,) = fused.newest.steps
        assert len(step.writes) == 2  # x and the result


def test_a_step_that_reads_another_view_of_what_the_group_writes_stays_outside(executor: Executor) -> None:
    def shifted(x: Any) -> Any:
        x.mul_(2)
        return (x.t() + 1) * x

    x = torch.randn(6, 6)
    with torch.no_grad():
        fused = replay(shifted, True, executor, x)
        wanted = x.clone()
        result = shifted(wanted)
        assert torch.equal(fused(x), result)


def test_without_a_compiler_a_plan_stays_unfused_or_says_what_is_missing(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing:
        @property
        def compiler(self) -> Compiler:
            raise NotPossibleHere("cannot compile operators", why="no C++ compiler", do="Install one.")

    monkeypatch.setattr(fusion, "_cache", Missing)
    x, y = torch.randn(8), torch.randn(8)
    with torch.no_grad():
        left = Replay(chain, None, "recapture", executor, 4, 60.0)  # type: ignore[arg-type]
        left.prepare(x, y)
        assert left.report().steps == 96
        assert torch.equal(left(x, y), chain(x, y))
        with pytest.raises(NotPossibleHere, match="no C\\+\\+ compiler"):
            replay(chain, True, executor, x, y)


def test_parts_of_a_large_chain_cover_it_once() -> None:
    x, y = torch.randn(300, 700), torch.randn(700)
    with Executor(workers=1, operators=4096) as one, torch.no_grad():
        fused = replay(chain, True, one, x, y)
        assert fused.newest.steps[0].shares > 1
        assert torch.equal(fused(x, y), chain(x, y))
