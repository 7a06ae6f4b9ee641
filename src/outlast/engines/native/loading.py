"""From a model file to what an engine runs on: weights in shared memory, the shape of its KV pool, its manifest."""

from __future__ import annotations

import contextlib
from pathlib import Path

from outlast.checkpoint.geometry import KVGeometry
from outlast.core.errors import CorruptState
from outlast.core.log import Manifest
from outlast.core.memory import Memory
from outlast.engines.native import decoder as decoders
from outlast.engines.native import weights as weight_store
from outlast.engines.native.architecture import ModelConfig
from outlast.engines.native.gguf import Gguf

#: Tokens of a KV block. A block is sealed with a digest when it is full; the last, open one is what a takeover checks
#: by computing its last position again.
BLOCK_TOKENS = 64


def pool_geometry(config: ModelConfig, kv_tokens: int, block_tokens: int = BLOCK_TOKENS) -> KVGeometry:
    """Shape of a KV pool that holds `kv_tokens` tokens."""
    native = decoders.kv_geometry(config, block_tokens, max(1, -(-kv_tokens // block_tokens)))
    return KVGeometry(
        native.pieces, native.block_tokens, native.row_bytes, native.blocks, native.piece_stride, native.block_bytes
    )


def manifest_of(
    weights: weight_store.Weights, geometry: KVGeometry, compute: decoders.Compute = decoders.COMPUTE
) -> Manifest:
    """What must be equal for logged state to be used again."""
    return Manifest(
        engine="native",
        model=weights.digest,
        weights_layout=weight_store.LAYOUT_VERSION,
        kv_type="f32",
        kv_layout="piece-token-row",
        pieces=geometry.pieces,
        row_bytes=geometry.row_bytes,
        block_tokens=geometry.block_tokens,
        kernels=decoders.kernels(compute),
        adapter="none",
        parallel="1/1",
        tokenizer=weights.digest,
    )


def weights_bytes(path: Path) -> int:
    """Size of the memory that the repacked weights of a model need."""
    with Gguf(path) as gguf:
        return weight_store.plan(gguf).size


def open_weights(memory: Memory, path: Path) -> weight_store.Weights:
    """The weights in `memory`, repacked into it first unless another process did."""
    with contextlib.suppress(CorruptState):  # not written yet, or by a process that died in the middle
        return weight_store.Weights.open(memory.buffer)
    with Gguf(path) as gguf:
        return weight_store.repack(gguf, weight_store.plan(gguf), memory.buffer)
