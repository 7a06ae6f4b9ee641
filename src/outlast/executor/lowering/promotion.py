"""Type promotion as PyTorch does it: which element type a mixed operation computes in.

Operands fall into three categories: tensors with dimensions, tensors without, and Python numbers. The later ones only
count if their kind (bool < integer < float) is higher. See "Tensor Attributes" of PyTorch's documentation.
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast.executor.values import Unsupported, Value

Number = bool | int | float
Operand = Value | Number

#: what a Python float becomes among integers
DEFAULT_FLOAT = "f32"

_SIGNED = ("i8", "i16", "i32", "i64")
_FLOATS = ("f16", "bf16", "f32", "f64")
_TORCH = {
    "bool": "bool", "uint8": "u8", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "float16": "f16",
    "bfloat16": "bf16", "float32": "f32", "float64": "f64",
}  # fmt: skip


def kind(dtype: str) -> int:
    """0 for bool, 1 for integers, 2 for floats."""
    return 0 if dtype == "bool" else 2 if dtype in _FLOATS else 1


def promote(a: str, b: str) -> str:
    """The smallest type that holds both, as `torch.promote_types`."""
    if a == b:
        return a
    if kind(a) != kind(b):
        return a if kind(a) > kind(b) else b
    if kind(a) == 2:
        return "f32" if {a, b} == {"f16", "bf16"} else max(a, b, key=_FLOATS.index)
    if "u8" in (a, b):
        other = b if a == "u8" else a
        return "i16" if other == "i8" else other
    return max(a, b, key=_SIGNED.index)


def number_type(number: Number) -> str:
    """The type that a Python number stands for."""
    return "bool" if isinstance(number, bool) else "i64" if isinstance(number, int) else DEFAULT_FLOAT


def result_type(*operands: Operand | object) -> str:
    """The type a mixed operation computes in, as `torch.result_type`."""
    best: list[str | None] = [None, None, None]
    for operand in operands:
        if isinstance(operand, Value):
            place, dtype = (0 if operand.shape else 1), operand.dtype
        elif isinstance(operand, int | float):
            place, dtype = 2, number_type(operand)
        else:  # a complex number, which no type here holds
            raise Unsupported(f"a {type(operand).__name__} as an operand")
        known = best[place]
        best[place] = dtype if known is None else promote(known, dtype)
    # Python numbers and tensors without dimensions bring their own type only if no higher category has their kind.
    found: str | None = None
    for brought in best:
        if brought is not None and (found is None or kind(brought) > kind(found)):
            found = brought
    if found is None:
        raise Unsupported("an operation on nothing")
    return found


def floating(dtype: str) -> str:
    """The type of functions that give floats: integers and bool become the default float."""
    return dtype if kind(dtype) == 2 else DEFAULT_FLOAT


def dtype_name(dtype: object) -> str:
    """Our name of a `torch.dtype`; raises `Unsupported` for one that operators do not have."""
    name = str(dtype).removeprefix("torch.")
    if name not in _TORCH:
        raise Unsupported(f"elements of type {name}")
    return _TORCH[name]


def widest(dtypes: Sequence[str]) -> str:
    """`promote` over several types."""
    found = dtypes[0]
    for dtype in dtypes[1:]:
        found = promote(found, dtype)
    return found
