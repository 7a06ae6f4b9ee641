"""A Hugging Face model folder, read without torch: its shape, whether its cache can be kept, its digest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast.checkpoint.geometry import KVGeometry
from outlast.core.errors import UsageError
from outlast.engines.native.gguf import ModelFileError, UnsupportedModel

#: Tokens of a block: what is sealed with one digest in the log.
BLOCK_TOKENS = 64
#: Sequences that run at once. They take turns, so more of them would only be slower each; the rest waits.
SLOTS = 16
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

#: The names that a number has in the configurations of different families.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """What the server must know of a model before an engine has loaded it. The engine checks it against the model."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int  #: positions
    dtype: str  #: of weights and KV rows: "float32", "bfloat16" or "float16"

    @property
    def pieces(self) -> int:
        """K and V of each head of each layer."""
        return self.layers * 2 * self.kv_heads

    @property
    def row_bytes(self) -> int:
        """Of one position in one piece."""
        return self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """KV of one position."""
        return self.pieces * self.row_bytes


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; of a model of several modes, its language model's part."""
    config = _json(folder / "config.json")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def read_shape(folder: Path, dtype: str = "float32") -> Shape:
    """Shape of the model in `folder`. Raises `UnsupportedModel`, by name, for a cache that is not plain full attention.

    `dtype` "auto" is that of the checkpoint.
    """
    config = read_config(folder)
    refuse_other_caches(folder, config)
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in ITEM_BYTES:
        raise UsageError(f"dtype {dtype!r}", why=f"known are {', '.join(ITEM_BYTES)} and auto")
    heads = _number(folder, config, _HEADS)
    head_dim = config.get("head_dim") or _number(folder, config, _HIDDEN) // heads
    return Shape(
        layers=_number(folder, config, _LAYERS),
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        vocab=_number(folder, config, ("vocab_size",)),
        context=_number(folder, config, _CONTEXT),
        dtype=dtype,
    )


def refuse_other_caches(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModel` where the configuration announces layers whose state is not all past keys and values."""
    kinds = config.get("layer_types") or []
    other = sorted({str(kind) for kind in kinds if kind != "full_attention"})
    if not kinds and config.get("sliding_window") and config.get("use_sliding_window") is not False:
        other = ["sliding_attention"]
    if other:
        raise UnsupportedModel(
            f"{folder} has layers of the kind {', '.join(other)} (model_type {config.get('model_type')})",
            why="this engine keeps the cache of full attention, and of no other kind",
            do="Serve a model whose layers are all full_attention.",
        )
    if config.get("is_encoder_decoder"):
        raise UnsupportedModel(f"{folder} is an encoder-decoder", why="this engine runs causal language models")
    if config.get("auto_map"):
        raise UnsupportedModel(
            f"{folder} brings its own code (auto_map)", why="code from a model folder is never run",
            do="Use a folder whose model class is part of transformers.",
        )  # fmt: skip


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the folder, in order. Raises `ModelFileError` if there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFileError(
            f"{folder} holds no *.safetensors",
            why="pickled weights are never loaded",
            do="Save the model with safe serialization.",
        )
    return files


def digest_of(folder: Path) -> str:
    """SHA-256 over the configuration and every weights file: the identity of the model, in hex."""
    files = [folder / "config.json", *weight_files(folder)]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashing leaves the interpreter's lock
        digests = list(pool.map(_digest_of_file, files))
    whole = hashlib.sha256()
    for path, digest in zip(files, digests, strict=True):
        whole.update(f"{path.name} {digest}\n".encode())
    return whole.hexdigest()


def slot_tokens(shape: Shape, kv_tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Positions that one sequence can have: the context or, if that is less, the whole pool; in whole blocks."""
    return -(-min(shape.context, max(1, kv_tokens)) // block_tokens) * block_tokens


def pool_geometry(shape: Shape, kv_tokens: int, block_tokens: int = BLOCK_TOKENS) -> KVGeometry:
    """A pool of `SLOTS` slots; each holds one sequence, piece by piece.

    Its size is that of the address space: pages are taken as positions are written, and `Slots` sees to it that all of
    them hold no more than `kv_tokens` positions.
    """
    positions = slot_tokens(shape, kv_tokens, block_tokens)
    per_piece = positions // block_tokens
    return KVGeometry(
        pieces=shape.pieces,
        block_tokens=block_tokens,
        row_bytes=shape.row_bytes,
        # The last block that a table may name is that of the last slot's first piece.
        blocks=(SLOTS * shape.pieces - shape.pieces + 1) * per_piece,
        piece_stride=positions * shape.row_bytes,
        block_bytes=block_tokens * shape.row_bytes,
        interleaved=True,
    )


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(f"cannot read {path}", why=error.strerror or str(error)) from error
    except ValueError as error:
        raise ModelFileError(f"{path} is not JSON", why=str(error)) from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} is not a JSON object")
    return value


def _number(folder: Path, config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31:
            return value
    raise UnsupportedModel(
        f"{folder}/config.json names no {names[0]}", why=f"model_type is {config.get('model_type')}",
        do="This engine runs causal language models whose cache is plain full attention.",
    )  # fmt: skip
