"""Epochs: what changed in registered regions, appended and committed as one.

`Checkpointer` serves any owner of regions. `StepCheckpointer` serves an engine whose step is a plan of executor tasks:
its delta handlers and the commit are the last tasks of that plan.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outlast.checkpoint.geometry import KVGeometry
from outlast.checkpoint.handlers import KVHandlers
from outlast.checkpoint.regions import Region
from outlast.checkpoint.spans import Extent, Spans
from outlast.core import _native
from outlast.core.errors import Refused, TimedOut
from outlast.core.log import DROP, EMISSION, KV_ROWS, KV_SEAL, REQUEST, LogWriter, Record
from outlast.executor import Executor, Operator

KV_REGION = 1
REQUEST_REGION = 2

Row = tuple[int, int, int, int, int, int, bytes]  #: type, region, generation, key, offset, count, payload


class Checkpointer:
    """Regions of one owner in one log. Not thread-safe; call it while nobody writes to the regions."""

    def __init__(self, executor: Executor, log: LogWriter, regions: Sequence[Region]) -> None:
        numbers = [region.number for region in regions]
        if len(set(numbers)) != len(numbers):
            raise Refused("two regions share a number", why=str(numbers))
        self._executor = executor
        self._log = log
        self._regions = list(regions)

    def checkpoint(self, rows: Sequence[Row] = ()) -> int:
        """Commit what changed since the last epoch, and `rows`; returns the epoch.

        On an error nothing of it counts and the changes will be found again.
        """
        native = self._log.native
        bytes_needed = sum(len(row[6]) for row in rows)
        records = len(rows)
        for region in self._regions:
            size, number = region.collect()
            bytes_needed += size
            records += number
        try:
            native.begin(bytes_needed, records)
            for row in rows:
                native.append(*row)
            for region in self._regions:
                region.stage(self._log, self._executor)
            native.commit()
        except BaseException:
            native.abort()
            for region in self._regions:
                region.aborted()
            raise
        for region in self._regions:
            region.committed()
        return native.committed_epoch


@dataclass(frozen=True, slots=True)
class Image:
    """Everything of one live request, for moving it out of an old segment."""

    generation: int
    payload: bytes  #: of its REQUEST record
    emissions: Sequence[bytes]  #: `ol_emission` of each generated token
    computed: int  #: positions whose rows are in the pool, or, if it is parked, in the log
    table: int  #: address of its block table
    parked: bool = False  #: the log alone holds its rows


@dataclass(frozen=True, slots=True)
class LogOperators:
    """The log as operators of an executor; installed once."""

    seal: Operator
    finish: Operator

    @classmethod
    def install(cls, executor: Executor) -> LogOperators:
        """Register them."""
        shipped = _native.log_operators()
        return cls(*(executor.register(name, shipped[name]) for name in ("log_seal", "log_finish")))


class StepCheckpointer:
    """Joins an engine's step with its epoch, and keeps the log bounded. One thread."""

    def __init__(
        self,
        executor: Executor,
        log: LogWriter,
        handlers: KVHandlers,
        operators: LogOperators,
        pool: int,
        image: Callable[[int], Image | None],
        alive: Callable[[int], bool],
    ) -> None:
        """`pool`: address of the KV pool. `image(key)`: state of a live request, None once it is dead; `alive(key)`:
        whether it would be None.
        """
        self._executor = executor
        self.log = log
        self._handlers = handlers
        self._operators = operators
        self._pool = pool
        self._image = image
        self._alive = alive
        self._trimmed_at = log.native.segment  #: segment in which the log was trimmed last
        self._plan = _native.StepPlan(
            log.native, KV_REGION, REQUEST_REGION, pool, handlers.geometry.numbers(), handlers.delta.index,
            handlers.digest.index, operators.seal.index, operators.finish.index,
        )  # fmt: skip
        self._queued: list[Row] = []
        #: By segment and request. Every live piece is noted for one segment only, the last that got it.
        self._extents: dict[int, dict[int, Extent]] = {}
        self.rewritten_bytes = 0  #: moved out of old segments so far

    def open_request(self, key: int, generation: int, payload: bytes) -> None:
        """Record a request's prompt and parameters with the next epoch."""
        self._queued.append((REQUEST, REQUEST_REGION, generation, key, 0, 0, payload))

    def queue(self, kind: int, generation: int, key: int, offset: int, payload: bytes) -> None:
        """Record a further piece of request state with the next epoch."""
        self._queued.append((kind, REQUEST_REGION, generation, key, offset, 1, payload))

    def records_of(self, key: int) -> Iterator[Record]:
        """Everything the log holds of a request, in log order. Not inside an epoch."""
        for segment in sorted(number for number, extents in self._extents.items() if key in extents):
            yield from map(Record._make, self.log.native.records_of(segment, key))

    def forget_rows(self, key: int) -> None:
        """What the log holds of a request is dead: its state is written anew, under another generation."""
        self._queued = [row for row in self._queued if row[3] != key]
        for extents in self._extents.values():
            extents.pop(key, None)

    def room(self) -> int:
        """Positions that the log can still take before more of it is alive than it can hold.

        Room for emptying segments is left out, and an eighth for headers and segments' ends.
        """
        native = self.log.native
        places = native.places_left + (native.segment - native.oldest_segment + 1 if native.oldest_segment else 0)
        usable = max(0, places - 4) * native.segment_bytes * 7 // 8
        return usable // (self._handlers.geometry.token_bytes + 64) - self._live()

    def copy_rows(self, key: int, first: int, end: int) -> None:
        """Write the rows of positions [`first`, `end`) from the pool, in epochs of their own."""
        self.flush()
        image = self._image(key)
        if image is not None:
            self._rewrite(key, image, Extent(False, Spans((first, end)), Spans()))

    def drop(self, key: int, generation: int) -> None:
        """Record with the next epoch that a request's state is dead."""
        self._queued = [row for row in self._queued if row[3] != key]
        self._queued.append((DROP, REQUEST_REGION, generation, key, 0, 0, b""))

    def run(
        self,
        tasks: int,
        count: int,
        writes: int,
        writes_count: int,
        spans: Iterable[tuple[int, int, int, int]],
        *,
        timeout: float,
        number: int = 0,
    ) -> None:
        """Run a step's plan and commit what it wrote; returns when the epoch counts.

        `number`: names the tasks; those of the number that ran last need not be read again. 0: they may differ.

        `writes`: address of `ol_step_write[]`; `spans`: what it wrote that counts, for bookkeeping, as (key, first,
        count, index of a token it emitted or -1); read only after the plan has run.
        On an error the epoch is taken back and the error is raised.
        """  # fmt: skip
        native = self.log.native
        self._make_room()
        size, records = self._plan.need(writes, writes_count)
        native.begin(size + sum(len(row[6]) for row in self._queued), records + len(self._queued))
        try:
            for row in self._queued:
                native.append(*row)
            address, total = self._plan.build(tasks, count, writes, writes_count, number)
            self._executor.run(address, total, timeout=timeout)
        except TimedOut:
            # A task may still be writing into the epoch. It stays open, so that nothing is put into its place: the log
            # refuses every further epoch of this process.
            raise
        except BaseException:
            native.abort()
            raise
        self._note_rows(self._queued)
        self._queued = []
        segment = self._extents.setdefault(native.segment, {})
        for key, first, number, emitted in spans:
            extent = segment.get(key)
            if extent is None:
                extent = segment[key] = Extent()
            extent.rows.add(first, first + number)
            if emitted >= 0:
                extent.emissions.add(emitted, emitted + 1)

    def flush(self) -> None:
        """Commit queued records without a step."""
        if self._queued:
            self._make_room()
            self.log.write(self._queued)
            self._note_rows(self._queued)
            self._queued = []

    def note_recovered(self, key: int, segments: Mapping[int, Extent]) -> None:
        """Tell what the existing segments hold of a request that was restored."""
        newer: list[Extent] = []
        for number in sorted(segments, reverse=True):
            extent = copy.deepcopy(segments[number])
            for other in newer:  # a crash while a segment was emptied leaves two copies
                extent.remove(other)
            newer.append(extent)
            self._extents.setdefault(number, {})[key] = extent

    def rebase(self, keys: Iterable[int]) -> None:
        """Write everything of `keys` into this log: it is new and holds nothing of them yet."""
        for key in keys:
            image = self._image(key)
            if image is not None:
                self._rewrite(key, image, Extent(True, Spans((0, image.computed)), Spans((0, len(image.emissions)))))

    def _make_room(self) -> None:
        """Keep the log short: whoever takes over reads all of it.

        On every new segment, empty the oldest ones while more than half of the log is dead; and whenever space runs
        out, until two segments can still be created (one to go on in, one to empty the next into).
        """
        native = self.log.native
        start = native.segment
        if start != self._trimmed_at:
            self._trimmed_at = start
            while native.segment - native.oldest_segment >= 2 and native.oldest_segment < start and self._mostly_dead():
                self._empty_oldest()
        while native.places_left < 2 and native.oldest_segment < native.segment:
            if native.oldest_segment > start:
                raise Refused(
                    "the log is full of live state",
                    why="emptying old segments frees nothing",
                    do="Raise the log's capacity.",
                )
            self._empty_oldest()

    def _live(self) -> int:
        """Positions in the log of requests that live."""
        return sum(
            extent.rows.total()
            for extents in self._extents.values()
            for key, extent in extents.items()
            if self._alive(key)
        )

    def _mostly_dead(self) -> bool:
        native = self.log.native
        whole = (native.segment - native.oldest_segment) * native.segment_bytes
        return 2 * self._live() * self._handlers.geometry.token_bytes < whole

    def _empty_oldest(self) -> None:
        """Move what lives in the oldest segment to the end of the log and release it."""
        oldest = self.log.native.oldest_segment
        for key, extent in self._extents.get(oldest, {}).items():
            image = self._image(key)
            if image is not None:
                self._rewrite(key, image, extent)
                if image.parked:
                    self._move_rows(key, image, oldest)
        self.log.native.release_before(oldest + 1)
        self._extents.pop(oldest, None)  # only now: after a failure on the way the segment still holds all of it

    def _rewrite(self, key: int, image: Image, extent: Extent) -> None:
        """Append again what an old segment holds of a request, from the live state."""
        geometry = self._handlers.geometry
        native = self.log.native
        limit = native.segment_bytes // 4  # an epoch fits one segment; a quarter wastes little of its end
        rows: list[Row] = []
        if extent.opened:
            rows.append((REQUEST, REQUEST_REGION, image.generation, key, 0, 0, image.payload))
        rows += [
            (EMISSION, REQUEST_REGION, image.generation, key, index, 1, image.emissions[index])
            for first, end in extent.emissions.below(len(image.emissions))
            for index in range(first, end)
        ]
        for part in _portions(rows, limit):
            self.log.write(part)
            self._note_rows(part)
            self.rewritten_bytes += sum(len(row[6]) for row in part)
        if image.parked:
            return
        step = max(1, limit // geometry.token_bytes)
        for first, end in extent.rows.below(image.computed):
            for at in range(first, end, step):
                count = min(step, end - at)
                self._rewrite_rows(geometry, key, image, at, count)
                self._extent(key).rows.add(at, at + count)

    def _move_rows(self, key: int, image: Image, segment: int) -> None:
        """Copy the rows and seals of a request that is not in the pool from an old segment to the end of the log."""
        native = self.log.native
        live = Spans(*self._extents[segment][key].rows)
        for number, extents in self._extents.items():
            if number > segment and key in extents:
                live.remove(extents[key].rows)  # an older copy must not come to stand behind a newer one
        rows = [
            piece
            for record in map(Record._make, native.records_of(segment, key))
            if record.generation == image.generation
            for piece in self._still_live(record, live)
        ]
        while rows:
            count, size = 0, 0
            while count < len(rows) and (not count or size + rows[count].length + 128 <= native.segment_bytes // 4):
                size += rows[count].length + 128
                count += 1
            part, rows = rows[:count], rows[count:]
            native.begin(sum(record.length for record in part), len(part))
            try:
                for r in part:
                    native.append_at(r.type, r.region, r.generation, r.key, r.offset, r.tokens, r.address, r.length)
                native.commit()
            except BaseException:
                native.abort()
                raise
            for r in part:
                if r.type == KV_ROWS:
                    self._extent(key).rows.add(r.offset, r.offset + r.tokens)
                    self.rewritten_bytes += r.length

    def _still_live(self, record: Record, live: Spans) -> Iterator[Record]:
        """The parts of a row record that lie in `live`; a seal if its block's last row does."""
        geometry = self._handlers.geometry
        if record.type == KV_SEAL:
            last = (record.offset + 1) * geometry.block_tokens - 1
            if any(first <= last < end for first, end in live):
                yield record
        elif record.type == KV_ROWS:
            for first, end in live:
                begin, stop = max(first, record.offset), min(end, record.offset + record.tokens)
                if begin < stop:
                    yield record._replace(
                        offset=begin, tokens=stop - begin, length=(stop - begin) * geometry.token_bytes,
                        address=record.address + (begin - record.offset) * geometry.token_bytes,
                    )  # fmt: skip

    def _extent(self, key: int) -> Extent:
        """What the segment of the epoch just written holds of a request."""
        return self._extents.setdefault(self.log.native.segment, {}).setdefault(key, Extent())

    def _note_rows(self, rows: Iterable[Row]) -> None:
        """Keep in mind where request state lies that was just written."""
        for row in rows:
            extent = self._extent(row[3])
            if row[0] == REQUEST:
                extent.opened = True
            elif row[0] == EMISSION:
                extent.emissions.add(row[4], row[4] + 1)

    def _rewrite_rows(self, geometry: KVGeometry, key: int, image: Image, first: int, count: int) -> None:
        native = self.log.native
        full = range(first // geometry.block_tokens, (first + count) // geometry.block_tokens)
        native.begin(count * geometry.token_bytes + 32 * len(full), 1 + len(full))
        try:
            self._stage(KV_ROWS, self._handlers.delta, key, image, first, first, count, count * geometry.token_bytes)
            for block in full:
                tokens = geometry.block_tokens
                self._stage(KV_SEAL, self._handlers.digest, key, image, block, block * tokens, tokens, 32)
            native.commit()
        except BaseException:
            native.abort()
            raise
        self.rewritten_bytes += count * geometry.token_bytes

    def _stage(self, kind: int, operator: Operator, key: int, image: Image, offset: int, first: int, count: int,
               length: int) -> None:  # fmt: skip
        native = self.log.native
        staged, handle = native.reserve(kind, KV_REGION, image.generation, key, offset, count, length)
        args = ctypes.create_string_buffer(self._handlers.geometry.args(self._pool, image.table, staged, first, count))
        self._executor.wait(self._executor.submit(operator, ctypes.addressof(args)), timeout=60.0)
        native.seal(handle)


def _portions(rows: Sequence[Row], limit: int) -> Iterator[list[Row]]:
    """The rows in their order, in parts of about `limit` bytes of the log."""
    part: list[Row] = []
    size = 0
    for row in rows:
        bytes_needed = len(row[6]) + 128  # header and padding
        if part and size + bytes_needed > limit:
            yield part
            part, size = [], 0
        part.append(row)
        size += bytes_needed
    if part:
        yield part
