"""Slots of the pool: reservations keep within the budget, and pages go back before it is exceeded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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


def test_pages_of_unused_slots_go_back_before_the_budget_is_exceeded() -> None:
    slots, memory, _ = pool(1024)
    token_bytes = SHAPE.token_bytes
    for _ in range(6):
        held = [slots.take(500), slots.take(500)]
        for slot in held:
            assert slot is not None
            start = slots.offset(slot)
            memory.buffer[start : start + slots.slot_bytes] = b"\1" * slots.slot_bytes
        assert resident(memory) <= 2.2 * 512 * token_bytes
        for slot in held:
            slots.give(slot or 0, 500)
    small = [slots.take(60) for _ in range(16)]
    assert None not in small
    assert resident(memory) <= 1100 * token_bytes


def test_discarded_pages_read_as_zeros(tmp_path: Path) -> None:
    with Memory.anonymous(4 * 4096) as memory:
        memory.buffer[:] = b"\7" * memory.size
        memory.discard(100, 3 * 4096)
        assert memory.buffer[:4096] == b"\7" * 4096
        assert memory.buffer[4096 : 3 * 4096] == bytes(2 * 4096)
        assert memory.buffer[3 * 4096 :] == b"\7" * 4096
