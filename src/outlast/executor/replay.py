"""Capture a function of tensors once, then call it as one submission.

`capture` runs the function once, records what it does (trace), lays that out as a plan (planner, program), and returns
a `Replay`. A call of the replay looks at its arguments (dtype, shape, strides, exactly), patches their addresses into
the plan, and submits it as one task. Arguments of another shape are captured in the same way when they first come, so
that the number of plans is the number of different shapes, and bounded.

The contract is that of a function under `torch.no_grad()`: results are new tensors, arguments change only if the
function changes them. What the function reads besides its arguments (module parameters) is kept alive by the replay
and read where it lies at each call; Python values and control flow are frozen as they were at capture.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outlast.core.errors import NotPossibleHere, Refused, UsageError
from outlast.executor import _native, metrics
from outlast.executor.errors import raise_step_failure
from outlast.executor.planner import External, Plan, Planner, flat
from outlast.executor.program import Output, Program, assemble
from outlast.executor.runtime import Executor
from outlast.executor.shared import default_executor
from outlast.executor.trace import TensorRef, Trace, dtype_names, record, torch_dtype, torch_dtypes
from outlast.executor.values import Value

if TYPE_CHECKING:
    from pathlib import Path

    import torch

MOST_TENSORS = 1024  #: arguments of a replay, and results of a plan; native/executor/replay.cpp has them on its stack
DEFAULT_VARIANTS = 256  #: plans that a replay keeps, the least recently used go first
_DLPACK = {
    "bool": (6, 8), "u8": (1, 8), "i8": (0, 8), "i16": (0, 16), "i32": (0, 32), "i64": (0, 64), "f16": (2, 16),
    "bf16": (4, 16), "f32": (2, 32), "f64": (2, 64),
}  # fmt: skip


@dataclass(slots=True)
class Report:
    """What a replay does, in numbers."""

    calls: int  #: answered by a plan
    captures: int
    variants: int  #: plans that are kept
    steps: int  #: of the newest plan
    kernels: dict[str, int]  #: of the newest plan
    fused: int  #: steps of it that were generated from several
    fallbacks: dict[str, int]  #: "overload: reason" -> calls in the newest plan that PyTorch runs
    eager: dict[str, int] = field(default_factory=dict)  #: reason -> calls that ran the function itself


def capture(
    function: Callable[..., Any],
    *example_inputs: Any,
    fuse: bool | None = None,
    on_mismatch: str = "recapture",
    executor: Executor | None = None,
    max_variants: int = DEFAULT_VARIANTS,
    timeout: float = 60.0,
) -> Replay:
    """Trace `function(*example_inputs)` and return a callable that replays it on the executor.

    The function runs once, as eager PyTorch, and what it changes is put back. `fuse`: generate one operator from chains
    of element-wise ones (needs a C++ compiler; None = if there is one). `on_mismatch`: "recapture" plans anew for
    arguments of another dtype, shape or stride; "error" refuses them. `timeout`: seconds for one call.

    Raises `DataDependent` if its Python code looks at the content of a tensor, `UsageError` for a wrong option,
    `NotPossibleHere` without PyTorch.
    """
    try:
        import torch
    except ImportError as error:
        raise NotPossibleHere(
            "cannot capture a function", why="PyTorch is not installed", do="pip install 'outlast[torch]'."
        ) from error
    if on_mismatch not in ("recapture", "error"):
        raise UsageError(f"on_mismatch={on_mismatch!r}", why="it is 'recapture' or 'error'")
    if max_variants < 1:
        raise UsageError(f"max_variants={max_variants}", why="at least one plan must be kept")
    replay = Replay(function, fuse, on_mismatch, executor or default_executor(), max_variants, timeout)
    with torch.no_grad() if not torch.is_inference_mode_enabled() else torch.inference_mode():
        replay.prepare(*example_inputs)
    return replay


class Replay(_native.Replay):
    """A captured function; see `capture`. Thread-safe; calls of one plan run one after the other."""

    def __init__(
        self,
        function: Callable[..., Any],
        fuse: bool | None,
        on_mismatch: str,
        executor: Executor,
        max_variants: int,
        timeout: float,
    ) -> None:
        import torch

        super().__init__(
            (torch.Tensor, torch.nn.Parameter), _exchange(), torch.is_grad_enabled, self._miss, self._with_grad, timeout
        )
        self.function = function
        self.executor = executor
        self.timeout = timeout
        self.fuse = fuse
        self.captures = 0
        self.newest: Program | None = None
        self.eager: Counter[str] = Counter()
        self.lenient = False  #: what can not be planned runs as it is, with a count, instead of being refused
        self._refused = ""  #: why it is not tried again
        self._changes = False  #: some plan changes memory that it was given
        self._on_mismatch = on_mismatch
        self._max_variants = max_variants
        self._nested: dict[Any, Replay] = {}
        self._lock = threading.RLock()
        self._counts, self._counted = metrics.follow(self, executor, max_variants)

    # --- capturing

    def prepare(self, *args: Any) -> None:
        """Plan for arguments like these now; what the function changes is put back."""
        tensors, rest = _split(args)
        if rest is not None:
            self._for_rest(rest).prepare(*tensors)
            return
        reason = _unfit(tensors)
        if reason:
            raise Refused(
                f"cannot capture: {reason}", why="a plan is made for plain strided tensors in host memory",
                do="Give such examples; later calls with others run the function itself.",
            )  # fmt: skip
        trace, _ = self._record(tensors, keep=True)
        self._add(trace, tensors)

    def _record(self, tensors: Sequence[torch.Tensor], *, keep: bool) -> tuple[Trace, Any]:
        """Run the function once on these.

        It gets other tensors of the same memory, so that one that it closes over is not taken for the argument which
        it happens to be this time.
        """
        from torch.utils import _pytree as pytree

        others = {id(tensor): _twin(tensor) for tensor in tensors}
        given = [others[id(tensor)] for tensor in tensors]
        trace, result = record(self.function, given, lambda function: function(*given), keep=keep)
        back = {id(other): tensor for tensor, other in zip(tensors, given, strict=True)}
        return trace, pytree.tree_map(lambda leaf: back.get(id(leaf), leaf), result)

    def _miss(self, args: tuple[Any, ...]) -> Any:
        """Arguments that no plan fits."""
        import torch

        tensors, rest = _split(args)
        if rest is not None:
            return self._for_rest(rest)(*tensors)
        reason = self._refused or _unfit(tensors)
        if reason:
            return self._eagerly(reason, args)
        if torch.is_grad_enabled() and (any(t.requires_grad for t in tensors) or self._wants_grad()):
            return self._with_grad(args)
        if self._on_mismatch == "error" and self.captures:
            raise UsageError(
                "the arguments differ from those that were captured",
                why=f"got {', '.join(map(_describe, tensors))}; captured {self._captured()}",
                do="Use on_mismatch='recapture', or pass tensors of the captured dtype, shape and strides.",
            )
        if self._changes_shared(tensors):
            return self._eagerly("tensors share memory and one of them is changed", args)
        try:
            with self._lock:
                trace, result = self._record(tensors, keep=False)
        except Refused as error:
            if not self.lenient:
                raise
            self._refused = str(error)
            return self._eagerly(self._refused, args)
        with self._lock:
            self._add(trace, tensors)
        return result

    def _for_rest(self, rest: Any) -> Replay:
        """The replay for one set of arguments that are no tensors; they are frozen into it."""
        key, rebuild = rest
        try:
            found = self._nested.get(key)
        except TypeError as error:
            raise UsageError("an argument can not be compared with later ones", why=str(error)) from error
        if found is None:
            if len(self._nested) >= self._max_variants:
                self._nested.pop(next(iter(self._nested)))
            function = self.function
            found = Replay(
                lambda *tensors: function(*rebuild(tensors)), self.fuse, self._on_mismatch, self.executor,
                self._max_variants, self.timeout,
            )  # fmt: skip
            self._nested[key] = found
        return found

    def _add(self, trace: Trace, tensors: Sequence[torch.Tensor]) -> None:
        plan = Planner().plan(trace)
        if any(call.after_dynamic for call in trace.calls) and (plan.mutated or _draws(trace)):
            self._refused = "a shape depends on the content of a tensor, in a function that can not be begun twice"
            return
        if self.fuse is not False:
            from outlast.executor.fusion import fuse_plan

            fuse_plan(plan, required=self.fuse is True)
        program = assemble(plan, self.executor)
        if len(program.outputs) > MOST_TENSORS:
            self._refused = f"it makes {len(program.outputs)} results (the most is {MOST_TENSORS})"
            return
        keys = [_key(ref.meta) for ref in trace.inputs]
        same_as = [next(k for k, t in enumerate(tensors) if t is tensor) for tensor in tensors]
        mixed = not program.only_native
        finish = None if mixed else _finisher(plan, program)
        form = "f" if finish is not None or mixed else _form(plan)
        self.add(
            inputs=keys,
            same_as=same_as,
            alias_sensitive=bool(plan.mutated),
            constants=[tensor for _, tensor in trace.constants],
            constant_keys=[_key(ref.meta) for ref, _ in trace.constants],
            outputs=[] if mixed else [_output_key(output) for output in program.outputs],
            form=form,
            finish=finish,
            python=Mixed(plan, program, self.timeout, self._eagerly) if mixed else None,
            program=program.native,
            most=self._max_variants,
        )
        self._counts.add(self._counted, program, self.executor)
        self._changes = self._changes or bool(plan.mutated)
        self.captures += 1
        self.newest = program

    # --- calls that no plan answers

    def _with_grad(self, args: tuple[Any, ...]) -> Any:
        return self._eagerly("autograd has to record: a tensor requires grad (use torch.no_grad())", args)

    def _eagerly(self, reason: str, args: tuple[Any, ...]) -> Any:
        self.eager[reason] += 1
        return self.function(*args)

    def _closed_over(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in self.newest.plan.trace.constants] if self.newest is not None else []

    def _wants_grad(self) -> bool:
        return any(tensor.requires_grad for tensor in self._closed_over())

    def _changes_shared(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it changes memory, and two different tensors among those it knows share some."""
        if not self._changes:
            return False
        distinct = {id(tensor): tensor for tensor in (*tensors, *self._closed_over())}
        spans = sorted(span for span in map(_span, distinct.values()) if span[0] < span[1])
        return any(after[0] < before[1] for before, after in itertools.pairwise(spans))

    def _captured(self) -> str:
        if self.newest is None:
            return "nothing"
        return ", ".join(f"{ref.meta.dtype}{list(ref.meta.shape)}" for ref in self.newest.plan.trace.inputs)

    # --- looking

    def report(self) -> Report:
        """What it has done so far, and what its newest plan consists of."""
        nested = list(self._nested.values())
        newest = self.newest or next((one.newest for one in reversed(nested) if one.newest), None)
        plan = newest.plan if newest else None
        eager = self.eager.copy()
        for one in nested:
            eager.update(one.report().eager)
        return Report(
            calls=self.calls + sum(one.report().calls for one in nested),
            captures=self.captures + sum(one.captures for one in nested),
            variants=self.variants + sum(one.variants for one in nested),
            steps=len(newest.steps) if newest else 0,
            kernels=dict(Counter(newest.kernels())) if newest else {},
            fused=sum(step.source is not None for step in newest.steps) if newest else 0,
            fallbacks={f"{name}: {why}": n for (name, why), n in plan.fallbacks.items()} if plan else {},
            eager=dict(eager),
        )

    def trace(self, *args: torch.Tensor, path: Path | str | None = None) -> dict[str, Any]:
        """One call on a time line, in the format of chrome://tracing and Perfetto; written to `path` as JSON if given.

        It is made on copies of the arguments; see `outlast.executor.chrome_trace`.
        """
        import json
        from pathlib import Path

        from outlast.executor import chrome_trace

        found = chrome_trace.record(self, *args)
        if path is not None:
            Path(path).write_text(json.dumps(found))
        return found


