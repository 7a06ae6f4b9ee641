"""Checkpoint handlers: shipped ones at once, ones specialised to a region's geometry as soon as they are compiled.

A handler is an executor operator that moves the bytes of a region into a log record (delta) or back (apply). A new one
is compared with the Python reference on content and tables of its own geometry before it is published, and tasks that
are under way finish on the code they were submitted under.
"""

from __future__ import annotations

import ctypes
import logging
import random
import threading
from collections.abc import Callable
from typing import Any

from outlast.checkpoint import _native
from outlast.checkpoint.geometry import KVGeometry, gather, scatter
from outlast.core.errors import OutlastError, Refused
from outlast.core.jit import JitCache, Library
from outlast.executor import Executor, Operator

_log = logging.getLogger(__name__)

_CALL = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
_DIGEST_BYTES = 32
_KV_SOURCE = '#include "outlast/ops/kv_digest.h"\nOL_UNIT;\n'


class Env(ctypes.Structure):
    """`ol_env`."""

    _fields_ = (("worker", ctypes.c_uint32), ("reserved", ctypes.c_uint32), ("error", ctypes.c_char * 240))


class Task(ctypes.Structure):
    """`ol_task`."""

    _fields_ = (
        ("seq", ctypes.c_uint64), ("op", ctypes.c_uint32), ("generation", ctypes.c_uint32), ("after", ctypes.c_uint64),
        ("part", ctypes.c_uint16), ("parts", ctypes.c_uint16), ("plan", ctypes.c_uint32), ("arg", ctypes.c_uint64 * 4),
    )  # fmt: skip


def call(address: int, argument: Any, *, part: int = 0, parts: int = 1) -> None:
    """Run an operator in the calling thread, outside any ring; `argument` is a ctypes object that arg[0] points to."""
    task = Task(part=part, parts=parts)
    task.arg[0] = ctypes.addressof(argument)
    env = Env()
    status = _CALL(address)(ctypes.addressof(task), ctypes.addressof(env))
    if status != 0:
        raise OutlastError(f"operator ended with status {status}", why=env.error.decode(errors="replace"))


def canary_kv(geometry: KVGeometry, delta: int, apply: int, *, seed: int = 1) -> None:
    """Compare kv_delta and kv_apply with the reference; raises `OutlastError` naming the first difference.

    A few tokens in two blocks, one pair across a block boundary: the code sees the real strides at little cost, since
    this runs while an engine serves.
    """
    rng = random.Random(seed)
    blocks = min(geometry.blocks, 2)
    table = list(reversed(range(blocks)))
    size = blocks * geometry.block_bytes
    c_table = (ctypes.c_uint32 * blocks)(*table)
    spans = [(0, 1), (geometry.block_tokens - 1, 1)]
    if blocks > 1:
        spans.append((geometry.block_tokens - 1, 2))
    for first, count in spans:
        content = rng.randbytes(count * geometry.token_bytes)
        expected = bytearray(size)
        scatter(geometry, expected, table, first, count, content)
        pool = ctypes.create_string_buffer(size)
        staged = ctypes.create_string_buffer(content, len(content))
        args = ctypes.create_string_buffer(
            geometry.args(ctypes.addressof(pool), ctypes.addressof(c_table), ctypes.addressof(staged), first, count)
        )
        call(apply, args)
        if memoryview(pool).cast("B") != expected:
            raise OutlastError("kv_apply differs from its reference", why=f"tokens {first}..{first + count - 1}")
        ctypes.memset(staged, 0, len(content))
        call(delta, args)
        if staged.raw != gather(geometry, memoryview(expected), table, first, count):
            raise OutlastError("kv_delta differs from its reference", why=f"tokens {first}..{first + count - 1}")


