"""Lowerings of the family pointwise.

Each computes in the type that PyTorch promotes its operands to. A lowering may be given a `Value` in place of `out`: it
then writes there, which is how the in-place forms work; planner.pointwise takes care of operands that overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from outlast.executor.kernels import DTYPES
from outlast.executor.kernels.pointwise import CLASS, FUNCTIONS
from outlast.executor.lowering import Meta, Planner, Unsupported, Value, lowers
from outlast.executor.lowering.promotion import Number, Operand, floating, kind, promote, result_type

Out = Meta | Value

#: PyTorch reads a second operand of one element as it is, without rounding it to the half type of the others.
_UNROUNDED = {"mul", "div", "floor_divide", "div_trunc"}
#: functions that only pick one of their operands: conversion may happen as the result is stored
_PICKING = {"copy", "where"}

_Lowering = TypeVar("_Lowering", bound=Callable[..., Any])


def _with_inplace(*overloads: str) -> Callable[[_Lowering], _Lowering]:
    """Register a lowering and, under the name with `_`, its in-place form, which writes into the first operand."""

    def register(function: _Lowering) -> _Lowering:
        def inplace(p: Planner, out: Meta, target: Value, *args: Any, **kwargs: Any) -> Value:
            if target.overlaps_itself:
                raise Unsupported("writes to a tensor whose elements share memory")
            result: Value = function(p, target, target, *args, **kwargs)
            if not result.same_place(target):
                p.copy(target, result)
            return target

        inplace.__doc__ = f"In-place form of {function.__name__}."
        for name in overloads:
            base, dot, overload = name.partition(".")
            lowers(f"{base}_{dot}{overload}")(inplace)
        return lowers(*overloads)(function)

    return register


def _target(p: Planner, out: Out) -> Value:
    return out if isinstance(out, Value) else p.like(out)


def apply(p: Planner, out: Out, function: str, *operands: Operand, dtype: str) -> Value:
    """One step that computes `function` of the operands in `dtype`, converted to the type of `out` if that differs."""
    known = FUNCTIONS[function]
    compute = CLASS[dtype]
    inputs = []
    for place, (operand, letter) in enumerate(zip(operands, known.inputs, strict=True)):
        single = not isinstance(operand, Value) or operand.numel == 1
        unrounded = letter == "p" or (place == 1 and single and function in _UNROUNDED)
        if not isinstance(operand, Value):
            inputs.append(p.scalar(operand, compute if unrounded and compute != "i64" else dtype))
        elif letter != "b" and _wraps(operand.dtype, dtype):
            inputs.append(p.cast(operand, dtype))  # a number in a tensor of 0 dimensions does not widen the type
        elif letter == "b" or operand.dtype == dtype or unrounded or (function in _PICKING and known.result == "x"):
            inputs.append(operand)
        elif dtype in ("f16", "bf16") or (known.result == "b" and CLASS[operand.dtype] != compute):
            inputs.append(p.cast(operand, dtype))  # rounded to the common type first
        else:
            inputs.append(operand)  # converted as it is loaded
    result = "bool" if known.result == "b" else dtype
    if out.dtype == result:
        value = _target(p, out)
        p.pointwise(function, value, *inputs)
        return value
    scratch = p.empty(result, out.shape)
    p.pointwise(function, scratch, *inputs)
    value = _target(p, out)
    p.copy(value, scratch)
    return value


def _wraps(given: str, to: str) -> bool:
    """Whether an integer type has values that another lacks."""
    if CLASS[given] != "i64" or CLASS[to] != "i64" or given == to or given == "bool":
        return False
    return to in ("bool", "u8") or DTYPES[given][2] > DTYPES[to][2] or (given, to) == ("u8", "i8")


def _fill(p: Planner, out: Out, number: Number) -> Value:
    value = _target(p, out)
    p.copy(value, p.scalar(number, value.dtype))
    return value


def _copy(p: Planner, out: Out, x: Value) -> Value:
    value = _target(p, out)
    if not value.same_place(x):
        p.copy(value, x)
    return value


# --- moves and constants


@lowers("aten::clone", "aten::_to_copy")
def _clone(p: Planner, out: Meta, x: Value, **_: Any) -> Value:
    return _copy(p, out, x)


@lowers("aten::copy_")
def _copy_into(p: Planner, out: Meta, to: Value, source: Value, non_blocking: bool = False) -> Value:
    if to.overlaps_itself:
        raise Unsupported("writes to a tensor whose elements share memory")
    return _copy(p, to, source)


@lowers("aten::copy")
def _copied(p: Planner, out: Meta, to: Value, source: Value, non_blocking: bool = False) -> Value:
    return _copy(p, out, source)


@lowers("aten::zeros_like", "aten::zeros", "aten::new_zeros")
def _zeros(p: Planner, out: Meta, *_: Any, **__: Any) -> Value:
    return _fill(p, out, 0)


@lowers("aten::ones_like", "aten::ones", "aten::new_ones")
def _ones(p: Planner, out: Meta, *_: Any, **__: Any) -> Value:
    return _fill(p, out, 1)


@lowers("aten::full_like", "aten::full", "aten::new_full")
def _full(p: Planner, out: Meta, x: Any, *args: Any, fill_value: Number | None = None, **_: Any) -> Value:
    return _fill(p, out, fill_value if fill_value is not None else args[-1])


@lowers("aten::scalar_tensor")
def _scalar_tensor(p: Planner, out: Meta, s: Number, **_: Any) -> Value:
    return _fill(p, out, s)


@lowers(
    "aten::empty_like", "aten::empty.memory_format", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"
)
def _empty(p: Planner, out: Meta, *_: Any, **__: Any) -> Value:
    return p.like(out)


@_with_inplace("aten::zero")
def _zero(p: Planner, out: Out, x: Value) -> Value:
    return _fill(p, out, 0)


@_with_inplace("aten::fill.Scalar", "aten::fill.Tensor")
def _filled(p: Planner, out: Out, x: Value, value: Operand) -> Value:
    return _copy(p, out, value) if isinstance(value, Value) else _fill(p, out, value)


@lowers("aten::arange", "aten::arange.start", "aten::arange.start_step")
def _arange(p: Planner, out: Meta, *args: Number, start: Number = 0, step: Number = 1, **_: Any) -> Value:
    if len(args) > 1:  # (end), (start, end) or (start, end, step)
        start, step = args[0], args[2] if len(args) > 2 else step
    count = out.numel
    if count > 1 << 16:
        raise Unsupported(f"a range of {count} numbers")
    value = p.like(out)
    if count:
        p.copy(value, p.literal([start + i * step for i in range(count)], out.dtype))
    return value


# --- arithmetic with alpha


def _is_one(alpha: Number) -> bool:
    return not isinstance(alpha, bool) and alpha == 1


@_with_inplace("aten::add.Tensor", "aten::add.Scalar")
def _add(p: Planner, out: Out, x: Operand, y: Operand, alpha: Number = 1) -> Value:
    dtype = result_type(x, y)
    if _is_one(alpha):
        return apply(p, out, "add", x, y, dtype=dtype)
    return apply(p, out, "add_scaled", x, y, _rounded(p, alpha, dtype), dtype=dtype)


@_with_inplace("aten::sub.Tensor", "aten::sub.Scalar")
def _sub(p: Planner, out: Out, x: Operand, y: Operand, alpha: Number = 1) -> Value:
    dtype = result_type(x, y)
    if _is_one(alpha):
        return apply(p, out, "sub", x, y, dtype=dtype)
    return apply(p, out, "add_scaled", x, y, _rounded(p, -alpha, dtype), dtype=dtype)


@lowers("aten::rsub.Tensor", "aten::rsub.Scalar")
def _rsub(p: Planner, out: Out, x: Operand, y: Operand, alpha: Number = 1) -> Value:
    dtype = result_type(x, y)
    if _is_one(alpha):
        return apply(p, out, "sub", y, x, dtype=dtype)
    return apply(p, out, "add_scaled", y, x, _rounded(p, -alpha, dtype), dtype=dtype)


def _rounded(p: Planner, number: Number, dtype: str) -> Operand:
    """A parameter that PyTorch rounds to the operation's own type before it computes."""
    return p.scalar(number, dtype)


