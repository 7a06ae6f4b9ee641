"""Rows between pool and log: what the log keeps of a sequence that had to yield, and of blocks that several share."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from outlast.checkpoint.checkpointer import StepCheckpointer
from outlast.checkpoint.geometry import KVGeometry
from outlast.checkpoint.recovery import LoggedRequest, Restorer, fold
from outlast.core.log import EMISSION
from outlast.engines.native.blocks import BlockPool
from outlast.engines.native.sequences import Sequence, encode_request

_logger = logging.getLogger(__name__)


class LoggedRows:
    """The log as the scheduler sees it. Without a log nothing is kept, and what yields is computed again."""

    def __init__(self, geometry: KVGeometry, pool: BlockPool, restorer: Restorer) -> None:
        self._geometry = geometry
        self._pool = pool
        self._restorer = restorer
        self.checkpointer: StepCheckpointer | None = None  #: from a takeover on, if there is a log
        self.log_steps = True  #: False: steps are not logged at the moment
        self.recovered: Mapping[int, LoggedRequest] = {}  #: while a takeover runs: what the log says

    def open(self, s: Sequence) -> None:
        """A sequence is about to be computed: the log must know the request."""
        if not s.logged:
            s.logged = True
            if self.checkpointer is not None:
                self.checkpointer.open_request(s.key, s.generation, encode_request(s.request))
                for index, emitted in enumerate(s.emitted):
                    self.checkpointer.queue(EMISSION, s.generation, s.key, index, emitted.encode())

    def park(self, s: Sequence, positions: int) -> int:
        """A sequence leaves the pool with `positions` computed: how many of them can be brought back later.

        Where the log has no room for rows that are not in the pool, they are given up.
        """
        kept = min(positions, s.rows_logged) if self.checkpointer is not None else 0
        if kept and self._room(len(s.blocks)) < 0:
            self.disown(s)
            return 0
        return kept

    def fetch(self, s: Sequence, first: int) -> int:
        """Bring positions from `first` on back from the log, into the blocks of `s`; the position reached."""
        logged = self.recovered.get(s.key)
        if logged is None and self.checkpointer is not None:
            logged = fold(self.checkpointer.records_of(s.key), self._geometry).get(s.key)
        positions = 0 if logged is None else min(s.parked, logged.contiguous(), s.length - 1)
        if logged is None or logged.generation != s.generation or positions <= first:
            return first
        if self._restorer.restore(logged, positions, s.table_address(), first=first):
            s.recheck = True
            return positions
        _logger.warning("request %d: %s; computing it anew", s.key, logged.trouble or "restored rows fail their digest")
        self.disown(s)
        return first

    def adopt(self, s: Sequence, first: int, end: int) -> None:
        """Positions [`first`, `end`) of `s` are in the pool, computed for somebody else: the log is to hold them too.

        Each request's part of the log stands for itself: it is a copy. Without room for one, a takeover computes them
        again.
        """
        missing = end - max(first, s.rows_logged)
        if self.checkpointer is None or not self.log_steps or missing <= 0 or s.rows_logged < first:
            return
        if self._room(0) >= missing:
            self.checkpointer.copy_rows(s.key, s.rows_logged, end)
            s.rows_logged = end

    def _room(self, more_free: int) -> int:
        """Positions that the log can take beside what may come to fill the free blocks and `more_free` others."""
        assert self.checkpointer is not None
        return self.checkpointer.room() - (self._pool.free + more_free) * self._geometry.block_tokens

    def disown(self, s: Sequence) -> None:
        """What the log holds of a sequence is not to be used any more; its tokens stay."""
        s.generation += 1
        s.rows_logged = 0
        s.logged = False
        if self.checkpointer is not None:
            self.checkpointer.forget_rows(s.key)
