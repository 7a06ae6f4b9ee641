"""`with dispatch():` runs the supported operators of any PyTorch code on the executor, without capturing it.

A `TorchDispatchMode` sees each call. A supported one is queued with a plan of its own (kept by operator, shapes,
strides and dtypes) and its result is handed out at once; the queue is run in order when it is full, before anything
that is not supported, when Python looks at a tensor's content, and at the end. On leaving, the report says per operator
how often it ran here and why it fell back where it did.

This is for convenience and for finding out what a program would gain: interception alone costs more than eager's own
call (docs/explanation/executor.md has the numbers). Capture is the fast way.

A result that is queued has memory but no content yet. Everything that reads tensors through PyTorch flushes first; C++
code that takes the address of a tensor without going through PyTorch's dispatcher or its Python methods would see it
unfilled: use `batch=1` around such code.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from outlast.core.errors import OutlastError, UsageError
from outlast.executor.planner import Planner
from outlast.executor.program import assemble
from outlast.executor.replay import new_output, view_of
from outlast.executor.runtime import Executor
from outlast.executor.shared import default_executor
from outlast.executor.trace import record

if TYPE_CHECKING:
    import torch

#: calls kept before they are run. Running one costs some 100 ns of submission, so that there is little more to save.
DEFAULT_BATCH = 16
_PLANS_KEPT = 4096
#: methods and functions that read or pass on a tensor's memory without calling an operator
_READERS = (
    "numpy", "__array__", "tolist", "data_ptr", "__dlpack__", "storage", "untyped_storage", "_typed_storage",
    "share_memory_", "__reduce_ex__", "__deepcopy__", "__cuda_array_interface__", "const_data_ptr", "pin_memory",
    "__repr__", "__format__",  # they switch modes off before they call operators
)  # fmt: skip


@dataclass(slots=True)
class Coverage:
    """What ran where. Keys are overloads, and overload with reason."""

    executed: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[tuple[str, str]] = field(default_factory=Counter)
    flushes: Counter[str] = field(default_factory=Counter)  #: by cause

    def __str__(self) -> str:
        done, left = sum(self.executed.values()), sum(self.fallbacks.values())
        share = f" ({100 * done / (done + left):.1f} %)" if done + left else ""
        lines = [f"outlast: {done} of {done + left} operator calls ran on the executor{share}"]
        lines += [f"  {n:8d}  {name}" for name, n in self.executed.most_common()]
        if left:
            lines.append("left to PyTorch:")
            lines += [f"  {n:8d}  {name}: {why}" for (name, why), n in self.fallbacks.most_common()]
        return "\n".join(lines)


@dataclass(slots=True)
class _Single:
    """The plan of one call with arguments of one kind; `program` None = it is left to PyTorch, for `reason`."""

    program: Any = None
    outputs: tuple[Any, ...] = ()  #: of the program, made anew for each call
    form: Any = None  #: flat results as values
    many: bool = False
    reason: str = ""


@dataclass(slots=True)
class _Pending:
    """A call whose result has memory but no content yet. It keeps its tensors alive."""

    single: _Single
    inputs: list[Any]
    made: list[Any]


class dispatch:  # noqa: N801 - used like a function, as torch.no_grad is
    """Context manager; see the module. `coverage` holds the counts during and after.

    `batch`: calls that are queued before they run; `report`: where the report goes on exit (None = nowhere).
    """

    def __init__(
        self, *, batch: int = DEFAULT_BATCH, executor: Executor | None = None, report: TextIO | None = sys.stderr
    ) -> None:
        if batch < 1:
            raise UsageError(f"batch={batch}", why="at least one call must be run at a time")
        self.coverage = Coverage()
        self._batch = batch
        self._executor = executor
        self._report = report
        self._modes: tuple[Any, Any] | None = None

    def __enter__(self) -> dispatch:
        if self._modes is not None:
            raise UsageError("this dispatch() is active already", do="Make one for each `with`.")
        queue = _Queue(self._executor or default_executor(), self.coverage, self._batch)
        self._modes = _modes(queue)
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        assert self._modes is not None
        modes, self._modes = self._modes, None
        try:
            modes[0].queue.flush("end")
        finally:
            for mode in reversed(modes):
                mode.__exit__(kind, error, trace)
            if self._report is not None:
                print(self.coverage, file=self._report)


class _Queue:
    """Calls in order. Belongs to the thread that entered the context."""

    def __init__(self, executor: Executor, coverage: Coverage, batch: int) -> None:
        self.executor, self.coverage, self.batch = executor, coverage, batch
        self.pending: list[_Pending] = []
        self.known: dict[Any, _Single] = {}
        self.thread = threading.get_ident()

    def flush(self, cause: str) -> None:
        """Run what is queued. If a call fails, those after it are not run, and its error is raised."""
        from outlast.executor import _native

        if not self.pending:
            return
        self.coverage.flushes[cause] += 1
        pending, self.pending = self.pending, []
        _native.set_flush(None)
        for one in pending:
            native = one.single.program.native
            for slot, tensor in enumerate((*one.inputs, *one.made)):
                native.bind(slot, tensor.data_ptr())
            status, step, text = native.run(0, native.steps, 60.0)
            if status != 0:
                from outlast.executor.errors import raise_step_failure

                raise_step_failure(one.single.program, step, status, text)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operator call, below autograd."""
        import torch

        from outlast.executor.trace import overload_name

        name = overload_name(func)
        leaves, key = _signature(func, args, kwargs)
        if key is None:
            return self._left(func, args, kwargs, name, "a tensor that is no plain tensor in host memory")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in leaves):
            return self._left(func, args, kwargs, name, "a tensor requires grad (use torch.no_grad())")
        single = self.known.get(key)
        if single is None:
            self.flush("a call of a new kind is planned")
            single, result = self._plan(func, args, kwargs, leaves)
            if len(self.known) >= _PLANS_KEPT:
                self.known.pop(next(iter(self.known)))
            self.known[key] = single
            self._count(name, single)
            return result
        if single.reason:
            if single.reason == _VIEW:
                return func(*args, **kwargs)  # no content is touched
            return self._left(func, args, kwargs, name, single.reason)
        made = [new_output(output) for output in single.outputs]
        self.pending.append(_Pending(single, leaves, made))
        self.coverage.executed[name] += 1
        if len(self.pending) >= self.batch:
            self.flush("the queue is full")
        else:
            from outlast.executor import _native

            _native.set_flush(lambda: self.flush("a replay is called"))
        results = [self._result(one, leaves, made, single) for one in single.form]
        return results[0] if not single.many else tuple(results)

    def _result(self, value: Any, leaves: list[Any], made: list[Any], single: _Single) -> Any:
        if value is None:
            return None
        if value.buffer.kind == "input":
            return leaves[value.buffer.index]
        index = next(i for i, output in enumerate(single.outputs) if output.buffer is value.buffer)
        return view_of(made[index], value)

    def _left(self, func: Any, args: Any, kwargs: Any, name: str, reason: str) -> Any:
        self.flush("an operator is left to PyTorch")
        self.coverage.fallbacks[name, reason] += 1
        return func(*args, **kwargs)

    def _count(self, name: str, single: _Single) -> None:
        if not single.reason:
            self.coverage.executed[name] += 1
        elif single.reason != _VIEW:
            self.coverage.fallbacks[name, single.reason] += 1

    def _plan(self, func: Any, args: Any, kwargs: Any, leaves: list[torch.Tensor]) -> tuple[_Single, Any]:
        """Run the call as eager does, and plan for the next of its kind."""
        try:
            trace, result = record(lambda *_: func(*args, **kwargs), leaves, lambda call: call(*leaves), keep=False)
        except OutlastError as error:
            return _Single(reason=error.what), func(*args, **kwargs)
        if len(trace.calls) == 1 and trace.calls[0].view_of:
            return _Single(reason=_VIEW), result
        plan = Planner().plan(trace)
        if plan.fallbacks:
            return _Single(reason=next(iter(plan.fallbacks))[1]), result
        if trace.constants or any(one.buffer.kind == "constant" for one in plan.outputs if one is not None):
            return _Single(reason="it reads a tensor that is no argument"), result
        for value in plan.outputs:
            if value is not None and value.buffer.kind == "input":
                own = trace.inputs[value.buffer.index].meta
                if (value.shape, value.stride, value.offset) != (own.shape, own.stride, 0):
                    return _Single(reason="its result shares memory with an argument"), result
        program = assemble(plan, self.executor)
        return _Single(program, tuple(program.outputs), plan.outputs, isinstance(result, tuple | list)), result


