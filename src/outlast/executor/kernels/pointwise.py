"""Kernels of the family pointwise: one table of functions of single elements, from which everything is generated.

A function is C++ over its inputs `x`, `y`, `z`, `w` (as many as it has) in a compute type `C`: float serves float16,
bfloat16 and float32, double serves float64, int64_t serves the integers and bool. A shipped kernel is one function in
one compute type, called `{function}_{f32|f64|i64}`; `select` says which one serves given operands. A fused operator
(outlast.executor.fusion) is generated from the same expressions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import DTYPES, Kernel

#: compute class -> its type in C++
COMPUTE = {"f32": "float", "f64": "double", "i64": "int64_t"}
#: element type -> the class that computes with it
CLASS = {
    "bool": "i64", "u8": "i64", "i8": "i64", "i16": "i64", "i32": "i64", "i64": "i64",
    "f16": "f32", "bf16": "f32", "f32": "f32", "f64": "f64",
}  # fmt: skip
LETTERS = "xyzw"


@dataclass(frozen=True, slots=True)
class Function:
    """One function of single elements."""

    name: str
    #: a letter for each input: "x" of the compute type, "b" bool, "p" a parameter (one element, of the compute type)
    inputs: str
    #: C++ by kind of compute class: "f" (f32 and f64) and "i"
    expression: Mapping[str, str]
    result: str = "x"  #: "x" or "b"
    refuses: str = ""  #: text of the failure when the expression for integers sets `bad`

    def classes(self) -> tuple[str, ...]:
        """Compute classes it exists for."""
        return tuple(c for c in COMPUTE if c[0] in self.expression)

    def code(self, compute: str) -> str:
        """Its expression in a compute class."""
        return self.expression[compute[0]]

    @property
    def data(self) -> int:
        """Number of inputs that are no parameters; they come first."""
        return len(self.inputs.rstrip("p"))

    def kernel(self, compute: str) -> Kernel:
        """The shipped kernel of a compute class."""
        types = {"x": "C", "b": "bool", "p": "C"}
        letters = list(zip(LETTERS, self.inputs, strict=False))
        parameters = "".join(
            f"const C {letter} = ol_parameter<C>(a, {k}); "
            for k, (letter, kind) in enumerate(letters, start=1)
            if kind == "p"
        )
        given = ", ".join(f"[[maybe_unused]] {types[kind]} {letter}" for letter, kind in letters if kind != "p")
        result = types[self.result]
        operands = ", ".join([result, *(types[kind] for kind in self.inputs if kind != "p")])
        apply = f"ol_map<{operands}>(a, block, grid, [&]({given}) -> {result} {{ return {self.code(compute)}; }})"
        if self.refuses and compute == "i64":
            body = f'bool bad = false; {apply}; if (bad) OL_FAIL("%s", "{self.refuses}"); return OL_OK;'
        else:
            body = f"return {apply};"
        return Kernel(
            f"{self.name}_{compute}",
            "pointwise.h",
            "ol_map_args",
            "[](const ol_map_args *a, ol_dim3 block, ol_dim3 grid, [[maybe_unused]] ol_env *environment) "
            "__attribute__((always_inline)) -> int32_t "
            f"{{ using C [[maybe_unused]] = {COMPUTE[compute]}; {parameters}{body} }}",
        )


_all: dict[str, Function] = {}


def _add(
    name: str, inputs: str, *, f: str = "", i: str = "", both: str = "", result: str = "x", refuses: str = ""
) -> None:
    expression = {kind: code for kind, code in (("f", f or both), ("i", i or both)) if code}
    _all[name] = Function(name, inputs, expression, result, refuses)


# moves
_add("copy", "x", both="x")
_add("where", "bxx", both="x ? y : z")
# arithmetic
_add("add", "xx", f="x + y", i="ol_wrap_add(x, y)")
_add("sub", "xx", f="x - y", i="ol_wrap_sub(x, y)")
_add("add_scaled", "xxp", f="ol_fma(z, y, x)", i="ol_wrap_add(x, ol_wrap_mul(z, y))")
_add("mul", "xx", f="x * y", i="ol_wrap_mul(x, y)")
_add("div", "xx", f="x / y")
_ZERO = "ZeroDivisionError"  # what PyTorch says
_by_zero = "(bad = bad || y == 0, {}(x, y))"
_add("div_trunc", "xx", f="ol_trunc(x / y)", i=_by_zero.format("ol_quotient"), refuses=_ZERO)
for _name in ("floor_divide", "remainder", "fmod"):
    _add(_name, "xx", f=f"ol_{_name}(x, y)", i=_by_zero.format(f"ol_{_name}"), refuses=_ZERO)
for _name, _code in (
    ("div_trunc", "quotient"),
    ("floor_divide", "floor_divide"),
    ("remainder", "remainder"),
    ("fmod", "fmod"),
):
    _all[_name] = Function(
        _name, "xx", {**_all[_name].expression, "i": f"(bad = bad || y == 0, ol_{_code}(x, y))"}, refuses=_ZERO
    )
_add("pow", "xx", both="ol_pow(x, y)")
_add("maximum", "xx", f="ol_maximum(x, y)", i="x > y ? x : y")
_add("minimum", "xx", f="ol_minimum(x, y)", i="x < y ? x : y")
_add("fmax", "xx", f="ol_select((x != x) | (x < y), y, x)", i="x > y ? x : y")
_add("fmin", "xx", f="ol_select((x != x) | (x > y), y, x)", i="x < y ? x : y")
_add("clamp", "xpp", f="ol_minimum(ol_maximum(x, y), z)", i="x < y ? (y < z ? y : z) : x < z ? x : z")
_add("clamp_min", "xp", f="ol_maximum(x, y)", i="x > y ? x : y")
_add("clamp_max", "xp", f="ol_minimum(x, y)", i="x < y ? x : y")
_add("clamp_between", "xxx", f="ol_minimum(ol_maximum(x, y), z)", i="x < y ? (y < z ? y : z) : x < z ? x : z")
_add("lerp", "xxx", f="ol_lerp(x, y, z)")
_add("addcmul", "xxxp", f="ol_fma(w * y, z, x)", i="ol_wrap_add(x, ol_wrap_mul(ol_wrap_mul(w, y), z))")
_add("addcdiv", "xxxp", f="x + w * y / z")
_add("atan2", "xx", f="ol_atan2(x, y)")
_add("hypot", "xx", f="ol_hypot(x, y)")
_add("copysign", "xx", f="ol_copysign(x, y)")
_add("logaddexp", "xx", f="ol_logaddexp(x, y)")
_add("xlogy", "xx", f="y != y ? y : x == C(0) ? C(0) : x * ol_log(y)")
_add("heaviside", "xx", both="x == C(0) ? y : C(x > C(0))")
_add("squared_difference", "xx", f="(x - y) * (x - y)")
_add("absolute_difference", "xx", f="ol_fabs(x - y)")
# one operand
_add("abs", "x", f="ol_fabs(x)", i="x < 0 ? ol_wrap_neg(x) : x")
_add("neg", "x", f="-x", i="ol_wrap_neg(x)")
_add("sign", "x", both="C(x > C(0)) - C(x < C(0))")
_add("square", "x", f="x * x", i="ol_wrap_mul(x, x)")
_add("cube", "x", f="x * x * x", i="ol_wrap_mul(ol_wrap_mul(x, x), x)")
_add("reciprocal", "x", f="C(1) / x")
_add("reciprocal_square", "x", f="C(1) / (x * x)")
_add("rsqrt", "x", f="C(1) / ol_sqrt(x)")
for _name in (
    "sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "sigmoid", "silu", "mish", "gelu", "gelu_tanh",
    "floor", "ceil", "round", "trunc",
):  # fmt: skip
    _add(_name, "x", f=f"ol_{_name}(x)")
_add("frac", "x", f="x - ol_trunc(x)")
_add("round_finer", "xp", f="ol_round(x * y) / y")
_add("round_coarser", "xp", f="ol_round(x / y) * y")
_add("logit", "x", f="ol_log(x / (C(1) - x))")
_add("relu", "x", both="x < C(0) ? C(0) : x")
_add("hardsigmoid", "x", f="ol_minimum(ol_maximum(x + C(3), C(0)), C(6)) / C(6)")
_add("hardswish", "x", f="x * ol_minimum(ol_maximum(x + C(3), C(0)), C(6)) / C(6)")
_add("leaky_relu", "xp", f="x > C(0) ? x : x * y")
_add("elu", "xppp", f="ol_select(x < C(0), ol_expm1(x * w) * y, x * z)")
_add("softplus", "xpp", f="ol_softplus(x, y, z)")
_add("threshold", "xpp", both="x <= y ? z : x")
_add("nan_to_num", "xppp", f="ol_nan_to_num(x, y, z, w)")
# predicates
_add("isnan", "x", f="x != x", result="b")
_add("isinf", "x", f="ol_fabs(x) == ol_infinity<C>()", result="b")
_add("isfinite", "x", f="ol_fabs(x) < ol_infinity<C>()", result="b")
_add("isposinf", "x", f="x == ol_infinity<C>()", result="b")
_add("isneginf", "x", f="x == -ol_infinity<C>()", result="b")
_add("signbit", "x", f="ol_copysign(C(1), x) < C(0)", i="x < 0", result="b")
for _name, _code in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
    _add(_name, "xx", both=f"x {_code} y", result="b")
_add("logical_and", "bb", i="x && y", result="b")
_add("logical_or", "bb", i="x || y", result="b")
_add("logical_xor", "bb", i="x != y", result="b")
_add("logical_not", "b", i="!x", result="b")
# bits
_add("bitwise_and", "xx", i="x & y")
_add("bitwise_or", "xx", i="x | y")
_add("bitwise_xor", "xx", i="x ^ y")
_add("bitwise_not", "x", i="~x")
_add("shift_left", "xx", i="ol_shift_left(x, y)")
_add("shift_right", "xx", i="ol_shift_right(x, y)")
# backward: x = gradient of the result, y = input or result, as PyTorch's schema has it. For a NaN these follow
# PyTorch's vectorised loops, from which its own loops over what is left of a row differ.
_add("threshold_backward", "xxp", both="y <= z ? C(0) : x")
_add("sigmoid_backward", "xx", f="x * (C(1) - y) * y")
_add("tanh_backward", "xx", f="x * (C(1) - y * y)")
for _name in ("silu_backward", "gelu_backward", "gelu_tanh_backward", "mish_backward"):
    _add(_name, "xx", f=f"ol_{_name}(x, y)")
_add("leaky_relu_backward", "xxp", f="y > C(0) ? x : x * z")
_add("hardtanh_backward", "xxpp", f="ol_select((y > z) & (y < w), x, C(0))")
_add("hardsigmoid_backward", "xx", f="ol_select((y > C(-3)) & (y < C(3)), x * C(1.0f / 6.0f), C(0))")
_add("hardswish_backward", "xx", f="ol_select(y >= C(3), x, ol_select(y <= C(-3), C(0), x * (y / C(3) + C(0.5))))")
_add("softplus_backward", "xxpp", f="ol_softplus_backward(x, y, z, w)")
_add("elu_backward_below", "xxpp", f="x * w * z * ol_exp(y * w)")
_add("elu_backward_below_result", "xxpp", f="x * w * (y + z)")
_add("mse_backward", "xxxp", f="w * (x - y) * z")

#: function by name
FUNCTIONS: Mapping[str, Function] = dict(_all)

_COPIES = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t"}

KERNELS: list[Kernel] = [
    *(function.kernel(compute) for function in FUNCTIONS.values() for compute in function.classes()),
    *(
        Kernel(
            f"copy_{8 * size}", "pointwise.h", "ol_map_args",
            "[](const ol_map_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) __attribute__((always_inline)) -> int32_t "
            f"{{ return ol_copy<{c}>(a, block, grid); }}",
        )
        for size, c in _COPIES.items()
    ),
]  # fmt: skip


def compute_class(function: str, dtypes: Sequence[str]) -> str | None:
    """The class that computes `function` for operands of these element types, the output first; None if none does.

    A result that is no bool is computed in the class of its own type, so inputs are converted as they are loaded;
    predicates and copies are computed in the widest class of their inputs.
    """
    known = FUNCTIONS.get(function)
    if known is None or len(dtypes) != len(known.inputs) + 1:
        return None
    if known.result == "b" or function == "copy":
        given = [dtype for dtype, kind in zip(dtypes[1:], known.inputs, strict=True) if kind != "p"]
        found = max((CLASS[dtype] for dtype in given), key=("i64", "f32", "f64").index)
        if set(known.inputs) == {"b"}:
            found = "i64"
    else:
        found = CLASS[dtypes[0]]
    return found if found in known.classes() else None


def select(function: str, dtypes: Sequence[str]) -> str | None:
    """Name of the shipped kernel for operands of these element types, the output first; None if there is none."""
    if function == "copy" and len(dtypes) == 2 and dtypes[0] == dtypes[1]:
        return f"copy_{8 * DTYPES[dtypes[0]][2]}"
    compute = compute_class(function, dtypes)
    return f"{function}_{compute}" if compute else None


#: OL_MAP_GENERAL, OL_MAP_DENSE, OL_MAP_LAST_ONE of args_pointwise.h
GENERAL, DENSE, LAST_ONE = 0, 1, 2


def form(function: str, dtypes: Sequence[str], outer: int, inner: Sequence[int], n: int) -> int:
    """What a kernel may take for granted: value of `ol_map_args.form`.

    `dtypes`, and `inner` (strides of the innermost dimension) are those of the operands, the output first.
    """
    compute = compute_class(function, dtypes)
    if outer or compute is None:
        return GENERAL
    known = FUNCTIONS[function]
    own = {"x": compute, "b": "bool"}
    wanted = [own[known.result], *(own[kind] for kind in known.inputs if kind != "p")]
    right = [have == want for have, want in zip(dtypes, wanted, strict=False)]
    dense = [stride == 1 or n == 1 for stride in inner[: len(wanted)]]
    if all(right) and all(dense):
        return DENSE
    if known.data == 2 and len(known.inputs) == 2 and all(right[:2]) and all(dense[:2]) and inner[2] == 0:
        return LAST_ONE
    return GENERAL
