"""Arguments for the overloads of the family pointwise: shapes, strides, types, broadcasting, special values.

`SAMPLES` maps an overload to a function of a hypothesis `draw` that gives (args, kwargs) of real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from strategies import ALL, FLOATS, INTEGERS, broadcast_to, shapes, tensors

Sample = Callable[[DrawFn], tuple[tuple[Any, ...], dict[str, Any]]]

NUMERIC = (*FLOATS, *INTEGERS)


def tensor(
    draw: DrawFn,
    dtypes: Sequence[torch.dtype],
    shape: tuple[int, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
) -> torch.Tensor:
    """A tensor of one of the types."""
    return tensors(draw, dtypes, shape, low=low, high=high)


def partner(
    draw: DrawFn, x: torch.Tensor, dtypes: Sequence[torch.dtype], low: float | None = None, high: float | None = None
) -> torch.Tensor:
    """A tensor that broadcasts to x's shape."""
    return tensors(draw, dtypes, broadcast_to(draw, tuple(x.shape)), low=low, high=high)


def number(draw: DrawFn, dtype: torch.dtype, zero: bool = True) -> float | int:
    """A Python number that PyTorch accepts beside the type."""
    small: list[float | int] = [1, 2, 3, *([0] if zero else [])]
    if dtype.is_floating_point or draw(st.booleans()):
        return draw(st.sampled_from([*small, 0.5, -1.5, 0.1, 2.5]))
    return draw(st.sampled_from(small))


SAMPLES: dict[str, Sample] = {}
#: relative and absolute by type; these functions subtract nearly equal numbers, in PyTorch as well as here
TOLERANCES = {
    "aten::addcmul": {torch.float16: (2e-3, 0.2), torch.bfloat16: (1.6e-2, 1.6)},
    "aten::addcdiv": {torch.float16: (2e-3, 0.05), torch.bfloat16: (1.6e-2, 0.4)},
    "aten::gelu": {torch.float32: (1e-4, 4e-6)},
    "aten::mish": {torch.float32: (1e-4, 4e-6)},
    "aten::gelu_backward": {torch.float32: (1e-4, 2e-5)},
    "aten::mish_backward": {torch.float32: (1e-4, 4e-6)},
}


def _unary(names: str, dtypes: Sequence[torch.dtype], low: float | None = None, high: float | None = None) -> None:
    for name in names.split():
        SAMPLES[f"aten::{name}"] = lambda draw: ((tensor(draw, dtypes, None, low, high),), {})


_unary("abs sgn relu", NUMERIC)
_unary("sign", ALL)
_unary("neg floor ceil round trunc", NUMERIC)
_unary("frac silu mish hardsigmoid hardswish selu celu hardtanh elu softplus", FLOATS)
_unary("exp expm1 sin cos tanh sigmoid erf erfc atan asinh sqrt rsqrt reciprocal exp2 square", NUMERIC)
# Beyond 88.7 PyTorch's vectorised loops give infinity already, its scalar ones do not.
_unary("sinh cosh", NUMERIC, -88.0, 88.0)
_unary("log log2 log10 log1p", NUMERIC, 0.001, 9.0)
_unary("asin acos atanh", FLOATS, -1.0, 1.0)
_unary("acosh", FLOATS, 1.0, 9.0)
_unary("tan", FLOATS, -1.4, 1.4)
_unary("logit", FLOATS, 0.0, 1.0)
_unary("isnan isinf isfinite isposinf isneginf signbit logical_not", ALL)
_unary("bitwise_not", (*INTEGERS, torch.bool))
_unary("nan_to_num clone zeros_like ones_like zero", ALL)