class Mixed:
    """Runs a plan that PyTorch takes part in: stretches of steps, and calls of aten operators between them."""

    def __init__(
        self,
        plan: Plan,
        program: Program,
        timeout: float,
        eagerly: Callable[[str, tuple[Any, ...]], Any] | None = None,
    ) -> None:
        self._eagerly = eagerly
        self._plan = plan
        self._program = program
        self._timeout = timeout
        self._lock = threading.Lock()
        self._constants = [tensor for _, tensor in plan.trace.constants]
        self._scratch = _scratch_tensor(program)

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """One call."""
        from torch.utils import _pytree as pytree

        program, native = self._program, self._program.native
        with self._lock:
            bases: dict[int, torch.Tensor] = {}
            for index, tensor in enumerate((*args, *self._constants)):
                native.bind(index, tensor.data_ptr())
            made = [new_output(output) for output in program.outputs]
            for output, tensor in zip(program.outputs, made, strict=True):
                bases[id(output.buffer)] = tensor
                native.bind(output.slot, tensor.data_ptr())
            look = _Look(program, args, self._constants, bases, self._scratch)
            for stretch in program.stretches:
                if stretch.external is not None:
                    if not self._external(stretch.external, look, bases):
                        break
                    continue
                status, step, text = native.run(stretch.first, stretch.count, self._timeout)
                if status != 0:
                    raise_step_failure(program, step, status, text)
            else:
                leaves = [look(one) if isinstance(one, Value) else one for one in self._plan.outputs]
                _note_changes(self._plan, args)
                return pytree.tree_unflatten(leaves, self._plan.trace.spec)
        why = "a shape that depends on the content of a tensor is not the one that was captured"
        if self._eagerly is None:
            raise Refused("this call can not be followed step by step", why=why)
        # Nothing was changed and nothing drawn (such plans are not made), so that it can be begun again.
        return self._eagerly(why, args)

    def _external(self, step: External, look: _Look, bases: dict[int, torch.Tensor]) -> bool:
        """Run one call; False if a shape that depends on data makes the rest of the plan wrong."""
        result = step.call.op(*look.tree(step.args), **look.tree(step.kwargs))
        results = list(result) if isinstance(result, tuple | list) else [result]
        if step.call.after_dynamic and len(results) != len(step.outs):
            return False
        for value, one in zip(step.outs, results, strict=True):
            if value is None or value.buffer.kind != "external" or value.buffer.made_by is not step:
                continue
            if (tuple(one.shape), one.stride()) != (value.shape, value.stride):
                if step.call.after_dynamic:
                    return False
                raise Refused(
                    f"{step.call.op} gave {tuple(one.shape)} with strides {one.stride()}",
                    why=f"it gave {value.shape} with {value.stride} when it was captured",
                    do="Capture again.",
                )
            bases[id(value.buffer)] = one
            slot = self._program.slots.get(id(value.buffer))
            if slot is not None:
                self._program.native.bind(slot, one.data_ptr())
        return True


