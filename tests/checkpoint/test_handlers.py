"""Shipped and specialised handlers against the plain Python reference, over random geometry and content."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outlast.checkpoint import _native
from outlast.checkpoint.geometry import KVGeometry, gather, scatter
from outlast.checkpoint.handlers import _KV_SOURCE, KVHandlers, call
from outlast.core.errors import OutlastError, Refused, UsageError
from outlast.core.jit import Compiler, JitCache, JitError, Library
from outlast.executor import Executor

SHIPPED = _native.operators()


@st.composite
def geometries(draw: st.DrawFn) -> KVGeometry:
    pieces, block_tokens = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    row_bytes, blocks = 4 * draw(st.integers(1, 40)), draw(st.integers(1, 5))
    stride = block_tokens * row_bytes + draw(st.sampled_from([0, 0, 1, 4, 60]))
    return KVGeometry(
        pieces, block_tokens, row_bytes, blocks, stride, pieces * stride + draw(st.sampled_from([0, 3, 128]))
    )


@st.composite
def spans(draw: st.DrawFn) -> tuple[KVGeometry, list[int], int, int]:
    """A geometry, a block table that names each block once, and tokens that it covers."""
    geometry = draw(geometries())
    table = draw(st.permutations(range(geometry.blocks)))
    positions = geometry.blocks * geometry.block_tokens
    first = draw(st.integers(0, positions - 1))
    return geometry, list(table), first, draw(st.integers(0, positions - first))


def defines(g: KVGeometry) -> dict[str, int | str]:
    return {
        "OL_PIECES": g.pieces, "OL_BLOCK_TOKENS": g.block_tokens, "OL_ROW_BYTES": g.row_bytes, "OL_BLOCKS": g.blocks,
        "OL_PIECE_STRIDE": f"{g.piece_stride}ull", "OL_BLOCK_BYTES": f"{g.block_bytes}ull",
    }  # fmt: skip


class Pool:
    """A pool, a table, staged bytes, and the arguments that name them; guard bytes around what may be written."""

    def __init__(self, geometry: KVGeometry, table: list[int], first: int, count: int, seed: int) -> None:
        self.geometry, self.table, self.first, self.count = geometry, table, first, count
        rng = random.Random(seed)
        self.content = rng.randbytes(geometry.pool_bytes)
        self.rows = rng.randbytes(count * geometry.token_bytes)
        self.pool = ctypes.create_string_buffer(self.content + b"G" * 64, geometry.pool_bytes + 64)
        self.staged = ctypes.create_string_buffer(self.rows + b"G" * 64, len(self.rows) + 64)
        self.c_table = (ctypes.c_uint32 * len(table))(*table)

    def run(self, address: int, parts: int) -> None:
        args = self.geometry.args(
            ctypes.addressof(self.pool),
            ctypes.addressof(self.c_table),
            ctypes.addressof(self.staged),
            self.first,
            self.count,
        )
        block = ctypes.create_string_buffer(args)
        for part in range(parts):
            call(address, block, part=part, parts=parts)


def check(delta: int, apply: int, case: tuple[KVGeometry, list[int], int, int], seed: int, parts: int) -> None:
    geometry, table, first, count = case
    pool = Pool(geometry, table, first, count, seed)
    pool.run(delta, parts)
    assert pool.staged.raw == gather(geometry, pool.content, table, first, count) + b"G" * 64
    assert pool.pool.raw == pool.content + b"G" * 64
    pool = Pool(geometry, table, first, count, seed)
    pool.run(apply, parts)
    expected = bytearray(pool.content)
    scatter(geometry, expected, table, first, count, pool.rows)
    assert pool.pool.raw == bytes(expected) + b"G" * 64
    assert pool.staged.raw == pool.rows + b"G" * 64


@given(case=spans(), seed=st.integers(0, 2**32), parts=st.integers(1, 4))
def test_shipped_handlers_equal_the_reference(
    case: tuple[KVGeometry, list[int], int, int], seed: int, parts: int
) -> None:
    check(SHIPPED["kv_delta"], SHIPPED["kv_apply"], case, seed, parts)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.data())
def test_interleaved_blocks_equal_the_reference(
    pieces: int, tokens: int, row: int, per_piece: int, slots: int, data: st.DataObject
) -> None:
    """[slot][piece][block][token][row]: blocks of a slot are consecutive, and each piece is one run of memory."""
    run = 4 * row * tokens
    blocks = ((slots - 1) * pieces + 1) * per_piece
    geometry = KVGeometry(pieces, tokens, 4 * row, blocks, per_piece * run, run, interleaved=True)
    assert geometry.pool_bytes == slots * pieces * per_piece * run
    slot = data.draw(st.integers(0, slots - 1)) * pieces * per_piece
    positions = per_piece * tokens
    first = data.draw(st.integers(0, positions - 1))
    case = (geometry, list(range(slot, slot + per_piece)), first, data.draw(st.integers(0, positions - first)))
    check(SHIPPED["kv_delta"], SHIPPED["kv_apply"], case, first, 2)


def test_interleaved_blocks_that_overlap_are_refused_and_handlers_stay_general(cache: JitCache) -> None:
    for numbers in ((2, 4, 4, 4, 40, 16), (2, 4, 4, 4, 32, 8)):
        with pytest.raises(UsageError):
            KVGeometry(*numbers, interleaved=True)
    executor = Executor(workers=0)
    handlers = KVHandlers(executor, KVGeometry(2, 4, 4, 4, 32, 16, interleaved=True))
    with pytest.raises(Refused, match="interleaved"):
        handlers.specialise(cache)
    executor.close()


@pytest.fixture(scope="module")
def cache(compiler: Compiler, tmp_path_factory: pytest.TempPathFactory) -> JitCache:
    return JitCache(tmp_path_factory.mktemp("jit"), compiler=compiler)


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(geometry=geometries(), data=st.data())
def test_specialised_handlers_equal_the_reference(cache: JitCache, geometry: KVGeometry, data: st.DataObject) -> None:
    library = Library(cache.compile(_KV_SOURCE, name="kv", defines=defines(geometry), native=True))
    try:
        delta, apply, digest = (library.symbol(name) for name in ("kv_delta", "kv_apply", "kv_digest"))
        positions = geometry.blocks * geometry.block_tokens
        for _ in range(20):
            table = data.draw(st.permutations(range(geometry.blocks)))
            first = data.draw(st.integers(0, positions - 1))
            count = data.draw(st.integers(0, positions - first))
            check(
                delta,
                apply,
                (geometry, list(table), first, count),
                data.draw(st.integers(0, 99)),
                data.draw(st.integers(1, 4)),
            )
        for block in range(geometry.blocks):
            pool = Pool(
                geometry, list(range(geometry.blocks)), block * geometry.block_tokens, geometry.block_tokens, block
            )
            assert digest_of(pool, digest) == digest_of(pool, SHIPPED["kv_digest"])
    finally:
        library.close()


def digest_of(pool: Pool, address: int = SHIPPED["kv_digest"]) -> bytes:
    out = ctypes.create_string_buffer(32)
    args = pool.geometry.args(
        ctypes.addressof(pool.pool),
        ctypes.addressof(pool.c_table),
        ctypes.addressof(out),
        pool.first,
        pool.geometry.block_tokens,
    )
    call(address, ctypes.create_string_buffer(args))
    return out.raw


def test_a_block_out_of_range_is_an_error_and_nothing_is_written() -> None:
    geometry = KVGeometry(4, 4, 16, 3)
    for name in ("kv_delta", "kv_apply"):
        for parts in (1, 2, 3):
            for table in ([0, 1, 3], [2, 0xFFFFFFFF, 0], [3, 0, 1]):
                pool = Pool(geometry, table, 0, 12, 1)
                for part in range(parts):
                    args = geometry.args(
                        ctypes.addressof(pool.pool),
                        ctypes.addressof(pool.c_table),
                        ctypes.addressof(pool.staged),
                        0,
                        12,
                    )
                    with pytest.raises(OutlastError, match="block table names block"):
                        call(SHIPPED[name], ctypes.create_string_buffer(args), part=part, parts=parts)
                assert pool.pool.raw == pool.content + b"G" * 64
                assert pool.staged.raw == pool.rows + b"G" * 64
    # Only blocks of the tokens asked for are looked at: the rest of a table may not be filled yet.
    pool = Pool(geometry, [0, 1, 99], 2, 6, 1)
    pool.run(SHIPPED["kv_delta"], 2)


def test_senseless_geometries_are_refused() -> None:
    for numbers in (
        (0, 1, 4, 1),
        (1, 0, 4, 1),
        (1, 1, 0, 1),
        (1, 1, 4, 0),
        (1, 1, 6, 1),
        (1, 4, 4, 1, 8),
        (2, 4, 4, 1, 16, 16),
    ):
        with pytest.raises(UsageError):
            KVGeometry(*numbers)


def test_a_specialised_handler_refuses_another_geometry(cache: JitCache) -> None:
    geometry = KVGeometry(4, 4, 16, 3)
    library = Library(cache.compile(_KV_SOURCE, name="kv", defines=defines(geometry)))
    others = [
        KVGeometry(2, 4, 16, 3), KVGeometry(4, 2, 16, 3), KVGeometry(4, 4, 32, 3), KVGeometry(4, 4, 16, 2),
        KVGeometry(4, 4, 16, 3, 68), KVGeometry(4, 4, 16, 3, 64, 260),
    ]  # fmt: skip
    for other in others:
        pool = Pool(other, [0, 1, 0], 0, 4, 1)
        for name in ("kv_delta", "kv_apply", "kv_digest"):
            with pytest.raises(OutlastError, match="another geometry"):
                pool.run(library.symbol(name), 1)
        assert pool.pool.raw == pool.content + b"G" * 64
    library.close()


GEOMETRY = KVGeometry(4, 4, 32, 6, 4 * 32 + 8)


@pytest.mark.parametrize("name", ["kv_delta", "kv_apply", "kv_digest"])
def test_wrong_code_is_refused_and_the_old_one_stays(cache: JitCache, name: str) -> None:
    """A build with a fault in one of the three: it runs, and moves bytes to the wrong place."""
    fault = {
        "kv_delta": "{ char *s = (char *)a->staged; if (a->count) s[a->count * 32 * 4 - 1] ^= 1; }",
        "kv_apply": "{ char *s = (char *)a->base; s[5] ^= 4; }",
        "kv_digest": "{ char *s = (char *)a->staged; s[31] ^= 1; }",
    }[name]
    source = f"""
    #define {name} right_{name}
    #include "outlast/ops/kv_digest.h"
    #undef {name}
    extern "C" OL_EXPORT int32_t {name}(const ol_task *task, ol_env *env) {{
        const int32_t status = right_{name}(task, env);
        const auto *a = reinterpret_cast<const ol_kv_args *>(task->arg[0]);
        if (status == OL_OK) {fault}
        return status;
    }}
    OL_UNIT;
    """
    path = cache.compile(source, name="wrong", defines=defines(GEOMETRY))
    with Executor() as executor:
        handlers = KVHandlers(executor, GEOMETRY)
        with pytest.raises(OutlastError, match=f"{name} differs"):
            handlers.inject(Library(path))
        assert not handlers.specialised
        for operator in (handlers.delta, handlers.apply, handlers.digest):
            assert executor.generation(operator) == 1
            assert executor.native.slot(operator.index)[1] == SHIPPED[operator.name]
        assert str(path) not in Path("/proc/self/maps").read_text()  # refused code is unloaded
        handlers.specialise(cache)
        assert handlers.specialised
        assert [executor.generation(o) for o in (handlers.delta, handlers.apply, handlers.digest)] == [2, 2, 2]


def test_code_that_does_not_compile_leaves_the_old_one(cache: JitCache, monkeypatch: pytest.MonkeyPatch) -> None:
    from outlast.checkpoint import handlers as module

    monkeypatch.setattr(module, "_KV_SOURCE", "this is no C++")
    with Executor() as executor:
        handlers = KVHandlers(executor, GEOMETRY)
        with pytest.raises(JitError):
            handlers.specialise(cache)
        thread = handlers.specialise_in_background(lambda: cache)
        thread.join(60)
        assert "does not compile" in handlers.trouble
        assert not handlers.specialised


def test_a_region_that_changes_its_shape_gets_shipped_handlers_back(cache: JitCache) -> None:
    other = KVGeometry(2, 8, 64, 4)
    with Executor(workers=1) as executor:
        handlers = KVHandlers(executor, GEOMETRY)
        handlers.specialise(cache)
        handlers.change_geometry(other)
        assert not handlers.specialised
        pool = Pool(other, [3, 1, 0, 2], 1, 30, 4)
        args = ctypes.create_string_buffer(
            other.args(
                ctypes.addressof(pool.pool), ctypes.addressof(pool.c_table), ctypes.addressof(pool.staged), 1, 30
            )
        )
        executor.wait(executor.submit(handlers.delta, ctypes.addressof(args)))
        assert pool.staged.raw[:-64] == gather(other, pool.content, [3, 1, 0, 2], 1, 30)
        # Code for the old shape that was compiled meanwhile comes too late.
        late = cache.compile(_KV_SOURCE, name="kv", defines=defines(GEOMETRY), native=True)
        with pytest.raises(OutlastError):
            handlers.inject(Library(late))
        handlers.specialise(cache)
        assert handlers.specialised


def test_a_shape_that_changes_during_the_check_refuses_the_code(
    cache: JitCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outlast.checkpoint import handlers as module

    with Executor() as executor:
        handlers = KVHandlers(executor, GEOMETRY)
        check_digest = module.canary_digest

        def meanwhile(geometry: KVGeometry, digest: int) -> None:
            check_digest(geometry, digest)
            handlers.change_geometry(KVGeometry(2, 8, 64, 4))

        monkeypatch.setattr(module, "canary_digest", meanwhile)
        with pytest.raises(Refused, match="shape"):
            handlers.specialise(cache)
        assert not handlers.specialised


DIGESTED = [
    KVGeometry(4, 4, 32, 2), KVGeometry(6, 16, 128, 1), KVGeometry(2, 40, 512, 1, 40 * 512 + 64),
    KVGeometry(3, 5, 4, 2),
]  # fmt: skip


# ---- digest --------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    geometry=st.sampled_from(DIGESTED),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_digest_sees_every_change_within_the_block(geometry: KVGeometry, seed: int, data: st.DataObject) -> None:
    table = list(range(geometry.blocks))
    pool = Pool(geometry, table, 0, geometry.block_tokens, seed)
    before = digest_of(pool)
    assert before == digest_of(pool)
    token = data.draw(st.integers(0, geometry.block_tokens - 1))
    piece = data.draw(st.integers(0, geometry.pieces - 1))
    at = geometry.row(table, token, piece) + data.draw(st.integers(0, geometry.row_bytes - 1))
    old = pool.pool[at]
    pool.pool[at] = bytes([old[0] ^ (1 << data.draw(st.integers(0, 7)))])
    assert digest_of(pool) != before
    pool.pool[at] = old
    assert digest_of(pool) == before

    def exchange(a: int, b: int, size: int) -> None:
        x, y = pool.pool[a : a + size], pool.pool[b : b + size]
        pool.pool[a : a + size], pool.pool[b : b + size] = y, x

    run = geometry.block_tokens * geometry.row_bytes
    for other in range(geometry.pieces):
        if other != piece:
            exchange(geometry.row(table, 0, piece), geometry.row(table, 0, other), run)
            assert digest_of(pool) != before
            exchange(geometry.row(table, 0, piece), geometry.row(table, 0, other), run)
    other = data.draw(st.integers(0, geometry.block_tokens - 1))
    if other != token:
        for p in range(geometry.pieces):
            exchange(geometry.row(table, token, p), geometry.row(table, other, p), geometry.row_bytes)
        assert digest_of(pool) != before


def test_digest_ignores_what_lies_between_pieces_and_where_the_block_is() -> None:
    geometry = KVGeometry(3, 4, 32, 4, 4 * 32 + 12, 3 * (4 * 32 + 12) + 20)
    pool = Pool(geometry, [2], 0, 4, 7)
    before = digest_of(pool)
    moved = Pool(geometry, [1], 0, 4, 8)
    scatter(geometry, memoryview(moved.pool).cast("B"), [1], 0, 4, gather(geometry, pool.content, [2], 0, 4))
    assert digest_of(moved) == before
    gap = geometry.row([2], 0, 0) + 4 * 32
    pool.pool[gap : gap + 12] = b"?" * 12
    assert digest_of(pool) == before


def test_digest_is_of_one_whole_block() -> None:
    geometry = KVGeometry(2, 4, 16, 2)
    pool = Pool(geometry, [0, 1], 1, 4, 1)
    with pytest.raises(OutlastError, match="whole block"):
        digest_of(pool)
    with pytest.raises(OutlastError, match="block table"):
        digest_of(Pool(geometry, [2], 0, 4, 1))


# ---- bytes ---------------------------------------------------------------------------------------------------------


class BytesArgs(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64), ("size", ctypes.c_uint64), ("runs", ctypes.c_uint64), ("staged", ctypes.c_uint64),
        ("count", ctypes.c_uint32), ("reserved", ctypes.c_uint32),
    )  # fmt: skip


@given(
    size=st.integers(1, 500),
    runs=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 100)), max_size=6),
    parts=st.integers(1, 4),
)
def test_bytes_handlers_copy_runs_or_refuse_all(size: int, runs: list[tuple[int, int]], parts: int) -> None:
    rng = random.Random(size)
    region, rows = rng.randbytes(size), rng.randbytes(sum(length for _, length in runs))
    numbers = (ctypes.c_uint64 * (2 * len(runs)))(*(n for run in runs for n in run))
    fits = all(offset + length <= size for offset, length in runs)
    for name in ("bytes_delta", "bytes_apply"):
        base = ctypes.create_string_buffer(region + b"G" * 16, size + 16)
        staged = ctypes.create_string_buffer(rows + b"G" * 16, len(rows) + 16)
        args = BytesArgs(
            ctypes.addressof(base), size, ctypes.addressof(numbers), ctypes.addressof(staged), len(runs), 0
        )
        for part in range(parts):
            if fits:
                call(SHIPPED[name], args, part=part, parts=parts)
            else:
                with pytest.raises(OutlastError, match="leaves the region"):
                    call(SHIPPED[name], args, part=part, parts=parts)
        expected_region, expected_rows, at = bytearray(region), bytearray(rows), 0
        for offset, length in runs if fits else ():
            if name == "bytes_delta":
                expected_rows[at : at + length] = region[offset : offset + length]
            elif parts == 1:  # runs that overlap have no order between parts
                expected_region[offset : offset + length] = rows[at : at + length]
            at += length
        if name == "bytes_delta" or parts == 1 or not fits:
            assert base.raw == bytes(expected_region) + b"G" * 16
        assert staged.raw == bytes(expected_rows) + b"G" * 16


def test_runs_that_wrap_around_the_address_space_are_refused() -> None:
    base, staged = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
    for offset, length in ((2**64 - 8, 16), (0, 2**64 - 1), (65, 0), (64, 1), (2**63, 2**63)):
        runs = (ctypes.c_uint64 * 2)(offset, length)
        args = BytesArgs(ctypes.addressof(base), 64, ctypes.addressof(runs), ctypes.addressof(staged), 1, 0)
        for name in ("bytes_delta", "bytes_apply"):
            with pytest.raises(OutlastError, match="leaves the region"):
                call(SHIPPED[name], args)