# --- functions of two operands in their common type


def _binary(function: str, *overloads: str, inplace: bool = True, only: str = "") -> None:
    @(_with_inplace if inplace else lowers)(*overloads)
    def lowering(p: Planner, out: Out, x: Operand, y: Operand) -> Value:
        dtype = result_type(x, y)
        if only == "float":
            dtype = floating(dtype)
        return apply(p, out, function, x, y, dtype=dtype)

    lowering.__name__ = function


_binary("mul", "aten::mul.Tensor", "aten::mul.Scalar")
_binary("div", "aten::div.Tensor", "aten::div.Scalar", only="float")
_binary("floor_divide", "aten::floor_divide", inplace=False)
_binary("floor_divide", "aten::floor_divide.Scalar")
_binary("remainder", "aten::remainder.Tensor", "aten::remainder.Scalar")
_binary("remainder", "aten::remainder.Scalar_Tensor", inplace=False)
_binary("fmod", "aten::fmod.Tensor", "aten::fmod.Scalar")
_binary("maximum", "aten::maximum", inplace=False)
_binary("minimum", "aten::minimum", inplace=False)
_binary("fmax", "aten::fmax", inplace=False)
_binary("fmin", "aten::fmin", inplace=False)
_binary("atan2", "aten::atan2", only="float")
_binary("hypot", "aten::hypot")
_binary("copysign", "aten::copysign.Tensor", "aten::copysign.Scalar", only="float")
_binary("logaddexp", "aten::logaddexp", inplace=False)
_binary("xlogy", "aten::xlogy.Tensor", "aten::xlogy.Scalar_Other", only="float")
_binary("xlogy", "aten::xlogy.Scalar_Self", inplace=False, only="float")
_binary("heaviside", "aten::heaviside")
for _name in ("and", "or", "xor"):
    _binary(f"bitwise_{_name}", f"aten::bitwise_{_name}.Tensor", f"aten::bitwise_{_name}.Scalar")
    _binary(f"bitwise_{_name}", f"aten::bitwise_{_name}.Scalar_Tensor", inplace=False)
