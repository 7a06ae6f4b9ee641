"""Decode and prefill of the native engine against transformers in fp32 on the same, dequantized weights.

One stream, greedy, the same number of threads on both sides, in turn. `decode_vs_transformers` is the ratio of tok/s at
a context of 32 tokens. Needs the extra `bench` (torch, transformers) for the baseline; without it the native figures
stand alone and the ratios are null.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from outlast.bench.dequantized import dequantized_model
from outlast.bench.report import conditions, median, say, significant, spread
from outlast.core.errors import UsageError
from outlast.core.memory import Memory
from outlast.engines.native import models
from outlast.engines.native.engine import NativeEngine
from outlast.engines.native.gguf import Gguf
from outlast.engines.native.loading import open_weights, weights_bytes
from outlast.engines.protocol import EngineRequest, SamplingParams

CONTEXTS, TOKENS, ROUNDS = (32, 1000), 24, 3
_BASELINE = "transformers, LlamaForCausalLM in fp32 on the same weights, dequantized; PyTorch eager, with KV cache"


def configure(parser: argparse.ArgumentParser) -> None:
    """How much of it."""
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--model", default="builtin", metavar="NAME|PATH", help="model to decode (default: builtin)")
    parser.add_argument("--threads", type=int, default=cores, metavar="N", help=f"of both sides (default: {cores})")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, metavar="N", help=f"decoded per measurement (default: {TOKENS})"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, metavar="N", help=f"of both sides in turn (default: {ROUNDS})"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report."""
    if min(arguments.threads, arguments.tokens, arguments.rounds) < 1:
        raise UsageError("nothing to measure", why="--threads, --tokens and --rounds are at least 1")
    path = models.find(arguments.model)
    sides: dict[str, _Native | _Transformers] = {"native": _Native(path, arguments.threads)}
    try:
        sides["transformers"] = _Transformers(path, arguments.threads)
        missing = ""
    except ImportError as error:
        missing = f"{error}; install the extra bench"
        say(f"NO BASELINE: {missing}")
    rows: dict[str, Any] = {}
    texts: dict[str, list[list[int]]] = {name: [] for name in sides}
    for context in CONTEXTS:
        prompt = _prompt(path, context)
        decode: dict[str, list[float]] = {name: [] for name in sides}
        prefill: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(arguments.rounds):
            for name, side in sides.items():
                say(f"context {context}, round {number + 1}: {name}")
                filled, steps, tokens = side.generate(prompt, arguments.tokens)
                prefill[name].append(context / filled)
                decode[name] += [1 / step for step in steps]
                texts[name].append(tokens)
        row: dict[str, Any] = {}
        for name in sides:
            row |= {f"{name}_decode_tok_s": median(decode[name]), f"{name}_prefill_tok_s": median(prefill[name])}
        row["decode_ratio"] = _ratio(decode)
        row["prefill_ratio"] = _ratio(prefill)
        row["spread"] = {name: spread(values) for name, values in decode.items()}
        rows[str(context)] = row
    first = rows[str(CONTEXTS[0])]
    sides["native"].close()
    return {
        "decode_vs_transformers": first["decode_ratio"],
        "decode_tok_s": first["native_decode_tok_s"],
        "prefill_tok_s": rows[str(CONTEXTS[-1])]["native_prefill_tok_s"],
        "same_tokens": None if missing else texts["native"] == texts["transformers"],
        "baseline": "none: " + missing if missing else _BASELINE,
        "threads": arguments.threads,
        "by_context": rows,
        **conditions("torch", "transformers", "numpy"),
    }


def _ratio(values: dict[str, list[float]]) -> float | None:
    if "transformers" not in values:
        return None
    return significant(statistics.median(values["native"]) / statistics.median(values["transformers"]), 4)


def _prompt(path: Path, context: int) -> tuple[int, ...]:
    with Gguf(path) as gguf:
        vocabulary = len(gguf.strings("tokenizer.ggml.tokens"))
    rng = random.Random(context)
    return tuple(rng.randrange(vocabulary) for _ in range(context))


class _Native:
    """The engine without a log: this compares arithmetic, `bench checkpoint` has the log's cost."""

    def __init__(self, path: Path, threads: int) -> None:
        self._memory = Memory.anonymous(weights_bytes(path), name="outlast-weights")
        room = max(CONTEXTS) + 1024
        self._engine = NativeEngine(
            open_weights(self._memory, path), log=None, kv_tokens=room, threads=threads, specialise=False
        )
        self._engine.recover(1, [])
        self._key = 0

    def generate(self, prompt: tuple[int, ...], tokens: int) -> tuple[float, list[float], list[int]]:
        """(seconds until the first token, seconds of each later one, tokens)."""
        self._key += 1
        self._engine.submit(EngineRequest(self._key, prompt, tokens + 1, params=SamplingParams(temperature=0.0)))
        out = []
        started = time.perf_counter()
        while not (emitted := self._engine.step()):
            continue
        filled = time.perf_counter() - started
        out += [e.token for e in emitted]
        steps = []
        for _ in range(tokens):
            started = time.perf_counter()
            out += [e.token for e in self._engine.step()]
            steps.append(time.perf_counter() - started)
        self._engine.release(self._key)
        return filled, steps, out

    def close(self) -> None:
        """Give memory and threads back."""
        self._engine.close()


class _Transformers:
    """`LlamaForCausalLM` in fp32. Raises ImportError where torch, transformers or numpy is missing."""

    def __init__(self, path: Path, threads: int) -> None:
        import torch

        self._torch = torch
        torch.set_num_threads(threads)
        self._model = dequantized_model(path)

    def generate(self, prompt: tuple[int, ...], tokens: int) -> tuple[float, list[float], list[int]]:
        """As `_Native.generate`."""
        torch = self._torch
        out, steps = [], []
        with torch.inference_mode():
            started = time.perf_counter()
            result = self._model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            out.append(int(result.logits[0, -1].argmax()))
            filled = time.perf_counter() - started
            for _ in range(tokens):
                started = time.perf_counter()
                result = self._model(torch.tensor([[out[-1]]]), past_key_values=result.past_key_values, use_cache=True)
                out.append(int(result.logits[0, -1].argmax()))
                steps.append(time.perf_counter() - started)
        return filled, steps, out

    def close(self) -> None:
        """Drop the model."""
        del self._model
