"""Finding a C++ compiler for operators that are built at run time."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from outlast.core.errors import NotPossibleHere


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler driver that understands GCC's options."""

    command: tuple[str, ...]
    family: str  #: "gcc", "clang" or "zig"
    version: str  #: first line of `--version` and the default target
    origin: str  #: where it was found: "OUTLAST_CXX", "CXX", "PATH" or "extra jit"

    @classmethod
    def find(cls) -> Compiler:
        """The compiler to use: $OUTLAST_CXX, $CXX, g++ or clang++ on the PATH, or zig from the extra `jit`.

        One that is named by a variable is used or refused, never passed over. Raises `NotPossibleHere` if there is
        none. Found once per process and setting of the variables.
        """
        return _find_compiler(os.environ.get("OUTLAST_CXX"), os.environ.get("CXX"), os.environ.get("PATH"))

    def flags(self, *, native: bool) -> tuple[str, ...]:
        """Options that this driver needs for the result all drivers should give."""
        if self.family == "zig":
            # zig compiles for the CPU it runs on unless told otherwise, may choose another C library than this
            # process has, and traps on what a sanitizer would report.
            return (
                f"--target={platform.machine()}-linux-gnu",
                "-mcpu=native" if native else "-mcpu=baseline",
                "-fno-sanitize=undefined",
            )
        march = ("-march=native",) if native else ()
        # GNU_UNIQUE symbols would pin the object in memory: operators are unloaded after a swap.
        return (*march, "-fno-gnu-unique") if self.family == "gcc" else march


@functools.lru_cache(maxsize=8)
def _find_compiler(outlast_cxx: str | None, cxx: str | None, path: str | None) -> Compiler:
    for variable, value in (("OUTLAST_CXX", outlast_cxx), ("CXX", cxx)):
        if value and value.strip():
            return _probe(tuple(shlex.split(value)), variable)
    for name in ("g++", "clang++"):
        found = shutil.which(name, path=path)
        if found:
            return _probe((found,), "PATH")
    if importlib.util.find_spec("ziglang") is not None:
        return _probe((sys.executable, "-m", "ziglang", "c++"), "extra jit")
    raise NotPossibleHere(
        "cannot compile operators",
        why="no C++ compiler: neither OUTLAST_CXX nor CXX is set, and g++ and clang++ are not on the PATH",
        do="Install g++ 11 or newer, or the extra that brings a compiler: pip install 'outlast[jit]'. "
        "Operators that are shipped compiled work without.",
    )


def _probe(command: tuple[str, ...], origin: str) -> Compiler:
    """Ask a driver who it is; raises `NotPossibleHere` if it does not answer."""
    # Compilation runs in another folder: a relative name would be lost there.
    command = (os.path.abspath(shutil.which(command[0]) or command[0]), *command[1:])  # noqa: PTH100 - keep symlinks
    try:
        about = _answer(command, "--version")
        target = _answer(command, "-dumpmachine")
    except (OSError, subprocess.SubprocessError) as error:
        raise NotPossibleHere(
            f"the C++ compiler {shlex.join(command)!r} does not run",
            why=str(error),
            do=f"Correct or unset {origin}." if origin in ("OUTLAST_CXX", "CXX") else "Reinstall it.",
        ) from error
    first = about.splitlines()[0] if about else "unknown"
    if "ziglang" in command or Path(command[0]).name.startswith("zig"):
        family = "zig"
    else:
        family = "clang" if "clang" in about.lower() else "gcc"
    return Compiler(command, family, f"{first} {target}".strip(), origin)


def _answer(command: tuple[str, ...], option: str) -> str:
    done = subprocess.run(
        [*command, option], capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL
    )
    return done.stdout.strip()
