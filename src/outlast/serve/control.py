"""The control page of a worker: 4 KiB of memory that the worker writes and its supervisor reads, also after its death.

All words are 64 bit, little endian, naturally aligned, so each is read and written whole.

    offset  writer      word
    0       supervisor  magic
    8       worker      heartbeat: any change is a sign of life. The worker bumps it between steps and about ten times
                        a second while idle; the engine (or native code, through `heartbeat_address`) may bump it
                        inside a long step
    16      worker      state: see State
    24      worker      number of steps begun
    32      worker      number of suspects (at most MAX_KEYS)
    40      worker      1 if the engine itself named the suspects of this step (`mark`), 0 if the worker guessed
    64      worker      suspects: keys of the requests that the running step, submit or recovery works on
    3072    tests       fault: number of the point to fail at (0 = none), passes to let through, action
                        (see FaultAction)

Order: a worker writes the suspects, then their number, then the state. The supervisor reads them only once the
process is dead, so it never sees a half-written list as whole: at worst an older number with newer keys, which
accuses a request once too often, and one strike has no consequence but a step of its own.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import signal
import struct
import time
from collections.abc import Iterable

from outlast.core.errors import OutlastError

PAGE = 4096
MAX_KEYS = 256
MAGIC = 0x6F75746C61737431  # "outlast1"

_MAGIC, _HEARTBEAT, _STATE, _STEPS, _COUNT, _EXACT, _KEYS = 0, 8, 16, 24, 32, 40, 64
_FAULT_POINT, _FAULT_SKIP, _FAULT_ACTION = 3072, 3080, 3088
_WORD = struct.Struct("<Q")


class State(enum.IntEnum):
    """What the worker is doing."""

    STARTING = 0
    SPARE = 1
    RECOVERING = 2
    IDLE = 3  #: active, between steps
    STEPPING = 4  #: inside engine.step or engine.submit


class FaultAction(enum.IntEnum):
    """How an armed fault point fails."""

    KILL = 1  #: SIGKILL to itself
    HANG = 2  #: stop without a sign of life
    RAISE = 3  #: an exception


class InjectedFault(OutlastError):
    """A test asked for this failure through the control page."""


class ControlPage:
    """One page, mapped in this process. `create` on the supervisor's side, `attach` on the worker's."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, PAGE)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self._base = ctypes.addressof(self._anchor)

    @classmethod
    def create(cls) -> ControlPage:
        """A new page, on the supervisor's side."""
        fd = os.memfd_create("outlast-control", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE)
        page = cls(fd)
        page._put(_MAGIC, MAGIC)
        return page

    @classmethod
    def attach(cls, fd: int) -> ControlPage:
        """Map the page behind `fd`, on the worker's side. Raises OutlastError if it is none."""
        page = cls(fd)
        if page._get(_MAGIC) != MAGIC:
            raise OutlastError("the control page has no magic", why=f"descriptor {fd} is something else")
        return page

    def close(self) -> None:
        """Unmap and close. Addresses handed out are invalid from here on."""
        del self._anchor
        self._map.close()
        os.close(self.fd)

    def _get(self, offset: int) -> int:
        return int(_WORD.unpack_from(self._map, offset)[0])

    def _put(self, offset: int, value: int) -> None:
        _WORD.pack_into(self._map, offset, value & 0xFFFFFFFFFFFFFFFF)

    # --- signs of life

    @property
    def heartbeat_address(self) -> int:
        """Address of the heartbeat word in this process, for native code: `++*(uint64_t *)address` is a beat."""
        return self._base + _HEARTBEAT

    @property
    def heartbeat(self) -> int:
        """The heartbeat word."""
        return self._get(_HEARTBEAT)

    def beat(self) -> None:
        """Give a sign of life."""
        self._put(_HEARTBEAT, self._get(_HEARTBEAT) + 1)

    @property
    def state(self) -> State:
        """What the worker is doing; a value out of range reads as STARTING."""
        value = self._get(_STATE)
        return State(value) if value <= State.STEPPING else State.STARTING

    @state.setter
    def state(self, value: State) -> None:
        self._put(_STATE, value)

    # --- suspects

    def mark(self, keys: Iterable[int]) -> None:
        """Called by an engine that knows which requests its running step works on, before it touches them.

        Narrows the worker's guess (every live request). Only then does a step without tokens (a part of a prompt) count
        as progress of those requests.
        """
        self.suspect(keys)
        self._put(_EXACT, 1)

    def suspect(self, keys: Iterable[int]) -> None:
        """Name the requests to blame if the process dies now. Past MAX_KEYS, the rest goes unnamed."""
        listed = list(keys)[:MAX_KEYS]
        if listed:
            struct.pack_into(f"<{len(listed)}Q", self._map, _KEYS, *listed)
        self._put(_COUNT, len(listed))
        self._put(_EXACT, 0)

    def begin_step(self, keys: Iterable[int]) -> None:
        """The worker is about to call the engine, which may touch `keys`."""
        self.suspect(keys)
        self._put(_STEPS, self._get(_STEPS) + 1)
        self._put(_STATE, State.STEPPING)

    def end_step(self) -> None:
        """The engine returned: nobody is suspect any more."""
        self._put(_STATE, State.IDLE)

    @property
    def steps(self) -> int:
        """Steps begun so far."""
        return self._get(_STEPS)

    @property
    def exact(self) -> bool:
        """Whether the engine itself named the suspects of this step."""
        return self._get(_EXACT) == 1

    def suspects(self) -> tuple[int, ...]:
        """Whom the worker was working on when it died; () if it was idle."""
        count = min(self._get(_COUNT), MAX_KEYS)
        if count == 0 or self.state not in (State.STEPPING, State.RECOVERING):
            return ()
        return struct.unpack_from(f"<{count}Q", self._map, _KEYS)

    # --- faults, for tests

    @property
    def fault_address(self) -> int:
        """Address of the three fault words (point, passes to let through, action), for native fault points."""
        return self._base + _FAULT_POINT

    def arm(self, point: int, action: FaultAction, skip: int = 0) -> None:
        """Fail at `point` after `skip` passes. Called by tests on the supervisor's side."""
        self._put(_FAULT_SKIP, skip)
        self._put(_FAULT_ACTION, action)
        self._put(_FAULT_POINT, point)

    def fault(self, point: int) -> None:
        """A fault point of the worker; does nothing unless a test armed it."""
        if self._get(_FAULT_POINT) != point:
            return
        skip = self._get(_FAULT_SKIP)
        if skip:
            self._put(_FAULT_SKIP, skip - 1)
            return
        self._put(_FAULT_POINT, 0)
        match self._get(_FAULT_ACTION):
            case FaultAction.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultAction.HANG:
                while True:
                    time.sleep(3600)
            case _:
                raise InjectedFault(f"fault point {point} was armed", why="a test asked for it")


#: Fault points of the worker loop itself; engines use numbers from 100 on.
POINT_RECOVER = 1  #: after `activate` was read, before engine.recover
POINT_STEP = 2  #: before engine.step
POINT_REPORT = 3  #: after engine.step, before its tokens are sent
POINT_START = 4  #: before the engine is built
