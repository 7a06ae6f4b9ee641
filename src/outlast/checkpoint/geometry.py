"""Shape of a paged KV pool, and what its handlers do, in plain Python.

The functions here are the reference that every compiled handler is compared with before it is injected.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from outlast.core.errors import UsageError

KV_ARGS = struct.Struct("<QQQIIIIIIQQ")  # ol_kv_args


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Where a token's rows lie in the pool (`ol_kv_geometry`, native/include/outlast/region.h)."""

    pieces: int  #: layers * 2 (K and V)
    block_tokens: int  #: tokens a block holds
    row_bytes: int  #: bytes of one token in one piece
    blocks: int  #: blocks in the pool
    piece_stride: int = 0  #: bytes between the pieces of a block; 0 = packed
    block_bytes: int = 0  #: bytes between blocks; 0 = packed
    #: Consecutive blocks of one piece lie side by side: [piece][block][token][row]. A sequence whose blocks are
    #: consecutive then has each piece in one run of memory, as an engine with plain tensors wants it. Whoever hands out
    #: blocks does so in whole strides: block b + piece_stride / block_bytes begins where piece 1 of block b does.
    interleaved: bool = False

    def __post_init__(self) -> None:
        if min(self.pieces, self.block_tokens, self.row_bytes, self.blocks) < 1 or self.row_bytes % 4:
            raise UsageError(f"KV geometry {self}", why="counts are at least 1 and row_bytes is a multiple of 4")
        if not self.piece_stride:
            object.__setattr__(self, "piece_stride", self.block_tokens * self.row_bytes)
        if not self.block_bytes:
            object.__setattr__(self, "block_bytes", self.pieces * self.piece_stride)
        apart = self.piece_stride >= self._run and self.block_bytes >= self.pieces * self.piece_stride
        if self.interleaved:
            apart = self.block_bytes >= self._run and self.piece_stride % self.block_bytes == 0
        if not apart:
            raise UsageError(f"KV geometry {self}", why="pieces or blocks overlap")

    @property
    def token_bytes(self) -> int:
        """Staged bytes of one token."""
        return self.pieces * self.row_bytes

    @property
    def pool_bytes(self) -> int:
        """Size of the pool."""
        if self.interleaved:  # the last block's last piece ends it
            return (self.blocks - 1) * self.block_bytes + (self.pieces - 1) * self.piece_stride + self._run
        return self.blocks * self.block_bytes

    @property
    def _run(self) -> int:
        return self.block_tokens * self.row_bytes

    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """In the order of `ol_kv_geometry`."""
        return self.pieces, self.block_tokens, self.row_bytes, self.blocks, self.piece_stride, self.block_bytes

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def row(self, table: Sequence[int], position: int, piece: int) -> int:
        """Offset in the pool of one row of the token at `position`."""
        block = table[position // self.block_tokens]
        if block >= self.blocks:
            raise UsageError(f"block table names block {block} of {self.blocks}", why=f"at position {position}")
        return block * self.block_bytes + piece * self.piece_stride + position % self.block_tokens * self.row_bytes

    def args(self, base: int, table: int, staged: int, first: int, count: int) -> bytes:
        """`ol_kv_args` for handlers; `base`, `table`, `staged` are addresses."""
        return KV_ARGS.pack(base, table, staged, first, count, *self.numbers())


def gather(geometry: KVGeometry, pool: bytes | memoryview, table: Sequence[int], first: int, count: int) -> bytes:
    """Reference of kv_delta: rows of tokens [first, first + count) as [token][piece][row_bytes]."""
    out = bytearray()
    for position in range(first, first + count):
        for piece in range(geometry.pieces):
            at = geometry.row(table, position, piece)
            out += pool[at : at + geometry.row_bytes]
    return bytes(out)


def scatter(
    geometry: KVGeometry, pool: bytearray | memoryview, table: Sequence[int], first: int, count: int, staged: bytes
) -> None:
    """Reference of kv_apply: the inverse of `gather`."""
    source = 0
    for position in range(first, first + count):
        for piece in range(geometry.pieces):
            at = geometry.row(table, position, piece)
            pool[at : at + geometry.row_bytes] = staged[source : source + geometry.row_bytes]
            source += geometry.row_bytes
