"""Every float16 number through every function of one operand, and the errors of the functions that are our own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch

from outlast.executor import Executor
from outlast.executor.replay import Replay

pytestmark = pytest.mark.torch

#: ulp of float32 against the same function in float64 (docs/reference/operators-numerics.md)
LIMITS = {"exp": 1.0, "expm1": 1.5, "log": 1.0, "log1p": 1.6, "tanh": 2.6, "erf": 1.3, "sigmoid": 2.6}
FUNCTIONS = (
    "exp", "expm1", "log", "log1p", "tanh", "erf", "sigmoid", "sqrt", "rsqrt", "reciprocal", "abs", "neg", "floor",
    "ceil", "round", "trunc", "sign", "relu", "isnan", "isfinite", "isinf", "sin", "cos", "atan", "asin", "acos",
    "log2", "log10", "exp2", "erfc",
)  # fmt: skip


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(workers=0) as one:
        yield one


def outcome(name: str, x: torch.Tensor, executor: Executor) -> torch.Tensor:
    function = getattr(torch, name)
    replay = Replay(lambda t: function(t), False, "recapture", executor, 4, 60.0)
    with torch.no_grad():
        replay.prepare(x)
        assert not replay.report().fallbacks
        return replay(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_numbers_of_16_bits_give_the_rounded_exact_result(
    name: str, dtype: torch.dtype, executor: Executor
) -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    got, wanted = outcome(name, x, executor), getattr(torch, name)(x)
    if not wanted.dtype.is_floating_point:
        assert torch.equal(got, wanted)
        return
    wanted = getattr(torch, name)(x.double()).to(dtype)  # eager itself is off by several units for erf of tiny numbers
    assert torch.equal(got.isnan(), wanted.isnan())
    a, b = got.nan_to_num().view(torch.int16).int(), wanted.nan_to_num().view(torch.int16).int()
    apart = (a - b).abs()
    apart = torch.where((got == 0) & (wanted == 0), 0, apart)
    if name == "sigmoid":  # 1 / (1 + exp(-x)), eager's formula, is 0 where exp overflows
        apart = torch.where((got == 0) & (wanted < 2.0**-126), 0, apart)
    assert apart.max() <= 1, f"{name}({x[apart.argmax()]}) = {got[apart.argmax()]}, exact {wanted[apart.argmax()]}"
    assert (apart > 0).sum() <= 64  # where the exact result lies in the middle between two


@pytest.mark.parametrize("name", LIMITS)
def test_errors_in_float32_stay_below_what_is_documented(name: str, executor: Executor) -> None:
    bits = torch.arange(-(1 << 31), (1 << 31) - 1, 4099, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    exact = getattr(torch, name)(x.double())
    got = outcome(name, x, executor)
    rounded = exact.float()
    assert torch.equal(got.isnan(), rounded.isnan())
    assert torch.equal(got.isposinf(), rounded.isposinf())
    usual = rounded.isfinite() & (rounded.abs() >= 2.0**-126)
    ulp = torch.nextafter(rounded.abs(), torch.tensor(float("inf"))).double() - rounded.abs().double()
    error = ((got.double() - exact).abs() / ulp)[usual].max()
    assert error <= LIMITS[name]


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float16])
@pytest.mark.parametrize("target", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_conversions_out_of_range_come_out_as_in_pytorch(
    source: torch.dtype, target: torch.dtype, executor: Executor
) -> None:
    numbers = [300.0, -300.0, 1e10, -1e10, 4294967301.0, 2147483653.0, float("nan"), float("inf"), -1.5, 255.7, 0.0]
    x = torch.tensor(numbers, dtype=torch.float64).repeat(13)
    x = (x if source.is_floating_point else x.nan_to_num(0, 9e9)).to(source)
    replay = Replay(lambda t: t.to(target), False, "recapture", executor, 4, 60.0)
    replay.prepare(x)
    assert torch.equal(replay(x), x.to(target))


def test_integer_division_by_zero_is_refused(executor: Executor) -> None:
    x, y = torch.tensor([5, 6]), torch.tensor([2, 1])
    replay = Replay(torch.floor_divide, False, "recapture", executor, 4, 60.0)
    replay.prepare(x, y)
    y[1] = 0
    with pytest.raises(Exception, match="ZeroDivisionError"):
        replay(x, y)
