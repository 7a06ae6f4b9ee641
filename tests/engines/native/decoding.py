"""A decoder with a pool and a block allocator, driven without the executor."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from outlast.engines.native import _native, weights
from outlast.engines.native.decoder import COMPUTE, Compute, Decoder, Item, StepResult, kv_geometry
from outlast.engines.native.gguf import Gguf
from outlast.engines.protocol import SamplingParams

GREEDY = SamplingParams(temperature=0)


class Task(ctypes.Structure):
    """ol_task"""

    _fields_ = (
        ("seq", ctypes.c_uint64),
        ("op", ctypes.c_uint32),
        ("generation", ctypes.c_uint32),
        ("after", ctypes.c_uint64),
        ("part", ctypes.c_uint16),
        ("parts", ctypes.c_uint16),
        ("flags", ctypes.c_uint32),
        ("arg", ctypes.c_uint64 * 4),
    )


class StepWrite(ctypes.Structure):
    """ol_step_write"""

    _fields_ = (
        ("key", ctypes.c_uint64),
        ("table", ctypes.c_uint64),
        ("generation", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("state_offset", ctypes.c_uint32),
        ("state", ctypes.c_uint64),
        ("state_length", ctypes.c_uint64),
    )


class Rig:
    """One decoder. Blocks are handed out in a shuffled order, so that no test relies on neighbouring blocks."""

    def __init__(
        self,
        path: Path,
        *,
        isa: str = "",
        compute: Compute = COMPUTE,
        blocks: int = 256,
        block_tokens: int = 16,
        seed: int = 0,
    ) -> None:
        self.gguf = Gguf(path)
        plan = weights.plan(self.gguf)
        self.weights = weights.repack(self.gguf, plan, mmap.mmap(-1, plan.size))
        self.config = plan.config
        self.geometry = kv_geometry(self.config, block_tokens, blocks)
        self.pool = mmap.mmap(-1, blocks * self.geometry.block_bytes)
        self.decoder = Decoder(
            self.weights, _native.address(self.pool), self.geometry, instructions=isa, compute=compute
        )
        self._free = [int(b) for b in np.random.default_rng(seed).permutation(blocks)]
        self.tables: dict[int, list[int]] = {}
        self.parts = 1
        self.threads = 1

    def add(
        self, tokens: Sequence[int], params: SamplingParams = GREEDY, *, prompt: int | None = None, computed: int = 0
    ) -> int:
        handle = self.decoder.add(len(self.tables) + 1, 7, tokens, prompt or len(tokens), computed, params)
        self.tables[handle] = []
        return handle

    def step(self, *items: Item) -> list[StepResult]:
        self.plan(items)
        self.decoder.run(self.threads)
        return self.decoder.commit()

    def plan(self, items: Iterable[Item]) -> None:
        items = list(items)
        for item in items:
            needed = self.decoder.computed(item.handle) + item.positions
            table = self.tables[item.handle]
            while len(table) * self.geometry.block_tokens < needed:
                table.append(self._free.pop())
            self.decoder.set_table(item.handle, table)
        self.decoder.plan(items, self.parts)

    def advance(self, handle: int, steps: int, chunk: int = 1 << 20) -> list[StepResult]:
        """Steps of one sequence alone, prefilling in chunks, until `steps` tokens were sampled; their results."""
        sampled: list[StepResult] = []
        while len(sampled) < steps:
            missing = self.decoder.length(handle) - self.decoder.computed(handle)
            result = self.step(Item(handle, min(chunk, missing)))[0]
            if result.token is not None:
                sampled.append(result)
        return sampled

    def release(self, handle: int) -> None:
        self.decoder.remove(handle)
        self._free += self.tables[handle]
        self.tables[handle] = []

    def rows(self, handle: int) -> np.ndarray:
        """KV rows of the computed positions as bytes: [position][piece][row_bytes]."""
        g, n = self.geometry, self.decoder.computed(handle)
        raw = np.frombuffer(self.pool, np.uint8).reshape(g.blocks, g.pieces, g.block_tokens, g.row_bytes)
        blocks = raw[self.tables[handle]]  # [block][piece][token][bytes]
        return blocks.transpose(0, 2, 1, 3).reshape(-1, g.pieces, g.row_bytes)[:n].copy()

    def row(self, handle: int, position: int, piece: int) -> memoryview:
        """One KV row in the pool, writable."""
        g = self.geometry
        block = self.tables[handle][position // g.block_tokens]
        start = block * g.block_bytes + piece * g.piece_stride + position % g.block_tokens * g.row_bytes
        return memoryview(self.pool)[start : start + g.row_bytes]

    def logits(self) -> list[np.ndarray]:
        return [np.frombuffer(row, np.float32) for row in self.decoder.logits()]


MakeRig = Callable[..., Rig]  #: (tensor type, shape, **options of Rig)


def random_tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, vocab, count)]
