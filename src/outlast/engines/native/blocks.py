"""Blocks of the KV pool: who uses them, which of them hold a known beginning of a text, and which are given up first.

A full block has a name: a hash over its tokens and the name of the block before it, seeded with the digest of the
manifest. As the rows of a position are a function of the tokens up to it and of what the manifest names, and not of
batch, chunk or thread, two blocks of one name hold the same bytes; the second sequence may as well use the first one's.

Where two texts part in the middle of a block, or one ends there, the rows up to that place are as good: they are copied
into a block of the second sequence's own. For that the pool knows the tokens of the blocks that stand behind a name,
full or not. Nobody writes to rows that were committed, so a block may be copied from while its owner fills the rest.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from outlast.checkpoint.geometry import KVGeometry
from outlast.core import _native as core
from outlast.core.errors import Refused

#: Bytes of a name. Two prompts that collide would be answered from each other's rows; 2^64 blocks of one manifest are
#: needed before that is likely.
NAME_BYTES = 16
#: Fewer rows than this are not worth a copy: one costs as much as a piece of each layer, and an epoch in the log.
LEAST_COPIED = 4
#: Blocks behind one name that begin with the same token, newest first, of which the best is looked for.
_LOOKED_AT = 64


def name_of(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name of the block that holds `tokens` behind the block named `parent` (for the first: `BlockPool.root`)."""
    return hashlib.blake2b(array("I", tokens).tobytes(), key=parent, digest_size=NAME_BYTES).digest()


def equal_beginning(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common before they part."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


class BlockPool:
    """Users of each block. Those without any are free; if they have a name they are kept until room is wanted."""

    def __init__(self, geometry: KVGeometry, manifest: bytes, *, sharing: bool = True, address: int = 0) -> None:
        """`manifest`: digest of everything that decides the rows of a text; `sharing`: False keeps nothing to share;
        `address`: of the blocks' memory.
        """
        self._address = address
        self._geometry = geometry
        self.sharing = sharing
        self.root = hashlib.blake2b(manifest, digest_size=NAME_BYTES).digest()
        self._users = [0] * geometry.blocks
        self._names: list[bytes | None] = [None] * geometry.blocks
        self._named: dict[bytes, int] = {}
        self._empty = list(range(geometry.blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  #: known and unused, longest unused first
        self._texts: dict[int, tuple[bytes, tuple[int, ...]]] = {}  #: block -> (name before it, tokens of its rows)
        #: (name, first token behind it) -> blocks, oldest first
        self._behind: dict[tuple[bytes, int], dict[int, None]] = {}

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
                self._forget(block)
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
            self.use(block)
            out.append(block)
        return out

    def find_part(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """The block behind the block named `parent` with most of the beginning of `tokens`: (block, rows), or (-1, 0).

        The caller does not become a user of it.
        """
        best, most = -1, LEAST_COPIED - 1
        known = self._behind.get((parent, tokens[0]), {}) if tokens else {}
        for block in itertools.islice(reversed(known), _LOOKED_AT):
            rows = equal_beginning(self._texts[block][1], tokens)
            if rows > most:
                best, most = block, rows
        return (best, most) if best >= 0 else (-1, 0)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` positions of a block into another."""
        g = self._geometry
        to, origin = (self._address + block * g.block_bytes for block in (target, source))
        for piece in range(g.pieces):
            at = piece * g.piece_stride
            core.memcpy(to + at, origin + at, rows * g.row_bytes)

    def use(self, block: int) -> None:
        """Become a user of a block that is known."""
        if self._users[block] == 0:
            del self._idle[block]
        self._users[block] += 1

    def publish(self, block: int, name: bytes, parent: bytes, tokens: Sequence[int]) -> None:
        """The block is full, its rows are committed and nobody will write to it again: others may use it.

        `parent`: name of the block before it; `tokens`: those of its rows.
        """
        if self.sharing and name not in self._named and self._names[block] is None:
            self._named[name] = block
            self._names[block] = name
            self._know(block, parent, tokens)

    def keep_part(self, block: int, parent: bytes, tokens: Sequence[int]) -> None:
        """Its last user leaves a block that is not full. The rows of `tokens` are committed: they may be copied."""
        if self.sharing and self._users[block] == 1 and block not in self._texts and len(tokens) >= LEAST_COPIED:
            self._know(block, parent, tokens)

    def give(self, blocks: list[int], *, doubtful: bool = False) -> None:
        """A user of `blocks` leaves; the list is emptied. `doubtful`: from here on nobody else is to find them."""
        for block in reversed(blocks):  # so that the end of a text is given up before its beginning
            if doubtful:
                self._forget(block)
            self._users[block] -= 1
            if self._users[block] == 0:
                if block not in self._texts:
                    self._empty.append(block)
                else:
                    self._idle[block] = None
        blocks.clear()

    def _know(self, block: int, parent: bytes, tokens: Sequence[int]) -> None:
        self._texts[block] = parent, tuple(tokens)
        self._behind.setdefault((parent, tokens[0]), {})[block] = None

    def _forget(self, block: int) -> None:
        """What the block holds is not to be found any more."""
        text = self._texts.pop(block, None)
        if text is not None:
            key = text[0], text[1][0]
            del self._behind[key][block]
            if not self._behind[key]:
                del self._behind[key]
        name = self._names[block]
        if name is not None:
            del self._named[name]
            self._names[block] = None