def canary_digest(geometry: KVGeometry, digest: int, *, seed: int = 1) -> None:
    """Compare kv_digest with the shipped one; raises `OutlastError`. Digests outlive the process that made them, so
    every build must make the same.
    """
    blocks = min(geometry.blocks, 2)
    pool = ctypes.create_string_buffer(random.Random(seed).randbytes(blocks * geometry.block_bytes))
    table = (ctypes.c_uint32 * blocks)(*reversed(range(blocks)))
    first = (blocks - 1) * geometry.block_tokens
    made = []
    for address in (_native.operators()["kv_digest"], digest):
        out = ctypes.create_string_buffer(_DIGEST_BYTES)
        args = geometry.args(
            ctypes.addressof(pool), ctypes.addressof(table), ctypes.addressof(out), first, geometry.block_tokens
        )
        call(address, ctypes.create_string_buffer(args))
        made.append(out.raw)
    if made[0] != made[1]:
        raise OutlastError("kv_digest differs from the shipped one", why=f"block of tokens from {first}")


class KVHandlers:
    """kv_delta, kv_apply and kv_digest of one region, in one executor."""

    def __init__(self, executor: Executor, geometry: KVGeometry, *, prefix: str = "") -> None:
        """Install the shipped handlers, which read the geometry from their arguments."""
        self._executor = executor
        self._lock = threading.Lock()
        shipped = _native.operators()
        self._prefix = prefix
        self.geometry = geometry
        self.specialised = False  #: whether the code in use has the geometry compiled in
        self.trouble = ""  #: why not, if it was tried
        self.delta = executor.register(prefix + "kv_delta", shipped["kv_delta"])
        self.apply = executor.register(prefix + "kv_apply", shipped["kv_apply"])
        self.digest = executor.register(prefix + "kv_digest", shipped["kv_digest"])

    def specialise(self, cache: JitCache) -> None:
        """Compile handlers for the geometry, check them, swap them in. Raises what went wrong; the old ones stay."""
        g = self.geometry
        if g.interleaved:  # the trial's memory would have to be as large as the whole pool
            raise Refused("handlers are not specialised", why="blocks of this pool are interleaved")
        path = cache.compile(
            _KV_SOURCE,
            name="kv",
            defines={
                "OL_PIECES": g.pieces, "OL_BLOCK_TOKENS": g.block_tokens, "OL_ROW_BYTES": g.row_bytes,
                "OL_BLOCKS": g.blocks, "OL_PIECE_STRIDE": f"{g.piece_stride}ull",
                "OL_BLOCK_BYTES": f"{g.block_bytes}ull",
            },
            native=True,
        )  # fmt: skip
        self.inject(Library(path))

    def change_geometry(self, geometry: KVGeometry) -> None:
        """The region has another shape from here on: the shipped handlers come back at once, which fit any.

        Tasks that were submitted before still run the code of their own geometry. Call `specialise` again afterwards.
        """
        shipped = _native.operators()
        with self._lock:
            self.geometry = geometry
            self.specialised = False
            for operator in (self.delta, self.apply, self.digest):
                self._executor.swap(operator, shipped[operator.name.removeprefix(self._prefix)])

    def inject(self, library: Library) -> None:
        """Check the handlers in `library` against the reference and publish them; refused code changes nothing."""
        try:
            delta, apply, digest = (library.symbol(name) for name in ("kv_delta", "kv_apply", "kv_digest"))
            geometry = self.geometry
            canary_kv(geometry, delta, apply)
            canary_digest(geometry, digest)
        except BaseException:
            library.close()
            raise
        with self._lock:
            if self.geometry != geometry:
                library.close()
                raise Refused("handlers were not replaced", why="the region changed its shape meanwhile")
            # Three operators from one object: each entry holds it, and it is unloaded with the last of them.
            self._publish(self.delta, delta, library)
            self._publish(self.apply, apply, Library(library.path))
            self._publish(self.digest, digest, Library(library.path))
            self.specialised = True

    def _publish(self, operator: Operator, address: int, library: Library) -> None:
        try:
            self._executor.swap(operator, address, library=library)
        except BaseException:
            library.close()
            raise

    def specialise_in_background(self, cache: Callable[[], JitCache]) -> threading.Thread:
        """`specialise` on a thread of its own. Without a compiler the shipped handlers stay, and `trouble` says so."""

        def work() -> None:
            try:
                self.specialise(cache())
            except OutlastError as error:
                self.trouble = str(error)
                _log.info("shipped checkpoint handlers stay in use: %s", error)

        thread = threading.Thread(target=work, name="specialise-kv", daemon=True)
        thread.start()
        return thread
