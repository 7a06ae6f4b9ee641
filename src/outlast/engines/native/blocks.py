"""Blocks of the KV pool: who uses them, which of them hold a known beginning of a text, and which are given up first.

A full block has a name: a hash over its tokens and the name of the block before it, seeded with the digest of the
manifest. As the rows of a position are a function of the tokens up to it and of what the manifest names, and not of
batch, chunk or thread, two blocks of one name hold the same bytes; the second sequence may as well use the first one's.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from outlast.checkpoint.geometry import KVGeometry
from outlast.core.errors import Refused

#: Bytes of a name. Two prompts that collide would be answered from each other's rows; 2^64 blocks of one manifest are
#: needed before that is likely.
NAME_BYTES = 16


def name_of(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name of the block that holds `tokens` behind the block named `parent` (for the first: `BlockPool.root`)."""
    return hashlib.blake2b(array("I", tokens).tobytes(), key=parent, digest_size=NAME_BYTES).digest()


class BlockPool:
    """Users of each block. Those without any are free; if they have a name they are kept until room is wanted."""

    def __init__(self, geometry: KVGeometry, manifest: bytes, *, sharing: bool = True) -> None:
        """`manifest`: digest of everything that decides the rows of a text; `sharing`: False gives no block a name."""
        self._geometry = geometry
        self._sharing = sharing
        self.root = hashlib.blake2b(manifest, digest_size=NAME_BYTES).digest()
        self._users = [0] * geometry.blocks
        self._names: list[bytes | None] = [None] * geometry.blocks
        self._named: dict[bytes, int] = {}
        self._empty = list(range(geometry.blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  #: named and unused, longest unused first

    @property
    def free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._empty) + len(self._idle)

    @property
    def kept(self) -> int:
        """Of the free ones, those whose rows can still be shared."""
        return len(self._idle)

    def check(self, tokens: int) -> None:
        """Raises `Refused` if `tokens` positions can never fit."""
        if self._geometry.blocks_for(tokens) > self._geometry.blocks:
            raise Refused(
                f"a request of {tokens} tokens",
                why=f"the KV pool holds {self._geometry.blocks * self._geometry.block_tokens}",
                do="Ask for fewer tokens or start the server with a larger pool.",
            )

    def take(self, count: int, *, spare: int = 0) -> list[int] | None:
        """`count` blocks for one user, with any content; None if there are not enough and `spare` beside them."""
        if count + spare > self.free:
            return None
        out = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._forget_name(block)
            self._users[block] = 1
            out.append(block)
        return out

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Blocks of the longest beginning of `names` that is there. The caller becomes a user of each."""
        out = []
        for name in names:
            block = self._named.get(name)
            if block is None:
                break
            if self._users[block] == 0:
                del self._idle[block]
            self._users[block] += 1
            out.append(block)
        return out

    def publish(self, block: int, name: bytes) -> None:
        """The block is full, its rows are committed and nobody will write to it again: others may use it."""
        if self._sharing and name not in self._named and self._names[block] is None:
            self._named[name] = block
            self._names[block] = name

    def give(self, blocks: list[int], *, doubtful: bool = False) -> None:
        """A user of `blocks` leaves; the list is emptied. `doubtful`: from here on nobody else is to find them."""
        for block in reversed(blocks):  # so that the end of a text is given up before its beginning
            if doubtful:
                self._forget_name(block)
            self._users[block] -= 1
            if self._users[block] == 0:
                if self._names[block] is None:
                    self._empty.append(block)
                else:
                    self._idle[block] = None
        blocks.clear()

    def _forget_name(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self._named[name]
            self._names[block] = None
