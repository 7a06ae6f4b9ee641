"""Who computes what in the next step, and who holds which blocks of the KV pool.

Requests are admitted in the order they came in, take blocks as they grow, and share those whose content another request
has computed already. When the pool is exhausted the youngest of the running ones yields: its blocks are given back, it
waits at the front of the queue, and its rows come back from the log once there is room. The oldest never yields, and it
fits if it is alone, so each step brings the whole further.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from outlast.engines.native.blocks import LEAST_COPIED, BlockPool, equal_beginning
from outlast.engines.native.decoder import Decoder
from outlast.engines.native.drafts import Drafts
from outlast.engines.native.rows import LoggedRows
from outlast.engines.native.sequences import Sequence


@dataclass(slots=True)
class Share:
    """One sequence's part of a step."""

    sequence: Sequence
    positions: int
    drafts: tuple[int, ...] = ()


class Scheduler:
    """Queue, running sequences and pool of one engine. `chunk`: prompt positions of a step, over all prompts."""

    def __init__(
        self, decoder: Decoder, pool: BlockPool, rows: LoggedRows, *, block_tokens: int, chunk: int, speculate: int = 0
    ) -> None:
        """`speculate`: most tokens that are guessed behind the last one of a sequence that runs alone."""
        self._decoder = decoder
        self.pool = pool
        self._rows = rows
        self._block_tokens = block_tokens
        self._chunk = chunk
        self._speculate = speculate
        self._next_order = 0
        self.waiting: list[Sequence] = []  #: by order of arrival
        self.running: list[Sequence] = []  #: likewise
        self.preemptions = 0
        self.shared_positions = 0  #: that did not have to be computed
        self.restored_positions = 0  #: that came back from the log

    # --- joining and leaving

    def enqueue(self, s: Sequence) -> None:
        """Take up a new sequence behind all others."""
        s.order = self._next_order
        self._next_order += 1
        self.waiting.append(s)

    def leave(self, s: Sequence, *, doubtful: bool = False) -> None:
        """Forget a sequence and free what it holds. `doubtful`: nobody is to use its rows."""
        if s.handle >= 0:
            self._let_go(s, doubtful=doubtful)
        elif s in self.waiting:
            self.waiting.remove(s)

    def start_over(self, s: Sequence) -> None:
        """A running sequence's rows are in doubt: nobody is to use them, and it is computed anew."""
        self._let_go(s, doubtful=True)
        s.parked = s.cached = 0
        bisect.insort(self.waiting, s, key=lambda other: other.order)

    def _let_go(self, s: Sequence, *, doubtful: bool = False) -> None:
        if not doubtful and not s.recheck and self.pool.sharing:
            self._keep_part(s)
        self._decoder.remove(s.handle)
        s.handle = -1
        s.published = 0
        self.running.remove(s)
        self.pool.give(s.blocks, doubtful=doubtful)

    def _keep_part(self, s: Sequence) -> None:
        """Let the rows of its last block, which is not full, be found."""
        computed = self._decoder.computed(s.handle)
        index = computed // self._block_tokens
        if computed % self._block_tokens and s.published == index:
            first = index * self._block_tokens
            self.pool.keep_part(s.blocks[index], self._parent(s, index), s.slice(first, computed))

    def _parent(self, s: Sequence, index: int) -> bytes:
        """Name of the block before block `index` of a sequence."""
        return s.name_blocks(self.pool.root, self._block_tokens)[index - 1] if index else self.pool.root

    def _preempt(self, s: Sequence) -> None:
        s.parked = self._rows.park(s, self._decoder.computed(s.handle))
        self._let_go(s)
        bisect.insort(self.waiting, s, key=lambda other: other.order)
        self.preemptions += 1

    # --- admission

    def admit(self, *, parked_only: bool = False) -> None:
        """Move sequences from waiting to running in order, as long as the rows they have tokens for find room.

        Beside that a block for each running sequence stays free, so that a newcomer is not at once sent away again.
        """
        while self.waiting and not (parked_only and not self.waiting[0].parked):
            s = self.waiting[0]
            # Whoever comes back from the log is checked as a whole in its first step; until that is done nobody who
            # is not checked himself may rely on its rows.
            unchecked = any(other.recheck for other in self.running)
            blocks = [] if unchecked and not s.parked else self.pool.find(self._sharable(s))
            first = len(blocks) * self._block_tokens
            source, copied = (-1, 0) if unchecked or s.parked > first else self._find_part(s, len(blocks))
            held = [source] if copied else []
            for block in held:
                self.pool.use(block)  # it might be given up for this very sequence
            needed = -(-s.length // self._block_tokens) - len(blocks)
            room = self.pool.take(needed, spare=len(self.running))
            if room is None and held:
                self.pool.give(held)
                copied = 0
                room = self.pool.take(needed, spare=len(self.running))
            if room is None:
                self.pool.give(blocks)
                return
            s.blocks = blocks + room
            computed = self._rows.fetch(s, first) if s.parked > first else first
            if copied:
                self.pool.copy_rows(source, room[0], copied)
                self.pool.give(held)
                first = computed = first + copied
            s.parked = 0
            self.restored_positions += computed - first
            if first and unchecked and not s.recheck:
                self.pool.give(s.blocks)
                continue
            self.waiting.pop(0)
            if not s.emitted:
                s.cached = first
            self.shared_positions += first
            s.published = len(blocks)
            bisect.insort(self.running, s, key=lambda other: other.order)
            self._rows.open(s)
            self._enter(s, computed)
            self._rows.adopt(s, 0, first)
            self._publish(s, max(0, computed - 1) // self._block_tokens)

    def _sharable(self, s: Sequence) -> list[bytes]:
        """Names of the blocks that it need not compute: all but the one its last known position is in."""
        return s.name_blocks(self.pool.root, self._block_tokens)[: (s.length - 1) // self._block_tokens]

    def _find_part(self, s: Sequence, index: int) -> tuple[int, int]:
        """Of all blocks, kept or of a running sequence, the one with most of the rows that block `index` of `s` begins
        with: (block, rows), or (-1, 0). Its last known position is left out.
        """
        if not self.pool.sharing:
            return -1, 0
        first = index * self._block_tokens
        tokens = s.slice(first, min(first + self._block_tokens, s.length - 1))
        parent = self._parent(s, index)
        best, most = self.pool.find_part(parent, tokens)
        for other in self.running:
            end = min(self._decoder.computed(other.handle), first + self._block_tokens)
            if end - first > most and other.published <= index and self._parent(other, index) == parent:
                rows = equal_beginning(other.slice(first, end), tokens)
                if rows > max(most, LEAST_COPIED - 1):
                    best, most = other.blocks[index], rows
        return best, most

    def _enter(self, s: Sequence, computed: int) -> None:
        s.handle = self._decoder.add(
            s.key, s.generation, s.tokens(), len(s.request.prompt), computed, s.request.params, s.request.stop_tokens
        )
        self._decoder.set_table(s.handle, s.blocks)

    # --- a step

    def choose(self) -> list[Share]:
        """The next step: a token of each decoding sequence, prompt positions up to the chunk; one on probation alone.

        Half of the chunk is the oldest prompt's, the rest goes to the shortest first, so that a long prompt neither
        waits for ever nor holds the short ones up.
        """
        candidates = next(([s] for s in self.running if s.alone), list(self.running))
        grants = self._grant(candidates)
        # Measured on texts that repeat themselves: guesses make one stream 1.5 to 1.8 times as fast, and two or more no
        # faster, since their rows fill the kernels' tiles already.
        width = self._speculate if len(candidates) == 1 else 0
        shares = []
        for s in candidates:
            positions = grants.get(id(s), 0)
            if positions and s.handle >= 0 and self._grow(s, positions):
                shares.append(Share(s, positions, self._guess(s, width) if positions == 1 and width else ()))
        return shares

    def _grant(self, candidates: list[Sequence]) -> dict[int, int]:
        grants = {}
        prompts = []
        for s in candidates:
            rest = s.length - self._decoder.computed(s.handle)
            if rest == 1:
                grants[id(s)] = 1
            else:
                prompts.append((s, rest))
        if len(prompts) == 1:
            s, rest = prompts[0]
            grants[id(s)] = min(self._chunk, rest)
        elif prompts:
            ready = list(self._without_followers(prompts))
            others = sorted(ready[1:], key=lambda pair: pair[1])
            left = self._chunk - min(ready[0][1], max(1, self._chunk // 2) if others else self._chunk)
            for s, rest in others:
                if left <= 0:
                    break
                grants[id(s)] = min(rest, left)
                left -= grants[id(s)]
            taken = sum(grants[id(s)] for s, _ in others if id(s) in grants)
            s, rest = ready[0]
            grants[id(s)] = min(rest, max(1, self._chunk - taken))
        return grants

    def _without_followers(self, prompts: list[tuple[Sequence, int]]) -> Iterator[tuple[Sequence, int]]:
        """Prompts less those whose next block an older one is about to compute; what is there by now is shared."""
        coming: set[bytes] = set()
        for s, rest in prompts:
            at, inside = divmod(self._decoder.computed(s.handle), self._block_tokens)
            names = self._sharable(s)[at:]
            if names and not inside and not any(other.recheck for other in self.running):
                there = self.pool.find(names)
                if there:
                    rest -= self._catch_up(s, at, there)
                    names = names[len(there) :]
            if names and not inside and names[0] in coming:
                continue
            coming.update(names)
            yield s, rest

    def _catch_up(self, s: Sequence, at: int, there: list[int]) -> int:
        """Put shared blocks into the place of own ones that were not written yet; the positions won."""
        own = s.blocks[at : at + len(there)]
        s.blocks[at : at + len(there)] = there
        self.pool.give(own)
        first, end = at * self._block_tokens, (at + len(there)) * self._block_tokens
        self._decoder.remove(s.handle)
        self._enter(s, end)
        s.published = max(s.published, at + len(there))
        if not s.emitted:
            s.cached += end - first
        self.shared_positions += end - first
        self._rows.adopt(s, first, end)
        return end - first

    def _grow(self, s: Sequence, positions: int) -> bool:
        """See that blocks for the next `positions` are there, sending younger sequences away; False if it had to go."""
        needed = -(-(self._decoder.computed(s.handle) + positions) // self._block_tokens)
        if needed <= len(s.blocks):
            return True
        while (more := self.pool.take(needed - len(s.blocks))) is None:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is s:
                return False
        s.blocks += more
        self._decoder.set_table(s.handle, s.blocks)
        return True

    def _guess(self, s: Sequence, width: int) -> tuple[int, ...]:
        """Drafts for a decoding sequence, as far as its request and the free blocks go."""
        if s.recheck or s.length - self._decoder.computed(s.handle) != 1:
            return ()
        if s.drafts is None:
            s.drafts = Drafts(self._speculate)
        if s.drafts.known < s.length:
            s.drafts.extend(s.slice(s.drafts.known, s.length))
        guesses = s.drafts.propose(min(width, s.request.max_tokens - len(s.emitted) - 1))
        more = -(-(s.length + len(guesses)) // self._block_tokens) - len(s.blocks)
        if more > 0:
            room = self.pool.take(more, spare=len(self.running))
            if room is None:
                return guesses[: len(s.blocks) * self._block_tokens - s.length]
            s.blocks += room
            self._decoder.set_table(s.handle, s.blocks)
        return guesses

    def publish(self, s: Sequence) -> None:
        """After a committed step: full blocks can be shared from here on."""
        self._publish(s, self._decoder.computed(s.handle) // self._block_tokens)

    def _publish(self, s: Sequence, full: int) -> None:
        if full > s.published:
            names = s.name_blocks(self.pool.root, self._block_tokens)
            for index in range(s.published, full):
                first = index * self._block_tokens
                tokens = s.slice(first, first + self._block_tokens)
                self.pool.publish(s.blocks[index], names[index], self._parent(s, index), tokens)
            s.published = full
