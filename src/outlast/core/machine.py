"""What this machine offers: each capability is tried, not looked up in a version table.

A probe leaves nothing behind and raises nothing: what goes wrong is its finding. Probes that need packages above
`core` (the model, the GPU of an extra) live with `outlast doctor`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import re
import resource
import signal
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outlast.core.errors import OutlastError
from outlast.core.jit import Compiler, JitCache, Library
from outlast.core.memory import Memory, huge_page_bytes

State = Literal["ok", "limited", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of `outlast doctor`."""

    name: str
    state: State
    detail: str  #: what was found
    advice: str = ""  #: why not more, and what to do about it


def processor() -> Finding:
    """Architecture, vector extensions that the kernels use, and cores this process may run on."""
    text = _read("/proc/cpuinfo")
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    flags = set(found.group(1).split()) if found else set()
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "amx_int8")
    has = [name for name in wanted if name in flags]
    detail = f"{platform.machine()}, {model.group(1) if model else 'unknown model'}; {', '.join(has) or 'no vectors'}"
    if {"avx2", "fma", "f16c"} <= flags:
        return Finding("processor", "ok", detail)
    return Finding("processor", "limited", detail, "Without AVX2, FMA and F16C the portable kernels run, more slowly.")


def cores() -> Finding:
    """Cores this process may use, after affinity and the cgroup's quota."""
    usable = len(os.sched_getaffinity(0))
    detail = f"{usable} of {os.cpu_count()}"
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and int(quota[0]) / int(quota[1]) < usable:
        return Finding("cores", "limited", f"{detail}; cgroup quota {int(quota[0]) / int(quota[1]):g}", "See cpu.max.")
    if usable == 1:
        return Finding("cores", "limited", detail, "Engine and spare share one core: a takeover slows streams more.")
    return Finding("cores", "ok", detail)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Most memory that this process and what it starts may have."""

    size: int  #: bytes
    source: str  #: what sets it, for people


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The smallest of the machine's memory, the limits of this process's cgroup and of those above, and RLIMIT_AS.

    `root` has the folders proc and sys; tests give one of their own.
    """
    found = dict(re.findall(r"^(MemTotal):\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE))
    limits = [MemoryLimit(int(found["MemTotal"]) << 10, "this machine")] if found else []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        base, name = root / "sys/fs/cgroup", "memory.max"
        if "memory" in controllers.split(","):
            base, name = base / "memory", "memory.limit_in_bytes"
        elif controllers:
            continue
        # Seen from inside a container, its own cgroup is at the top, whatever its path is outside.
        for folder in (base, *(base / Path(*Path(path).parts[1 : n + 1]) for n in range(1, len(Path(path).parts)))):
            text = _read(folder / name).strip()
            if text.isdigit():
                limits.append(MemoryLimit(int(text), f"the cgroup's {name}"))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        limits.append(MemoryLimit(space, "the limit of address space (ulimit -v)"))
    return min(limits, key=lambda limit: limit.size, default=MemoryLimit(1 << 62, "nothing that is known"))


def memory() -> Finding:
    """Memory that is available now, and the cgroup's limit."""
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE))
    total, free = int(found.get("MemTotal", 0)) << 10, int(found.get("MemAvailable", 0)) << 10
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        free = min(free, int(limit) - int(_read("/sys/fs/cgroup/memory.current") or 0))
    detail = f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB"
    if free < 2 << 30:
        return Finding("memory", "limited", detail, "Two engines and the log of the built-in model want about 2 GiB.")
    return Finding("memory", "ok", detail)


def compiler() -> Finding:
    """Whether an operator can be compiled, loaded and called; done for real, through the JIT cache."""
    try:
        found = Compiler.find()
        cache = JitCache(compiler=found)
        source = 'extern "C" __attribute__((visibility("default"))) int probe() { return 42; }'
        library = Library(cache.compile(source, name="probe"))
        answer = ctypes.CFUNCTYPE(ctypes.c_int)(library.symbol("probe"))()
        library.close()
    except OutlastError as error:
        return _refused("compiler", error)
    where = f"{' '.join(found.command)} ({found.origin}): {found.version}; cache {cache.directory}"
    if answer != 42:
        return Finding("compiler", "missing", where, f"A compiled operator returned {answer} and not 42.")
    return Finding("compiler", "ok", where)


