"""A thousand swaps under load: each call is wholly old or wholly new, none is lost, replaced code is unloaded."""

from __future__ import annotations

import ctypes
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from outlast.core.jit import Compiler, JitCache, Library
from outlast.executor import Executor

SWAPS = 1000

# Writes VERSION into every element, in several passes with other work between: a torn call would leave two versions.
UNIT = """
#include "outlast/dialect.h"
struct fill_args { uint64_t *out; uint64_t n; };
static uint64_t version_of_this_object = VERSION;  // in the object's own data, which goes when it is unloaded
OL_OPERATOR(fill, fill_args, a) {
    for (uint64_t i = 0; i < a->n; ++i) {
        a->out[i] = *const_cast<volatile uint64_t *>(&version_of_this_object);
        if (i % 16 == 0) for (volatile int spin = 0; spin < 20; ) spin = spin + 1;
    }
    return OL_OK;
}
OL_UNIT;
"""


def mapped(folder: Path) -> set[str]:
    """Files below `folder` that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[5] for line in lines if str(folder) in line}


def test_a_thousand_swaps_under_load_lose_and_tear_nothing(compiler: Compiler, tmp_path: Path) -> None:
    cache = JitCache(tmp_path / "jit", compiler=compiler)
    built = [cache.compile(UNIT, name="fill", defines={"VERSION": 100 + v}) for v in range(8)]
    loaded = tmp_path / "loaded"  # every swap loads a file of its own, as a fresh compilation would be
    loaded.mkdir()

    def load(turn: int) -> Library:
        path = loaded / f"fill{turn}.so"
        shutil.copyfile(built[turn % 8], path)
        library = Library(path)
        path.unlink()
        return library

    stop = threading.Event()
    calls = [0, 0, 0]
    torn: list[object] = []
    with Executor(capacity=64, workers=1) as executor:
        first = load(0)
        fill = executor.register("fill", first.symbol("fill"), library=first)

        def work(which: int) -> None:
            outs = [np.zeros(48, np.uint64) for _ in range(8)]
            args = [np.array([out.ctypes.data, 48], np.uint64) for out in outs]
            while not stop.is_set():
                for out in outs:
                    out[:] = 0
                before = executor.generation(fill)
                tickets = [executor.submit(fill, a.ctypes.data, keep=(a, outs)) for a in args]
                for ticket in tickets:
                    executor.wait(ticket)
                behind = executor.generation(fill)
                for out in outs:
                    # Generation g is version 100 + (g - 1) % 8.
                    allowed = {100 + (g - 1) % 8 for g in range(before, behind + 1)}
                    if len(set(out.tolist())) != 1 or int(out[0]) not in allowed:
                        torn.append((set(out.tolist()), before, behind))
                calls[which] += len(outs)

        threads = [threading.Thread(target=work, args=(which,)) for which in range(3)]
        for thread in threads:
            thread.start()
        most = 0
        try:
            for turn in range(1, SWAPS + 1):
                library = load(turn)
                executor.swap(fill, library.symbol("fill"), library=library, timeout=60)
                if turn % 25 == 0:
                    most = max(most, len(mapped(loaded)))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert torn == []
        assert executor.generation(fill) == SWAPS + 1
        assert 1 <= most <= 2  # the active code, and what stands ready for a rollback
        executor.wait(executor.native.tail)
        row = executor.stats().operators[0]
        assert (row.name, row.calls, row.failures, row.generation) == ("fill", sum(calls), 0, SWAPS + 1)
        assert all(calls)
    assert mapped(loaded) == set()


def test_a_first_swap_waits_for_nothing_and_names_the_ticket_that_frees_the_old_code(
    compiler: Compiler, tmp_path: Path
) -> None:
    """A swap waits for the flip before it, not for its own; whoever unloads the old code waits for that ticket."""
    cache = JitCache(tmp_path / "jit", compiler=compiler)
    library = Library(cache.compile(UNIT, name="fill", defines={"VERSION": 7}))
    with Executor() as executor:
        fill = executor.register("fill", library.symbol("fill"))
        words = (ctypes.c_uint64 * 2)(0, 0)
        waiting = executor.submit(fill, ctypes.addressof(words))  # nobody runs it yet
        flip = executor.swap(fill, library.symbol("fill"), timeout=0.0)
        assert flip == waiting
        assert not executor.native.quiescent(fill.index)
        executor.wait(waiting)
        assert executor.native.quiescent(fill.index)
    library.close()


@pytest.mark.parametrize("operators", [1, 3])
def test_a_full_table_is_refused_and_the_rest_goes_on(compiler: Compiler, tmp_path: Path, operators: int) -> None:
    from outlast.core.errors import Refused, UsageError

    cache = JitCache(tmp_path / "jit", compiler=compiler)
    library = Library(cache.compile(UNIT, name="fill", defines={"VERSION": 7}))
    with Executor(operators=operators) as executor:
        for i in range(operators):
            last = executor.register(f"fill{i}", library.symbol("fill"))
        for _ in range(3):
            with pytest.raises(Refused, match=f"full: all {operators} places"):
                executor.register("one too many", library.symbol("fill"))
        out = (ctypes.c_uint64 * 4)()
        words = (ctypes.c_uint64 * 2)(ctypes.addressof(out), 4)
        executor.wait(executor.submit(last, ctypes.addressof(words)))
        assert list(out) == [7] * 4
    for bad in (0, -1, 1 << 21):
        with pytest.raises(UsageError):
            Executor(operators=bad)
    library.close()
