"""Fixtures of the executor's tests: the backends, and the tools that compile for a CUDA device."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from outlast.core.errors import NotPossibleHere, TimedOut
from outlast.core.jit import Compiler, JitCache, Library
from outlast.executor import Executor
from outlast.executor.backends import nvrtc


class Words(Protocol):
    """Eight 64-bit words that a backend's operators can reach."""

    v: Any

    @property
    def address(self) -> int: ...


class HostWords(ctypes.Structure):
    """Words in this process's memory."""

    _fields_ = (("v", ctypes.c_uint64 * 8),)

    @property
    def address(self) -> int:
        return ctypes.addressof(self)


class Backend:
    """One backend: executors of it, operators for it, memory that both sides reach."""

    name = ""

    def executor(self, **options: Any) -> Any:
        """A new executor; the fixture closes it."""
        raise NotImplementedError

    def build(self, executor: Any, source: str, name: str, **defines: int | str) -> Any:
        """Operators compiled for this backend: something with `symbol` and `close`."""
        raise NotImplementedError

    def words(self, executor: Any, count: int = 8) -> Any:
        """Zeroed words that operators and this process share; `v` has at least `count`."""
        raise NotImplementedError


def close_all(executors: list[Any]) -> None:
    """Close them; a test that failed may have left a task that does not end, which must not hold the others up."""
    for executor in executors:
        with contextlib.suppress(TimedOut):
            executor.close(timeout=5.0)


class CpuBackend(Backend):
    """Threads of this process."""

    name = "cpu"

    def __init__(self, cache: JitCache) -> None:
        self._cache = cache
        self._opened: list[Any] = []

    def executor(self, **options: Any) -> Any:
        executor = Executor(**options)
        self._opened.append(executor)
        return executor

    def build(self, executor: Any, source: str, name: str, **defines: int | str) -> Any:
        return Library(self._cache.compile(source, name=name, defines=defines))

    def words(self, executor: Any, count: int = 8) -> Any:
        class Words(HostWords):
            _fields_ = (("more", ctypes.c_uint64 * max(0, count - 8)),)

        return Words()

    def close(self) -> None:
        close_all(self._opened)


class CudaBackend(Backend):
    """A persistent kernel on the first CUDA device."""

    name = "cuda"

    def __init__(self, cache: nvrtc.CubinCache) -> None:
        self._cache = cache
        self._opened: list[Any] = []

    def executor(self, **options: Any) -> Any:
        from outlast.executor.backends.cuda import CudaExecutor

        executor = CudaExecutor(cache=self._cache, **{**options, "workers": max(1, options.get("workers", 1))})
        self._opened.append(executor)
        return executor

    def build(self, executor: Any, source: str, name: str, **defines: int | str) -> Any:
        return executor.compile(source, name=name, defines=defines)

    def words(self, executor: Any, count: int = 8) -> Any:
        block = executor.allocate(8 * max(8, count))
        words = HostWords.from_address(block.host)
        assert block.host == block.device, "addressing is not unified here: tests share addresses with the device"
        return words

    def close(self) -> None:
        close_all(self._opened)


class RecordedBackend(CudaBackend):
    """The host side of the CUDA backend, with a recording driver in place of the driver and its device.

    Operators are compiled and checked for real; what then runs in their place are Python functions of the same meaning.
    """

    name = "recorded"

    def __init__(self, cache: nvrtc.CubinCache) -> None:
        super().__init__(cache)
        self._defines: dict[int, dict[str, int | str]] = {}

    def executor(self, **options: Any) -> Any:
        from recorded_operators import PROGRAMS
        from recording_driver import Loaded, RecordingDriver

        from outlast.executor.backends.driver import Driver

        def program(module: Loaded, name: str, task: Any) -> tuple[int, str]:
            words = (ctypes.c_uint64 * 8).from_address(task.arg[0])
            return PROGRAMS[name](words, task, self._defines.get(module.number, {}))

        self.recording = RecordingDriver()
        self.recording.program = program
        return super().executor(**options, driver=Driver(self.recording))

    def build(self, executor: Any, source: str, name: str, **defines: int | str) -> Any:
        module = super().build(executor, source, name, **defines)
        self._defines[len(self.recording.modules) - 1] = defines
        return module


@pytest.fixture(scope="session")
def toolkit() -> nvrtc.Toolkit:
    """NVRTC and nvJitLink. They need no device, so CI has them and must not skip."""
    try:
        return nvrtc.toolkit()
    except NotPossibleHere as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cubins(toolkit: nvrtc.Toolkit, tmp_path_factory: pytest.TempPathFactory) -> nvrtc.CubinCache:
    """A cache of device modules that all tests of the session share."""
    return nvrtc.CubinCache(tmp_path_factory.mktemp("cubin"), tools=toolkit)


@pytest.fixture(scope="session")
def host_operators(compiler: Compiler, tmp_path_factory: pytest.TempPathFactory) -> JitCache:
    return JitCache(tmp_path_factory.mktemp("backend-jit"), compiler=compiler)


@pytest.fixture(params=["cpu", "recorded", "cuda"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """Each backend in turn; one that this machine lacks is skipped, with the reason."""
    made: CpuBackend | CudaBackend
    if request.param == "cpu":
        made = CpuBackend(request.getfixturevalue("host_operators"))
    elif request.param == "recorded":
        made = RecordedBackend(request.getfixturevalue("cubins"))
    else:
        from outlast.executor.backends import driver

        try:
            driver.probe()
            made = CudaBackend(nvrtc.CubinCache(tmp_path_factory.mktemp("cubin")))
        except NotPossibleHere as error:
            pytest.skip(f"not run on a GPU: {error}")
    yield made
    made.close()
