"""Cache layers of transformers whose keys and values lie in the KV pool."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer


class RegionLayer(DynamicLayer):
    """One layer of one sequence: rows are written in place, and attention sees exactly those that were written.

    Unlike `StaticLayer` nothing past the length is ever read, so what an earlier owner of the pages left there, NaN
    included, can not matter, and a step costs what its context costs, not what the longest would. Unlike `DynamicLayer`
    nothing is copied when a position is added.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, beat: Callable[[], None]) -> None:
        """`keys`, `values`: [1, heads, positions, dim], views into the pool. `beat`: called with every update."""
        super().__init__()
        self._all_keys, self._all_values = keys, values
        self._beat = beat
        self.length = 0  #: positions written
        self.device, self.dtype = keys.device, keys.dtype
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Write new positions behind the last, return the views of all."""
        end = self.length + key_states.shape[-2]
        if end > self._all_keys.shape[-2] or key_states.dtype != self.dtype or value_states.dtype != self.dtype:
            raise RuntimeError(f"{key_states.dtype} rows up to position {end} do not fit a slot of {self.dtype}")
        self._all_keys[:, :, self.length : end].copy_(key_states)
        self._all_values[:, :, self.length : end].copy_(value_states)
        self.length = end
        self._beat()
        return self._all_keys[:, :, :end], self._all_values[:, :, :end]

    def get_seq_length(self) -> int:
        """Positions written."""
        return self.length

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the memory is there."""

    def reset(self) -> None:
        """Refused: the rows belong to the pool."""
        raise NotImplementedError("the rows of a region layer are not its own")

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` positions."""
        self.length -= abs(tokens_to_remove)


class SlotCache:
    """The cache of one sequence in one slot of the pool."""

    def __init__(self, slot: torch.Tensor, beat: Callable[[], None]) -> None:
        """`slot`: [layers, 2, heads, positions, dim], a view of the pool."""
        self._slot = slot
        self.layers = [RegionLayer(layer[0][None], layer[1][None], beat) for layer in slot]
        self.cache = Cache(layers=list(self.layers))

    def rewind(self, length: int) -> None:
        """The next forward writes position `length`."""
        for layer in self.layers:
            layer.length = length

    def rows(self, first: int, end: int) -> torch.Tensor:
        """A copy of the rows of positions [first, end)."""
        return self._slot[:, :, :, first:end].clone()


def heartbeat(address: int) -> Callable[[], None]:
    """Counts the word at `address` up; 0 = does nothing."""
    if not address:
        return lambda: None
    word = ctypes.c_uint64.from_address(address)

    def beat() -> None:
        word.value += 1

    return beat
