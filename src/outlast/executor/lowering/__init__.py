"""How each aten overload is run by kernels: a registry of lowerings, one module per family.

A lowering is called once per traced call, while a plan is made: `lower(planner, out, *args, **kwargs)` with the
arguments of the aten schema (tensors as `Value`), and `out` the `Meta` of eager's result, or a tuple of them. It
appends steps and returns the result's `Value` or Values. `Unsupported` leaves the call to PyTorch.

In-place (`aten::add_`) and `out=` overloads without a lowering of their own run the functional one and copy the
result; operators that return a view need no lowering.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from outlast.executor.planner import Planner
from outlast.executor.trace import overload_name
from outlast.executor.values import Meta, Unsupported, Value

__all__ = ["Meta", "Planner", "Unsupported", "Value", "find", "lowers", "registered"]

#: modules of this package that register lowerings
FAMILIES = (
    "pointwise",
    "movement",
    "views",
    "indexing",
    "advanced",
    "reduce",
    "losses",
    "rows",
    "norms",
    "order",
    "matmul",
    "attention",
)

_Lowering = TypeVar("_Lowering", bound=Callable[..., Any])
_table: dict[str, Callable[..., Any]] = {}


def lowers(*overloads: str) -> Callable[[_Lowering], _Lowering]:
    """Register a function as the lowering of these overloads, named as in `aten::add.Tensor`."""

    def register(function: _Lowering) -> _Lowering:
        for name in overloads:
            if name in _table:
                raise ValueError(f"{name} has two lowerings")
            _table[name] = function
        return function

    return register


@functools.cache
def registered() -> dict[str, Callable[..., Any]]:
    """All lowerings by overload, without those that are derived."""
    for family in FAMILIES:
        importlib.import_module(f"{__name__}.{family}")
    return _table


def find(op: Any) -> Callable[..., Any] | None:
    """The lowering of an `OpOverload`: its own, or one derived from the functional form; None if there is none."""
    return _find(op)


@functools.cache
def _find(op: Any) -> Callable[..., Any] | None:
    own = registered().get(overload_name(op))
    if own is not None:
        return own
    from outlast.executor.lowering import derived

    return derived.derive(op, registered())
