"""The parts of a server with the transformers engine: made without torch, refused early with a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))

from tiny_folder import write_tiny_folder

from outlast.core.errors import UsageError
from outlast.engines.native.gguf import ModelFileError, UnsupportedModel
from outlast.serve import hf
from outlast.serve.settings import ENGINES, Settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


def settings(model: Path | str, **more: object) -> Settings:
    return Settings(assembly=ENGINES["transformers"], model=str(model), kv_tokens=4096, **more)  # type: ignore[arg-type]


def test_a_folder_is_served_under_its_name(folder: Path) -> None:
    assembly = hf.assemble(settings(folder, engine_options=(("replay", "fast"),)))
    assert assembly.model.id == "tiny"
    assert assembly.model.context == 2048
    assert assembly.engine.options["replay"] == "fast"
    assert assembly.engine.options["digest"] == hf.digest_of(folder)
    assembly.close()
    assembly.log.close()


def test_the_server_never_imports_torch(folder: Path) -> None:
    script = (
        "import sys; from outlast.serve.settings import Settings; from outlast.serve.hf import assemble;"
        f"assemble(Settings(model={str(folder)!r}, kv_tokens=4096));"
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_can_not_be_served_is_refused_before_a_worker_starts(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only the native engine"):
        hf.assemble(settings(folder, fast=True))
    with pytest.raises(UsageError, match="float8"):
        hf.assemble(settings(folder, engine_options=(("dtype", "float8"),)))
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(ModelFileError, match=r"config\.json"):
        hf.assemble(settings(bare))
    config = json.loads((folder / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "layer_types": ["sliding_attention"] * 2}))
    (bare / "model.safetensors").write_bytes(b"x")
    (bare / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(UnsupportedModel, match="sliding_attention"):
        hf.assemble(settings(bare))
    (bare / "config.json").write_text(json.dumps(config))
    (bare / "model.safetensors").unlink()
    (bare / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFileError, match="safetensors"):
        hf.assemble(settings(bare))
