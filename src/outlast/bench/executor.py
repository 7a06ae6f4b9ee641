"""Small tensor operations on the executor, beside eager PyTorch, torch.compile (inductor) and numpy in the same rounds.

Every figure is a ratio of medians, baseline by outlast: above 1, outlast is quicker. Eager and inductor run under
no_grad and under inference_mode, with all of PyTorch's threads and with one; the fastest of the four is the baseline.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from outlast.bench import executor_workloads as workloads
from outlast.bench.executor_rounds import Arm, Race, busy, geometric, microseconds, race
from outlast.bench.report import conditions, say, significant
from outlast.core.errors import NotPossibleHere, OutlastError

if TYPE_CHECKING:
    import torch

PARTS = ("lists", "mlp", "attention", "dynamic", "direct", "swap", "large", "waiting", "loaded")
BATCHES = (1, 2, 4, 8)
CONTEXTS = (1, 4, 16, 32, 64, 128, 256)
HEADS = (1, 8)
DYNAMIC_LENGTHS = 200
#: arm of the dynamic lengths -> mode; under inference_mode inductor is not quicker, and each arm compiles anew
_INDUCTOR_DYNAMIC = {"inductor": "no_grad", "inductor, 1 thread": "no_grad, 1 thread"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Which parts, how long."""
    parser.add_argument("--quick", action="store_true", help="few rounds and sizes: to see that it works")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of each race (60; 5 with --quick)")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--no-inductor", action="store_true", help="leave torch.compile out (it compiles for minutes)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report. Raises `NotPossibleHere` without PyTorch, `OutlastError` if two arms give different results."""
    try:
        import torch
    except ImportError as error:
        raise NotPossibleHere(
            "there is nothing to compare with", why="PyTorch is not installed", do="pip install 'outlast[bench]'."
        ) from error
    torch.manual_seed(0)
    bench = Bench(arguments.rounds or (5 if arguments.quick else 60), arguments.quick, not arguments.no_inductor)
    report: dict[str, Any] = {}
    for part in arguments.only or PARTS:
        say(f"{part} ...")
        report |= getattr(bench, part)()
    rows: list[dict[str, Any]] = bench.rows
    report |= {
        "ok": not report.get("swap_lost_tasks"),
        "loses": [f"{row['workload']}: {row['ratio']}x of {row['baseline']}" for row in rows if row["ratio"] < 1],
        "not_reached": [f"{row['workload']} against {row['baseline']}: {row['ratio']}x, not {row['must']}x"
                        for row in rows if row["reached"] is False],
        "rows": rows,
        "rounds": bench.rounds,
        "torch_threads": torch.get_num_threads(),
        "trouble": bench.trouble,
        **conditions("torch", "numpy"),
    }  # fmt: skip
    return report


