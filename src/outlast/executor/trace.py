"""What a function does, call by call: one run of it under a TorchDispatchMode, with real tensors.

Results, shapes, strides and aliases are therefore eager's own. A call whose result is a number that depends on data
(`item`, `equal`) would freeze that number into a plan, so recording refuses it; after a result whose *shape* depends on
data (`nonzero`), the calls that follow are marked: the plan ends there and PyTorch runs the rest, as long as the shapes
are those that were recorded.

A replay that is called inside shows its operators: it runs its function instead of its plan while its thread records.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from outlast.core.errors import Refused
from outlast.executor.values import Meta

if TYPE_CHECKING:
    import torch


class DataDependent(Refused):
    """A function whose Python code depends on the content of a tensor."""


@dataclass(slots=True, eq=False)
class TensorRef:
    """A tensor of a trace."""

    id: int
    meta: Meta


@dataclass(slots=True, eq=False)
class Call:
    """One call of an aten operator; tensors in `args` and `kwargs` are `TensorRef`s."""

    op: Any  #: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[TensorRef | None, ...]  #: flat
    view_of: tuple[TensorRef, ...] = ()  #: per result: the operand that it is a view of; () if they are no views
    mutates: tuple[TensorRef, ...] = ()
    after_dynamic: bool = False  #: shapes from here on depend on data


@dataclass(slots=True)
class Trace:
    """A recorded run."""

    inputs: list[TensorRef] = field(default_factory=list)
    constants: list[tuple[TensorRef, torch.Tensor]] = field(default_factory=list)  #: what the function closes over
    calls: list[Call] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)  #: flat: `TensorRef` or another object
    spec: Any = None  #: tree of the outputs


def overload_name(op: Any) -> str:
    """`aten::add.Tensor`."""
    schema = op._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


@functools.cache
def dtype_names() -> dict[Any, str]:
    """torch.dtype -> name of `outlast.executor.kernels.DTYPES`; others are named as torch does."""
    import torch

    return {
        torch.bool: "bool", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32",
        torch.int64: "i64", torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64",
    }  # fmt: skip


@functools.cache
def torch_dtypes() -> dict[str, Any]:
    """The reverse of `dtype_names`."""
    return {name: dtype for dtype, name in dtype_names().items()}


def torch_dtype(name: str) -> Any:
    """The torch.dtype of a `Meta`'s name, supported or not."""
    import torch

    return torch_dtypes().get(name) or getattr(torch, name.removeprefix("torch."))


def meta_of(tensor: torch.Tensor) -> Meta:
    """The `Meta` of a tensor. Raises `Refused` for one without strides."""
    import torch

    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise Refused(
            f"a tensor of layout {tensor.layout} on {tensor.device}",
            why="the CPU executor works on strided tensors in host memory",
        )
    name = dtype_names().get(tensor.dtype, str(tensor.dtype))
    return Meta(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())


def record(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    call: Callable[[Callable[..., Any]], Any],
    *,
    keep: bool,
) -> tuple[Trace, Any]:
    """Run `call(function)` once and record it; returns the trace and what it returned.

    `inputs` are the tensors among its arguments. With `keep`, or when it fails, tensors that existed before and are
    changed get their content back. Raises `DataDependent`.
    """
    import torch
    from torch.utils import _pytree as pytree

    recorder = _recorder_type()(inputs)
    mode = torch.inference_mode() if torch.is_inference_mode_enabled() else torch.no_grad()
    try:
        with mode, _shown_replays(), recorder.reads, recorder:
            result = call(function)
        leaves, recorder.trace.spec = pytree.tree_flatten(result)
        recorder.trace.outputs = [recorder.output(leaf) for leaf in leaves]
    except BaseException:
        recorder.restore()
        raise
    if keep:
        recorder.restore()
    return recorder.trace, result


_recording: Counter[int] = Counter()  #: by thread
_recording_lock = threading.Lock()


@contextmanager
def _shown_replays() -> Iterator[None]:
    """Replays that this thread calls run their functions, whose operators are seen."""
    from outlast.executor import _native

    me = threading.get_ident()

    def function_of(replay: Any, args: tuple[Any, ...]) -> Any:
        return replay.function(*args)

    with _recording_lock:
        _recording[me] += 1
        _native.set_recording(lambda: function_of if threading.get_ident() in _recording else None)
    try:
        yield
    finally:
        with _recording_lock:
            _recording[me] -= 1
            if not _recording[me]:
                del _recording[me]
            if not _recording:
                _native.set_recording(None)


#: methods that take a tensor's content to where no operator is seen
_LEAKS = ("numpy", "__array__", "tolist", "__dlpack__", "storage", "_typed_storage")


