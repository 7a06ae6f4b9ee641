"""What checkpointing costs a decode step: the same sequence, on and off in turn, step by step, in this process."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from outlast.bench.report import median_interval, significant, spread
from outlast.core.errors import OutlastError
from outlast.core.log import LogOwner
from outlast.core.memory import Memory
from outlast.engines.native import models
from outlast.engines.native.engine import NativeEngine
from outlast.engines.native.loading import open_weights, weights_bytes
from outlast.engines.protocol import EngineRequest, SamplingParams

#: One measurement is four steps in this order: a cost that grows with the context cancels out.
_ORDER = (True, False, False, True)
_WARM_STEPS = 8
_SPECIALISE_SECONDS = 60.0
_LOG_BYTES = 1 << 30


def measure(model: str, *, context: int, quads: int, threads: int = 1, seed: int = 0) -> dict[str, Any]:
    """Decode `4 * quads` tokens of one greedy sequence behind a prompt of `context` random tokens.

    `overhead_pct` is the median over the quads of (on - off) / off in CPU time of this process, which other load on
    the machine disturbs less; a step waits for nothing, so on an idle machine it is the cost in tok/s.
    `overhead_interval` is its 95 % confidence interval, `overhead_pct_wall` the same by the clock on the wall.
    """
    path = models.find(model)
    steps = len(_ORDER) * quads + _WARM_STEPS
    with Memory.anonymous(weights_bytes(path), name="outlast-weights") as memory:
        weights = open_weights(memory, path)
        owner = LogOwner.in_memory(_LOG_BYTES)
        engine = NativeEngine(weights, log=owner.spec(), kv_tokens=context + steps + 64, threads=threads)
        try:
            # Not while a compiler runs beside it.
            deadline = time.monotonic() + _SPECIALISE_SECONDS
            while not (engine.handlers.specialised or engine.handlers.trouble) and time.monotonic() < deadline:
                time.sleep(0.05)
            engine.recover(owner.fence(), [])
            rng = random.Random(seed)
            vocabulary = weights.config.vocab
            prompt = tuple(rng.randrange(vocabulary) for _ in range(context))
            engine.submit(EngineRequest(1, prompt, steps + 1, params=SamplingParams(temperature=0.0)))
            return _alternate(engine, context, quads)
        finally:
            engine.close()
            owner.close()


def _alternate(engine: NativeEngine, context: int, quads: int) -> dict[str, Any]:
    while not engine.step():
        continue
    for _ in range(_WARM_STEPS):
        engine.step()
    wall: dict[bool, list[float]] = {True: [], False: []}
    costs: dict[str, list[float]] = {"cpu": [], "wall": []}
    logged = engine.stats()["log_bytes"]
    for _ in range(quads):
        cpu_quad, wall_quad = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
        for on in _ORDER:
            engine.log_steps = on
            cpu, started = time.process_time(), time.perf_counter()
            emitted = engine.step()
            took = time.perf_counter() - started
            cpu_quad[on] += time.process_time() - cpu
            wall_quad[on] += took
            wall[on].append(took)
            if len(emitted) != 1:
                raise OutlastError("a decode step gave no token", why=f"{len(emitted)} emissions; the sequence ended")
        for name, quad in (("cpu", cpu_quad), ("wall", wall_quad)):
            costs[name].append(100 * (quad[True] - quad[False]) / quad[False])
    logged = engine.stats()["log_bytes"] - logged
    return {
        "context": context,
        "overhead_pct": significant(statistics.median(costs["cpu"]), 3),
        "overhead_interval": [significant(end, 3) for end in median_interval(costs["cpu"])],
        "overhead_pct_wall": significant(statistics.median(costs["wall"]), 3),
        "overhead_interval_wall": [significant(end, 3) for end in median_interval(costs["wall"])],
        "tok_s_off": significant(1 / statistics.median(wall[False])),
        "tok_s_on": significant(1 / statistics.median(wall[True])),
        "bytes_per_token": round(logged / len(wall[True])),
        "steps": len(wall[True]) + len(wall[False]),
        "step_ms_off": spread([1000 * s for s in wall[False]]),
        "step_ms_on": spread([1000 * s for s in wall[True]]),
        "handlers_specialised": engine.handlers.specialised,
    }
