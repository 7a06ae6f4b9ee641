"""Two measurements that Python would disturb: calls without the executor, and tasks under load while code is swapped.

Both loops are compiled by the JIT cache and called through ctypes, which lets go of the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from outlast.bench.report import significant
from outlast.core.jit import JitCache, Library
from outlast.executor import Executor

#: lengths of the operators that are compared with a direct call, and operators in a plan
DIRECT_LENGTHS = (1024, 4096, 16384)
DIRECT_STEPS = 96
#: seconds between two swaps under load
_SWAP_PAUSE = 0.001

_LOOPS = """
#include "outlast/dialect.h"
#include "outlast/plan.h"
#include <atomic>
#include <chrono>

static uint64_t now() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// Calls functions[i] with arguments[i], `rounds` times over; returns the first status that is not OL_OK.
extern "C" OL_EXPORT int32_t direct(const uint64_t *functions, const uint64_t *arguments, uint64_t count,
                                    uint64_t rounds) {
    ol_env env{};
    ol_task task{};
    task.parts = 1;
    for (uint64_t r = 0; r < rounds; ++r)
        for (uint64_t i = 0; i < count; ++i) {
            task.arg[0] = arguments[i];
            const int32_t status = reinterpret_cast<ol_op_fn>(functions[i])(&task, &env);
            if (status != OL_OK) return status;
        }
    return OL_OK;
}

