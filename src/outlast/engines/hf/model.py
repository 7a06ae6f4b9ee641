"""A causal language model of transformers: loaded from local files, tried once, then one sequence per forward."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

# Before torch is imported: idle OpenMP threads that spin, and tokenizers' own threads, take the cores of others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer

from outlast.core.memory import Memory
from outlast.engines.hf.cache import SlotCache
from outlast.engines.hf.folder import Shape, weight_files
from outlast.engines.native.gguf import ModelFileError, UnsupportedModel

_log = logging.getLogger(__name__)


class CausalModel:
    """Model and pool of one process. One thread."""

    def __init__(self, folder: Path, shape: Shape, threads: int) -> None:
        """Load the weights and try them. Raises `UnsupportedModel`, by name, for a cache that is not plain."""
        torch.set_num_threads(threads)
        self.shape = shape
        self.dtype: torch.dtype = getattr(torch, shape.dtype)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        weight_files(folder)
        try:
            self._model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                output_loading_info=True,
                dtype=self.dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                attn_implementation="sdpa",
            )
        except (ValueError, OSError, KeyError, RuntimeError, ImportError) as error:
            raise ModelFileError(f"transformers cannot load {folder}", why=str(error).split("\n")[0]) from error
        # transformers fills what is missing with random numbers and says so in a warning.
        wrong = sorted(str(name) for kind in ("missing_keys", "mismatched_keys") for name in report.get(kind) or ())
        if wrong:
            raise ModelFileError(
                f"{folder} lacks weights of its model", why=f"{len(wrong)} are missing or misshapen: {wrong[0]} ...",
                do="Fetch the model again, all of its files.",
            )  # fmt: skip
        self._model.eval()
        self._last_only = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._try(folder)

    def _try(self, folder: Path) -> None:
        """Two tokens through the model's own kind of cache: every layer must keep keys and values of one shape."""
        cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([[0, 0]]), cache=cache, use_cache=True)
        kinds = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer})
        if kinds:
            raise UnsupportedModel(
                f"{folder} has cache layers of the kind {', '.join(kinds)}",
                why="this engine keeps the cache of full attention, and of no other kind",
            )
        expected = (1, self.shape.kv_heads, 2, self.shape.head_dim)
        for index, layer in enumerate(cache.layers):
            for name in ("keys", "values"):
                tensor = getattr(layer, name)
                found = tuple(tensor.shape) if tensor is not None else None
                if found != expected or tensor.dtype != self.dtype:
                    raise UnsupportedModel(
                        f"{folder}: {name} of layer {index} are {found} of {getattr(tensor, 'dtype', None)}",
                        why=f"this engine needs {expected} of {self.dtype} in every layer",
                    )
        if len(cache.layers) != self.shape.layers:
            raise UnsupportedModel(
                f"{folder} caches {len(cache.layers)} layers", why=f"config.json says {self.shape.layers}"
            )
        if output.logits.shape[-1] != self.shape.vocab:
            raise UnsupportedModel(
                f"{folder} gives {output.logits.shape[-1]} logits", why=f"config.json says {self.shape.vocab}"
            )

    def slot(self, pool: Memory, offset: int, positions: int, beat: Callable[[], None]) -> SlotCache:
        """The cache of a sequence in `positions` positions of the pool from `offset` on. The pool must outlive it."""
        s = self.shape
        dims = (s.layers, 2, s.kv_heads, positions, s.head_dim)
        count = s.layers * 2 * s.kv_heads * positions * s.head_dim
        return SlotCache(torch.frombuffer(pool.buffer, dtype=self.dtype, count=count, offset=offset).view(dims), beat)

    def forward(self, tokens: Sequence[int], cache: SlotCache, *, logits: bool) -> bytes:
        """The next positions of a sequence; the last one's logits as native float32, b"" if they are not wanted."""
        keep = {"logits_to_keep": 1} if self._last_only else {}
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([list(tokens)]), cache=cache.cache, use_cache=True, **keep)
            if not logits:
                return b""
            return bytes(output.logits[0, -1].to(torch.float32).contiguous().numpy().data)


def environment() -> dict[str, str | int]:
    """What decides bits beside the model and the options: for the manifest."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
