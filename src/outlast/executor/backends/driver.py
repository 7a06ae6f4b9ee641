"""One CUDA device of this process through the driver API of cuda-bindings: context, memory, streams, modules.

Calls are made by name (`Driver.call("cuModuleLoadData", image)`), so that a test can put a recording in the driver's
place. Nothing here starts a kernel by itself.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from outlast.core.errors import NotPossibleHere, OutlastError, UsageError

_log = logging.getLogger("outlast.cuda")

CPU_INSTEAD = "The CPU backend needs neither: outlast.executor.Executor()."


class DeviceError(OutlastError):
    """A call of the CUDA driver failed; `code` is its CUresult."""

    def __init__(self, what: str, *, why: str = "", do: str = "", code: int = 0) -> None:
        super().__init__(what, why=why, do=do)
        self.code = code


@dataclass(frozen=True, slots=True)
class Block:
    """Pinned host memory that a device reads and writes in place."""

    host: int  #: address for this process
    device: int  #: address for operators; the same number wherever addressing is unified
    size: int  #: bytes


class Driver:
    """The driver API, with errors raised. `api` is `cuda.bindings.driver`, or what a test puts in its place."""

    def __init__(self, api: Any | None = None) -> None:
        """Find and start the driver; raises `NotPossibleHere` naming what is missing.

        Sets CUDA_MODULE_LOADING=EAGER first: a kernel that is loaded on first use can wait for the persistent one.
        """
        if api is None:
            try:
                api = importlib.import_module("cuda.bindings.driver")
            except ImportError as error:
                raise NotPossibleHere(
                    "no CUDA device can be used",
                    why=f"the package cuda-bindings is missing ({error})",
                    do=f"Run: pip install 'outlast[cuda]'. {CPU_INSTEAD}",
                ) from error
        self.api: Any = api
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"
        try:
            self.call("cuInit", 0)
        except RuntimeError as error:  # cuda-bindings did not find libcuda
            raise NotPossibleHere(
                "no CUDA device can be used",
                why=f"libcuda.so.1, which the NVIDIA driver brings, is missing ({error})",
                do=f"Install the NVIDIA driver (branch 580 or newer). {CPU_INSTEAD}",
            ) from error
        except DeviceError as error:
            raise NotPossibleHere("no CUDA device can be used", why=error.why, do=CPU_INSTEAD) from error

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver; gives its value, a tuple of several, or None. Raises `DeviceError`."""
        status, *values = getattr(self.api, name)(*arguments)
        if int(status) != 0:
            raise self._error(name, int(status), status)
        return values[0] if len(values) == 1 else tuple(values) or None

    def status(self, name: str, *arguments: Any) -> int:
        """Call a function whose CUresult is the answer, such as cuStreamQuery."""
        return int(getattr(self.api, name)(*arguments)[0])

    def error(self, name: str, code: int) -> DeviceError:
        """The error that a CUresult stands for."""
        return self._error(name, code, self.api.CUresult(code))

    def _error(self, name: str, code: int, status: Any) -> DeviceError:
        texts = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            failed, text = getattr(self.api, function)(status)
            texts.append(text.decode() if int(failed) == 0 and text else "")
        return DeviceError(f"{name} failed", why=f"{texts[0] or f'CUresult {code}'} {texts[1]}".strip(), code=code)

    def devices(self) -> int:
        """How many devices there are."""
        return int(self.call("cuDeviceGetCount"))


class Device:
    """The primary context of one device. Its methods make the context current in the calling thread and put back."""

    def __init__(self, driver: Driver, ordinal: int, *, allow_lazy_loading: bool = False) -> None:
        """Retain the context; raises `NotPossibleHere` if the device lacks what the executor needs."""
        self.driver = driver
        api = driver.api
        count = driver.devices()
        if not 0 <= ordinal < count:
            raise UsageError(f"CUDA device {ordinal}", why=f"there are {count} devices")
        self._handle = driver.call("cuDeviceGet", ordinal)
        kinds = api.CUdevice_attribute
        major = self._attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.architecture = 10 * major + minor  #: 90 for sm_90
        self.name = driver.call("cuDeviceGetName", 128, self._handle).split(b"\0")[0].decode()
        if self.architecture < 75:  # order.h needs the memory model of sm_70, NVRTC 13 compiles from sm_75 on
            raise NotPossibleHere(f"device {self.name} can not be used", why="it is older than sm_75", do=CPU_INSTEAD)
        #: whether a stream can write and wait for 64-bit values, which ordering with a caller's stream needs
        self.stream_values = bool(self._attribute(kinds.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS))
        if (
            not allow_lazy_loading
            and driver.call("cuModuleGetLoadingMode") != api.CUmoduleLoadingMode.CU_MODULE_EAGER_LOADING
        ):
            raise NotPossibleHere(
                "CUDA loads modules lazily in this process",
                why="it was started before the executor; a kernel that is loaded on first use can then wait for ever "
                "for the persistent one",
                do="Set CUDA_MODULE_LOADING=EAGER before the process first uses CUDA, or pass allow_lazy_loading=True.",
            )
        self._context = driver.call("cuDevicePrimaryCtxRetain", self._handle)

    def _attribute(self, kind: Any) -> int:
        return int(self.driver.call("cuDeviceGetAttribute", kind, self._handle))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current in this thread."""
        self.driver.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent")

    def release(self) -> None:
        """Give the context back."""
        self.driver.call("cuDevicePrimaryCtxRelease", self._handle)

    def pinned(self, size: int) -> Block:
        """Zeroed pinned memory, mapped for the device. The context is current."""
        import ctypes

        host = int(self.driver.call("cuMemHostAlloc", size, self.driver.api.CU_MEMHOSTALLOC_DEVICEMAP))
        ctypes.memset(host, 0, size)
        return Block(host, int(self.driver.call("cuMemHostGetDevicePointer", host, 0)), size)

    def low_priority_stream(self) -> Any:
        """A stream that waits for no other and yields to all. The context is current."""
        least, _ = self.driver.call("cuCtxGetStreamPriorityRange")
        flags = self.driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING
        return self.driver.call("cuStreamCreateWithPriority", flags, least)


def probe() -> str:
    """What CUDA offers here, in words. Makes no context. Raises `NotPossibleHere`."""
    driver = Driver()
    count = driver.devices()
    if count == 0:
        raise NotPossibleHere("no CUDA device can be used", why="the driver finds none", do=CPU_INSTEAD)
    names = [
        driver.call("cuDeviceGetName", 128, driver.call("cuDeviceGet", i)).split(b"\0")[0].decode()
        for i in range(count)
    ]
    return ", ".join(names)
