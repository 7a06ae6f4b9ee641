"""Which aten overloads run on the executor: `python -m outlast.executor.coverage [--json | --markdown]`.

The table is made from the registry of lowerings and from PyTorch's own schemas, so that it can not be out of date.
`--markdown` prints the page docs/reference/operators.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from outlast.core.errors import EXIT_DONE, NotPossibleHere, OutlastError


@dataclass(frozen=True, slots=True)
class Supported:
    """One overload."""

    name: str  #: `aten::add.Tensor`
    how: str  #: "kernel", "derived" (from the functional form), or "view" (no step at all)
    family: str  #: module of its lowering, or of the lowering it is derived from
    notes: str = ""


def table() -> list[Supported]:
    """Every overload that runs on the executor, by name. Raises `NotPossibleHere` without PyTorch.

    An overload with a lowering of its own is named even if this PyTorch lacks it; derived ones and views are found
    among the overloads that this PyTorch has.
    """
    try:
        import torch
    except ImportError as error:
        raise NotPossibleHere(
            "the overloads can not be listed", why="PyTorch, which names them, is not installed",
            do="pip install 'outlast[torch]'.",
        ) from error  # fmt: skip
    from outlast.executor import lowering
    from outlast.executor.lowering import derived
    from outlast.executor.trace import overload_name

    own = lowering.registered()
    found = {}
    for name, lower in own.items():
        found[name] = Supported(name, "kernel", _family(lower), _notes(name))
    # The dispatcher's own list: what torch.ops.aten lists grows with what a process has used.
    for registered in sorted(torch._C._dispatch_get_all_op_names()):
        if not registered.startswith("aten::") or registered in found:
            continue
        packet, _, overload = registered.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is None:
            continue
        name = overload_name(op)
        if derived.derive(op, own) is not None:
            functional = derived.functional_overload(op) or ""
            found[name] = Supported(name, "derived", _family(own[functional]), f"computes {_short(functional)}, copies")
        elif _is_view(op):
            found[name] = Supported(name, "view", "views", "no step: the plan counts offsets and strides")
    return sorted(found.values(), key=lambda one: one.name)


def executed(rows: Sequence[Supported]) -> int:
    """How many of them run kernels: views, which cost nothing, are left out."""
    return sum(row.how != "view" for row in rows)


def _family(lower: object) -> str:
    module = str(getattr(lower, "__module__", ""))
    return module.removeprefix("outlast.executor.lowering").lstrip(".") or "lowering"


def _is_view(op: object) -> bool:
    """Whether all results share memory with an operand that is not changed, so that the planner needs no lowering."""
    schema = op._schema  # type: ignore[attr-defined]
    if any(arg.alias_info is not None and arg.alias_info.is_write for arg in schema.arguments):
        return False
    returns = schema.returns
    if not returns or any(one.alias_info is None or one.alias_info.is_write for one in returns):
        return False
    if _stands_for_others(op) or schema.name in _NO_STRIDED_VIEWS:
        return False  # others stand for it in a trace, or its result is no plain strided tensor in host memory
    return not schema.name.startswith("aten::_") or schema.name == "aten::_reshape_alias"


def _stands_for_others(op: object) -> bool:
    """Whether a trace shows other overloads in its place."""
    try:
        return bool(op._can_decompose())  # type: ignore[attr-defined]
    except RuntimeError:
        return True  # known to TorchScript alone


_NO_STRIDED_VIEWS = ("aten::view_as_complex", "aten::view_as_real", "aten::real", "aten::imag", "aten::conj")


#: what a reader would not expect, by the start of the overload's name
_NOTES = {
    "aten::topk": "among equal values, the order of indices may differ from eager's",
    "aten::empty": "the content is undefined, as eager's is",
    "aten::new_empty": "the content is undefined, as eager's is",
}


def _notes(name: str) -> str:
    return next((text for start, text in _NOTES.items() if name.startswith(start)), "")


def _short(name: str) -> str:
    return name.removeprefix("aten::")


def as_json(rows: Sequence[Supported]) -> dict[str, object]:
    """`supported`: overloads that run kernels; `views`: overloads that cost nothing; `overloads`: all of them."""
    return {
        "supported": executed(rows),
        "views": len(rows) - executed(rows),
        "by_how": dict(Counter(row.how for row in rows)),
        "by_family": dict(Counter(row.family for row in rows)),
        "overloads": [asdict(row) for row in rows],
    }


def as_markdown(rows: Sequence[Supported]) -> str:
    """The page docs/reference/operators.md. It names no version: what it lists does not depend on the machine."""
    counts = Counter(row.how for row in rows)
    lines = [
        "# Supported operators",
        "",
        "<!-- Generated: python -m outlast.executor.coverage --markdown > docs/reference/operators.md -->",
        "",
        f"The executor runs {executed(rows)} overloads of aten. {counts['kernel']} have a lowering of their own; "
        f"{counts['derived']} in-place and",
        "`out=` forms are derived from those: the functional form runs, and its result is copied. "
        f"{counts['view']} more are views and",
        "cost no step. A call that stands for others (`aten::linear`) is seen as those others and is not counted.",
        "Everything else is left to PyTorch inside the same call, and `Replay.report().fallbacks` says what and why.",
        "",
        "What holds for all of them:",
        "",
        "- dtypes bool, uint8, int8 to int64, float16, bfloat16, float32, float64, as far as PyTorch has the",
        "  combination; up to 8 dimensions, any strides, broadcasting, empty tensors; strided tensors in host memory;",
        "- results have eager's dtype, shape and strides; values agree within the [tolerances](operators-numerics.md);",
        "- a call whose tensors require grad while autograd records runs in PyTorch;",
        "- a combination of arguments that a lowering does not take (a dtype, a mode) is left to PyTorch, with its",
        "  reason in the report.",
        "",
        "In the tables, \"derived\" stands for in-place and `out=` forms.",
    ]  # fmt: skip
    for family in sorted({row.family for row in rows}):
        mine = [row for row in rows if row.family == family]
        lines += ["", f"## {family}", "", "| overload | how | notes |", "| --- | --- | --- |"]
        lines += [f"| `{_short(row.name)}` | {row.how} | {row.notes} |" for row in mine if row.how != "view"]
        views = [f"`{_short(row.name)}`" for row in mine if row.how == "view"]
        if views:
            lines += ["", "Views, of which a plan only counts offsets and strides:", "", ", ".join(views) + "."]
    return "\n".join(lines) + "\n"


def as_text(rows: Sequence[Supported]) -> str:
    """For people: one line per overload, and the count."""
    width = max((len(row.name) for row in rows), default=0)
    lines = [f"{row.name:<{width}}  {row.how:<8} {row.family:<10} {row.notes}".rstrip() for row in rows]
    return "\n".join(
        [*lines, "", f"{executed(rows)} overloads run on the executor, {len(rows) - executed(rows)} are views"]
    )


def main(words: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m outlast.executor.coverage", description=(__doc__ or "").split("\n")[0]
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--markdown", action="store_true", help="print the page of the reference")
    arguments = parser.parse_args(words)
    try:
        rows = table()
    except OutlastError as error:
        print(f"outlast: {error}", file=sys.stderr)
        return error.exit_code
    if arguments.json:
        print(json.dumps(as_json(rows), indent=1))
    else:
        print(as_markdown(rows) if arguments.markdown else as_text(rows), end="" if arguments.markdown else "\n")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
