"""The persistent kernel as the host sees it: launched, left, relaunched; modules loaded while it is away.

Nothing waits for the device without a deadline: the kernel may be stuck in an operator, and a call such as cuMemFree
would then never return. So the kernel is asked to leave, and only after it did are modules loaded or unloaded and
memory freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

from outlast.core import layout
from outlast.core.errors import OutlastError, Refused, TimedOut, UsageError
from outlast.executor.backends import cubin, gates, nvrtc
from outlast.executor.backends.driver import Block, Device, DeviceError, Driver
from outlast.executor.backends.ring import LINE, Ring

_log = logging.getLogger("outlast.cuda")

PARK_S = 10.0  #: how long the kernel may take to end its tasks before a module is loaded
_BEAT_S = 0.1  # also how late a kernel that left while work came in is relaunched, if nobody waits
_SCRATCH_BYTES = 4096
_LEFT_HEARTBEAT = layout.constants()["OL_LEFT_HEARTBEAT"]
_BLOCKS_MAX = layout.constants()["OL_DEVICE_BLOCKS_MAX"]
_COMMAND_RUN = layout.constants()["OL_COMMAND_RUN"]
_COMMAND_LEAVE = layout.constants()["OL_COMMAND_LEAVE"]


class Module:
    """Operators of one loaded module, used by address: what `outlast.core.jit.Library` is on the CPU."""

    def __init__(self, kernel: PersistentKernel, name: str, handle: Any, entries: dict[str, int], abi: int) -> None:
        self.name = name
        self.entries = entries  #: operator -> address of its code
        self.abi = abi  #: ABI version that it was built for
        self._kernel = kernel
        self._handle: Any = handle

    def symbol(self, name: str) -> int:
        """Address of an operator, valid until `close`; raises `OutlastError` if there is none."""
        if self._handle is None:
            raise UsageError(f"module {self.name} is unloaded")
        if name not in self.entries:
            raise OutlastError(f"module {self.name} has no operator {name!r}", why=f"it has {', '.join(self.entries)}")
        return self.entries[name]

    def close(self) -> None:
        """Unload it at the next moment when the kernel is away. The caller vouches that nothing will call it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._kernel.retire(handle)


