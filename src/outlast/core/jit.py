"""The JIT cache: C++ operators compiled at run time, once, and loaded into this process.

An entry is a directory `NAME-KEY/` that holds the shared object, its source and `entry.json` (command, compiler,
SHA-256 of the object). The key covers everything that decides the bits: source, defines, flags, the content of the
shared headers (and with them `OL_ABI_VERSION`), the compiler's version and target, and the CPU where `native` is
asked for. An entry is built beside and published by renaming its directory, so a reader sees a whole one or none; it
is checked before every use, and built again if it is damaged. Processes that want the same entry wait for one builder
behind flock, which the kernel releases when the builder dies, however it dies.

Code from the cache runs with all rights of this process, so a cache that another user could write is refused.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from outlast.core.compiler import Compiler
from outlast.core.errors import OutlastError, TimedOut, UsageError
from outlast.core.paths import cache_dir, make_private

__all__ = ["Compiler", "JitCache", "JitError", "Library", "include_dir", "load"]

_log = logging.getLogger("outlast.jit")

_FORMAT = "outlast-jit-1"  # changes with the layout of entries or the meaning of the key
_FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden")
_OBJECT = "operator.so"
_ENTRIES_MAX = 512  # an operator is some 20-60 kB: tens of megabytes at the very most
_LOCKS = 64  # lock files are never removed (removing one that is held would split it), so their number is fixed
_ABANDONED_S = 3600.0  # a build folder this old belongs to a builder that was killed
_TIME_LIMIT_S = 300.0  # g++ takes below 1 s; zig builds its C++ library on first use: 70 s on two busy cores
_ERROR_TEXT_MAX = 8000


class JitError(OutlastError):
    """An operator did not compile. `command`, the compiler's `output` and the kept `source` are attributes."""

    def __init__(self, what: str, *, why: str, do: str, command: Sequence[str], output: str, source: Path) -> None:
        super().__init__(what, why=why, do=do)
        self.command = tuple(command)
        self.output = output
        self.source = source