for _name, _long in (("lshift", "left_shift"), ("rshift", "right_shift")):
    _function = "shift_left" if _name == "lshift" else "shift_right"
    _binary(_function, f"aten::bitwise_{_long}.Tensor", f"aten::bitwise_{_long}.Tensor_Scalar")
    _binary(_function, f"aten::bitwise_{_long}.Scalar_Tensor", inplace=False)
    _binary(_function, f"aten::__{_name}__.Tensor", f"aten::__{_name}__.Scalar", inplace=False)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _binary(_name, f"aten::{_name}.Tensor", f"aten::{_name}.Scalar")
for _name in ("and", "or", "xor"):
    _binary(f"logical_{_name}", f"aten::logical_{_name}")


@_with_inplace("aten::div.Tensor_mode", "aten::div.Scalar_mode")
def _div_mode(p: Planner, out: Out, x: Operand, y: Operand, rounding_mode: str | None = None) -> Value:
    dtype = result_type(x, y)
    if rounding_mode is None:
        return apply(p, out, "div", x, y, dtype=floating(dtype))
    if rounding_mode == "trunc" and dtype in ("f16", "bf16") and isinstance(y, Value) and y.numel > 1:
        quotient = p.empty(dtype, out.shape)  # PyTorch rounds the quotient before it cuts it
        return apply(p, out, "trunc", apply(p, quotient, "div", x, y, dtype=dtype), dtype=dtype)
    return apply(p, out, "floor_divide" if rounding_mode == "floor" else "div_trunc", x, y, dtype=dtype)


#: exponents that PyTorch computes otherwise than by pow
_EXACT_POWERS = {0.5: "sqrt", 2.0: "square", 3.0: "cube", -0.5: "rsqrt", -1.0: "reciprocal", -2.0: "reciprocal_square"}