class PersistentKernel:
    """One persistent kernel with its ring, its memory and the modules beside it. `lock` guards all of it."""

    def __init__(
        self,
        driver: Driver,
        *,
        device: int,
        capacity: int,
        blocks: int,
        threads: int,
        operators: int,
        idle_park_s: float | None,
        heartbeat_timeout_s: float | None,
        cache: nvrtc.CubinCache | None,
        allow_lazy_loading: bool,
        live_load: bool,
        first_ticket: int,
        stack_bytes: int,
    ) -> None:
        """Build the kernel, take memory and launch. Seconds; `operators`: places of the slot table."""
        if not 1 <= blocks <= _BLOCKS_MAX:
            raise UsageError(f"{blocks} blocks", why=f"a device executor has 1 to {_BLOCKS_MAX}")
        if not 32 <= threads <= nvrtc.THREADS or threads % 32:
            raise UsageError(f"{threads} threads a block", why=f"it is a multiple of 32 from 32 to {nvrtc.THREADS}")
        self.lock = threading.RLock()
        self.driver = driver
        self.cache = cache or nvrtc.CubinCache()
        self.blocks = blocks
        self.threads = threads
        self.launches = self.parks = 0
        self.parked = False  #: on request: it comes back with `resume` only
        self.closed = False
        self.loaded = 0  #: modules now loaded, the kernel's own left out
        self._live_load = live_load
        self._retired: list[Any] = []
        self._lost: OutlastError | None = None
        self._readers = 0
        self._stop = threading.Event()
        with contextlib.ExitStack() as undo:
            self.device = Device(driver, device, allow_lazy_loading=allow_lazy_loading)
            undo.callback(self.device.release)
            image = self.cache.cubin(
                nvrtc.kernel_source(threads), name="persistent", architecture=self.device.architecture, operators=False
            )
            self.limits = gates.kernel_limits(cubin.read(image), stack_bytes=stack_bytes)
            with self.device.current(), contextlib.ExitStack() as resources:
                limit = driver.api.CUlimit.CU_LIMIT_STACK_SIZE  # before the launch: it can not change under a kernel
                driver.call("cuCtxSetLimit", limit, stack_bytes)
                self._memory(capacity, operators, resources, first_ticket)
                self.ring.control.idle_ns = int((idle_park_s or 0.0) * 1e9)
                self.ring.control.heartbeat_ns = int((heartbeat_timeout_s or 0.0) * 1e9)
                self._stream = self._kept_stream(resources)
                self._control = self._kept_stream(resources)
                handle = driver.call("cuModuleLoadData", image)
                resources.callback(driver.call, "cuModuleUnload", handle)
                self._function = driver.call("cuModuleGetFunction", handle, gates.KERNEL.encode())
                self._start_state(first_ticket)
                self.sequence = self._pointer(handle, gates.ENTRY_PREFIX + "sequence")
                self._launch()
                self._resources = resources.pop_all()
            undo.pop_all()
        self._beat = threading.Thread(target=self._beat_main, name="outlast-cuda-heartbeat", daemon=True)
        self._beat.start()

    def _memory(self, capacity: int, operators: int, resources: contextlib.ExitStack, first_ticket: int) -> None:
        self._scratch = self.device.pinned(_SCRATCH_BYTES)
        resources.callback(self.driver.call, "cuMemFreeHost", self._scratch.host)
        block = self.device.pinned(Ring.size(capacity))
        resources.callback(self.driver.call, "cuMemFreeHost", block.host)
        self.address = block.device
        self.ring = Ring(block, capacity, first_ticket)
        # State, marks and slot table in one allocation; each begins on a line of its own.
        state_bytes, mark_bytes = layout.sizeof("ol_device_state"), -(-8 * capacity // LINE) * LINE
        self._device_bytes = state_bytes + mark_bytes + operators * layout.sizeof("ol_slot")
        base = int(self.driver.call("cuMemAlloc", self._device_bytes))
        resources.callback(self.driver.call, "cuMemFree", base)
        self._state, self.slots = base, base + state_bytes + mark_bytes
        control = self.ring.control
        control.state, control.marks, control.slots = base, base + state_bytes, self.slots
        control.operators = operators

    def _kept_stream(self, resources: contextlib.ExitStack) -> Any:
        stream = self.device.low_priority_stream()
        resources.callback(self.driver.call, "cuStreamDestroy", stream)
        return stream

    def _start_state(self, first_ticket: int) -> None:
        members = {member.name: member.offset for member in layout.structs()["ol_device_state"].members}
        self.driver.call("cuMemsetD8Async", self._state, 0, self._device_bytes, self._control)
        for word in ("head", "completed"):
            self.write(self._state + members[word], first_ticket)

    def write(self, address: int, value: int) -> None:
        """Write 64 bits of device memory, in order with other writes. The context is current, the lock held."""
        ctypes.c_uint64.from_address(self._scratch.host).value = value
        self.driver.call("cuMemcpyHtoDAsync", address, self._scratch.host, 8, self._control)
        self.driver.call("cuStreamSynchronize", self._control)

    def _read(self, address: int, size: int) -> int:
        self.driver.call("cuMemcpyDtoHAsync", self._scratch.host, address, size, self._control)
        self.driver.call("cuStreamSynchronize", self._control)
        return int.from_bytes(ctypes.string_at(self._scratch.host, size), "little")

    def _pointer(self, handle: Any, variable: str) -> int:
        """The code address that a module's entry variable holds once it is loaded."""
        place, size = self.driver.call("cuModuleGetGlobal", handle, variable.encode())
        if size != 8:
            raise Refused(f"variable {variable} is no entry", why=f"it has {size} bytes and not 8")
        address = self._read(int(place), 8)
        if address == 0:
            raise Refused(f"variable {variable} is no entry", why="the driver did not fill it")
        return address

    # -- launch and leave --------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        """Launch behind whatever is in the kernel's stream. The context is current, the lock held."""
        self.launches += 1
        self.ring.control.launch = self.launches
        self.ring.control.command = _COMMAND_RUN
        arguments = ((self.address,), (ctypes.c_void_p,))
        self.driver.call(
            "cuLaunchKernel", self._function, self.blocks, 1, 1, self.threads, 1, 1, 0, self._stream, arguments, 0
        )

    def _away(self) -> bool:
        """Whether all blocks of the last launch have said that they leave. Needs no lock."""
        left = self.ring.control.left
        return all(left[block] >> 8 == self.launches for block in range(self.blocks))

    def _ended(self) -> bool:
        """Whether the kernel is gone from the device; raises the error that ended it."""
        api = self.driver.api.CUresult
        with self.device.current():
            code = self.driver.status("cuStreamQuery", self._stream)
        if code == int(api.CUDA_ERROR_NOT_READY):
            return False
        if code != 0:
            error = self.driver.error("the persistent kernel", code)
            self._lost = DeviceError(
                "the persistent kernel was ended by an error; the device's context can not be used any more",
                why=error.why,
                do="An operator did this. Restart the process.",
                code=code,
            )
            raise self._lost
        return True

    @property
    def lost(self) -> bool:
        """Whether an error ended the kernel, and with it the device's context."""
        return self._lost is not None

    def check(self) -> None:
        """Raise what makes every further call pointless: closed, or the context lost."""
        if self.closed:
            raise UsageError("the executor is closed")
        if self._lost is not None:
            raise self._lost

    def look(self) -> None:
        """See whether the kernel still runs, for a caller that has waited long. Raises its error."""
        if self.lock.acquire(blocking=False):
            try:
                self.check()
                self._ended()
            finally:
                self.lock.release()

    @property
    def reason(self) -> int:
        """Why the kernel is away, as in `outlast.executor.stats.AWAY`; 0 = it is there."""
        if self.parked or self.closed:
            return int(layout.constants()["OL_LEFT_COMMAND"])
        return int(self.ring.control.left[0] & 0xFF) if self._away() else 0

    def revive(self, *, idle: bool = False) -> None:
        """Relaunch a kernel that left by itself while there is work, or even without (`idle`). Never blocks."""
        if self.parked or not self._away() or not self.lock.acquire(blocking=False):
            return
        try:
            self.check()
            if not self.parked and self._away() and (idle or self.ring.completed() < self.ring.tail):
                if self.ring.control.left[0] & 0xFF == _LEFT_HEARTBEAT:
                    _log.warning("the persistent kernel had left: this process gave no sign of life")
                self._ended()
                with self.device.current():
                    self._launch()
        finally:
            self.lock.release()

    def park(self, timeout: float) -> int:
        """Let the kernel end the tasks that it has begun and leave; it stays away until `resume`.

        Returns the number of tickets it has claimed. Raises `TimedOut` if it does not leave; it then goes on.
        """
        with self.lock:
            self.check()
            self._leave(timeout)
            if not self.parked:
                self.parks += 1
            self.parked = True
            return int(self.ring.control.cursor)

    def resume(self) -> None:
        """Launch a parked kernel where it stopped. Repeating does nothing."""
        with self.lock:
            self.check()
            if self.parked:
                with self.device.current():
                    self._launch()
                self.parked = False

    def _leave(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self.ring.control.command = _COMMAND_LEAVE
        while not (self._ended() and self._away()):
            if time.monotonic() >= deadline:
                self.ring.control.command = _COMMAND_RUN
                raise TimedOut(
                    f"the persistent kernel has not left after {timeout} s", why="a task that it runs does not end"
                )
            time.sleep(20e-6)

    @contextlib.contextmanager
    def quiet(self, timeout: float = PARK_S) -> Iterator[None]:
        """A moment without the kernel: modules may be loaded and unloaded. It comes back unless it was parked before.

        With `live_load` it stays; whether the driver can load beside a spinning kernel then is its affair.
        """
        with self.lock:
            self.check()
            returns = not self.parked and not self._live_load
            if returns:
                self._leave(timeout)
                self.parks += 1
            try:
                with self.device.current():
                    self._unload_retired()
                    yield
            finally:
                if returns:
                    with self.device.current():
                        self._launch()

    # -- modules -----------------------------------------------------------------------------------------------------

    def load(self, image: bytes, name: str, timeout: float = PARK_S) -> Module:
        """Check a linked cubin against what this kernel offers and load it. Raises `Refused`, `TimedOut`."""
        entries = gates.check_operator(cubin.read(image), name, self.limits)
        with self.quiet(timeout):
            handle = self.driver.call("cuModuleLoadData", image)
            try:
                addresses = {operator: self._pointer(handle, variable) for operator, variable in entries.items()}
                place, size = self.driver.call("cuModuleGetGlobal", handle, b"outlast_abi")
                abi = self._read(int(place), 4) if size == 4 else 0
            except OutlastError:
                self.driver.call("cuModuleUnload", handle)
                raise
            self.loaded += 1
            return Module(self, name, handle, addresses, abi)

    def retire(self, handle: Any) -> None:
        """Unload a module when the kernel is away the next time."""
        with self.lock:
            self._retired.append(handle)

    def _unload_retired(self) -> None:
        while self._retired:
            self.driver.call("cuModuleUnload", self._retired.pop())
            self.loaded -= 1

    def allocate(self, size: int) -> Block:
        """Pinned memory that operators and this process share; freed with the executor."""
        with self.lock, self.device.current():
            self.check()
            block = self.device.pinned(size)
            self._resources.callback(self.driver.call, "cuMemFreeHost", block.host)
            return block

    # -- life --------------------------------------------------------------------------------------------------------

    def _beat_main(self) -> None:
        while not self._stop.wait(_BEAT_S):
            self.ring.control.heartbeat += 1
            try:
                self.revive()
            except OutlastError as error:  # the next caller meets the same error; here nobody would see it
                _log.error("the persistent kernel is lost: %s", error)
                return

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Keep the ring's memory in place for a thread that reads it without the lock."""
        with self.lock:
            self.check()
            self._readers += 1
        try:
            yield
        finally:
            with self.lock:
                self._readers -= 1

    def beat(self) -> None:
        """Give a sign of life; the kernel's own thread does so ten times a second."""
        with self.lock:
            self.check()
            self.ring.control.heartbeat += 1
            self.revive(idle=True)

    def abandon(self) -> None:
        """Give up on a kernel that does not leave: its memory stays, and the missing heartbeat ends it later."""
        with self.lock:
            self.closed = True
            self._stop.set()

    def close(self) -> None:
        """Give everything back. The kernel is parked, or lost."""
        with self.lock:
            self.closed = True  # which readers meet at their next look
            self._stop.set()
        self._beat.join()
        while self._readers:
            time.sleep(20e-6)
        if self.lost:
            return  # in a lost context every call fails; the process's end gives it back
        with self.device.current():
            self._unload_retired()
            self._resources.close()
        self.device.release()
