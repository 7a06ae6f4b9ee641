"""What one step wrote, as the checkpointer reads it (`ol_step_write`, native/include/outlast/region.h)."""

from __future__ import annotations

import ctypes

from outlast.engines.native.sequences import Emitted


class _StepWrite(ctypes.Structure):
    _fields_ = (
        ("key", ctypes.c_uint64), ("table", ctypes.c_uint64), ("generation", ctypes.c_uint32),
        ("first", ctypes.c_uint32), ("count", ctypes.c_uint32), ("state_offset", ctypes.c_uint32),
        ("state", ctypes.c_uint64), ("state_length", ctypes.c_uint64),
    )  # fmt: skip


class StepWrite:
    """One sequence's step; keeps the memory that it points to, which must live until the epoch is committed."""

    def __init__(
        self, key: int, generation: int, table: int, first: int, count: int, index: int, emitted: Emitted | None
    ) -> None:
        """`table`: address of the block table; `index`: of the emitted token."""
        payload = b"" if emitted is None else emitted.encode()
        self._state = ctypes.create_string_buffer(payload, max(1, len(payload)))
        self._length = ctypes.c_uint32(len(payload))
        self._write = _StepWrite(
            key, table, generation, first, count, index,
            ctypes.addressof(self._state) if payload else 0, ctypes.addressof(self._length) if payload else 0,
        )  # fmt: skip

    @property
    def address(self) -> int:
        """Of the `ol_step_write`."""
        return ctypes.addressof(self._write)

    @property
    def no_tasks(self) -> int:
        """An address for an empty list of tasks: the forward was not one of the executor's."""
        return ctypes.addressof(self._state)