@lowers("aten::pow.Tensor_Scalar")
def _pow_scalar(p: Planner, out: Out, x: Value, exponent: Number) -> Value:
    dtype = result_type(x, exponent)
    if exponent == 0:
        return _fill(p, out, 1)
    if exponent == 1:
        return _copy(p, out, x)
    # Not so float16: there -inf to the power of 0.5 is inf, as with pow, and not the root's NaN.
    rooted = exponent in (0.5, -0.5) and dtype == "f16"
    if exponent in _EXACT_POWERS and not rooted and (kind(dtype) == 2 or exponent in (2, 3)):
        return apply(p, out, _EXACT_POWERS[float(exponent)], x, dtype=dtype)
    return apply(p, out, "pow", x, exponent, dtype=dtype)


@lowers("aten::pow.Tensor_Tensor")
def _pow(p: Planner, out: Out, x: Operand, exponent: Operand) -> Value:
    return apply(p, out, "pow", x, exponent, dtype=result_type(x, exponent))


@lowers("aten::pow.Scalar")
def _pow_base(p: Planner, out: Out, x: Number, exponent: Value) -> Value:
    if x == 1:
        return _fill(p, out, 1)
    return apply(p, out, "pow", x, exponent, dtype=result_type(x, exponent))


# --- clamping


@_with_inplace("aten::clamp", "aten::clip")
def _clamp(p: Planner, out: Out, x: Value, min: Number | None = None, max: Number | None = None) -> Value:
    bounds = [bound for bound in (min, max) if bound is not None]
    dtype = result_type(x, *bounds)
    if len(bounds) == 2:
        return apply(p, out, "clamp", x, *(_rounded(p, bound, dtype) for bound in bounds), dtype=dtype)
    if not bounds:
        raise Unsupported("clamp without bounds")
    return apply(p, out, "clamp_min" if max is None else "clamp_max", x, _rounded(p, bounds[0], dtype), dtype=dtype)


@_with_inplace("aten::clamp.Tensor", "aten::clip.Tensor")
def _clamp_tensor(p: Planner, out: Out, x: Value, min: Value | None = None, max: Value | None = None) -> Value:
    bounds = [bound for bound in (min, max) if bound is not None]
    dtype = result_type(x, *bounds)
    if len(bounds) == 2:
        return apply(p, out, "clamp_between", x, *bounds, dtype=dtype)
    if not bounds:
        raise Unsupported("clamp without bounds")
    return apply(p, out, "maximum" if max is None else "minimum", x, bounds[0], dtype=dtype)


@_with_inplace("aten::clamp_min", "aten::clamp_min.Tensor")
def _clamp_min(p: Planner, out: Out, x: Value, min: Operand) -> Value:
    return apply(p, out, "maximum", x, min, dtype=result_type(x, min))


@_with_inplace("aten::clamp_max", "aten::clamp_max.Tensor")
def _clamp_max(p: Planner, out: Out, x: Value, max: Operand) -> Value:
    return apply(p, out, "minimum", x, max, dtype=result_type(x, max))


# --- functions of one operand


def _unary(function: str, *overloads: str, inplace: bool = True, gives: str = "same") -> None:
    """`gives`: "same" type as the operand, "float" (integers become the default float)."""

    @(_with_inplace if inplace else lowers)(*overloads)
    def lowering(p: Planner, out: Out, x: Value) -> Value:
        return apply(p, out, function, x, dtype=floating(x.dtype) if gives == "float" else x.dtype)

    lowering.__name__ = function


for _name in (
    "reciprocal", "rsqrt", "sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "sigmoid",
):  # fmt: skip
    _unary(_name, f"aten::{_name}", gives="float")
for _name in ("abs", "neg", "sign", "frac", "silu", "mish", "relu", "hardsigmoid", "hardswish"):
    _unary(_name, f"aten::{_name}")
_unary("sign", "aten::sgn")


def _rounding(function: str) -> None:
    @_with_inplace(f"aten::{function}")
    def lowering(p: Planner, out: Out, x: Value) -> Value:
        return _copy(p, out, x) if kind(x.dtype) < 2 else apply(p, out, function, x, dtype=x.dtype)

    lowering.__name__ = function


