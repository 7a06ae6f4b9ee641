"""Slots of the pool: reservations keep within the budget, and pages go back before it is exceeded."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.geometry import KVGeometry, gather, scatter
from outlast.core.errors import Refused
from outlast.core.memory import Memory
from outlast.engines.hf.folder import SLOTS, Shape, pool_geometry
from outlast.engines.hf.slots import Slots

SHAPE = Shape(layers=2, kv_heads=2, head_dim=64, vocab=10, context=512, dtype="float32")


def pool(kv_tokens: int) -> tuple[Slots, Memory, KVGeometry]:
    geometry = pool_geometry(SHAPE, kv_tokens)
    memory = Memory.anonymous(geometry.pool_bytes)
    return Slots(geometry, memory, SLOTS, kv_tokens), memory, geometry


def resident(memory: Memory) -> int:
    return os.fstat(memory.fd).st_blocks * 512


def test_slots_do_not_overlap_and_cover_the_pool() -> None:
    slots, _, geometry = pool(2048)
    seen: set[int] = set()
    for slot in range(SLOTS):
        table = slots.table(slot)
        for position in range(slots.slot_tokens):
            for piece in range(geometry.pieces):
                at = geometry.row(table, position, piece)
                assert at % geometry.row_bytes == 0
                assert at not in seen
                assert slots.offset(slot) <= at < slots.offset(slot) + slots.slot_bytes
                seen.add(at)
    assert len(seen) * geometry.row_bytes == geometry.pool_bytes


def test_a_slot_is_one_tensor_piece_by_piece() -> None:
    """Rows put in through the block table stand where a view [layer, kv, head, position, dim] reads them."""
    np = pytest.importorskip("numpy")
    slots, memory, geometry = pool(1024)
    table = slots.table(3)
    data = np.random.default_rng(1).standard_normal((100, 2, 2, 2, 64)).astype(np.float32)
    scatter(geometry, memory.buffer, table, 20, 100, data.tobytes())
    view = np.frombuffer(memory.buffer, np.float32, slots.slot_bytes // 4, slots.offset(3))
    view = view.reshape(2, 2, 2, slots.slot_tokens, 64)
    assert np.array_equal(view[:, :, :, 20:120], data.transpose(1, 2, 3, 0, 4))
    assert gather(geometry, memory.buffer, table, 20, 100) == data.tobytes()
    del view


def test_reservations_keep_within_the_budget() -> None:
    slots, _, _ = pool(1000)
    with pytest.raises(Refused):
        slots.check(513)
    taken = [slots.take(400), slots.take(400)]
    assert None not in taken
    assert slots.take(201) is None
    assert slots.take(200) is not None
    slots.give(taken[0] or 0, 400)
    assert slots.take(400) is not None


@given(st.lists(st.tuples(st.integers(1, 512), st.booleans()), max_size=30), st.randoms())
def test_no_more_pages_are_held_than_the_budget_allows(wishes: list[tuple[int, bool]], rng: random.Random) -> None:
    """Whatever comes and goes, and however much of its reservation each sequence writes."""
    slots, memory, geometry = pool(1024)
    held: list[tuple[int, int]] = []
    for tokens, leave in wishes:
        slot = slots.take(tokens)
        if slot is not None:
            for piece in range(geometry.pieces):
                start = slots.offset(slot) + piece * geometry.piece_stride
                memory.buffer[start : start + tokens * geometry.row_bytes] = b"\1" * (tokens * geometry.row_bytes)
            held.append((slot, tokens))
        # A page holds 16 rows: each sequence may touch part of one more for each piece.
        assert resident(memory) <= (1024 + 16 * SLOTS) * SHAPE.token_bytes
        if leave and held:
            slots.give(*held.pop(rng.randrange(len(held))))
    memory.close()


def test_a_slot_that_was_written_is_taken_again_before_a_new_one() -> None:
    """Touched pages are quick to fill: for the next sequence of the size nothing is given back or taken anew."""
    slots, memory, _ = pool(1024)
    first = slots.take(400)
    assert first is not None
    memory.buffer[slots.offset(first)] = 1
    slots.give(first, 400)
    assert slots.take(400) == first
    assert memory.buffer[slots.offset(first)] == 1


def test_a_short_sequence_does_not_keep_the_pages_of_a_long_one() -> None:
    slots, memory, _ = pool(1024)
    for slot in [slots.take(60) for _ in range(SLOTS)]:
        assert slot is not None
        memory.buffer[slots.offset(slot)] = 1
        slots.give(slot, 60)
    before = resident(memory)
    taken = slots.take(10)
    assert taken is not None
    assert resident(memory) < before
    assert memory.buffer[slots.offset(taken)] == 0


def test_discarded_pages_read_as_zeros(tmp_path: Path) -> None:
    with Memory.anonymous(4 * 4096) as memory:
        memory.buffer[:] = b"\7" * memory.size
        memory.discard(100, 3 * 4096)
        assert memory.buffer[:4096] == b"\7" * 4096
        assert memory.buffer[4096 : 3 * 4096] == bytes(2 * 4096)
        assert memory.buffer[3 * 4096 :] == b"\7" * 4096