// Runs one task after the other until `stop`, at most `most`; times[i] = nanoseconds of task i. Returns how many ran.
extern "C" OL_EXPORT uint64_t load(const ol_executor *executor, uint32_t op, uint64_t argument, uint64_t *times,
                                   uint64_t most, const std::atomic<uint32_t> *stop, uint64_t *failed) {
    using RunOne = int32_t (*)(uint64_t, const ol_task *, double, char *, uint64_t);
    const auto run_one = reinterpret_cast<RunOne>(executor->run_one);
    char text[64];
    uint64_t done = 0;
    while (done < most && !stop->load(std::memory_order_relaxed)) {
        ol_task task{};
        task.op = op;
        task.parts = 1;
        task.arg[0] = argument;
        const uint64_t from = now();
        if (run_one(executor->self, &task, 10.0, text, sizeof text) != OL_OK) ++*failed;
        times[done++] = now() - from;
    }
    return done;
}
OL_UNIT;
"""

# Adds 1 to a counter and some work of about the length of a small operator.
_COUNT = """
#include "outlast/dialect.h"
struct count_args { uint64_t *count; float *data; };
OL_OPERATOR(count, count_args, a) {
    for (int i = 0; i < 64; ++i) a->data[i] = a->data[i] * 0.5f + SIDE;
    *a->count += 1;  // tasks of one caller run one after the other
    return OL_OK;
}
OL_UNIT;
"""


class Loops:
    """The compiled loops. Raises `NotPossibleHere` without a compiler."""

    def __init__(self) -> None:
        cache = JitCache()
        self._library = Library(cache.compile(_LOOPS, name="executor_bench", native=True))
        self.sides = [
            Library(cache.compile(_COUNT, name="executor_bench_count", defines={"SIDE": side}, native=True))
            for side in (1, 2)
        ]
        word = ctypes.c_uint64
        self.direct: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int32, word, word, word, word)(
            self._library.symbol("direct")
        )
        self.load: Callable[..., int] = ctypes.CFUNCTYPE(
            word, word, ctypes.c_uint32, word, word, word, word, word
        )(self._library.symbol("load"))  # fmt: skip

    def close(self) -> None:
        """Unload them."""
        for library in (self._library, *self.sides):
            library.close()


def direct_overhead(loops: Loops, rounds: int) -> list[dict[str, Any]]:
    """Per length: a captured plan of 96 additions run by the executor, against the same functions called directly.

    Same functions, same argument structs, same memory; the executor's side contains its call from Python.
    """
    import torch

    from outlast.executor import _native, capture

    addresses = _native.operators(_native.isa())
    found = []
    with Executor() as executor:
        for length in DIRECT_LENGTHS:
            x, y = torch.rand(length), torch.rand(length)

            def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                for _ in range(DIRECT_STEPS):
                    x = x + y
                return x

            replay = capture(chain, x, y, fuse=False, executor=executor)
            replay(x, y)
            program = replay.newest
            assert program is not None
            native, out = program.native, torch.empty(length)
            for slot, tensor in enumerate((x, y, out)):
                native.bind(slot, tensor.data_ptr())
            at, arguments = 0, []
            for step in program.steps:
                at = -(-at // 16) * 16
                arguments.append(native.block + at)
                at += len(step.args)
            count = len(arguments)
            functions = (ctypes.c_uint64 * count)(*(addresses[step.kernel] for step in program.steps))
            structs = (ctypes.c_uint64 * count)(*arguments)
            where = ctypes.addressof(functions), ctypes.addressof(structs), count, 1
            pairs: list[tuple[float, float]] = []
            for turn in range(rounds + 5):
                acts = (partial(native.run, 0, count, 10.0), partial(loops.direct, *where))
                times = [0.0, 0.0]
                for which in (0, 1) if turn % 2 else (1, 0):
                    started = time.perf_counter()
                    for _ in range(10):
                        acts[which]()
                    times[which] = time.perf_counter() - started
                pairs.append((times[0], times[1]))
            del pairs[:5]
            through, straight = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
            least = tuple(min(pair[i] for pair in pairs) for i in (0, 1))
            found.append({
                "elements": length,
                "direct_ns_per_op": significant(1e9 * straight / 10 / count, 4),
                "executor_ns_per_op": significant(1e9 * through / 10 / count, 4),
                "overhead_pct": significant(100 * (through / straight - 1), 3),
                "of_minima_pct": significant(100 * (least[0] / least[1] - 1), 3),
            })  # fmt: skip
    return found


def hot_swap(loops: Loops, *, seconds: float, phases: int = 6) -> dict[str, Any]:
    """Time of a task while its code is swapped every millisecond, against no swap, in turn; and tasks that were lost.

    `lost` = tasks that the load ran less those that the operator counted itself, plus those that failed.
    """
    most = int(seconds / phases * 5e6) + 1000
    times = (ctypes.c_uint64 * most)()
    count, data = ctypes.c_uint64(), (ctypes.c_float * 64)()
    state = (ctypes.c_uint64 * 2)(ctypes.addressof(count), ctypes.addressof(data))
    failed = ctypes.c_uint64()
    samples: dict[bool, list[list[int]]] = {True: [], False: []}
    swaps = total = 0
    with Executor(workers=1) as executor:
        first, second = (side.symbol("count") for side in loops.sides)
        operator = executor.register("bench_count", first)
        turn = 0
        for phase in range(phases):
            swapping = bool(phase % 2)
            stop = ctypes.c_uint32(0)
            ran: list[int] = []
            words = (executor.api, operator.index, ctypes.addressof(state), ctypes.addressof(times), most,
                     ctypes.addressof(stop), ctypes.addressof(failed))  # fmt: skip
            with _thread(partial(_into, ran, partial(loops.load, *words)), stop):
                until = time.monotonic() + seconds / phases
                while time.monotonic() < until:
                    if swapping:
                        turn += 1
                        executor.swap(operator, second if turn % 2 else first)
                    time.sleep(_SWAP_PAUSE)
            total += ran[0]
            samples[swapping].append(sorted(times[: ran[0]]))
        swaps = turn
        counted = executor.stats().operators[0].calls
    p99 = {on: [phase[len(phase) * 99 // 100] for phase in found if phase] for on, found in samples.items()}
    return {
        "swap_lost_tasks": abs(total - count.value) + abs(total - counted) + failed.value,
        "swap_p99_ratio": significant(statistics.median(p99[True]) / statistics.median(p99[False]), 4),
        "p99_ns_swapping": significant(statistics.median(p99[True]), 4),
        "p99_ns_quiet": significant(statistics.median(p99[False]), 4),
        "swaps": swaps,
        "tasks": total,
    }


def _into(results: list[int], act: Callable[[], int]) -> None:
    results.append(act())


@contextlib.contextmanager
def _thread(act: Callable[[], None], stop: ctypes.c_uint32) -> Iterator[None]:
    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        stop.value = 1
        thread.join()
