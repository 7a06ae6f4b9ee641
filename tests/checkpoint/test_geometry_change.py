"""A region that changes its shape while the executor runs."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from outlast.checkpoint.geometry import KVGeometry, gather
from outlast.checkpoint.handlers import KVHandlers
from outlast.core.errors import OperatorFailed
from outlast.core.jit import JitCache
from outlast.executor import Executor

OLD = KVGeometry(pieces=4, block_tokens=8, row_bytes=32, blocks=4)
NEW = KVGeometry(pieces=6, block_tokens=4, row_bytes=64, blocks=5)


def staged_rows(executor: Executor, handlers: KVHandlers, geometry: KVGeometry, count: int) -> tuple[bytes, bytes]:
    """What kv_delta stages of a pool with known content, and what it should."""
    pool = ctypes.create_string_buffer(bytes(i * 31 % 251 for i in range(geometry.pool_bytes)), geometry.pool_bytes)
    table = list(reversed(range(geometry.blocks)))
    c_table = (ctypes.c_uint32 * len(table))(*table)
    out = ctypes.create_string_buffer(count * geometry.token_bytes)
    args = ctypes.create_string_buffer(
        geometry.args(ctypes.addressof(pool), ctypes.addressof(c_table), ctypes.addressof(out), 1, count)
    )
    executor.wait(executor.submit(handlers.delta, ctypes.addressof(args)))
    return out.raw, gather(geometry, pool.raw, table, 1, count)


def test_handlers_follow_a_region_that_changes_its_shape(compiler: object, tmp_path: Path) -> None:
    with Executor() as executor:
        handlers = KVHandlers(executor, OLD)
        cache = JitCache(tmp_path)
        handlers.specialise(cache)
        got, expected = staged_rows(executor, handlers, OLD, 9)
        assert got == expected
        with pytest.raises(OperatorFailed, match="another geometry"):
            staged_rows(executor, handlers, NEW, 3)
        handlers.change_geometry(NEW)
        assert not handlers.specialised
        got, expected = staged_rows(executor, handlers, NEW, 7)
        assert got == expected
        handlers.specialise(cache)
        got, expected = staged_rows(executor, handlers, NEW, 7)
        assert got == expected
        with pytest.raises(OperatorFailed, match="another geometry"):
            staged_rows(executor, handlers, OLD, 3)
        assert executor.generation(handlers.delta) == 4