for _name in ("floor", "ceil", "round", "trunc"):
    _rounding(_name)


@_with_inplace("aten::square")
def _square(p: Planner, out: Out, x: Value) -> Value:
    return _pow_scalar(p, out, x, 2)


@_with_inplace("aten::round.decimals")
def _round_decimals(p: Planner, out: Out, x: Value, decimals: int) -> Value:
    if kind(x.dtype) < 2:
        raise Unsupported("rounding integers to decimals")
    if decimals == 0:
        return apply(p, out, "round", x, dtype=x.dtype)
    function = "round_finer" if decimals > 0 else "round_coarser"
    return apply(p, out, function, x, _rounded(p, 10.0 ** abs(decimals), x.dtype), dtype=x.dtype)


@_with_inplace("aten::logit")
def _logit(p: Planner, out: Out, x: Value, eps: float | None = None) -> Value:
    dtype = floating(x.dtype)
    if eps is None or eps < 0:
        return apply(p, out, "logit", x, dtype=dtype)
    bounded = p.empty(dtype, x.shape)
    if dtype in ("f16", "bf16"):
        raise Unsupported("logit with eps in half precision")
    p.pointwise("clamp", bounded, x, p.scalar(eps, dtype), p.scalar(1 - eps, dtype))
    return apply(p, out, "logit", bounded, dtype=dtype)


@_with_inplace("aten::bitwise_not")
def _bitwise_not(p: Planner, out: Out, x: Value) -> Value:
    return apply(p, out, "logical_not" if x.dtype == "bool" else "bitwise_not", x, dtype=x.dtype)


@_with_inplace("aten::logical_not")
def _logical_not(p: Planner, out: Out, x: Value) -> Value:
    return apply(p, out, "logical_not", x, dtype="bool")


def _predicate(function: str, for_integers: bool) -> None:
    @lowers(f"aten::{function}")
    def lowering(p: Planner, out: Out, x: Value) -> Value:
        if kind(x.dtype) < 2:
            return _fill(p, out, for_integers)
        return apply(p, out, function, x, dtype=x.dtype)

    lowering.__name__ = function


for _name in ("isnan", "isinf", "isposinf", "isneginf"):
    _predicate(_name, False)
_predicate("isfinite", True)


@lowers("aten::signbit")
def _signbit(p: Planner, out: Out, x: Value) -> Value:
    return apply(p, out, "signbit", x, dtype=x.dtype)


