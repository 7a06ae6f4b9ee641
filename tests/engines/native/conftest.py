"""Tiny models, repacked, and decoders over them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Tests import the harness and the fixtures package by name.
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from decoding import MakeRig, Rig
from fixtures.tiny_model import TinyShape, write_tiny_model


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def make_rig(tmp_path: Path) -> MakeRig:
    """A decoder on a tiny model of a tensor type and shape, with its own pool."""

    def make(kind: str = "Q4_1", shape: TinyShape | None = None, **options: object) -> Rig:
        name = f"{kind}-{hash(shape)}.gguf"
        if not (tmp_path / name).exists():
            write_tiny_model(tmp_path / name, kind, shape=shape)
        return Rig(tmp_path / name, **options)  # type: ignore[arg-type]

    return make