def memfd() -> Finding:
    """Anonymous shared memory that no peer can shrink."""
    try:
        with Memory.anonymous(mmap.PAGESIZE) as region:
            sealed = region.sealed
            region.prefault()
    except (OutlastError, OSError) as error:
        return _refused("memfd", error)
    if not sealed:
        return Finding("memfd", "limited", "without seals", "A faulty peer could shrink shared memory (SIGBUS).")
    return Finding("memfd", "ok", "sealed shared memory")


def huge_pages() -> Finding:
    """Whether one huge page can be mapped."""
    size = huge_page_bytes()
    try:
        with Memory.hugetlb(max(size, 1)) as region:
            detail = f"{region.size >> 10} KiB pages"
    except (OutlastError, OSError) as error:
        return _refused("huge pages", error)
    return Finding("huge pages", "ok", detail)


def pidfd() -> Finding:
    """Whether a process can be watched and signalled without a race on its number."""
    try:
        fd = os.pidfd_open(os.getpid())
        try:
            signal.pidfd_send_signal(fd, 0)
        finally:
            os.close(fd)
    except (OSError, AttributeError) as error:
        return Finding("pidfd", "missing", str(error), "Needs Linux 5.3; deaths are then seen by polling.")
    return Finding("pidfd", "ok", "deaths are seen at once")


# Linux UAPI: userfaultfd.h and fs.h. Requests are _IOWR(type, number, size) and equal on x86-64 and arm64.
_UFFDIO_API, _UFFDIO_REGISTER, _UFFDIO_WRITEPROTECT = 0xC018AA3F, 0xC020AA00, 0xC018AA06
_PAGEMAP_SCAN = 0xC0606610
_USERFAULTFD_IOC_NEW = 0xAA00
_WP_ASYNC, _WP_UNPOPULATED = 1 << 15, 1 << 13
_SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}