@_with_inplace("aten::nan_to_num")
def _nan_to_num(
    p: Planner, out: Out, x: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Value:
    if kind(x.dtype) < 2:
        return _copy(p, out, x)
    largest = {"f16": 65504.0, "bf16": float.fromhex("0x1.fep127"), "f32": float.fromhex("0x1.fffffep127")}.get(
        x.dtype, float.fromhex("0x1.fffffffffffffp1023")
    )
    given = [nan or 0.0, largest if posinf is None else posinf, -largest if neginf is None else neginf]
    return apply(p, out, "nan_to_num", x, *(_rounded(p, number, x.dtype) for number in given), dtype=x.dtype)


# --- activations


@_with_inplace("aten::gelu")
def _gelu(p: Planner, out: Out, x: Value, approximate: str = "none") -> Value:
    return apply(p, out, "gelu_tanh" if approximate == "tanh" else "gelu", x, dtype=x.dtype)


@lowers("aten::gelu.out")
def _gelu_out(p: Planner, _meta: Meta, /, *_: Any, **__: Any) -> Value:
    raise Unsupported("PyTorch itself does not write a bfloat16 `out` that has gaps")


@_with_inplace("aten::hardtanh")
def _hardtanh(p: Planner, out: Out, x: Value, min_val: Number = -1, max_val: Number = 1) -> Value:
    bounds = (_rounded(p, bound, x.dtype) for bound in (min_val, max_val))
    return apply(p, out, "clamp", x, *bounds, dtype=x.dtype)


@_with_inplace("aten::leaky_relu")
def _leaky_relu(p: Planner, out: Out, x: Value, negative_slope: Number = 0.01) -> Value:
    return apply(p, out, "leaky_relu", x, negative_slope, dtype=x.dtype)


@_with_inplace("aten::elu")
def _elu(p: Planner, out: Out, x: Value, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Value:
    return apply(p, out, "elu", x, _product(x.dtype, alpha, scale), scale, input_scale, dtype=x.dtype)


def _product(dtype: str, a: Number, b: Number) -> float:
    """Product of two parameters, rounded to single precision where PyTorch multiplies in it."""
    import struct

    if dtype == "f64":
        return float(a) * float(b)
    single = [struct.unpack("f", struct.pack("f", float(number)))[0] for number in (a, b)]
    return float(single[0] * single[1])


@_with_inplace("aten::selu")
def _selu(p: Planner, out: Out, x: Value) -> Value:
    return _elu(p, out, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@_with_inplace("aten::celu")
def _celu(p: Planner, out: Out, x: Value, alpha: Number = 1.0) -> Value:
    return _elu(p, out, x, alpha, 1, 1.0 / alpha)


@lowers("aten::softplus")
def _softplus(p: Planner, out: Out, x: Value, beta: Number = 1, threshold: Number = 20) -> Value:
    return apply(p, out, "softplus", x, beta, threshold, dtype=x.dtype)


@_with_inplace("aten::threshold")
def _threshold(p: Planner, out: Out, x: Value, threshold: Number, value: Number) -> Value:
    return apply(p, out, "threshold", x, *(_rounded(p, n, x.dtype) for n in (threshold, value)), dtype=x.dtype)


@lowers("aten::glu")
def _glu(p: Planner, out: Out, x: Value, dim: int = -1) -> Value:
    if x.dtype in ("f16", "bf16"):
        raise Unsupported("glu in half precision, where PyTorch rounds once for both steps")
    half = x.shape[dim] // 2
    gate = p.empty(x.dtype, out.shape)
    p.pointwise("sigmoid", gate, x.narrow(dim, half, half))
    return apply(p, out, "mul", x.narrow(dim, 0, half), gate, dtype=x.dtype)


# --- choice and combinations of three


@lowers("aten::where.self", "aten::where.ScalarOther", "aten::where.ScalarSelf", "aten::where.Scalar")
def _where(p: Planner, out: Out, condition: Value, x: Operand, y: Operand) -> Value:
    if condition.dtype != "bool":
        raise Unsupported("a condition that is not bool")
    return apply(p, out, "where", condition, x, y, dtype=out.dtype)


@_with_inplace("aten::masked_fill.Scalar", "aten::masked_fill.Tensor")
def _masked_fill(p: Planner, out: Out, x: Value, mask: Value, value: Operand) -> Value:
    if mask.dtype != "bool":
        raise Unsupported("a mask that is not bool")
    return apply(p, out, "where", mask, value, x, dtype=x.dtype)


@_with_inplace("aten::lerp.Scalar", "aten::lerp.Tensor")
def _lerp(p: Planner, out: Out, x: Value, end: Value, weight: Operand) -> Value:
    if isinstance(weight, Value):
        return apply(p, out, "lerp", x, end, weight, dtype=x.dtype)
    # a number is not rounded to the type of the tensors
    return apply(p, out, "lerp", x, end, p.scalar(weight, x.dtype), dtype=x.dtype)


@_with_inplace("aten::addcmul")
def _addcmul(p: Planner, out: Out, x: Value, a: Value, b: Value, value: Number = 1) -> Value:
    dtype = result_type(x, a, b)
    return apply(p, out, "addcmul", x, a, b, _rounded(p, value, dtype), dtype=dtype)


@_with_inplace("aten::addcdiv")
def _addcdiv(p: Planner, out: Out, x: Value, a: Value, b: Value, value: Number = 1) -> Value:
    dtype = result_type(x, a, b)
    return apply(p, out, "addcdiv", x, a, b, _rounded(p, value, dtype), dtype=dtype)


# --- backward


def _gradient(function: str) -> None:
    """(gradient of the result, input or result)"""

    @lowers(f"aten::{function}")
    def lowering(p: Planner, out: Out, grad: Value, x: Value) -> Value:
        return apply(p, out, function, grad, x, dtype=result_type(grad, x))

    lowering.__name__ = function


for _name in ("sigmoid", "tanh", "silu", "mish", "hardswish", "hardsigmoid"):
    _gradient(f"{_name}_backward")


@lowers("aten::gelu_backward")
def _gelu_backward(p: Planner, out: Out, grad: Value, x: Value, approximate: str = "none") -> Value:
    function = "gelu_tanh_backward" if approximate == "tanh" else "gelu_backward"
    return apply(p, out, function, grad, x, dtype=x.dtype)


@lowers("aten::threshold_backward")
def _threshold_backward(p: Planner, out: Out, grad: Value, x: Value, threshold: Number) -> Value:
    dtype = result_type(grad, x)
    return apply(p, out, "threshold_backward", grad, x, _rounded(p, threshold, dtype), dtype=dtype)


@lowers("aten::leaky_relu_backward")
def _leaky_relu_backward(
    p: Planner, out: Out, grad: Value, x: Value, negative_slope: Number, self_is_result: bool
) -> Value:
    return apply(p, out, "leaky_relu_backward", grad, x, negative_slope, dtype=x.dtype)


@lowers("aten::hardtanh_backward")
def _hardtanh_backward(p: Planner, out: Out, grad: Value, x: Value, min_val: Number, max_val: Number) -> Value:
    bounds = (_rounded(p, bound, x.dtype) for bound in (min_val, max_val))
    return apply(p, out, "hardtanh_backward", grad, x, *bounds, dtype=x.dtype)


@lowers("aten::softplus_backward")
def _softplus_backward(p: Planner, out: Out, grad: Value, x: Value, beta: Number, threshold: Number) -> Value:
    return apply(p, out, "softplus_backward", grad, x, beta, threshold, dtype=x.dtype)


@lowers("aten::elu_backward")
def _elu_backward(
    p: Planner, out: Out, grad: Value, alpha: Number, scale: Number, input_scale: Number, is_result: bool, x: Value
) -> Value:
    """Both branches are computed, each rounded once as PyTorch rounds them, and then one is picked."""
    below, above = p.empty(x.dtype, out.shape), p.empty(x.dtype, out.shape)
    positive = p.empty("bool", x.shape)
    compute = CLASS[x.dtype]
    coefficient = p.scalar(_product(x.dtype, alpha, scale), compute)
    function = "elu_backward_below_result" if is_result else "elu_backward_below"
    p.pointwise(function, below, grad, x, coefficient, p.scalar(input_scale, compute))
    p.pointwise("mul", above, grad, p.scalar(scale, compute))
    p.pointwise("gt", positive, x, p.scalar(0, x.dtype))
    return apply(p, out, "where", positive, above, below, dtype=x.dtype)


_NONE, _MEAN = 0, 1  # at::Reduction


@lowers("aten::mse_loss")
def _mse_loss(p: Planner, out: Meta, x: Value, target: Value, reduction: int = _MEAN) -> Value:
    from outlast.executor.lowering import registered

    dtype = promote(x.dtype, target.dtype)
    if reduction == _NONE:
        return apply(p, out, "squared_difference", x, target, dtype=dtype)
    squares = p.empty(dtype, _broadcast(x.shape, target.shape))
    apply(p, squares, "squared_difference", x, target, dtype=dtype)
    reduce = registered().get("aten::mean" if reduction == _MEAN else "aten::sum")
    if reduce is None:
        raise Unsupported("a loss that is reduced")
    result: Value = reduce(p, out, squares)
    return result


@lowers("aten::mse_loss_backward")
def _mse_loss_backward(p: Planner, out: Meta, grad: Value, x: Value, target: Value, reduction: int) -> Value:
    factor = 2.0 / math.prod(x.shape) if reduction == _MEAN and x.numel else 2.0
    return apply(p, out, "mse_backward", x, target, grad, factor, dtype=x.dtype)


def _broadcast(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    rank = max(len(a), len(b))
    left, right = (1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b)
    return tuple(n if m == 1 else m for m, n in zip(left, right, strict=True))