def _binary(
    names: str,
    dtypes: Sequence[torch.dtype],
    *,
    same: bool = False,
    low: float | None = None,
    high: float | None = None,
) -> None:
    def sample(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = tensor(draw, dtypes, None, low, high)
        y = partner(draw, x, (x.dtype,) if same or draw(st.booleans()) else dtypes, low, high)
        return ((x, y) if draw(st.integers(0, 3)) else (y, x)), {}

    for name in names.split():
        SAMPLES[f"aten::{name}"] = sample


def _with_number(names: str, dtypes: Sequence[torch.dtype], zero: bool = True) -> None:
    def sample(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = tensor(draw, dtypes)
        return (x, number(draw, x.dtype, zero)), {}

    for name in names.split():
        SAMPLES[f"aten::{name}"] = sample


_binary("mul.Tensor maximum minimum fmax fmin eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor", ALL)
_binary("logical_and logical_or logical_xor", ALL)
_binary("div.Tensor atan2 copysign.Tensor", ALL)
_binary("hypot logaddexp", FLOATS, same=True)
_binary("heaviside", NUMERIC, same=True)
_binary("xlogy.Tensor", NUMERIC)
_binary("pow.Tensor_Tensor", FLOATS)
_binary("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor", (*INTEGERS, torch.bool))
_binary(
    "bitwise_left_shift.Tensor bitwise_right_shift.Tensor __lshift__.Tensor __rshift__.Tensor", INTEGERS, low=0, high=6
)
_with_number("mul.Scalar div.Scalar eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", ALL)
_with_number("copysign.Scalar xlogy.Scalar_Other", FLOATS)


def _divided(draw: DrawFn, scalar: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Divisors that are not 0, which integers refuse, and small quotients of floats.

    PyTorch's vectorised loops lose the remainder of floats where the quotient is large, its scalar ones do not.
    """
    dtype = draw(st.sampled_from(NUMERIC))
    bounds = (-20.0, 20.0) if dtype.is_floating_point else (None, None)
    x = tensor(draw, (dtype,), None, *bounds)
    if scalar:
        return (x, number(draw, dtype, zero=False)), {}
    y = partner(draw, x, (dtype,) if dtype.is_floating_point or draw(st.booleans()) else INTEGERS, *bounds)
    small = y.abs() < 0.5 if dtype.is_floating_point else y == 0
    return (x, torch.where(small, torch.ones((), dtype=y.dtype), y)), {}


def _positive(names: str, scalar: bool) -> None:
    for name in names.split():
        SAMPLES[f"aten::{name}"] = lambda draw: _divided(draw, scalar)


_positive("floor_divide remainder.Tensor fmod.Tensor", scalar=False)
_positive("floor_divide.Scalar remainder.Scalar fmod.Scalar", scalar=True)


def _sample(*names: str) -> Callable[[Sample], Sample]:
    def register(sample: Sample) -> Sample:
        for name in names:
            SAMPLES[f"aten::{name}"] = sample
        return sample

    return register


def _alpha(draw: DrawFn, x: torch.Tensor, y: torch.Tensor, choices: tuple[float | int, ...]) -> float | int:
    """In half precision one whose product is exact: PyTorch's scalar loops round that, its vectorised ones do not."""
    half = torch.result_type(x, y) in (torch.float16, torch.bfloat16)
    return draw(st.sampled_from((2, 0.5) if half else choices))


@_sample("add.Tensor")
def _add(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, ALL)
    y = partner(draw, x, (x.dtype,) if draw(st.booleans()) else ALL)
    floating = x.dtype.is_floating_point or y.dtype.is_floating_point
    if (x.dtype == torch.bool and y.dtype == torch.bool) or draw(st.booleans()):
        return (x, y), {}
    return (x, y), {"alpha": _alpha(draw, x, y, (2, 3, -1, *((0.5, 0.1) if floating else ())))}


@_sample("sub.Tensor", "rsub.Tensor")
def _sub(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, NUMERIC)
    y = partner(draw, x, (x.dtype,) if draw(st.booleans()) else NUMERIC)
    floating = x.dtype.is_floating_point or y.dtype.is_floating_point
    if draw(st.booleans()):
        return (x, y), {}
    return (x, y), {"alpha": _alpha(draw, x, y, (2, 3, *((0.5, 0.1) if floating else ())))}


@_sample("add.Scalar", "sub.Scalar", "rsub.Scalar")
def _add_number(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, NUMERIC)
    alpha = draw(st.sampled_from((1, 2)))
    return (x, number(draw, x.dtype), alpha), {}


@_sample("div.Tensor_mode")
def _div_mode(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x, y), _ = SAMPLES["aten::remainder.Tensor"](draw)
    return (x, y), {"rounding_mode": draw(st.sampled_from((None, "floor", "trunc")))}


@_sample("div.Scalar_mode")
def _div_number_mode(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x, y), _ = SAMPLES["aten::remainder.Scalar"](draw)
    return (x, y), {"rounding_mode": draw(st.sampled_from((None, "floor", "trunc")))}


@_sample("pow.Tensor_Scalar")
def _pow_number(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, NUMERIC)
    powers = (0, 1, 2, 3, 5, *((0.5, -0.5, -1, -2, 1.7, 2.0) if x.dtype.is_floating_point else (0.5, 2.0)))
    return (x, draw(st.sampled_from(powers))), {}


@_sample("pow.Scalar")
def _pow_base(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (draw(st.sampled_from((0.5, 2.0, 1.0, 3.0))), tensor(draw, FLOATS)), {}


@_sample("clamp", "clip")
def _clamp(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, NUMERIC)
    return (x,), draw(
        st.sampled_from(({"min": 1}, {"max": 2}, {"min": 1, "max": 2}, {"min": 0.5, "max": 1.5}, {"min": 2, "max": 1}))
    )


@_sample("clamp.Tensor", "clip.Tensor")
def _clamp_tensor(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, NUMERIC)
    bounds = {
        name: partner(draw, x, (x.dtype,)) for name in draw(st.sampled_from((("min",), ("max",), ("min", "max"))))
    }
    return (x,), bounds


@_sample("clamp_min.Tensor", "clamp_max.Tensor")
def _clamp_one(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, NUMERIC)
    return (x, partner(draw, x, NUMERIC)), {}


_with_number("clamp_min clamp_max", NUMERIC)
_with_number("leaky_relu", FLOATS)
_with_number("fill.Scalar full_like", NUMERIC)
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    SAMPLES[f"aten::{_name}.Scalar"] = lambda draw: ((tensor(draw, INTEGERS), draw(st.integers(0, 100))), {})
for _name in ("bitwise_left_shift.Tensor_Scalar", "bitwise_right_shift.Tensor_Scalar"):
    SAMPLES[f"aten::{_name}"] = lambda draw: ((tensor(draw, INTEGERS), draw(st.integers(0, 7))), {})


@_sample("round.decimals")
def _round_decimals(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tensor(draw, (torch.float32, torch.float64)),), {"decimals": draw(st.integers(-2, 3))}


@_sample("gelu")
def _gelu(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Finite: PyTorch's vectorised loops make NaN of infinity and overflow above 1.7e38, its scalar ones do not."""
    return (tensor(draw, FLOATS, None, -30, 30),), {"approximate": draw(st.sampled_from(("none", "tanh")))}


@_sample("hardtanh")
def _hardtanh(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tensor(draw, FLOATS), *draw(st.sampled_from(((-1, 1), (0.0, 6.0), (-0.3, 2.7))))), {}


@_sample("elu")
def _elu(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tensor(draw, FLOATS), *draw(st.sampled_from(((), (0.7,), (1.5, 1.2), (0.7, 1.1, 0.9))))), {}


@_sample("softplus")
def _softplus(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tensor(draw, FLOATS), *draw(st.sampled_from(((), (2.0,), (0.5, 3.0))))), {}


@_sample("threshold")
def _threshold(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tensor(draw, NUMERIC), draw(st.sampled_from((0, 1, 2))), draw(st.sampled_from((0, 5)))), {}


@_sample("where.self")
def _where(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, ALL)
    y = partner(draw, x, (x.dtype,) if draw(st.booleans()) else ALL)
    return (partner(draw, x, (torch.bool,)), x, y), {}


@_sample("where.ScalarOther")
def _where_other(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, NUMERIC)
    return (partner(draw, x, (torch.bool,)), x, number(draw, x.dtype)), {}


@_sample("where.ScalarSelf")
def _where_self(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, NUMERIC)
    return (partner(draw, x, (torch.bool,)), number(draw, x.dtype), x), {}


@_sample("where.Scalar")
def _where_numbers(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tensor(draw, (torch.bool,)), draw(st.sampled_from((1, 2.5))), draw(st.sampled_from((0, -1.5)))), {}


@_sample("masked_fill.Scalar")
def _masked_fill(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, NUMERIC)
    value = draw(st.sampled_from((0, 1, float("-inf"), 0.1) if x.dtype.is_floating_point else (0, 1)))
    return (x, partner(draw, x, (torch.bool,)), value), {}


@_sample("masked_fill.Tensor")
def _masked_fill_tensor(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, NUMERIC)
    return (x, partner(draw, x, (torch.bool,)), tensor(draw, (x.dtype,), ())), {}


@_sample("lerp.Scalar")
def _lerp(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, FLOATS)
    return (x, partner(draw, x, (x.dtype,)), draw(st.sampled_from((0.0, 0.1, 0.5, 0.7, 1.0)))), {}


@_sample("lerp.Tensor")
def _lerp_tensor(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, FLOATS)
    return (x, partner(draw, x, (x.dtype,)), partner(draw, x, (x.dtype,), 0.0, 1.0)), {}


@_sample("addcmul", "addcdiv")
def _addc(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, FLOATS)
    bounds: tuple[float, ...] = ()
    if x.dtype in (torch.float16, torch.bfloat16):  # eager rounds between the products or not, as its loop is built
        x, bounds = x.nan_to_num(1.0, 2.0, -2.0).clamp(-9, 9), (0.5, 9.0)
    given = (x, partner(draw, x, (x.dtype,), *bounds), partner(draw, x, (x.dtype,), *bounds))
    return given, draw(st.sampled_from(({}, {"value": 2}, {"value": 0.3})))


@_sample("copy", "copy_")
def _copy(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, ALL)
    return (x, partner(draw, x, ALL)), {}


@_sample("_to_copy")
def _to_copy(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tensor(draw, ALL),), {"dtype": draw(st.sampled_from(ALL))}


@_sample("fill.Tensor")
def _fill(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tensor(draw, ALL), tensor(draw, ALL, ())), {}


@_sample("full")
def _full(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (list(shapes(draw)), draw(st.sampled_from((0, 1.5, 3)))), {"dtype": draw(st.sampled_from(ALL))}


@_sample("new_full")
def _new_full(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tensor(draw, ALL), list(shapes(draw)), draw(st.sampled_from((0, 1, 3)))), {}


@_sample("zeros", "ones")
def _zeros(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (list(shapes(draw)),), {"dtype": draw(st.sampled_from(ALL))}


@_sample("new_zeros", "new_ones")
def _new_zeros(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tensor(draw, ALL), list(shapes(draw))), {}


@_sample("scalar_tensor")
def _scalar_tensor(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (draw(st.sampled_from((0, 1.5, -3))),), {"dtype": draw(st.sampled_from((torch.float32, torch.int64)))}


@_sample("arange")
def _arange(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (draw(st.integers(0, 70)),), {
        "dtype": draw(st.sampled_from((None, torch.float32, torch.int32, torch.float64)))
    }


@_sample("arange.start")
def _arange_start(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    start = draw(st.integers(-9, 9))
    return (start, start + draw(st.integers(0, 40))), {}


@_sample("arange.start_step")
def _arange_step(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return draw(st.sampled_from(((0, 10, 2), (1.5, 9, 0.25), (5, -3, -1)))), {}


def _same_shape(names: str) -> None:
    def sample(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = tensor(draw, FLOATS)
        return (tensor(draw, (x.dtype,), tuple(x.shape)), x), {}

    for name in names.split():
        SAMPLES[f"aten::{name}"] = sample


_same_shape("sigmoid_backward tanh_backward silu_backward mish_backward hardsigmoid_backward")


@_sample("gelu_backward")
def _gelu_backward(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, FLOATS, None, -5, 5)
    grad = tensor(draw, (x.dtype,), tuple(x.shape), -4, 4)
    return (grad, x), {"approximate": draw(st.sampled_from(("none", "tanh")))}


def _finite(draw: DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient and input without NaN, of which PyTorch's vectorised and scalar loops make different things."""
    x = tensor(draw, FLOATS, None, -9.0, 9.0)
    return tensor(draw, (x.dtype,), tuple(x.shape)), x


def _backward(name: str, *choices: tuple[Any, ...], nan: bool = True) -> None:
    def sample(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = SAMPLES["aten::silu_backward"](draw)[0] if nan else _finite(draw)
        return (*given, *draw(st.sampled_from(choices))), {}

    SAMPLES[f"aten::{name}"] = sample


_backward("threshold_backward", (0,), (1,))
_backward("leaky_relu_backward", (0.01, False), (0.3, False))
_backward("hardtanh_backward", (-1, 1), (0.0, 6.0), nan=False)
_backward("hardswish_backward", (), nan=False)
_backward("softplus_backward", (1, 20), (0.5, 3.0))


@_sample("elu_backward")
def _elu_backward(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    grad, x = _finite(draw)
    return (grad, *draw(st.sampled_from(((1, 1, 1), (0.7, 1.2, 0.9)))), draw(st.booleans()), x), {}


@_sample("mse_loss")
def _mse_loss(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, (torch.float32, torch.float64))
    # With another reduction eager's out= form first resizes `out` to the shape of the inputs, with a warning.
    return (x, tensor(draw, (x.dtype,), tuple(x.shape))), {"reduction": 0}


@_sample("mse_loss_backward")
def _mse_loss_backward(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, (torch.float32, torch.float64))
    reduction = draw(st.integers(0, 2))
    grad = tensor(draw, (x.dtype,), tuple(x.shape) if reduction == 0 else ())
    return (grad, x, tensor(draw, (x.dtype,), tuple(x.shape)), reduction), {}


@_sample("glu")
def _glu(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = tensor(draw, (torch.float32, torch.float64), (draw(st.integers(1, 5)), 2 * draw(st.integers(0, 8))))
    return (x, draw(st.sampled_from((-1, 1)))), {}


@_sample("empty_like")
def _empty_like(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Without elements: their content would be undefined."""
    return (tensor(draw, ALL, (0, *shapes(draw, most=3))),), {}


@_sample("empty.memory_format")
def _empty(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ([0, *shapes(draw, most=3)],), {"dtype": draw(st.sampled_from(ALL))}


@_sample("new_empty")
def _new_empty(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tensor(draw, ALL), [*shapes(draw, most=3), 0]), {}


@_sample("empty_strided")
def _empty_strided(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ([0, 3], [3, 1]), {"dtype": draw(st.sampled_from(ALL))}


@_sample("new_empty_strided")
def _new_empty_strided(draw: DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tensor(draw, ALL), [0, 3], [3, 1]), {}


def _number_first(names: str, dtypes: Sequence[torch.dtype], *numbers: float | int) -> None:
    for name in names.split():
        SAMPLES[f"aten::{name}"] = lambda draw: ((draw(st.sampled_from(numbers)), tensor(draw, dtypes)), {})


_number_first("bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor", INTEGERS, 3, 100)
_number_first("bitwise_left_shift.Scalar_Tensor bitwise_right_shift.Scalar_Tensor", INTEGERS, 3, 100)
_number_first("xlogy.Scalar_Self", FLOATS, 2.5, 3)
SAMPLES["aten::remainder.Scalar_Tensor"] = lambda draw: (
    (draw(st.sampled_from((2.5, 3))), tensor(draw, FLOATS, None, 0.5, 9)),
    {},
)
for _name in ("__lshift__.Scalar", "__rshift__.Scalar"):
    SAMPLES[f"aten::{_name}"] = SAMPLES["aten::bitwise_left_shift.Tensor_Scalar"]
