"""A process that drives an engine over an inherited log until it is done or dies. Not a test.

Reads one JSON object on standard input (see `Orders`), writes one JSON line per step on standard output: the tokens
that the step committed. At the end, a line with a digest of each sequence's KV rows and the times of the recovery.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outlast.checkpoint.geometry import gather
from outlast.core import _native as core
from outlast.core.jit import JitCache, Library
from outlast.core.memory import Memory
from outlast.engines.native.engine import NativeEngine
from outlast.engines.native.loading import open_weights, weights_bytes
from outlast.engines.native.sequences import decode_request
from outlast.engines.protocol import EngineRequest, JournalEntry


@dataclass
class Orders:
    model: str  #: a GGUF file; a folder for the transformers engine
    log: dict[str, Any] | None
    writer_epoch: int
    requests: list[str]  #: encoded EngineRequest
    delivered: dict[int, list[int]]  #: by key; a key that is missing is submitted as new
    stop_at: int  #: tokens of each request after which the run ends
    kill_point: str = ""
    countdown: int = 1
    threads: int = 1
    block_tokens: int = 16
    kv_tokens: int = 4096
    specialise: bool = False
    crash_at: int = 0  #: step before which a handler that crashes is swapped in; 0 = never
    engine: str = "native"  #: or "transformers"
    churn: int = 0  #: short requests that come and go first, so that the log has dead segments to release


def computed(engine: Any, key: int) -> int:
    """Positions of a request whose rows are in the pool."""
    if isinstance(engine, NativeEngine):
        return engine.decoder.computed(engine._sequences[key].handle)
    return int(engine.computed(key))


def kv_digest(engine: Any, key: int) -> str:
    """Digest of the rows of all computed positions of a request, in logical order."""
    sequence = engine._sequences[key]
    count = computed(engine, key)
    pool = (ctypes.c_char * engine.geometry.pool_bytes).from_address(engine.pool)
    return hashlib.sha256(gather(engine.geometry, memoryview(pool).cast("B"), sequence.blocks, 0, count)).hexdigest()


def inject_crash(engine: Any) -> None:
    """Swap in a delta handler that writes to address 0, past the canary that would have caught a wrong one."""
    source = '#include "outlast/ops/kv.h"\nOL_UNIT;\nOL_OPERATOR(bad, ol_kv_args, a) { *(volatile int *)a = 0; return '
    source += "*(volatile int *)nullptr; }\n"
    library = Library(JitCache().compile(source, name="bad"))
    engine.executor.swap(engine.handlers.delta, library.symbol("bad"), library=library)


def build(orders: Orders) -> Any:
    path = Path(orders.model)
    if orders.engine == "transformers":
        from outlast.engines.hf.engine import HfEngine

        return HfEngine(
            path, log=orders.log, kv_tokens=orders.kv_tokens, block_tokens=orders.block_tokens,
            threads=orders.threads, prefill_chunk=24, digest=orders.model,
        )  # fmt: skip
    return NativeEngine(
        open_weights(Memory.anonymous(weights_bytes(path)), path),
        log=orders.log,
        kv_tokens=orders.kv_tokens,
        block_tokens=orders.block_tokens,
        threads=orders.threads,
        specialise=orders.specialise,
        prefill_chunk=24,
    )


def drive(orders: Orders) -> None:
    delivered = {int(key): tuple(tokens) for key, tokens in orders.delivered.items()}
    engine = build(orders)
    if orders.kill_point:
        core.arm_kill_point(orders.kill_point, orders.countdown)
    requests: list[EngineRequest] = [decode_request(text.encode()) for text in orders.requests]
    report = engine.recover(
        orders.writer_epoch, [JournalEntry(r, delivered[r.key]) for r in requests if r.key in delivered]
    )
    for key in range(1000, 1000 + orders.churn):
        engine.submit(EngineRequest(key, tuple(range(3, 103)), 1))
        while not any(e.finish for e in engine.step()):
            pass
        engine.release(key)
    for request in requests:
        if request.key not in delivered:
            engine.submit(request)
    steps = 0
    counts = {r.key: len(delivered.get(r.key, ())) for r in requests}
    while min(counts.values()) < orders.stop_at:
        steps += 1
        if steps == orders.crash_at:
            inject_crash(engine)
        tokens = []
        for e in engine.step():
            counts[e.key] = max(counts[e.key], e.index + 1)
            tokens.append((e.key, e.index, e.token, e.logprob, e.top))
        print(json.dumps({"tokens": tokens}), flush=True)
        assert engine.failures() == []
    kv = {str(r.key): kv_digest(engine, r.key) for r in requests}
    counts = {str(r.key): computed(engine, r.key) for r in requests}
    print(json.dumps({"kv": kv, "computed": counts, "report": asdict(report)}), flush=True)


if __name__ == "__main__":
    drive(Orders(**json.loads(sys.stdin.read())))
