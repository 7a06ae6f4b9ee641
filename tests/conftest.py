"""Fixtures that all tests share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from outlast.core.errors import NotPossibleHere, OutlastError
from outlast.core.jit import Compiler
from outlast.engines.native import models

# Timings are noise on a shared machine, so no deadline; CI draws the same examples each time, nightly runs draw more.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile(
    "nightly", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session", autouse=True)
def _own_state() -> Iterator[None]:
    """No test reads or writes the state (log, journal) of the user who runs it."""
    folder = tempfile.mkdtemp(prefix="outlast-test-state-")
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = folder
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before
    shutil.rmtree(folder, ignore_errors=True)


def _missing(error: OutlastError) -> None:
    """Skip at a developer's desk, fail in CI: there a skipped test would hide a broken set-up."""
    if os.environ.get("CI"):
        pytest.fail(str(error))
    pytest.skip(str(error))


@pytest.fixture(scope="session")
def compiler() -> Compiler:
    """A C++ compiler."""
    try:
        return Compiler.find()
    except NotPossibleHere as error:
        _missing(error)
        raise


@pytest.fixture(scope="session")
def builtin_model() -> Path:
    """The built-in model's GGUF, as `outlast model fetch` leaves it."""
    try:
        return models.find("builtin")
    except OutlastError as error:
        _missing(error)
        raise


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Recorded data sets: OUTLAST_DATA, or ../shared/data beside the checkout."""
    root = Path(__file__).resolve().parent.parent
    folder = Path(os.environ.get("OUTLAST_DATA") or root.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no recorded data at {folder}; set OUTLAST_DATA")
    return folder