def userfaultfd() -> Finding:
    """Whether writes can be tracked: protect four pages asynchronously, write one, and scan for it."""
    why_not = "Opaque regions are then compared by page hashes, at some 50 times the cost."
    fd = _open_userfaultfd()
    if isinstance(fd, str):
        advice = f"{why_not} Run as root, or set vm.unprivileged_userfaultfd=1 or the mode of /dev/userfaultfd."
        return Finding("userfaultfd", "missing", fd, advice)
    region = mmap.mmap(-1, 4 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        try:
            fcntl.ioctl(fd, _UFFDIO_API, struct.pack("<QQQ", 0xAA, _WP_ASYNC | _WP_UNPOPULATED, 0))
        except OSError as error:
            return Finding(
                "userfaultfd", "limited", f"no asynchronous write protection ({error.strerror})",
                f"Needs Linux 6.7; this is {platform.release()}. {why_not}",
            )  # fmt: skip
        start = ctypes.addressof(ctypes.c_char.from_buffer(region))
        size = len(region)
        fcntl.ioctl(fd, _UFFDIO_REGISTER, struct.pack("<QQQQ", start, size, 2, 0))  # 2: write protection
        fcntl.ioctl(fd, _UFFDIO_WRITEPROTECT, struct.pack("<QQQ", start, size, 1))
        region[2 * mmap.PAGESIZE] = 1
        written = _written_pages(start, size)
    except OSError as error:
        return Finding("userfaultfd", "limited", f"write tracking fails: {error.strerror}", why_not)
    finally:
        os.close(fd)
        region.close()
    if written != [2]:
        return Finding("userfaultfd", "limited", f"a write to page 2 was reported as {written}", why_not)
    return Finding("userfaultfd", "ok", "asynchronous write protection and PAGEMAP_SCAN find written pages exactly")


def _open_userfaultfd() -> int | str:
    """A descriptor, or why there is none. Only faults of user code are wanted, which fewer rights suffice for."""
    number = _SYS_USERFAULTFD.get(platform.machine())
    if number is None:
        return f"not known for {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.syscall(number, os.O_CLOEXEC | 1))  # 1: UFFD_USER_MODE_ONLY
    if fd >= 0:
        return fd
    reason = os.strerror(ctypes.get_errno())
    with contextlib.suppress(OSError):
        device = os.open("/dev/userfaultfd", os.O_RDWR | os.O_CLOEXEC)
        try:
            return int(fcntl.ioctl(device, _USERFAULTFD_IOC_NEW, os.O_CLOEXEC | 1))
        finally:
            os.close(device)
    return reason


def _written_pages(start: int, size: int) -> list[int]:
    """Indices of pages written since they were protected, by the PAGEMAP_SCAN request (Linux 6.7)."""
    regions = (ctypes.c_uint64 * (3 * 8))()  # struct page_region: start, end, categories
    written = 1 << 1  # PAGE_IS_WRITTEN
    argument = struct.pack(
        "<12Q", 96, 0, start, start + size, 0, ctypes.addressof(regions), 8, 0, 0, written, 0, written
    )
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = _ioctl_result(pagemap, _PAGEMAP_SCAN, argument)
    finally:
        os.close(pagemap)
    pages: list[int] = []
    for first, end in zip(regions[: 3 * found : 3], regions[1 : 3 * found : 3], strict=True):
        pages += range((first - start) // mmap.PAGESIZE, (end - start) // mmap.PAGESIZE)
    return pages


def _ioctl_result(fd: int, request: int, argument: bytes) -> int:
    """The ioctl's own return value, which fcntl.ioctl gives only for a buffer that it may change."""
    return int(fcntl.ioctl(fd, request, bytearray(argument), True))


def gpu() -> Finding:
    """Whether the CUDA driver starts and sees a device."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("gpu", "missing", "no libcuda.so.1", "Everything runs on the CPU. A GPU needs NVIDIA's driver.")
    count, version, name = ctypes.c_int(0), ctypes.c_int(0), ctypes.create_string_buffer(100)
    status = (
        cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(version)) or cuda.cuDeviceGetCount(ctypes.byref(count))
    )
    if status or not count.value:
        detail = f"the driver reports error {status}" if status else "the driver sees no device"
        return Finding("gpu", "missing", detail, "Check nvidia-smi, and that /dev/nvidia* may be opened.")
    cuda.cuDeviceGetName(name, len(name), 0)
    cuda_version = f"CUDA {version.value // 1000}.{version.value // 10 % 100}"
    return Finding("gpu", "ok", f"{count.value} x {name.value.decode(errors='replace')}, {cuda_version}")


def durable_folder(folder: Path) -> Finding:
    """Whether a log under `folder` would survive the loss of the host: can be written, flushed, and is on a disk."""
    advice = "Durability `host` needs a folder on a disk: --log-dir DIR."
    place = folder
    while not place.exists():
        place = place.parent
    try:
        with tempfile.NamedTemporaryFile(dir=place) as file:
            file.write(b"outlast")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Finding("durability host", "missing", f"{place}: {error.strerror}", advice)
    kind = _filesystem(place)
    if kind in ("tmpfs", "ramfs"):
        return Finding("durability host", "limited", f"{folder} is on {kind}: its files die with the host", advice)
    return Finding("durability host", "ok", f"{folder} ({kind}, {_free_gib(place):.0f} GiB free)")


def _filesystem(path: Path) -> str:
    """Type of the file system that holds `path`: the mount with the longest matching path, the last one if equal."""
    best, kind = "", "unknown"
    target = str(path.resolve())
    for line in _read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def _free_gib(path: Path) -> float:
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize / 2**30


def _refused(name: str, error: OutlastError | OSError) -> Finding:
    if isinstance(error, OutlastError):
        return Finding(name, "missing", ": ".join(filter(None, (error.what, error.why))), error.do)
    code = errno.errorcode.get(error.errno or 0, "?")
    return Finding(name, "missing", f"{error.strerror or error} ({code})")


def _read(path: str | Path) -> str:
    """Text of a kernel file; "" where it does not exist."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def findings(log_dir: Path) -> Iterator[Finding]:
    """Every probe of this module, in the order of the table."""
    for probe in (processor, cores, memory, compiler, memfd, huge_pages, pidfd, userfaultfd, gpu):
        yield probe()
    yield durable_folder(log_dir)
