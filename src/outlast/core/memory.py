"""Shared memory regions: one class over an anonymous memfd, a file, huge pages, or a DAX map.

Everything that must survive a process lives in a `Memory`. It is handed to another process by descriptor, never by
name, so nothing is left behind when the last process that holds it ends. CXL memory appears as a file on a DAX file
system or as a DAX character device and is opened by path like any other file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
from pathlib import Path
from types import TracebackType
from typing import Literal

from outlast.core.errors import CorruptState, NotPossibleHere, OutlastError, Refused, UsageError

Kind = Literal["anonymous", "hugetlb", "file", "device"]

_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since Linux 5.14; the mmap module has no name for it
# A peer that shrinks the memory would turn our next access into SIGBUS; the size is fixed for good.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SHRINK") else 0


class Memory:
    """A writable region of memory that several processes map.

    Made by `anonymous`, `hugetlb`, `create`, `open` or `from_fd`; use it as a context manager or call `close`. Not
    bound to a thread; who writes which byte is the matter of the layout that lives inside.
    """

    def __init__(self, fd: int, size: int, kind: Kind, name: str) -> None:
        """Map `size` bytes of `fd`, which this object owns from now on. Use the class methods instead."""
        if size <= 0:
            os.close(fd)
            raise UsageError(f"memory {name!r} of {size} bytes", why="a region has at least one byte")
        self.kind: Kind = kind
        self.name = name
        self.size = size  #: bytes
        self._fd = fd
        self._buffer: memoryview | None = None
        try:
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(fd)
            raise
        self._buffer = memoryview(self._map)
        # The probe exports the buffer only until this statement ends; the address holds until the map is closed.
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def anonymous(cls, size: int, *, name: str = "outlast", preallocate: bool = False) -> Memory:
        """Memory without a path, of fixed size, zeroed; it lives as long as a process holds a descriptor or map of it.

        `preallocate` takes the pages now, so that a lack of memory is an error here and not at the first write. Raises
        `NotPossibleHere` if this process may not map so much.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            return cls._sized(fd, size, "anonymous", name, preallocate)
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.EFBIG):
                raise
            raise NotPossibleHere(
                f"cannot map {size} bytes of memory ({name})",
                why=error.strerror or str(error),
                do="Ask for less, or raise the limit of this process (ulimit -v, ulimit -f).",
            ) from error

    @classmethod
    def hugetlb(cls, size: int, *, name: str = "outlast") -> Memory:
        """Anonymous memory of huge pages; `size` is rounded up to whole ones.

        Raises `NotPossibleHere` when the kernel has too few of them reserved.
        """
        page = huge_page_bytes()
        if page == 0:
            raise NotPossibleHere("no huge pages", why="this kernel has none", do="Use anonymous memory instead.")
        size = -(-size // page) * page
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
            # The map reserves all pages at once (hugetlbfs accounts shared maps when they are made).
            return cls._sized(fd, size, "hugetlb", name, preallocate=False)
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.ENOSPC, errno.ENOSYS, errno.EINVAL, errno.EPERM):
                raise
            raise NotPossibleHere(
                f"cannot map {size} bytes of huge pages",
                why=f"{error.strerror}; /proc/sys/vm/nr_hugepages is {_read_int('/proc/sys/vm/nr_hugepages')}",
                do=f"Reserve them (sysctl vm.nr_hugepages={size // page}) or use anonymous memory.",
            ) from error

    @classmethod
    def create(cls, path: str | os.PathLike[str], size: int, *, preallocate: bool = True) -> Memory:
        """A new file of `size` zero bytes, readable by its owner only (0600).

        With `preallocate` a full disk raises `Refused` here, and nothing is left at `path`; without it, the first
        write to a page that finds no space kills the process with SIGBUS. An existing file is a `UsageError`.
        """
        path = Path(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(path, flags, 0o600)
        except FileExistsError:
            raise UsageError(
                f"cannot create {path}", why="it exists", do="Open it instead, or remove it first."
            ) from None
        except OSError as error:
            raise OutlastError(f"cannot create {path}", why=error.strerror or str(error)) from error
        try:
            return cls._sized(fd, size, "file", str(path), preallocate)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Memory:
        """Map an existing file, or a DAX character device, at its full size."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise OutlastError(f"cannot open {os.fspath(path)}", why=error.strerror or str(error)) from error
        return cls.from_fd(fd, name=os.fspath(path))

    @classmethod
    def from_fd(cls, fd: int, *, name: str = "", size: int | None = None) -> Memory:
        """Map what another process made; the descriptor belongs to the new object, also when this raises.

        `size` is what the caller expects; a smaller object raises `CorruptState`. Without it the whole object is
        mapped.
        """
        label = name or f"descriptor {fd}"
        try:
            info = os.fstat(fd)
            device = stat.S_ISCHR(info.st_mode)
            if not device and not stat.S_ISREG(info.st_mode):
                raise UsageError(f"cannot map {label}", why="it is neither a file nor a memory device")
            actual = _device_bytes(info) if device else info.st_size
            if actual < (1 if size is None else size):
                raise CorruptState(
                    f"{label} is too small", why=f"{actual} bytes where {size or 'at least 1'} are expected"
                )
        except BaseException:
            with contextlib.suppress(OSError):  # already raising; a descriptor that is not open cannot be closed
                os.close(fd)
            raise
        kind: Kind = "device" if device else "file" if info.st_nlink else "anonymous"
        return cls(fd, actual if size is None else size, kind, label)

    @classmethod
    def _sized(cls, fd: int, size: int, kind: Kind, name: str, preallocate: bool) -> Memory:
        """Give a fresh descriptor its size, its pages and, for a memfd, its seals; then map it."""
        try:
            if size <= 0:
                raise UsageError(f"memory {name!r} of {size} bytes", why="a region has at least one byte")
            try:
                os.ftruncate(fd, size)
                if preallocate:
                    os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
                    raise
                raise Refused(
                    f"cannot reserve {size} bytes for {name}",
                    why=error.strerror or str(error),
                    do="Free some space, choose another place, or ask for less.",
                ) from error
            if kind in ("anonymous", "hugetlb"):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, size, kind, name)

    @property
    def fd(self) -> int:
        """The descriptor, close-on-exec; pass it on with `Popen(pass_fds=...)`, SCM_RIGHTS or `inherit`."""
        self._require_open()
        return self._fd

    @property
    def address(self) -> int:
        """Address of byte 0 in this process, for native code. Valid until `close`."""
        self._require_open()
        return self._address

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable."""
        if self._buffer is None:
            raise UsageError(f"memory {self.name!r} is closed")
        return self._buffer

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._buffer is None

    @property
    def sealed(self) -> bool:
        """True if no process can shrink it, so that an access inside `size` never raises SIGBUS."""
        try:
            return bool(fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        except OSError:  # not a memfd
            return False

    def view(self, offset: int, length: int) -> memoryview:
        """Bytes [offset, offset + length), writable. Raises `UsageError` unless they all lie inside."""
        self._check(offset, length)
        return self.buffer[offset : offset + length]

    def address_of(self, offset: int, length: int) -> int:
        """Address of the same bytes, checked in the same way."""
        self._check(offset, length)
        return self.address + offset

    def prefault(self) -> None:
        """Bring all pages in for writing now, so that the first write is not slowed by a fault.

        Contents do not change, whatever other processes do meanwhile. Raises `Refused` where a later write would have
        raised SIGBUS or run out of memory.
        """
        self._require_open()
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise Refused(
                    f"cannot bring in {self.size} bytes of {self.name}",
                    why=error.strerror or str(error),
                    do="Free some memory or space, or ask for less.",
                ) from error
            # Linux before 5.14. Reading allocates the pages of shared memory too; writing could undo a peer's write.
            for offset in range(0, self.size, mmap.PAGESIZE):
                self.buffer[offset]

    def discard(self, offset: int, length: int) -> None:
        """Give the whole pages inside [`offset`, `offset` + `length`) back to the system; they read as zeros then.

        For every process that maps them. Raises `UsageError` outside the region, `NotPossibleHere` where the memory
        cannot be given back (a device, huge pages).
        """
        self._check(offset, length)
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + length) // mmap.PAGESIZE * mmap.PAGESIZE
        if end <= start:
            return
        try:
            self._map.madvise(mmap.MADV_REMOVE, start, end - start)
        except OSError as error:
            raise NotPossibleHere(f"cannot give back pages of {self.name}", why=error.strerror or str(error)) from error

    def map_present(self, start: int, limit: int, *, write: bool) -> int:
        """Enter pages that other processes have already filled into this process's page table.

        Looks at bytes [start, size), does at most `limit` bytes, allocates nothing, and returns where to go on (`size`
        = all done). A first access that finds the page mapped costs nothing; one that does not costs about 2 us.
        Does nothing where the kernel has no MADV_POPULATE (Linux 5.14).
        """
        advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
        at, budget = start, limit
        while at < self.size and budget > 0:
            try:
                data = os.lseek(self.fd, at, os.SEEK_DATA)
                hole = os.lseek(self.fd, data, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole from here on
                    return self.size
                raise
            data -= data % mmap.PAGESIZE
            end = min(-(-hole // mmap.PAGESIZE) * mmap.PAGESIZE, data + max(budget, mmap.PAGESIZE), self.size)
            end = self.size if end + mmap.PAGESIZE > self.size else end - end % mmap.PAGESIZE
            try:
                self._map.madvise(advice, data, end - data)
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EFAULT, errno.ENOMEM):
                    return self.size
                raise
            budget -= end - data
            at = end
        return at

    def inherit(self, inheritable: bool = True) -> int:
        """Let the descriptor survive exec (or not), and return it: for spawning without `pass_fds`."""
        os.set_inheritable(self.fd, inheritable)
        return self.fd

    def close(self) -> None:
        """Give the memory back; the second call does nothing.

        Views that are still held elsewhere stay valid: the pages are unmapped with the last of them. Addresses handed
        to native code do not count as views.
        """
        if self._buffer is None:
            return
        self._buffer.release()
        self._buffer = None
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(BufferError):  # a view is held: its owner's reference unmaps
            self._map.close()
        del self._map

    def __enter__(self) -> Memory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Memory {self.kind} {self.name!r} {self.size} bytes{' closed' if self.closed else ''}>"

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise UsageError(
                f"bytes [{offset}, {offset + length}) of memory {self.name!r}", why=f"it holds [0, {self.size})"
            )

    def _require_open(self) -> None:
        if self._buffer is None:
            raise UsageError(f"memory {self.name!r} is closed")


def huge_page_bytes() -> int:
    """Size of the kernel's default huge page; 0 where it has none."""
    try:
        found = re.search(r"^Hugepagesize:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found.group(1)) * 1024 if found else 0


def _device_bytes(info: os.stat_result) -> int:
    """Size of a DAX character device, which the kernel shows in sysfs (drivers/dax)."""
    return _read_int(f"/sys/dev/char/{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}/size")


def _read_int(path: str) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return 0