_VIEW = "view"


def _signature(func: Any, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """Tensors of a call in order, and a key of all that its plan depends on; None if it can have none."""
    import torch

    leaves: list[Any] = []
    plain = True

    def walk(tree: Any) -> Any:
        nonlocal plain
        if isinstance(tree, torch.Tensor):
            if (
                type(tree) not in (torch.Tensor, torch.nn.Parameter)
                or tree.device.type != "cpu"
                or tree.layout != torch.strided
            ):
                plain = False
                return None
            same = next((i for i, one in enumerate(leaves) if one is tree), len(leaves))
            leaves.append(tree)
            return ("tensor", same, tree.dtype, tuple(tree.shape), tree.stride())
        if isinstance(tree, list | tuple):
            return tuple(walk(one) for one in tree)
        if isinstance(tree, dict):
            return tuple((name, walk(one)) for name, one in sorted(tree.items()))
        return (type(tree), repr(tree)) if isinstance(tree, float) else (type(tree), tree)

    key = (func, walk(args), walk(kwargs))
    if plain and any(arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments):
        spans = [(one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in leaves]
        for i, (a, x) in enumerate(zip(leaves, spans, strict=True)):
            for b, y in list(zip(leaves, spans, strict=True))[:i]:
                if a is not b and x[0] < y[0] + y[1] and y[0] < x[0] + x[1]:
                    plain = False  # which of them overlaps how is not part of the key
    try:
        hash(key)
    except TypeError:
        plain = False
    return leaves, key if plain else None


def _modes(queue: _Queue) -> tuple[Any, Any]:
    """The two modes that see calls: operators, and Python methods that read memory."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from outlast.executor import lowering

    class Operators(TorchDispatchMode):
        """Sees every operator call."""

        def __init__(self) -> None:
            super().__init__()
            self.queue = queue

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if lowering.find(func) is None and func._can_decompose():
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return queue.call(func, args, kwargs)

    readers = {getattr(torch.Tensor, name, None) for name in _READERS} - {None}

    class Reads(TorchFunctionMode):
        """Flushes before Python reads a tensor's memory."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in readers or getattr(func, "__name__", "") in _READERS or func is torch.save:
                queue.flush("Python reads a tensor")
            return func(*args, **(kwargs or {}))

    return Operators(), Reads()


__all__ = ["DEFAULT_BATCH", "Coverage", "dispatch"]
