"""Who decodes in the engine's benchmark: this engine, transformers, llama.cpp, all in the same way.

A side takes prompts (`open`), then makes one token for each of them per step, greedily, on a given number of threads.
A baseline whose package is missing raises ImportError when it is built.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from outlast.bench.dequantized import dequantized_model
from outlast.core.errors import OutlastError
from outlast.engines.native.decoder import COMPUTE, Compute
from outlast.engines.native.engine import NativeEngine
from outlast.engines.native.weights import Weights
from outlast.engines.protocol import EngineRequest, SamplingParams
from outlast.executor import PlanStats

Prompts = Sequence[tuple[int, ...]]
#: Compute modes: the default, that of `--fast`, and fp32.
DEFAULT: Compute = COMPUTE
FAST: Compute = "int8"
FULL: Compute = "f32"
MODES: tuple[Compute, ...] = (DEFAULT, FAST, FULL)
#: llama.cpp takes a prompt in parts of this many tokens: its own default.
_LLAMA_BATCH = 512


class Side(Protocol):
    """One of them. Not thread-safe."""

    def open(self, prompts: Prompts) -> float:
        """Take prompts up, drop what was there; seconds until each has its first token."""

    def step(self) -> float:
        """One token for each prompt; seconds it took."""

    def close(self) -> None:
        """Give everything back."""


class Native:
    """This engine through its protocol, without a log: its cost has a row of its own."""

    def __init__(
        self, weights: Weights, *, threads: int, mode: Compute, streams: int, room: int, **options: Any
    ) -> None:
        """`room`: positions of each stream, prompt included."""
        slack = 2 * 64 * streams  # the pool is handed out in blocks
        self._room = room
        self._engine = NativeEngine(
            weights, log=None, kv_tokens=streams * room + slack, threads=threads, specialise=False,
            compute=mode, **options,
        )  # fmt: skip
        self._engine.recover(1, [])
        self._keys: list[int] = []
        self._last = 0

    def open(self, prompts: Prompts) -> float:
        """See `Side.open`."""
        self.drop()
        for prompt in prompts:
            self._last += 1
            self._keys.append(self._last)
            request = EngineRequest(
                self._last, prompt, self._room - len(prompt), params=SamplingParams(temperature=0.0)
            )
            self._engine.submit(request)
        missing = set(self._keys)
        started = time.perf_counter()
        while missing:
            missing -= {emission.key for emission in self._engine.step()}
        return time.perf_counter() - started

    def step(self) -> float:
        """See `Side.step`."""
        started = time.perf_counter()
        emitted = self._engine.step()
        took = time.perf_counter() - started
        if len({emission.key for emission in emitted}) != len(self._keys):
            raise OutlastError("a decode step left a stream out", why=f"{len(emitted)} tokens for {len(self._keys)}")
        return took

    def plan_stats(self) -> PlanStats:
        """What the engine's executor counted of its plans."""
        return self._engine.executor.plan_stats()

    def drop(self) -> None:
        """Forget the prompts, so that their blocks are free."""
        for key in self._keys:
            self._engine.release(key)
        self._keys = []

    def close(self) -> None:
        """See `Side.close`."""
        self._engine.close()


class Transformers:
    """`LlamaForCausalLM` in fp32 on the dequantized weights, PyTorch eager, with KV cache; one stream."""

    def __init__(self, path: Path, threads: int, *, model: Any = None) -> None:
        """`model`: that of another side, to run it on another number of threads."""
        import torch

        self._torch = torch
        self._threads = threads
        self.model = dequantized_model(path) if model is None else model
        self._cache: Any = None
        self._token = 0

    def open(self, prompts: Prompts) -> float:
        """See `Side.open`."""
        (prompt,) = prompts
        self._cache = None
        return self._forward([list(prompt)])

    def step(self) -> float:
        """See `Side.step`."""
        return self._forward([[self._token]])

    def _forward(self, tokens: list[list[int]]) -> float:
        self._torch.set_num_threads(self._threads)
        started = time.perf_counter()
        with self._torch.inference_mode():
            result = self.model(
                self._torch.tensor(tokens), past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
            self._cache = result.past_key_values
            self._token = int(result.logits[0, -1].argmax())
        return time.perf_counter() - started

    def logits(self, tokens: Sequence[int]) -> Any:
        """Logits of every position of a text as a numpy array [positions, vocabulary]."""
        with self._torch.inference_mode():
            return self.model(self._torch.tensor([list(tokens)])).logits[0].numpy()

    def close(self) -> None:
        """See `Side.close`."""
        self._cache = None


class LlamaModel:
    """A model of llama.cpp, for several contexts of it."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if model is None:
            raise OutlastError(f"llama.cpp does not load {path.name}")
        self.native = model
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        info = llama_cpp.llama_print_system_info()
        self.features = info.decode() if info else ""  #: what it was built for, in its own words

    def close(self) -> None:
        """Give it back."""
        import llama_cpp

        llama_cpp.llama_model_free(self.native)


class LlamaCpp:
    """llama.cpp by its C interface: one `llama_decode` a step for all sequences, so that no wrapper is measured.

    Everything is left at llama.cpp's defaults (KV in fp16, flash attention where it chooses it) but threads and room.
    """

    def __init__(self, model: LlamaModel, *, threads: int, streams: int, room: int) -> None:
        import llama_cpp
        import numpy as np

        self._api, self._np = llama_cpp, np
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = streams * (-(-room // 256) * 256)
        params.n_seq_max = streams
        params.n_batch = _LLAMA_BATCH
        params.n_threads = params.n_threads_batch = threads
        context = llama_cpp.llama_init_from_model(model.native, params)
        if context is None:
            raise OutlastError("llama.cpp does not set up a context", why=f"{streams} streams of {room} positions")
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._vocabulary = model.vocabulary
        self._batch = llama_cpp.llama_batch_init(_LLAMA_BATCH, 0, 1)
        self._tokens: list[int] = []
        self._position = 0

    def open(self, prompts: Prompts) -> float:
        """See `Side.open`. All prompts must be of one length; the first is filled in and copied to the others."""
        self._api.llama_memory_clear(self._memory, True)
        prompt = prompts[0]
        started = time.perf_counter()
        for at in range(0, len(prompt), _LLAMA_BATCH):
            part = prompt[at : at + _LLAMA_BATCH]
            self._decode([(token, at + i, 0) for i, token in enumerate(part)], outputs={len(part) - 1})
        token = self._greedy(self._batch.n_tokens - 1)
        for stream in range(1, len(prompts)):
            self._api.llama_memory_seq_cp(self._memory, 0, stream, -1, -1)
        took = time.perf_counter() - started
        self._position = len(prompt)
        self._tokens = [token] * len(prompts)
        return took

    def step(self) -> float:
        """See `Side.step`."""
        started = time.perf_counter()
        rows = [(token, self._position, stream) for stream, token in enumerate(self._tokens)]
        self._decode(rows, outputs=set(range(len(rows))))
        self._tokens = [self._greedy(row) for row in range(len(rows))]
        self._position += 1
        return time.perf_counter() - started

    def _decode(self, rows: Sequence[tuple[int, int, int]], outputs: set[int]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, stream) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, stream
            batch.logits[i] = i in outputs
        status = self._api.llama_decode(self._context, batch)
        if status != 0:
            raise OutlastError("llama.cpp did not decode", why=f"llama_decode returned {status}")

    def _greedy(self, row: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(self._np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())

    def close(self) -> None:
        """See `Side.close`."""
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
