"""Slots of the KV pool: which sequence has which, and how much memory they may hold."""

from __future__ import annotations

from outlast.checkpoint.geometry import KVGeometry
from outlast.core.errors import Refused
from outlast.core.memory import Memory


class Slots:
    """Hands out whole slots. A sequence reserves the positions it may come to need, so it never has to yield.

    A slot is address space for the longest sequence; pages are real once they were written. Pages of an unused slot are
    kept, as touched pages are quick to fill, until they and the reservations exceed the budget.
    """

    def __init__(self, geometry: KVGeometry, memory: Memory, slots: int, tokens: int) -> None:
        """`tokens`: positions that all slots together may hold."""
        self._geometry = geometry
        self._memory = memory
        self._per_piece = geometry.piece_stride // geometry.block_bytes  #: blocks
        self.slot_bytes = geometry.pieces * geometry.piece_stride
        self.slot_tokens = self._per_piece * geometry.block_tokens
        self.budget = tokens
        self._free = list(range(slots - 1, -1, -1))
        self._touched = [0] * slots  #: positions whose pages may be there
        self._reserved: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Positions that are reserved now."""
        return sum(self._reserved.values())

    def check(self, tokens: int) -> None:
        """Raises `Refused` if a sequence of `tokens` positions can never fit."""
        limit = min(self.slot_tokens, self.budget)
        if tokens > limit:
            raise Refused(
                f"a request of {tokens} tokens",
                why=f"the KV pool holds {limit} of one sequence",
                do="Ask for fewer tokens or start the server with more --kv-tokens.",
            )

    def take(self, tokens: int) -> int | None:
        """A slot for a sequence of `tokens` positions, with any content; None if there is no room now."""
        if not self._free or self.used + tokens > self.budget:
            return None
        fitting = [slot for slot in self._free if self._touched[slot] <= tokens]
        if fitting:
            slot = max(fitting, key=lambda i: self._touched[i])
        else:
            slot = min(self._free, key=lambda i: self._touched[i])
            self._discard(slot)
        self._free.remove(slot)
        self._reserved[slot] = tokens
        self._trim()
        return slot

    def give(self, slot: int, written: int) -> None:
        """A slot is free again; `written`: positions whose rows were written to it."""
        del self._reserved[slot]
        self._touched[slot] = max(self._touched[slot], written)
        self._free.append(slot)

    def table(self, slot: int) -> list[int]:
        """Block table of a slot: all its blocks, in order."""
        first = slot * self._geometry.pieces * self._per_piece
        return list(range(first, first + self._per_piece))

    def offset(self, slot: int) -> int:
        """Of the slot's first byte in the pool."""
        return slot * self.slot_bytes

    def _trim(self) -> None:
        """Give pages of unused slots back, the fullest first, until all that may be touched fits the budget."""
        held = self.used + sum(self._touched[slot] for slot in self._free)  # used ones have touched no more than theirs
        for slot in sorted(self._free, key=lambda i: -self._touched[i]):
            if held <= self.budget or not self._touched[slot]:
                return
            held -= self._touched[slot]
            self._discard(slot)

    def _discard(self, slot: int) -> None:
        self._memory.discard(self.offset(slot), self.slot_bytes)
        self._touched[slot] = 0
