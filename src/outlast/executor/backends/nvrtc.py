"""Operators and the persistent kernel compiled for a device: NVRTC to a relocatable object, nvJitLink to a cubin.

Needs the packages of the extra `cuda` but neither a driver nor a device. Objects are linked alone and without LTO: only
such code can be called through pointers from the kernel, which is another module (see gates.py). Compiled modules are
kept on disk under the rules of outlast.core.jit.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import os
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast.core import jit
from outlast.core.errors import CorruptState, NotPossibleHere, OutlastError, UsageError
from outlast.core.jit import JitCache, JitError
from outlast.core.paths import cache_dir
from outlast.executor.backends import cubin, gates

__all__ = ["BALLAST", "THREADS", "CubinCache", "Toolkit", "kernel_source"]

_log = logging.getLogger("outlast.cuda")

_FORMAT = "outlast-cubin-1"  # changes with the layout of entries or the meaning of the key
_OBJECT = "operator.cubin"
THREADS = 256  #: of a block, at most
#: 64-bit values that the ballast function holds: the first number of 4 that makes it reach the cap of 128 with NVRTC
#: 13.0 (56 ends at 126 registers, 60 at 128).
BALLAST = 60
_ERROR_TEXT_MAX = 8000

#: Contraction would make sums differ from the CPU's; -default-device spares plain helper functions an annotation. The
#: diagnostic that is silenced is about comparisons that are pointless in one instance of a template.
_FLAGS = ("-std=c++20", "-rdc=true", "--device-as-default-execution-space", "--fmad=false", "--diag-suppress=186")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What NVRTC said."""

    image: bytes  #: the object, or PTX; empty if it failed
    log: str


class Toolkit:
    """NVRTC and nvJitLink of this process."""

    def __init__(self) -> None:
        """Find them; raises `NotPossibleHere` naming the extra that brings what is missing."""
        try:
            self._nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
            self._linker: Any = importlib.import_module("cuda.bindings.nvjitlink")
            error, major, minor = self._nvrtc.nvrtcVersion()
            self._check(error)
            linker = self._linker.version()
        except (ImportError, RuntimeError) as error:  # RuntimeError: the bindings are there and the library is not
            raise NotPossibleHere(
                "operators can not be compiled for CUDA devices",
                why=str(error),
                do="Run: pip install 'outlast[cuda]'. Operators for the CPU need no such package.",
            ) from error
        self.version = f"NVRTC {major}.{minor}, nvJitLink {linker[0]}.{linker[1]}"

    def architectures(self) -> list[int]:
        """Devices that it compiles for: 90 for sm_90."""
        error, count = self._nvrtc.nvrtcGetNumSupportedArchs()
        self._check(error)
        error, found = self._nvrtc.nvrtcGetSupportedArchs()
        self._check(error)
        return list(found[:count])

    def compile(self, source: str, options: Sequence[str], *, name: str, ptx: bool = False) -> Compiled:
        """Compile one source; `image` is empty if it has errors, which `log` then holds with `name`.cu and lines."""
        error, program = self._nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], [])
        self._check(error)
        try:
            raw = [option.encode() for option in options]
            (status,) = self._nvrtc.nvrtcCompileProgram(program, len(raw), raw)
            log = self._take(program, "ProgramLog").rstrip(b"\0 \n").decode(errors="replace")
            if status != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
                if not log:
                    self._check(status)
                return Compiled(b"", log or "NVRTC gave no message")
            return Compiled(self._take(program, "PTX" if ptx else "CUBIN"), log)
        finally:
            self._nvrtc.nvrtcDestroyProgram(program)

    def link(self, image: bytes, architecture: int, *, name: str) -> bytes:
        """Link one object alone to an executable cubin; raises `OutlastError` with the linker's words."""
        handle = self._linker.create(1, [f"-arch=sm_{architecture}"])
        try:
            try:
                self._linker.add_data(handle, self._linker.InputType.CUBIN, image, len(image), name)
                self._linker.complete(handle)
                linked = bytearray(self._linker.get_linked_cubin_size(handle))
                self._linker.get_linked_cubin(handle, linked)
            except self._linker.nvJitLinkError as error:
                log = bytearray(self._linker.get_error_log_size(handle))
                self._linker.get_error_log(handle, log)
                text = log.rstrip(b"\0").decode(errors="replace").strip()
                raise OutlastError(f"operator {name} does not link", why=text or str(error)) from error
            return bytes(linked)
        finally:
            self._linker.destroy(handle)

    def _take(self, program: Any, what: str) -> bytes:
        error, size = getattr(self._nvrtc, f"nvrtcGet{what}Size")(program)
        self._check(error)
        # NVRTC writes into this object. It must be one of our own: a bytes object of one character is shared by the
        # whole process, and an empty log has one byte, its NUL.
        data = b" " * max(size, 2)
        (error,) = getattr(self._nvrtc, f"nvrtcGet{what}")(program, data)
        self._check(error)
        return bytes(data[:size])

    def _check(self, error: Any) -> None:
        if error != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
            _, text = self._nvrtc.nvrtcGetErrorString(error)
            raise OutlastError("NVRTC failed", why=text.decode())


