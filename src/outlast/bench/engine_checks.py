"""What the engine's benchmark checks beside its speed: accuracy against fp32, and that results have the same bits."""

from __future__ import annotations

import array
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outlast.bench.report import significant
from outlast.core.log import LogOwner
from outlast.core.memory import Memory
from outlast.engines.native import decoder as decoders
from outlast.engines.native.decoder import Compute
from outlast.engines.native.engine import NativeEngine
from outlast.engines.native.weights import Weights
from outlast.engines.protocol import Emission, EngineRequest, JournalEntry, SamplingParams
from outlast.executor import Executor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_GREEDY = SamplingParams(temperature=0.0)
_BLOCK_TOKENS = 64
_TIMEOUT = 120.0
#: Prompts of the check of bits: shorter and longer than a block and than a chunk, and one of a single token.
_LENGTHS = (1, 33, 64, 97, 130)
_TOKENS = 6


class Bench:
    """A decoder with pool and executor, stepped by hand: for logits, and for plans that are looked at."""

    def __init__(self, weights: Weights, *, threads: int, mode: Compute, positions: int) -> None:
        """`positions`: what all sequences together may occupy."""
        self.geometry = decoders.kv_geometry(weights.config, _BLOCK_TOKENS, -(-positions // _BLOCK_TOKENS))
        self._memory = Memory.anonymous(self.geometry.blocks * self.geometry.block_bytes, name="outlast-kv")
        self.executor = Executor(workers=threads - 1)
        self.decoder = decoders.Decoder(weights, self._memory.address, self.geometry, compute=mode)
        self.decoder.bind(
            {name: self.executor.register(name, address).index for name, address in decoders.operators().items()}
        )
        self.threads = threads
        self._free = list(range(self.geometry.blocks))
        self._keys = 0

    def table(self, positions: int) -> list[int]:
        """Blocks for so many positions."""
        count = -(-positions // _BLOCK_TOKENS)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def add(self, tokens: Sequence[int], table: Sequence[int], computed: int = 0) -> int:
        """A sequence; its handle."""
        self._keys += 1
        handle = self.decoder.add(self._keys, 1, tokens, len(tokens), computed, _GREEDY)
        self.decoder.set_table(handle, list(table))
        return handle

    def step(self, items: Sequence[decoders.Item]) -> tuple[list[decoders.StepResult], list[bytes]]:
        """Results, and the logits of those that sampled."""
        plan = self.decoder.plan(items, self.threads)
        self.executor.run(plan.address, plan.count, timeout=_TIMEOUT)
        logits = self.decoder.logits()
        return self.decoder.commit(), logits

    def teach(self, text: Sequence[int]) -> list[bytes]:
        """Logits behind each token of `text` but the last, one decode step for each."""
        table = self.table(len(text))
        found = []
        for at in range(len(text) - 1):
            handle = self.add(text[: at + 1], table, computed=at)
            found += self.step([decoders.Item(handle, 1)])[1]
            self.decoder.remove(handle)
        return found

    def close(self) -> None:
        """Give threads and memory back."""
        self.executor.close()
        del self.decoder
        self._memory.close()


# --- accuracy


def accuracy(
    weights: Weights, text: Sequence[int], oracle: npt.NDArray[np.float32], modes: Sequence[Compute], threads: int
) -> dict[str, Any]:
    """By mode: how the logits behind each token of `text` differ from `oracle`'s, and what that does to perplexity.

    `oracle`: logits [positions, vocabulary] of the same text by transformers in fp32 on the dequantized weights.
    """
    import numpy as np

    target = np.asarray(text[1:])
    wanted = oracle[: len(target)]
    report: dict[str, Any] = {"tokens": len(target), "logit_deviation": significant(float(wanted.std()), 3)}
    entropy = _entropy(wanted, target)
    for mode in modes:
        bench = Bench(weights, threads=threads, mode=mode, positions=len(text) + _BLOCK_TOKENS)
        found = np.stack([np.frombuffer(row, np.float32) for row in bench.teach(text)])
        bench.close()
        difference = np.abs(found - wanted)
        report[mode] = {
            "max_logit_difference": significant(float(difference.max()), 3),
            "mean_logit_difference": significant(float(difference.mean()), 3),
            "top1_equal": int((found.argmax(1) == wanted.argmax(1)).sum()),
            "perplexity_pct": significant(100 * (math.exp(_entropy(found, target) - entropy) - 1), 3),
        }
    return report


def _entropy(logits: npt.NDArray[np.float32], target: npt.NDArray[Any]) -> float:
    """Mean negative log-likelihood of `target`, computed in fp64."""
    import numpy as np

    rows = logits.astype(np.float64)
    rows -= rows.max(1, keepdims=True)
    picked = rows[np.arange(len(target)), target]
    return float((np.log(np.exp(rows).sum(1)) - picked).mean())


# --- bits


def bits_equal(weights: Weights, mode: Compute, texts: Sequence[int]) -> dict[str, bool]:
    """Whether logits and tokens are byte-equal over batch, threads, chunks and a recovery, by name of the variation."""
    prompts = [tuple(texts[i : i + length]) for i, length in enumerate(_LENGTHS)]
    base = _logits(weights, mode, prompts, threads=1, chunk=64, together=False)
    return {
        "batch": _logits(weights, mode, prompts, threads=1, chunk=64, together=True) == base,
        "threads_and_chunks": _logits(weights, mode, prompts[::-1], threads=2, chunk=7, together=True) == base,
        "chunks": _logits(weights, mode, prompts, threads=2, chunk=32, together=False) == base,
        "recovery": _recovered(weights, mode, prompts),
    }


def _logits(
    weights: Weights, mode: Compute, prompts: Sequence[tuple[int, ...]], *, threads: int, chunk: int, together: bool
) -> dict[tuple[int, ...], list[bytes]]:
    """By prompt, the logits of its first tokens. `together`: all in one batch, else one after the other."""
    room = [len(prompt) + _TOKENS for prompt in prompts]
    bench = Bench(weights, threads=threads, mode=mode, positions=sum(room) + _BLOCK_TOKENS * len(prompts))
    found: dict[tuple[int, ...], list[bytes]] = {prompt: [] for prompt in prompts}
    for group in [list(prompts)] if together else [[prompt] for prompt in prompts]:
        handles = {bench.add(p, bench.table(len(p) + _TOKENS)): p for p in group}
        while short := [h for h, p in handles.items() if len(found[p]) < _TOKENS]:
            left = {h: bench.decoder.length(h) - bench.decoder.computed(h) for h in short}
            results, logits = bench.step([decoders.Item(h, min(chunk, left[h])) for h in short])
            rows = iter(logits)
            for result in results:
                if result.token is not None:
                    found[handles[result.handle]].append(next(rows))
    bench.close()
    return found


def _recovered(weights: Weights, mode: Compute, prompts: Sequence[tuple[int, ...]]) -> bool:
    """Whether streams that another engine takes over in the middle end as those of one engine do."""
    whole = _Run(weights, mode, prompts)
    expected = whole.go(2 * _TOKENS)
    whole.close()
    first = _Run(weights, mode, prompts)
    delivered = first.go(_TOKENS)
    second = _Run(weights, mode, prompts, before=first, delivered=delivered)
    got = {key: delivered[key] + more for key, more in second.go(_TOKENS).items()}
    second.close()
    first.close()
    shared = {key: min(len(got[key]), len(expected[key])) for key in got}
    return all(got[key][:n] == expected[key][:n] and n > _TOKENS for key, n in shared.items())


class _Run:
    """An engine with a log; with `before`, one that takes over from another as if that had been killed."""

    def __init__(
        self, weights: Weights, mode: Compute, prompts: Sequence[tuple[int, ...]], *, before: _Run | None = None,
        delivered: Mapping[int, Sequence[tuple[int, bytes]]] | None = None,
    ) -> None:  # fmt: skip
        self._owner: LogOwner = before._owner if before is not None else LogOwner.in_memory(256 << 20)
        self._owned = before is None
        room = 8 * _TOKENS
        self._engine = NativeEngine(
            weights, log=self._owner.spec(), kv_tokens=(max(_LENGTHS) + room + 128) * len(prompts), specialise=False,
            compute=mode,
        )  # fmt: skip
        requests = [
            EngineRequest(key, prompt, room, params=SamplingParams(temperature=0.8 * (key % 2), seed=key))
            for key, prompt in enumerate(prompts, 1)
        ]
        journal = []
        if delivered is not None:
            journal = [JournalEntry(r, tuple(token for token, _ in delivered[r.key])) for r in requests]
        self._engine.recover(self._owner.fence(), journal)
        if before is None:
            for request in requests:
                self._engine.submit(request)
        self._keys = [request.key for request in requests]

    def go(self, tokens: int) -> dict[int, list[tuple[int, bytes]]]:
        """Until each stream has `tokens` more; tokens and the bytes of their log-probabilities, by key."""
        found: dict[int, list[tuple[int, bytes]]] = {key: [] for key in self._keys}
        while min(map(len, found.values())) < tokens:
            for emission in self._engine.step():
                found[emission.key].append(_exact(emission))
        return found

    def close(self) -> None:
        """Give everything back."""
        self._engine.close()
        if self._owned:
            self._owner.close()


def _exact(emission: Emission) -> tuple[int, bytes]:
    return emission.token, array.array("d", [emission.logprob]).tobytes()