def include_dir() -> Path:
    """Folder to pass as -I for `outlast/task.h`: the installed one, or native/include of a source tree."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "include", package.parent.parent / "native" / "include"):
        if (folder / "outlast" / "task.h").is_file():
            return folder
    raise OutlastError(
        "the operator headers are missing",
        why=f"neither {package / 'include'} nor a source tree holds outlast/task.h",
        do="Reinstall outlast.",
    )


class Library:
    """A loaded shared object whose symbols are used by address."""

    def __init__(self, path: Path) -> None:
        """Load `path`, with all symbols resolved now; raises `OutlastError` if the loader refuses it."""
        self.path = path
        try:
            self._library: ctypes.CDLL | None = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            raise OutlastError(f"cannot load {path}", why=str(error)) from error

    def symbol(self, name: str) -> int:
        """Address of a function or object, valid until `close`; raises `OutlastError` if there is none."""
        if self._library is None:
            raise UsageError(f"{self.path} is unloaded")
        try:
            address = ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value
        except AttributeError:
            address = None
        if not address:
            raise OutlastError(
                f"{self.path} has no symbol {name!r}", do='Declare it extern "C" with default visibility.'
            )
        return address

    def close(self) -> None:
        """Unload it. The caller vouches that no thread runs, or will call, code in it. Repeating does nothing."""
        if self._library is None:
            return
        handle = self._library._handle
        self._library = None
        _ctypes.dlclose(handle)


_kept: dict[Path, Library] = {}


def load(path: Path, symbol: str) -> int:
    """Address of `symbol` in the shared object at `path`, which stays loaded for the life of the process."""
    library = _kept.get(path)
    if library is None:
        library = _kept[path] = Library(path)
    return library.symbol(symbol)


class JitCache:
    """Compiled operators of one user, on disk. Safe to use from several threads and processes at once."""

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        compiler: Compiler | None = None,
        time_limit: float = _TIME_LIMIT_S,
    ) -> None:
        """Use `directory` (default: `jit` in the cache folder), made with mode 0700.

        `time_limit`: seconds that one run of the compiler may take; waiting for another builder is limited to twice
        that. Raises `OutlastError` if others could write the directory.
        """
        self.directory = Path(directory).absolute() if directory is not None else cache_dir() / "jit"
        self.time_limit = time_limit
        self._compiler = compiler
        _prepare(self.directory)

    @property
    def compiler(self) -> Compiler:
        """The compiler in use; found on first need. Raises `NotPossibleHere`."""
        if self._compiler is None:
            self._compiler = Compiler.find()
        return self._compiler

    def compile(
        self,
        source: str,
        *,
        name: str,
        defines: Mapping[str, int | str] | None = None,
        flags: Sequence[str] = (),
        native: bool = False,
    ) -> Path:
        """Path of the shared object built from C++ `source`, from the cache or built now.

        `name` is for people (letters, digits, `_`, `.`, `-`); `defines` become -DNAME=VALUE; `native` compiles for this
        machine's CPU. Raises `JitError` with the compiler's message, `TimedOut` when another builder does not end,
        and `NotPossibleHere` without a compiler. Use the path soon: old entries of a full cache are removed.
        """
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
            raise UsageError(f"operator name {name!r}", why="it is not 1 to 64 letters, digits, '_', '.' or '-'")
        macros = [f"-D{key}={value}" for key, value in sorted((defines or {}).items())]
        options = [*_FLAGS, *self.compiler.flags(native=native), *flags, *macros]
        key = self._key(source, options, native)
        entry = self.directory / f"{name}-{key[:32]}"
        ready = _usable(entry)
        if ready is None:
            with self._lock(key, name):
                ready = _usable(entry)  # another process may have built it meanwhile
                if ready is None:
                    ready = self._build(entry, source, options, name)
        return ready

    def _key(self, source: str, options: Sequence[str], native: bool) -> str:
        digest = hashlib.sha256()
        headers = [part for path, text in _headers(include_dir()) for part in (path, text)]
        target = f"{sys.platform} {platform.machine()} {_cpu() if native else ''}"
        command = shlex.join(self.compiler.command)
        for text in (_FORMAT, target, command, self.compiler.version, *options, "", source, *headers):
            raw = text.encode()
            digest.update(struct.pack("<Q", len(raw)) + raw)  # with lengths: no two lists run together alike
        return digest.hexdigest()

    def _build(self, entry: Path, source: str, options: Sequence[str], name: str) -> Path:
        """Compile into a folder beside `entry` and publish it. The caller holds the entry's lock."""
        self._sweep()
        work = Path(tempfile.mkdtemp(prefix=".build-", dir=self.directory))
        try:
            (work / f"{name}.cpp").write_text(source)
            command = [*self.compiler.command, *options, "-I", str(include_dir()), "-o", _OBJECT, f"{name}.cpp"]
            _log.info("compiling operator %s with %s", name, self.compiler.version)
            started = time.monotonic()
            status, output = self._run(command, work)
            trouble = _object_trouble(work / _OBJECT) if status == 0 else None
            if status != 0 or trouble:
                raise self._failure(name, work, command, status, trouble, output)
            for extra in work.iterdir():
                if extra.name not in (_OBJECT, f"{name}.cpp"):
                    _remove(extra)
            facts = {
                "command": command,
                "compiler": self.compiler.version,
                "seconds": round(time.monotonic() - started, 3),
            }
            self._publish(work, entry, _OBJECT, facts)
            _log.info("compiled operator %s in %.2f s", name, facts["seconds"])
            return entry / _OBJECT
        except OSError as error:
            raise OutlastError(
                f"cannot build operator {name} in {self.directory}",
                why=str(error),
                do="Free some space there, or set OUTLAST_CACHE_DIR to another folder.",
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _publish(self, work: Path, entry: Path, name: str, facts: dict[str, object]) -> None:
        """Put `work`, whose object is called `name`, where readers look. The caller holds the entry's lock."""
        (work / "entry.json").write_text(json.dumps({**facts, "sha256": _sha256(work / name)}, indent=1))
        if entry.exists():  # damaged, or it would have been used; a process that has it loaded keeps its pages
            with tempfile.TemporaryDirectory(prefix=".build-", dir=self.directory) as aside:
                entry.rename(Path(aside) / "damaged")
            _log.warning("cache entry %s was damaged and is replaced", entry.name)
        work.rename(entry)

    def _run(self, command: Sequence[str], work: Path) -> tuple[int, str]:
        """Run the compiler in `work`, within the time limit; returns its status and what it said."""
        process = subprocess.Popen(
            command,
            cwd=work,
            env={**os.environ, "TMPDIR": str(work), "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,  # so that a driver's children are ended with it
        )
        try:
            output, _ = process.communicate(timeout=self.time_limit)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL, f"no result after {self.time_limit:g} s; stopped"
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    def _failure(
        self, name: str, work: Path, command: Sequence[str], status: int, trouble: str | None, output: str
    ) -> JitError:
        """Keep the source for a look (one per operator name) and say what happened."""
        kept = self.directory / "failed" / f"{name}.cpp"
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        (work / f"{name}.cpp").replace(kept)
        output = output.strip()[:_ERROR_TEXT_MAX]
        why = trouble or output or f"the compiler ended with status {status} and no message"
        return JitError(
            f"operator {name} does not compile",
            why=why,
            do=f"The source is kept at {kept}; command: {shlex.join(command)}",
            command=command,
            output=output,
            source=kept,
        )

    @contextlib.contextmanager
    def _lock(self, key: str, name: str) -> Iterator[None]:
        """Hold the lock of `key`'s group. flock belongs to the open file, so a dead holder cannot keep it."""
        locks = self.directory / "locks"
        locks.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(locks / f"{int(key[:8], 16) % _LOCKS:02d}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            started = time.monotonic()
            limit, report, pause = 2 * self.time_limit, 1.0, 0.002
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    waited = time.monotonic() - started
                if waited > limit:
                    raise TimedOut(
                        f"operator {name} was not compiled within {limit:g} s",
                        why="another process holds the lock of the JIT cache",
                        do=f"See who holds it: fuser {locks}/*; ending that process releases it.",
                    )
                if waited > report:
                    _log.info("waiting for another process to compile operator %s (%.0f s)", name, waited)
                    report = waited + 10.0
                time.sleep(pause)
                pause = min(pause * 1.5, 0.05)
            yield
            fcntl.flock(fd, fcntl.LOCK_UN)  # at once, even if a child that was forked meanwhile holds a copy of fd
        finally:
            os.close(fd)

    def _sweep(self) -> None:
        """Remove folders that killed builders left, and the entries unused for longest when there are too many."""
        entries: list[tuple[float, Path]] = []
        now = time.time()
        for path in self.directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process sweeps too
                used = path.stat().st_mtime
                if path.name.startswith(".build-"):
                    if now - used > max(_ABANDONED_S, 3 * self.time_limit):
                        _remove(path)
                elif (path / "entry.json").exists():
                    entries.append((used, path))
        for _, path in sorted(entries)[: max(0, len(entries) - _ENTRIES_MAX + 1)]:
            _remove(path)


def _prepare(directory: Path) -> None:
    """Make `directory` (0700) and refuse it if another user could put code into it."""
    try:
        make_private(directory)
        directory = directory.resolve(strict=True)
        for folder in (directory, *directory.parents):
            reason = _foreign_hands(folder.stat(), own=folder == directory)
            if reason:
                raise OutlastError(
                    f"the JIT cache {directory} is refused",
                    why=f"{reason} {folder}, and so could make this process run their code",
                    do=f"chmod go-w {folder}, or set OUTLAST_CACHE_DIR to a folder of your own.",
                )
    except OSError as error:
        raise OutlastError(
            f"cannot use the JIT cache {directory}",
            why=str(error),
            do="Set OUTLAST_CACHE_DIR to a folder that you can write.",
        ) from error


def _foreign_hands(info: os.stat_result, *, own: bool) -> str:
    """Who else could put files into a folder ("" = nobody); `own`: it is the cache itself and not a parent of it."""
    if own:
        if info.st_uid != os.geteuid():
            return f"user {info.st_uid} owns"
        return "other users can write" if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""
    # In a sticky folder such as /tmp others cannot rename or replace what is ours.
    return "other users can write" if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX else ""


def _usable(entry: Path, name: str = _OBJECT, trouble: Callable[[Path], str | None] | None = None) -> Path | None:
    """The object of a whole, unchanged entry, marked as used; None if there is none. `trouble` checks its form."""
    path = entry / name
    try:
        facts = json.loads((entry / "entry.json").read_bytes())
        if not isinstance(facts, dict) or facts.get("sha256") != _sha256(path):
            return None
        if (trouble or _object_trouble)(path):
            return None
        os.utime(entry)
    except (OSError, ValueError):
        return None
    return path


def _object_trouble(path: Path) -> str | None:
    """Why `path` is no whole shared object for this machine; None if it is one (ELF-64 header, section table)."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return "the compiler reported success but wrote no object"
    if len(head) < 64 or head[:4] != b"\x7fELF":
        return "the compiler wrote something that is no ELF object"
    if head[4] != 2 or head[5] != 1:
        return "the object is not 64-bit little-endian ELF"
    kind, machine = struct.unpack_from("<HH", head, 16)
    with open("/proc/self/exe", "rb") as own:  # noqa: PTH123 - not a path of ours
        own_machine = struct.unpack_from("<H", own.read(20), 18)[0]
    if kind != 3 or machine != own_machine:
        return "the object is not a shared object for this machine"
    table, entry_bytes, entries = struct.unpack_from("<Q10xHH", head, 40)
    if table + entry_bytes * entries > size:
        return "the object is cut short"
    return None


def _headers(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each shared header, in a fixed order."""
    for path in sorted((folder / "outlast").rglob("*.h*")):
        yield str(path.relative_to(folder)), path.read_text()


@functools.cache
def _cpu() -> str:
    """What -march=native depends on: the model and the features the kernel reports."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "flags", "CPU implementer", "CPU part", "Features")
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):  # then only the compiler's own target speaks for the CPU
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in wanted:
                found.setdefault(key.strip(), " ".join(sorted(value.split())))
    return repr(sorted(found.items()))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