class _Look:
    """Values of a plan as tensors, during one call."""

    def __init__(
        self,
        program: Program,
        args: tuple[Any, ...],
        constants: Sequence[torch.Tensor],
        bases: dict[int, torch.Tensor],
        scratch: torch.Tensor,
    ) -> None:
        self._program, self._args, self._constants, self._bases, self._scratch = (
            program,
            args,
            constants,
            bases,
            scratch,
        )

    def tree(self, tree: Any) -> Any:
        """Nested arguments with tensors in place of values."""
        if isinstance(tree, Value):
            return self(tree)
        if isinstance(tree, dict):
            return {key: self.tree(one) for key, one in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(self.tree(one) for one in tree)
        return tree

    def __call__(self, value: Value) -> torch.Tensor:
        """The tensor of one value."""
        buffer = value.buffer
        if buffer.kind == "input":
            return view_of(self._args[buffer.index], value)
        if buffer.kind == "constant":
            return view_of(self._constants[buffer.index], value)
        base = self._bases.get(id(buffer))
        if base is not None:
            if buffer.kind == "external" and value.offset == 0 and _is(value, buffer.made_by):
                return base
            return view_of(base, value)
        at = self._program.arena[id(buffer)]
        return view_of(self._scratch, value, at)


def _is(value: Value, made_by: External) -> bool:
    return any(value is out for out in made_by.outs)


def view_of(base: torch.Tensor, value: Value, shift: int = 0) -> torch.Tensor:
    """`value` as a view of its buffer's tensor; offsets count from the base's first element."""
    import torch

    dtype = torch_dtype(value.dtype)
    size = dtype.itemsize
    if base.dtype == dtype and not shift:
        if value.offset == 0 and tuple(base.shape) == value.shape and base.stride() == value.stride:
            return base
        return base.as_strided(value.shape, value.stride, base.storage_offset() + value.offset // size)
    start = base.storage_offset() * base.element_size() + shift + value.offset
    return torch.empty(0, dtype=dtype).set_(base.untyped_storage(), start // size, value.shape, value.stride)


def _scratch_tensor(program: Program) -> torch.Tensor:
    """The program's block as a tensor of bytes. The program outlives it: whoever holds it holds the program."""
    import ctypes

    import torch

    size = max((at for at in program.arena.values()), default=0) + program.arena_bytes
    memory = (ctypes.c_uint8 * max(size, 1)).from_address(program.native.block)
    return torch.frombuffer(memory, dtype=torch.uint8)


def new_output(output: Output) -> torch.Tensor:
    import torch

    value = output.value
    dtype = torch_dtypes()[value.dtype]
    if value.is_contiguous and value.offset == 0 and value.span[1] == output.buffer.size:
        return torch.empty(value.shape, dtype=dtype)
    return torch.empty(output.buffer.size // dtype.itemsize, dtype=dtype)


def _whole(output: Output) -> bool:
    """Whether its view is the whole buffer, contiguous."""
    value = output.value
    return value.is_contiguous and value.offset == 0 and value.span[1] == output.buffer.size and _plain_strides(value)


def _plain_strides(value: Value) -> bool:
    from outlast.executor.values import contiguous_strides

    return value.stride == contiguous_strides(value.shape)


def _output_key(output: Output) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """What the native side allocates: the result itself, or its elements in one row."""
    value = output.value
    code, bits = _DLPACK[value.dtype]
    if _whole(output):
        return code << 8 | bits, value.shape, value.stride
    return code << 8 | bits, (output.buffer.size * 8 // bits,), (1,)


def _form(plan: Plan) -> str:
    """How the native side returns the results itself."""
    import torch
    from torch.utils import _pytree as pytree

    probe = pytree.tree_unflatten([torch.empty(0)] * len(plan.outputs), plan.trace.spec)
    if isinstance(probe, torch.Tensor):
        return "s"
    return "t" if type(probe) is tuple else "l"


def _finisher(plan: Plan, program: Program) -> Callable[[tuple[Any, ...], tuple[Any, ...]], Any] | None:
    """What puts a call's results together, if they are more than the new tensors in a row; None if they are not."""
    import torch
    from torch.utils import _pytree as pytree

    order = [one.buffer for one in plan.outputs if isinstance(one, Value)]
    simple = (
        len(order) == len(plan.outputs) == len(program.outputs)
        and all(a is output.buffer for a, output in zip(order, program.outputs, strict=True))
        and all(_whole(output) for output in program.outputs)
        and not plan.mutated
        and len(order) > 0
    )
    if simple:
        probe = pytree.tree_unflatten([torch.empty(0)] * len(plan.outputs), plan.trace.spec)
        if isinstance(probe, torch.Tensor) or (
            type(probe) in (tuple, list) and all(isinstance(one, torch.Tensor) for one in probe)
        ):
            return None
    constants = [tensor for _, tensor in plan.trace.constants]
    index = {id(output.buffer): i for i, output in enumerate(program.outputs)}

    def finish(args: tuple[Any, ...], made: tuple[Any, ...]) -> Any:
        leaves = []
        for one in plan.outputs:
            if not isinstance(one, Value):
                leaves.append(one)
            elif one.buffer.kind == "input":
                leaves.append(view_of(args[one.buffer.index], one))
            elif one.buffer.kind == "constant":
                leaves.append(view_of(constants[one.buffer.index], one))
            else:
                leaves.append(view_of(made[index[id(one.buffer)]], one))
        _note_changes(plan, args)
        return pytree.tree_unflatten(leaves, plan.trace.spec)

    return finish


def _note_changes(plan: Plan, args: tuple[Any, ...]) -> None:
    """Tell autograd that tensors were changed in place, as an in-place operator does."""
    import torch

    for buffer in plan.mutated:
        tensor = args[buffer.index] if buffer.kind == "input" else plan.trace.constants[buffer.index][1]
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _key(meta: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    code, bits = _DLPACK.get(meta.dtype, (255, 255))
    return code << 8 | bits, meta.shape, meta.stride


def _exchange() -> int:
    """Address of PyTorch's DLPack exchange table; 0 if this version has none (each call then takes the slow path)."""
    import ctypes

    import torch

    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return 0
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(get(capsule, b"dlpack_exchange_api") or 0)


def _split(args: Sequence[Any]) -> tuple[list[Any], Any]:
    """The tensors among arguments; and, unless all are tensors, a key of the others with what puts both together."""
    import torch
    from torch.utils import _pytree as pytree

    if all(isinstance(one, torch.Tensor) for one in args):
        return list(args), None
    leaves, spec = pytree.tree_flatten(tuple(args))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    # 0.0 == -0.0 and nan != nan, but functions tell the one apart and not the other: numbers are compared as texts.
    others = tuple(
        None
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf)
        for leaf in leaves
    )

    kept = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def rebuild(given: Sequence[Any]) -> Any:
        them = iter(given)
        both = zip(others, kept, strict=True)
        return pytree.tree_unflatten([next(them) if other is None else one for other, one in both], spec)

    return tensors, ((others, str(spec)), rebuild)


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor object of the same memory, kind and attributes."""
    import torch

    twin = tensor.detach()
    if type(tensor) is torch.nn.Parameter:
        twin = torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad:
        twin.requires_grad_(True)
    twin.__dict__.update(tensor.__dict__)
    return twin


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte (exclusive) that a tensor may touch."""
    if tensor.numel() == 0:
        return 0, 0
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _draws(trace: Trace) -> bool:
    """Whether it takes random numbers."""
    import torch

    return any(torch.Tag.nondeterministic_seeded in call.op.tags for call in trace.calls)


def _unfit(tensors: Sequence[torch.Tensor]) -> str:
    """Why arguments can not be captured; "" if they can."""
    import torch

    if len(tensors) > MOST_TENSORS:
        return f"there are {len(tensors)} tensors among the arguments (the most is {MOST_TENSORS})"
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return f"an argument is a {type(tensor).__name__}"
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return "an argument is inside a transform of torch.func"
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return f"an argument is on {tensor.device} with layout {tensor.layout}"
        if tensor.dtype not in dtype_names():
            return f"an argument is of {tensor.dtype}"
        if tensor.is_neg() or tensor.is_conj():
            return "an argument is a lazy negation or conjugation"
    return ""


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} with strides {list(tensor.stride())}"


__all__ = ["DEFAULT_VARIANTS", "Replay", "Report", "TensorRef", "capture", "flat"]