class Bench:
    """The parts; each returns its keys of the report and adds lines to `rows`."""

    def __init__(self, rounds: int, quick: bool, inductor: bool) -> None:
        import torch

        self.rounds = rounds
        self.quick = quick
        self.rows: list[dict[str, Any]] = []
        self.trouble: list[str] = []  #: what could not be measured, and why
        self._inductor = inductor and self._compiler()
        # With a thread per core, small operators of PyTorch wait for each other's threads; with one they do not, and
        # other work on the machine does not hold them up either. Whatever is quickest is the baseline.
        self._modes: dict[str, Callable[[], Any]] = {
            "no_grad": torch.no_grad,
            "inference_mode": torch.inference_mode,
            "no_grad, 1 thread": partial(_one_thread, torch.no_grad),
            "inference_mode, 1 thread": partial(_one_thread, torch.inference_mode),
        }

    def _compiler(self) -> bool:
        """Whether there is a C++ compiler, which inductor and fused plans need."""
        from outlast.core.compiler import Compiler

        try:
            Compiler.find()
        except NotPossibleHere as error:
            self.trouble.append(f"no inductor, no fusion: {error}")
            say(f"NO INDUCTOR, NO FUSION: {error}")
            return False
        return True

    # --- captured lists

    def lists(self) -> dict[str, Any]:
        """96 operators on 64 floats: the element-wise list, and the one with reductions."""
        import torch

        x, a, b = torch.randn(64), torch.rand(64), torch.randn(64)
        found = self._list("96 element-wise ops", workloads.elementwise, (x, a, b), numpy=True)
        mixed = self._list("96 ops with reductions", workloads.reducing,
                           (torch.randn(8, 8), torch.rand(8), torch.randn(8)), numpy=False)  # fmt: skip
        race_, fused = found.pop("race"), found["fused"]
        del mixed["race"]
        best = "outlast" if fused else "outlast unfused"
        report: dict[str, Any] = {}
        for key, baseline, must in (("eager", "eager", 60), ("inductor", "inductor", 7), ("numpy", "numpy out=", 15)):
            for suffix, ours in (("", best), ("_unfused", "outlast unfused")):
                known = baseline in (*race_.groups.values(),)
                report[f"replay96_vs_{key}{suffix}"] = race_.ratio(baseline, ours) if known else None
                if known and (suffix == "" or fused):
                    self.rows.append(race_.row("96 element-wise ops" + suffix.replace("_", " "), baseline, ours, must))
        report["ns_per_op"] = significant(1e9 * race_.median("outlast unfused") / workloads.OPERATORS, 4)
        report["ns_per_op_fused"] = significant(1e9 * race_.median(best) / workloads.OPERATORS, 4) if fused else None
        report |= {"list_arms": found.pop("arms"), "list_with_reductions_arms": mixed.pop("arms")}
        report |= {"list": found, "list_with_reductions": mixed}
        report["capture_ms"] = found["capture_ms"]
        report["inductor_compile_s"] = found["inductor_compile_s"]
        return report

    def _list(self, name: str, function: Callable[..., Any], args: Any, *, numpy: bool) -> dict[str, Any]:
        import torch

        from outlast.executor import capture
        from outlast.executor.compile_backend import outlast as backend

        expected = function(*args)
        started = time.perf_counter()
        unfused = capture(function, *args, fuse=False)
        capture_ms = {"unfused": _milliseconds(started)}
        started = time.perf_counter()
        fused = capture(function, *args)
        capture_ms["first fused (may compile)"] = _milliseconds(started)
        started = time.perf_counter()
        fused = capture(function, *args)
        capture_ms["fused"] = _milliseconds(started)
        arms, compile_s = self._baselines(name, function, args)
        arms += [Arm("outlast", fused, args, torch.no_grad), Arm("outlast unfused", unfused, args, torch.no_grad)]
        compiled = torch.compile(_own(function), backend=backend)
        arms.append(Arm("torch.compile(backend='outlast')", compiled, args, torch.no_grad))
        if numpy:
            call = workloads.elementwise_numpy(*(one.numpy().copy() for one in args))
            _agree("numpy", torch.from_numpy(call()), expected)
            arms.append(Arm("numpy out=", call))
        self._check(arms, expected)
        found = race(arms, rounds=self.rounds)
        if not numpy:
            for baseline, must in (("eager", None), ("inductor", None)):
                if baseline in found.groups.values():
                    self.rows.append(found.row(name, baseline, "outlast", must))
        return {
            "race": found, "arms": found.table(), "capture_ms": capture_ms, "inductor_compile_s": compile_s,
            "fused": fused.report().fused, "steps": fused.report().steps, "steps_unfused": unfused.report().steps,
        }  # fmt: skip

    # --- small models

    def mlp(self) -> dict[str, Any]:
        """Three layers of width 64, batch 1 to 8."""
        import torch

        from outlast.executor import capture

        model = workloads.mlp()
        eager, inductor, batches = [], [], []
        arms_of: dict[str, Any] = {}
        for batch in BATCHES[:1] if self.quick else BATCHES:
            args = (torch.randn(batch, workloads.WIDTH),)
            with torch.no_grad():
                expected, replay = model(*args), capture(model, *args)
                unfused = capture(model, *args, fuse=False)
            arms, _ = self._baselines(f"MLP, batch {batch}", lambda x: model(x), args)
            arms.append(Arm("outlast", replay, args, torch.no_grad))
            arms.append(Arm("outlast unfused", unfused, args, torch.no_grad))
            self._check(arms, expected)
            found = race(arms, rounds=self.rounds)
            arms_of |= {f"batch {batch}, {name}": row for name, row in found.table().items()}
            batches.append(batch)
            eager.append(self._row(found, f"MLP 3x64, batch {batch}", "eager", 10))
            inductor.append(self._row(found, f"MLP 3x64, batch {batch}", "inductor", 2))
        return {
            "mlp_vs_eager": _mean(eager), "mlp_vs_inductor": _mean(inductor),
            "mlp_vs_eager_by_batch": dict(zip(batches, eager, strict=True)),
            "mlp_vs_inductor_by_batch": dict(zip(batches, inductor, strict=True)), "mlp_arms": arms_of,
        }  # fmt: skip

    def attention(self) -> dict[str, Any]:
        """One decode step's attention; the headline is the worst of all sizes."""
        import torch

        from outlast.executor import capture

        ratios: dict[str, Any] = {}
        for heads in HEADS:
            for context in CONTEXTS[-1:] if self.quick else CONTEXTS:
                q = torch.randn(1, heads, 1, workloads.WIDTH)
                k, v = (torch.randn(1, heads, context, workloads.WIDTH) for _ in range(2))
                arms = self._eager(workloads.attention, (q, k, v))
                arms.append(Arm("outlast", capture(workloads.attention, q, k, v), (q, k, v), torch.no_grad))
                self._check(arms, workloads.attention(q, k, v))
                found = race(arms, rounds=self.rounds)
                name = f"attention, {heads} x 64, context {context}"
                ratios[f"{heads}x{context}"] = self._row(found, name, "eager", 3)
        return {
            "attention_vs_eager": min(ratios.values()),
            "attention_vs_eager_median": significant(statistics.median(ratios.values()), 4),
            "attention_by_heads_x_context": ratios,
        }

    def dynamic(self) -> dict[str, Any]:
        """200 lengths in random order: the first pass, in which each length is new, and steady state."""
        import random

        import torch

        from outlast.executor import capture, default_executor

        rng = random.Random(0)
        chosen = rng.sample(range(2, 402), 20 if self.quick else DYNAMIC_LENGTHS)
        scale, shift = torch.rand(16), torch.rand(16)
        inputs = [torch.randn(length, 16) for length in chosen]
        capture(workloads.lengths, torch.randn(401, 16), scale, shift)  # the operators that fusion generates are there
        before = len(default_executor().operators)
        ours = capture(workloads.lengths, inputs[0], scale, shift)
        calls: dict[str, Callable[..., Any]] = {"outlast": ours, "eager": workloads.lengths}
        report: dict[str, Any] = {"dynamic_lengths": len(chosen)}
        if self._inductor:
            say("inductor compiles, dynamic shapes")
            example = inputs[0].clone()
            torch._dynamo.mark_dynamic(example, 0)
            torch._dynamo.utils.counters.clear()
            for name, mode in _INDUCTOR_DYNAMIC.items():
                calls[name] = torch.compile(_own(workloads.lengths), dynamic=True)
                started = time.perf_counter()
                with self._modes[mode]():
                    calls[name](example, scale, shift)
                report.setdefault("dynamic_inductor_compile_s", significant(time.perf_counter() - started, 3))
        first: dict[str, float] = {}
        for name, call in calls.items():
            with self._modes[_INDUCTOR_DYNAMIC.get(name, "no_grad")]():
                started = time.perf_counter()
                results = [call(x, scale, shift) for x in inputs]
                first[name] = (time.perf_counter() - started) / len(inputs)
            for x, result in zip(inputs, results, strict=True):
                _agree(name, result, workloads.lengths(x, scale, shift))
        recompiled = None
        if self._inductor:
            recompiled = int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) - len(_INDUCTOR_DYNAMIC)

        def sweep(call: Callable[..., Any]) -> Callable[[], None]:
            def all_lengths() -> None:
                for x in inputs:
                    call(x, scale, shift)

            return all_lengths

        arms = [
            Arm(f"{name} {mode}" if name == "eager" else name, sweep(call), (), self._modes[mode], name.split(",")[0])
            for name, call in calls.items()
            for mode in (self._modes if name == "eager" else (_INDUCTOR_DYNAMIC.get(name, "no_grad"),))
        ]
        found = race(arms, rounds=self.rounds)
        report["dynamic_vs_eager"] = self._row(found, "200 lengths, steady (all)", "eager", None)
        report["dynamic_vs_inductor"] = self._row(found, "200 lengths, steady (all)", "inductor", 3)
        return report | {
            "dynamic_first_pass_us_per_call": {name: microseconds(seconds) for name, seconds in first.items()},
            "dynamic_steady_us_per_call": {arm: microseconds(found.median(arm) / len(inputs)) for arm in found.seconds},
            "dynamic_recompilations": {
                "outlast": len(default_executor().operators) - before, "inductor": recompiled,
            },
            "dynamic_plans": ours.captures,
        }  # fmt: skip

    # --- the executor itself

    def direct(self) -> dict[str, Any]:
        """Operators of 1,024 elements and more, through the executor and called directly."""
        found = self._loops(lambda loops: _native().direct_overhead(loops, 20 if self.quick else 300))
        worst = max((row["overhead_pct"] for row in found), default=None) if found else None
        return {"direct_overhead_pct": worst, "direct_must_be_below_pct": 5, "direct": found}

    def swap(self) -> dict[str, Any]:
        """Hot swap under load."""
        found = self._loops(lambda loops: _native().hot_swap(loops, seconds=0.6 if self.quick else 6.0))
        return found or {"swap_lost_tasks": None, "swap_p99_ratio": None}

    def _loops(self, measure: Callable[[Any], Any]) -> Any:
        try:
            loops = _native().Loops()
        except NotPossibleHere as error:
            self.trouble.append(str(error))
            return None
        try:
            return measure(loops)
        finally:
            loops.close()

    def waiting(self) -> dict[str, Any]:
        """The unfused list on executors with and without workers; a task handed to a worker, and run by its caller."""
        import torch

        from outlast.executor import Executor, capture, default_executor

        x, a, b = torch.randn(64), torch.rand(64), torch.randn(64)
        arms = []
        with Executor(workers=0) as alone, Executor(workers=1) as handed:
            for name, executor in (("workers=0", alone), ("default", default_executor())):
                replay = capture(workloads.elementwise, x, a, b, fuse=False, executor=executor)
                arms.append(Arm(f"96 ops, {name}", replay, (x, a, b), torch.no_grad))
            task = handed.native.sequence, *_empty_sequence(handed)
            for assist in (True, False):

                def one(assist: bool = assist) -> None:
                    handed.native.wait(handed.native.submit(task[0], task[1], 0, 0, 0, 0, 0, 1, 10.0), 10.0, assist)

                arms.append(Arm(f"one task, {'caller runs it' if assist else 'a worker runs it'}", one))
            found = race(arms, rounds=self.rounds)
            del arms, replay
        return {"waiting": found.table()}

    # --- other sizes, other circumstances

    def large(self) -> dict[str, Any]:
        """1 M elements, eager with all its threads; and a matrix product, where a tuned library is ahead."""
        import torch

        from outlast.executor import capture

        ratios = {}
        for kind in workloads.LARGE[:2] if self.quick else workloads.LARGE:
            function, shapes = workloads.large(kind)
            args = tuple(torch.rand(shape) for shape in shapes)
            ratios[kind] = self._large(f"1 M elements, {kind}", function, args, capture, 0.95)
        args = (torch.rand(512, 512), torch.rand(512, 512))
        product = self._large("matmul 512 x 512", workloads.matmul, args, capture, None)
        return {"large_vs_eager": min(ratios.values()), "large_by_kind": ratios, "matmul512_vs_eager": product}

    def _large(self, name: str, function: Any, args: tuple[Any, ...], capture: Any, must: float | None) -> float:
        import torch

        arms = self._eager(function, args)
        arms.append(Arm("outlast", capture(function, *args), args, torch.no_grad))
        self._check(arms, function(*args))
        found = race(arms, rounds=min(self.rounds, 30), round_seconds=0.005)
        return self._row(found, name, "eager", must) or 0.0

    def loaded(self) -> dict[str, Any]:
        """The element-wise list and the MLP while other processes want every core."""
        import torch

        from outlast.executor import capture

        cores = len(os.sched_getaffinity(0))
        x, a, b = torch.randn(64), torch.rand(64), torch.randn(64)
        model, row = workloads.mlp(), torch.randn(1, workloads.WIDTH)
        report: dict[str, Any] = {"loaded_processes": cores}
        programs: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
            ("96 element-wise ops", workloads.elementwise, (x, a, b)),
            ("MLP 3x64, batch 1", lambda x: model(x), (row,)),
        ]
        for name, function, args in programs:
            arms, _ = self._baselines(name, function, args)
            with torch.no_grad():
                replay = capture(function, *args)
            arms.append(Arm("outlast", replay, args, torch.no_grad))
            with busy(cores):
                found = race(arms, rounds=self.rounds)
            report[f"loaded: {name}"] = {
                baseline: self._row(found, f"{name}, cores busy", baseline, None) for baseline in ("eager", "inductor")
            }
        return report

    # --- arms

    def _eager(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Arm]:
        return [Arm(f"eager {name}", function, args, mode, "eager") for name, mode in self._modes.items()]

    def _baselines(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[list[Arm], float | None]:
        """Arms of eager and inductor; and how long inductor compiled."""
        import torch

        arms = self._eager(function, args)
        if not self._inductor:
            return arms, None
        say(f"inductor compiles: {name}")
        started = time.perf_counter()
        for mode_name, mode in self._modes.items():
            compiled = torch.compile(_own(function), dynamic=False)
            with mode():
                compiled(*args)
            arms.append(Arm(f"inductor {mode_name}", compiled, args, mode, "inductor"))
        return arms, significant(time.perf_counter() - started, 3)

    def _check(self, arms: Sequence[Arm], expected: torch.Tensor) -> None:
        """Every arm computes what eager does."""
        import torch

        for arm in arms:
            with arm.mode():
                result = arm.call(*arm.args)
            _agree(arm.name, result if isinstance(result, torch.Tensor) else torch.from_numpy(result), expected)

    def _row(self, found: Race, workload: str, baseline: str, must: float | None) -> float | None:
        if baseline not in found.groups.values():
            return None
        row = found.row(workload, baseline, "outlast", must)
        self.rows.append(row)
        return float(row["ratio"])


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own: Dynamo keeps graphs by code object, and looks through all."""
    if not isinstance(function, types.FunctionType):
        return function
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


@contextlib.contextmanager
def _one_thread(mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """PyTorch computes on the calling thread alone."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mode():
            yield
    finally:
        torch.set_num_threads(before)


def _agree(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    import torch

    try:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    except AssertionError as error:
        raise OutlastError(f"{name} computes something else than eager", why=str(error)) from error


def _empty_sequence(executor: Any) -> tuple[int, Any]:
    """Address of a sequence without steps, a task that does nothing; and what keeps it alive."""
    import ctypes

    from outlast.core import layout

    def offset(struct: str, member: str) -> int:
        return next(one.offset for one in layout.structs()[struct].members if one.name == member)

    slots = ctypes.c_uint64.from_address(executor.api + offset("ol_executor", "slots")).value
    words = (ctypes.c_uint64 * (layout.sizeof("ol_sequence") // 8))()
    words[offset("ol_sequence", "slots") // 8] = slots
    return ctypes.addressof(words), words


def _native() -> Any:
    from outlast.bench import executor_native

    return executor_native


def _milliseconds(started: float) -> float:
    return significant(1000 * (time.perf_counter() - started), 3)


def _mean(ratios: Sequence[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return geometric(known) if known else None