@functools.cache
def _recorder_type() -> type[Any]:
    """The recording mode; a class made late, since its base needs torch."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from outlast.executor import lowering

    item_like = {torch.Tag.data_dependent_output}
    dynamic = {torch.Tag.dynamic_output_shape}
    plain = (
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        torch.dtype,
        torch.device,
        torch.layout,
        slice,
        type,
        Enum,
    )
    fixed = (*plain, torch.SymInt, torch.SymFloat, torch.SymBool)

    class Reads(TorchFunctionMode):
        """Refuses what would take content out of a tensor, past the recorder."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if name in _LEAKS and getattr(torch.Tensor, name, None) in (func, getattr(func, "__func__", func)):
                raise _data_dependent(f"Tensor.{name}")
            return func(*args, **(kwargs or {}))

    class Recorder(TorchDispatchMode):
        """Records calls while they run."""

        def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
            super().__init__()
            self.trace = Trace()
            self.reads = Reads()
            self._place: dict[int, int] = {}  #: id(tensor) -> its storage, which only `.data =` and the like change
            self._refs: dict[int, TensorRef] = {}
            self._alive: list[Any] = []  # ids are only unique while the tensors live
            self._outside: list[torch.Tensor] = []
            self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
            self._dynamic = False
            for tensor in inputs:
                self.trace.inputs.append(self._refs.get(id(tensor)) or self._new(tensor))
                self._outside.append(tensor)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if lowering.find(func) is None and func._can_decompose():
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            if item_like & set(func.tags) or func is torch.ops.aten._local_scalar_dense.default:
                raise _data_dependent(overload_name(func))
            given, named = self._seen(args), {key: self._seen(one) for key, one in kwargs.items()}
            changed = self._changed(func, args, kwargs)
            for tensor in changed:
                self._save(tensor)
            result = func(*args, **kwargs)
            flat = list(result) if isinstance(result, tuple | list) else [result]
            operands = [one for one in _leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            mutates = tuple(self._refs[id(one)] for one in changed)
            view_of = () if changed or func is torch.ops.aten.lift_fresh.default else self._view_of(flat, operands)
            outs = tuple(self._result(one) for one in flat)
            for tensor, ref in zip(changed, mutates, strict=True):
                if meta_of(tensor) != ref.meta:
                    raise Refused(
                        f"{overload_name(func)} changes the shape of its operand", why="a plan's memory is fixed"
                    )
            masks = any(one.dtype in (torch.bool, torch.uint8) for one in operands[1:])
            if dynamic & set(func.tags) and (func is not torch.ops.aten.index.Tensor or masks):
                self._dynamic = True
            self.trace.calls.append(Call(func, given, named, outs, view_of, mutates, self._dynamic))
            return result

        def output(self, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, fixed):
                    raise Refused(
                        f"the function returns a {type(leaf).__name__}",
                        why="a plan makes tensors, in tuples, lists, dicts and types registered with PyTorch's pytree; "
                        "an object would be today's for ever",
                        do="Return the tensors, or register the type (torch.utils._pytree.register_pytree_node).",
                    )
                return leaf
            return self._known(leaf)

        def restore(self) -> None:
            for storage, content in self._before.values():
                # It may have been resized; its tensors have the new shape, so that it keeps the new size.
                n = min(storage.nbytes(), content.nbytes())
                now, before = (torch.empty(0, dtype=torch.uint8).set_(one) for one in (storage, content))
                now[:n].copy_(before[:n])

        def _new(self, tensor: torch.Tensor) -> TensorRef:
            ref = TensorRef(len(self._refs), meta_of(tensor))
            self._refs[id(tensor)] = ref
            self._place[id(tensor)] = tensor.untyped_storage()._cdata
            self._alive.append(tensor)
            return ref

        def _known(self, tensor: torch.Tensor) -> TensorRef:
            if tensor.is_neg() or tensor.is_conj():
                raise Refused(
                    "a lazily negated or conjugated tensor is used",
                    why="its memory does not hold its values, and a plan reads memory",
                    do="Call resolve_conj() or resolve_neg() on it, or capture less.",
                )
            ref = self._refs.get(id(tensor))
            if ref is None:
                return self._constant(tensor)
            if self._place[id(tensor)] != tensor.untyped_storage()._cdata:
                raise Refused(
                    "a tensor was given other memory (`.data =`, `set_`)",
                    why="a plan knows tensors by their memory, and no operator shows the change",
                    do="Use copy_(), or a new variable.",
                )
            return ref

        def _constant(self, tensor: torch.Tensor) -> TensorRef:
            ref = self._new(tensor)
            self.trace.constants.append((ref, tensor))
            self._outside.append(tensor)
            return ref

        def _seen(self, tree: Any) -> Any:
            if isinstance(tree, torch.Tensor):
                return self._known(tree)
            if isinstance(tree, list | tuple):
                return (
                    tuple(self._seen(one) for one in tree) if isinstance(tree, tuple) else [self._seen(x) for x in tree]
                )
            return tree

        def _result(self, one: Any) -> TensorRef | None:
            if not isinstance(one, torch.Tensor):
                if one is not None:
                    raise Refused(f"a result of type {type(one).__name__}", why="a plan keeps tensors")
                return None
            return self._refs.get(id(one)) or self._new(one)

        def _changed(self, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
            found: list[torch.Tensor] = []
            for i, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = args[i] if i < len(args) else kwargs.get(argument.name)
                    found += [one for one in _leaves(given) if isinstance(one, torch.Tensor)]
            return found

        def _view_of(self, results: list[Any], operands: list[torch.Tensor]) -> tuple[TensorRef, ...]:
            found = []
            for result in results:
                if not isinstance(result, torch.Tensor):
                    return ()
                place = result.untyped_storage()._cdata
                base = next((one for one in operands if one.untyped_storage()._cdata == place), None)
                if base is None:
                    return ()
                found.append(self._refs[id(base)])
            return tuple(found)

        def _save(self, tensor: torch.Tensor) -> None:
            """Keep the content that a tensor from outside had before it is first changed."""
            storage = tensor.untyped_storage()
            if storage._cdata in self._before:
                return
            if any(one.untyped_storage()._cdata == storage._cdata for one in self._outside):
                self._before[storage._cdata] = (storage, storage.clone())

    return Recorder


def _data_dependent(what: str) -> DataDependent:
    return DataDependent(
        f"{what} asks for the content of a tensor",
        why="a plan would repeat today's answer for ever",
        do="Use torch.compile(backend='outlast') or outlast.executor.dispatch(): those go on in Python.",
    )


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for one in tree.values() for leaf in _leaves(one)]
    if isinstance(tree, list | tuple):
        return [leaf for one in tree for leaf in _leaves(one)]
    return [tree]
