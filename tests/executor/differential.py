"""One call of an aten overload, eager and through the executor, compared in everything that a caller can see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from outlast.core.errors import Refused
from outlast.executor.replay import Replay
from outlast.executor.runtime import Executor

#: relative and absolute difference that counts as equal (docs/reference/operators-numerics.md)
TOLERANCE = {
    torch.float64: (1e-12, 1e-14),
    torch.float32: (4e-6, 1e-6),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}

#: (overload, reason) -> cases left to PyTorch
unsupported: Counter[tuple[str, str]] = Counter()
compared: Counter[str] = Counter()


def overload(name: str) -> Any:
    """`aten::add.Tensor` -> the OpOverload."""
    space, _, rest = name.partition("::")
    packet, _, kind = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), kind or "default")


def copied(tree: Any) -> Any:
    """The same arguments over memory of their own, with the same strides and the same sharing among themselves."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        storage = leaf.untyped_storage()
        own = storages.setdefault(storage._cdata, storage.clone())
        return torch.empty(0, dtype=leaf.dtype).set_(own, leaf.storage_offset(), leaf.shape, leaf.stride())

    return pytree.tree_map(copy, tree)


def compare(
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    executor: Executor,
    tolerance: tuple[float, float] | None = None,
) -> bool:
    """Run both and assert that nothing differs; False if eager refuses the sample or the executor leaves it."""
    op = overload(name)
    with torch.no_grad():
        expected_args = copied((tuple(args), kwargs))
        try:
            expected = op(*expected_args[0], **expected_args[1])
        except (RuntimeError, IndexError, NotImplementedError, ValueError, TypeError):
            return False
        leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def call(*tensors: torch.Tensor) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            given, named = pytree.tree_unflatten(filled, spec)
            return op(*given, **named)

        actual_args = copied((tuple(args), kwargs))
        tensors = [leaf for leaf in pytree.tree_leaves(actual_args) if isinstance(leaf, torch.Tensor)]
        before = [tensor.clone() for tensor in tensors]
        replay = Replay(call, False, "recapture", executor, 4, 30.0)
        try:
            replay.prepare(*tensors)
        except Refused as refused:  # eager gave its out= tensor other strides, which a plan does not do
            unsupported[name, str(refused)] += 1
            return False
        for tensor, content in zip(tensors, before, strict=True):
            torch.testing.assert_close(
                tensor,
                content,
                rtol=0,
                atol=0,
                equal_nan=True,
                check_stride=False,
                msg=f"{name}: capture changed an argument",
            )
        actual = replay(*tensors)
        assert not replay.eager, f"{name}: ran eagerly: {replay.eager}"
        left = replay.report().fallbacks
        for reason in left:
            unsupported[name, reason.partition(": ")[2]] += 1
        if left:
            return False
        assert replay.calls == 1, f"{name}: the call did not find its plan"
    limit = tolerance
    _tree(f"{name}{_shown(args, kwargs)}", actual, expected, limit)
    for got, wanted in zip(pytree.tree_leaves(actual_args), pytree.tree_leaves(expected_args), strict=True):
        if isinstance(got, torch.Tensor):
            _same(f"{name}{_shown(args, kwargs)}: an argument afterwards", got, wanted, limit)
    compared[name] += 1
    return True


def _tree(what: str, actual: Any, expected: Any, limit: tuple[float, float] | None) -> None:
    got, wanted = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(got) == len(wanted), f"{what}: {len(got)} results, eager has {len(wanted)}"
    for a, b in zip(got, wanted, strict=True):
        if isinstance(b, torch.Tensor):
            _same(what, a, b, limit)
        else:
            assert a == b, f"{what}: {a}, eager has {b}"


def _same(what: str, a: torch.Tensor, b: torch.Tensor, limit: tuple[float, float] | None) -> None:
    assert a.dtype == b.dtype, f"{what}: dtype {a.dtype}, eager has {b.dtype}"
    assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)}, eager has {tuple(b.shape)}"
    strides = [(x, y) for x, y, n in zip(a.stride(), b.stride(), a.shape, strict=True) if n > 1]
    if b.numel() > 0:
        assert all(x == y for x, y in strides), f"{what}: strides {a.stride()}, eager has {b.stride()}"
    if isinstance(limit, dict):  # by type
        limit = limit.get(b.dtype)
    relative, absolute = limit if limit is not None else TOLERANCE.get(b.dtype, (0.0, 0.0))
    try:
        torch.testing.assert_close(a, b, rtol=relative, atol=absolute, equal_nan=True, check_stride=False)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}\nexecutor: {a}\neager: {b}") from None


def _shown(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    def show(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}/{list(leaf.stride())}"
        return leaf

    return str(pytree.tree_map(show, (tuple(args), kwargs)))


def forms(
    name: str,
) -> dict[str, Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]]:
    """In-place and out= forms of a functional overload, each with what turns its sample into theirs."""
    space, _, rest = name.partition("::")
    packet = rest.partition(".")[0]
    wanted = [(a.name, str(a.type)) for a in overload(name)._schema.arguments]
    found: dict[str, Any] = {}
    inplace = getattr(torch.ops.aten, packet + "_", None)
    if inplace is not None:
        for one in inplace.overloads():
            if [(a.name, str(a.type)) for a in getattr(inplace, one)._schema.arguments] == wanted:
                found[f"{space}::{packet}_.{one}".removesuffix(".default")] = lambda args, kwargs: (args, kwargs)
    base = getattr(torch.ops.aten, packet)
    for one in base.overloads():
        schema = getattr(base, one)._schema
        outs = [a.name for a in schema.arguments if a.is_out]
        if len(outs) == 1 and [(a.name, str(a.type)) for a in schema.arguments if not a.is_out] == wanted:
            found[f"{space}::{packet}.{one}"] = _with_out(name, outs[0])
    return found


def _with_out(name: str, out: str) -> Any:
    def change(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        try:
            with torch.no_grad():
                result = overload(name)(*copied(args), **copied(kwargs))
        except (RuntimeError, IndexError, NotImplementedError, ValueError, TypeError):
            return None
        if not isinstance(result, torch.Tensor):
            return None
        # every second place of something larger, so that a result written as contiguous is seen
        room = torch.full((*result.shape, 2), 7, dtype=torch.float32).to(result.dtype)
        return args, {**kwargs, out: room[..., 0]}

    return change
