"""A recording driver: stands in the place of `cuda.bindings.driver`, notes every call, and serves tasks in Python.

It is no GPU. "Device memory" is memory of this process, a "module" is the real cubin with made-up code addresses, and
a launched kernel is a Python thread that follows outlast/device_ring.h with one block and runs Python functions instead
of device code. It shows in which order the host asks for things and how the host's half of the protocol behaves; it can
not show memory ordering, speed, or that device code is right.
"""
# ruff: noqa: N802 - the functions are called after those of the driver

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver as real

from outlast.core import layout
from outlast.executor.backends import cubin
from outlast.executor.backends.ring import structure

CONSTANTS = layout.constants()
SUCCESS = real.CUresult.CUDA_SUCCESS


@dataclass
class Loaded:
    """A module that the recording driver was given."""

    number: int
    image: bytes
    facts: cubin.Cubin
    unloaded: bool = False
    variables: dict[str, ctypes.Array[Any]] = field(default_factory=dict)


class RecordingDriver:
    """Functions of the driver API. `calls` holds (name, arguments) in order, from every thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.notes: list[str] = []  #: what happened, in words, in the same order as the calls
        self.modules: list[Loaded] = []
        self.code: dict[int, tuple[Loaded, str]] = {}
        #: module number and operator -> what runs instead; gives (status, text)
        self.program: Callable[[Loaded, str, Any], tuple[int, str]] = lambda module, name, task: (0, "")
        self.ran: list[tuple[int, int, str]] = []  #: (ticket, module number, operator)
        self.failing: dict[str, int] = {}  #: function -> CUresult to answer with
        self.lazy = False
        self.architecture = (9, 0)
        self.leave_idle = threading.Event()
        self.stuck = threading.Event()  #: the kernel stops looking at anything
        self.trap: int = 0  #: CUresult that the kernel's stream answers with from now on
        self.environment_at_init: str | None = None
        self.stream_waits: list[tuple[int, int]] = []  #: (address, value)
        self._memory: dict[int, Any] = {}
        self._handles = itertools.count(0x1000, 0x10)
        self._code = itertools.count(0x7F0000000000, 0x1000)
        self._kernels: dict[int, threading.Thread] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(real, name)  # enumerations and flags
        answer = getattr(type(self), f"do_{name}", None)

        def call(*arguments: Any) -> tuple[Any, ...]:
            with self._lock:
                self.calls.append((name, arguments))
            if name in self.failing:
                return (real.CUresult(self.failing[name]), None, None)[: 1 if answer is None else 2]
            return (SUCCESS,) if answer is None else (SUCCESS, *answer(self, *arguments))

        return call

    def names(self) -> list[str]:
        """Names of the calls so far."""
        with self._lock:
            return [name for name, _ in self.calls]

    # -- what the functions give ---------------------------------------------------------------------------------

    def do_cuInit(self, flags: int) -> tuple[()]:
        self.environment_at_init = os.environ.get("CUDA_MODULE_LOADING")
        return ()

    def do_cuGetErrorName(self, error: Any) -> tuple[bytes]:
        return (real.CUresult(int(error)).name.encode(),)

    def do_cuGetErrorString(self, error: Any) -> tuple[bytes]:
        return (b"(recorded)",)

    def do_cuDeviceGetCount(self) -> tuple[int]:
        return (1,)

    def do_cuDeviceGet(self, ordinal: int) -> tuple[int]:
        return (ordinal,)

    def do_cuDeviceGetName(self, size: int, device: int) -> tuple[bytes]:
        return (b"recording driver\0",)

    def do_cuDeviceGetAttribute(self, kind: Any, device: int) -> tuple[int]:
        kinds = real.CUdevice_attribute
        known = {
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: self.architecture[0],
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: self.architecture[1],
            kinds.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: 1,
        }
        return (known[kind],)

    def do_cuModuleGetLoadingMode(self) -> tuple[Any]:
        modes = real.CUmoduleLoadingMode
        return (modes.CU_MODULE_LAZY_LOADING if self.lazy else modes.CU_MODULE_EAGER_LOADING,)

    def do_cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int]:
        return (next(self._handles),)

    def do_cuCtxPopCurrent(self) -> tuple[int]:
        return (0,)

    def do_cuCtxGetStreamPriorityRange(self) -> tuple[int, int]:
        return (0, -5)

    def do_cuStreamCreateWithPriority(self, flags: Any, priority: int) -> tuple[int]:
        return (next(self._handles),)

    def do_cuMemHostAlloc(self, size: int, flags: int) -> tuple[int]:
        buffer = ctypes.create_string_buffer(size + 256)
        address = -(-ctypes.addressof(buffer) // 256) * 256
        self._memory[address] = buffer
        return (address,)

    def do_cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int]:
        return (address,)

    def do_cuMemAlloc(self, size: int) -> tuple[int]:
        return self.do_cuMemHostAlloc(size, 0)

    def do_cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> tuple[()]:
        ctypes.memset(address, value, size)
        return ()

    def do_cuMemcpyHtoDAsync(self, to: int, source: int, size: int, stream: int) -> tuple[()]:
        ctypes.memmove(to, source, size)
        return ()

    def do_cuMemcpyDtoHAsync(self, to: int, source: int, size: int, stream: int) -> tuple[()]:
        ctypes.memmove(to, source, size)
        return ()

    def do_cuModuleLoadData(self, image: bytes) -> tuple[Loaded]:
        module = Loaded(len(self.modules), image, cubin.read(image))
        for variable, function in module.facts.pointers.items():
            address = next(self._code)
            self.code[address] = (module, str(function))
            module.variables[variable] = (ctypes.c_uint64 * 1)(address)
        module.variables["outlast_abi"] = (ctypes.c_uint32 * 1)(CONSTANTS["OL_ABI_VERSION"])
        self.modules.append(module)
        return (module,)

    def do_cuModuleUnload(self, module: Loaded) -> tuple[()]:
        module.unloaded = True
        return ()

    def do_cuModuleGetFunction(self, module: Loaded, name: bytes) -> tuple[str]:
        return (module.facts.functions[name.decode()].name,)

    def do_cuModuleGetGlobal(self, module: Loaded, name: bytes) -> tuple[int, int]:
        variable = module.variables[name.decode()]
        return ctypes.addressof(variable), ctypes.sizeof(variable)

    def do_cuStreamWriteValue64(self, stream: int, address: int, value: int, flags: int) -> tuple[()]:
        if stream != STALLED_STREAM:
            ctypes.c_uint64.from_address(address).value = value
        return ()

    def do_cuStreamWaitValue64(self, stream: int, address: int, value: int, flags: int) -> tuple[()]:
        self.stream_waits.append((address, value))
        return ()

    def do_cuLaunchKernel(self, *arguments: Any) -> tuple[()]:
        stream, ((ring,), _) = arguments[8], arguments[9]
        before = self._kernels.get(stream)
        thread = threading.Thread(target=self._serve, args=(ring, before), name="recorded kernel", daemon=True)
        self._kernels[stream] = thread
        thread.start()
        return ()

    def cuStreamQuery(self, stream: int) -> tuple[Any]:
        """NOT_READY while the stream's kernel runs."""
        thread = self._kernels.get(stream)
        if self.trap and thread is not None:
            return (real.CUresult(self.trap),)
        running = thread is not None and thread.is_alive()
        return (real.CUresult.CUDA_ERROR_NOT_READY if running else SUCCESS,)

    # -- the kernel's place ----------------------------------------------------------------------------------------

    def _serve(self, address: int, before: threading.Thread | None) -> None:
        """One block's leader, as in persistent.cu."""
        if before is not None:
            before.join()
        ring: Any = structure("ol_device_ring").from_address(address)
        state: Any = structure("ol_device_state").from_address(ring.state)
        tasks: Any = (structure("ol_task") * ring.capacity).from_address(ring.tasks)
        outcomes: Any = (structure("ol_outcome") * ring.capacity).from_address(ring.outcomes)
        marks: Any = (ctypes.c_uint64 * ring.capacity).from_address(ring.marks)
        mask, reason = ring.capacity - 1, 0
        while True:
            if self.stuck.is_set() or self.trap:
                time.sleep(0.001)
                if self.trap:
                    return
                continue
            ticket = state.head + 1
            slot = tasks[(ticket - 1) & mask]
            if ring.command == CONSTANTS["OL_COMMAND_LEAVE"]:
                reason = CONSTANTS["OL_LEFT_COMMAND"]
                break
            if slot.seq != ticket:
                if self.leave_idle.is_set():
                    self.leave_idle.clear()
                    reason = CONSTANTS["OL_LEFT_IDLE"]
                    break
                time.sleep(20e-6)
                continue
            task = structure("ol_task").from_buffer_copy(slot)
            status, text = 0, ""
            if task.op == CONSTANTS["OL_OP_GATE"]:
                if ctypes.c_uint64.from_address(task.arg[0]).value < task.arg[1]:
                    time.sleep(20e-6)
                    continue
            elif task.after:
                if state.completed < task.after:
                    continue
                if marks[(task.after - 1) & mask] == task.after << 1 | 1:
                    status, text = CONSTANTS["OL_DEPENDENCY"], "the task it waits for failed"
            state.head = ticket
            slot.seq = ticket + mask
            if status == 0 and task.op != CONSTANTS["OL_OP_GATE"]:
                status, text = self._run(ring, task)
            outcome = outcomes[(ticket - 1) & mask]
            outcome.status, outcome.began, outcome.ended = status, 1000, 1500
            if status:
                outcome.text = text.encode()
                if task.plan not in (0, CONSTANTS["OL_PLAN_DOOMED"]):
                    ring.plan_failed[task.plan % CONSTANTS["OL_DEVICE_PLANS"]] = task.plan
            outcome.word = marks[(ticket - 1) & mask] = ticket << 1 | (status != 0)
            state.completed = ticket
        ring.cursor = state.head
        ring.left[0] = ring.launch << 8 | reason

    def _run(self, ring: Any, task: Any) -> tuple[int, str]:
        if task.plan == CONSTANTS["OL_PLAN_DOOMED"]:
            return CONSTANTS["OL_DEPENDENCY"], "the task it waits for failed"
        if task.plan and ring.plan_failed[task.plan % CONSTANTS["OL_DEVICE_PLANS"]] == task.plan:
            return CONSTANTS["OL_DEPENDENCY"], "an earlier task of its plan failed"
        slot: Any = structure("ol_slot").from_address(ring.slots + task.op * layout.sizeof("ol_slot"))
        address = slot.fn[task.generation & 1]
        if address == 0:
            return CONSTANTS["OL_NO_OPERATOR"], "no operator is registered under this number"
        module, name = self.code[address]
        assert not module.unloaded, f"{name} was called after its module was unloaded"
        with self._lock:
            self.ran.append((task.seq, module.number, name))
        return self.program(module, name, task)


#: a stream of the caller that never reaches its write, until the test writes the gate itself
STALLED_STREAM = 0x77