def options(
    architecture: int, *, cap: int = gates.REGISTER_CAP, defines: Mapping[str, int | str] | None = None
) -> list[str]:
    """NVRTC's options for code that runs under the persistent kernel."""
    macros = [f"-D{key}={value}" for key, value in sorted((defines or {}).items())]
    return [*_FLAGS, f"--gpu-architecture=sm_{architecture}", f"-maxrregcount={cap}", *macros]


def kernel_source(threads: int = THREADS) -> str:
    """Source of the persistent kernel for blocks of `threads` threads."""
    return f'#define OL_THREADS {threads}\n#define OL_BALLAST {BALLAST}\n#include "outlast/cuda/persistent.cu"\n'


@functools.cache
def toolkit() -> Toolkit:
    """The toolkit, loaded on first need. Raises `NotPossibleHere`."""
    return Toolkit()


class CubinCache(JitCache):
    """Compiled device modules of one user, on disk. Safe to use from several threads and processes at once.

    The key covers source, options, architecture, all shared headers (and with them the ABI) and the versions of NVRTC
    and nvJitLink.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, tools: Toolkit | None = None) -> None:
        """Use `directory` (default: `cubin` in the cache folder). Raises as `JitCache` does."""
        super().__init__(directory if directory is not None else cache_dir() / "cubin")
        self._tools = tools

    @property
    def tools(self) -> Toolkit:
        """NVRTC and nvJitLink; found on first need. Raises `NotPossibleHere`."""
        if self._tools is None:
            self._tools = toolkit()
        return self._tools

    def cubin(
        self,
        source: str,
        *,
        name: str,
        architecture: int,
        defines: Mapping[str, int | str] | None = None,
        operators: bool = True,
    ) -> bytes:
        """The linked cubin of a source in the operators' dialect, from the cache or built now.

        `operators`: it holds operators, which are checked before they are linked (`gates.check_object`); the kernel
        is not. Raises `JitError` with the compiler's message, `Refused`, `TimedOut`, `NotPossibleHere`.
        """
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
            raise UsageError(f"operator name {name!r}", why="it is not 1 to 64 letters, digits, '_', '.' or '-'")
        flags = options(architecture, defines=defines)
        key = self._cubin_key(source, [*flags, str(operators)])
        entry = self.directory / f"{name}-{key[:32]}"
        ready = jit._usable(entry, _OBJECT, _trouble)
        if ready is None:
            with self._lock(key, name):
                ready = jit._usable(entry, _OBJECT, _trouble)  # another process may have built it meanwhile
                if ready is None:
                    ready = self._build_cubin(entry, source, flags, name, architecture, operators)
        return ready.read_bytes()

    def _cubin_key(self, source: str, flags: Sequence[str]) -> str:
        digest = hashlib.sha256()
        folder = jit.include_dir()
        paths = [path for path in sorted((folder / "outlast").rglob("*")) if path.suffix in (".h", ".cu", ".cuh")]
        headers = [text for path in paths for text in (str(path.relative_to(folder)), path.read_text())]
        for text in (_FORMAT, self.tools.version, *flags, "", source, *headers):
            raw = text.encode()
            digest.update(struct.pack("<Q", len(raw)) + raw)  # with lengths: no two lists run together alike
        return digest.hexdigest()

    def _build_cubin(
        self, entry: Path, source: str, flags: list[str], name: str, architecture: int, operators: bool
    ) -> Path:
        """Compile and link into a folder beside `entry` and publish it. The caller holds the entry's lock."""
        self._sweep()
        work = Path(tempfile.mkdtemp(prefix=".build-", dir=self.directory))
        try:
            _log.info("compiling operator %s for sm_%d with %s", name, architecture, self.tools.version)
            started = time.monotonic()
            compiled = self.tools.compile(source, [*flags, f"-I{jit.include_dir()}"], name=name)
            if not compiled.image:
                raise self._compile_error(name, source, flags, compiled.log)
            if operators:
                gates.check_object(cubin.read(compiled.image), name)
            linked = self.tools.link(compiled.image, architecture, name=name)
            cubin.read(linked)
            (work / f"{name}.cu").write_text(source)
            (work / _OBJECT).write_bytes(linked)
            seconds = round(time.monotonic() - started, 3)
            self._publish(work, entry, _OBJECT, {"options": flags, "compiler": self.tools.version, "seconds": seconds})
            _log.info("compiled operator %s in %.2f s", name, seconds)
            return entry / _OBJECT
        except OSError as error:
            raise OutlastError(
                f"cannot build operator {name} in {self.directory}",
                why=str(error),
                do="Free some space there, or set OUTLAST_CACHE_DIR to another folder.",
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _compile_error(self, name: str, source: str, flags: Sequence[str], log: str) -> JitError:
        """Keep the source for a look (one per operator name) and say what happened."""
        kept = self.directory / "failed" / f"{name}.cu"
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        kept.write_text(source)
        output = log.strip()[:_ERROR_TEXT_MAX]
        return JitError(
            f"operator {name} does not compile",
            why=output,
            do=f"The source is kept at {kept}; options of NVRTC: {json.dumps(list(flags))}",
            command=flags,
            output=output,
            source=kept,
        )


def _trouble(path: Path) -> str | None:
    """Why `path` is no whole linked cubin; None if it is one."""
    try:
        return None if cubin.read(path.read_bytes()).executable else "it is not linked"
    except CorruptState as error:
        return str(error)
