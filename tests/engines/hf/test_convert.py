"""A GGUF becomes a folder once: the weights are its own, whole or not there; both engines say the same with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fixtures.tiny_model import TinyShape, write_tiny_model

from outlast.core.memory import Memory
from outlast.engines.hf import convert
from outlast.engines.native.engine import NativeEngine
from outlast.engines.native.gguf import Gguf, ModelFileError, UnsupportedModel
from outlast.engines.native.loading import open_weights, weights_bytes
from outlast.engines.native.reference import dequantize
from outlast.engines.native.tokenizer import Tokenizer
from outlast.engines.protocol import Engine, EngineRequest, SamplingParams

pytest.importorskip("safetensors")
pytest.importorskip("gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTLAST_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0"])
def test_weights_are_the_dequantized_ones(cache: Path, tmp_path: Path, kind: str) -> None:
    from safetensors.numpy import load_file

    path = write_tiny_model(tmp_path / "m.gguf", kind, shape=TinyShape(tied=False))
    folder = convert.convert(path)
    tensors = load_file(folder / "model.safetensors")
    with Gguf(path) as gguf:
        assert folder == convert.folder_for(gguf.digest())
        assert len(tensors) == len(gguf.tensors)
        down = np.array(dequantize(gguf, "blk.1.ffn_down.weight"))
        assert np.array_equal(tensors["model.layers.1.mlp.down_proj.weight"], down)
        assert np.array_equal(tensors["lm_head.weight"], np.array(dequantize(gguf, "output.weight")))
        k = np.array(dequantize(gguf, "blk.0.attn_k.weight"))
        halves = np.concatenate([np.concatenate([h[0::2], h[1::2]]) for h in np.split(k, 2)])
        assert np.array_equal(tensors["model.layers.0.self_attn.k_proj.weight"], halves)


def test_a_model_is_converted_once_and_again_if_it_is_not_whole(cache: Path, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "F32")
    with Gguf(path) as gguf:
        digest = gguf.digest()
    folder, first = convert.converted(path, digest)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert.converted(path, digest) == (folder, first)
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert convert.converted(path, digest) == (folder, first)
    assert (folder / "model.safetensors").stat().st_size > 1000
    assert [p.name for p in folder.parent.iterdir()] == [folder.name], "nothing half-done is left"


def test_what_is_not_converted_is_refused_by_name(cache: Path, tmp_path: Path) -> None:
    good = write_tiny_model(tmp_path / "good.gguf", "F32").read_bytes()
    for name, old, new, named in (
        ("arch", b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba", "architecture 'mamba'"),
        ("part", b"blk.0.attn_q.weight", b"blk.0.attn_x.weight", "blk.0.attn_x.weight"),
    ):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(good.replace(old, new))
        with Gguf(path) as gguf:
            digest = gguf.digest()
        with pytest.raises(ModelFileError, match=named):
            convert.converted(path, digest)
        with pytest.raises(UnsupportedModel):
            convert.convert(path)
        assert not list(convert.folder_for(digest).parent.iterdir())


def greedy(engine: Engine, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    engine.recover(1, [])
    out = []
    for key, prompt in enumerate(prompts, 1):
        engine.submit(EngineRequest(key, tuple(prompt), tokens, params=SamplingParams(temperature=0.0)))
        made: list[int] = []
        while len(made) < tokens:
            made += [e.token for e in engine.step()]
        engine.release(key)
        out.append(made)
    return out


def both(path: Path, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    from outlast.engines.hf.engine import HfEngine

    with Gguf(path) as gguf:
        folder, digest = convert.converted(path, gguf.digest())
    weights = open_weights(Memory.anonymous(weights_bytes(path)), path)
    native = NativeEngine(weights, log=None, kv_tokens=2048, specialise=False)
    theirs = HfEngine(folder, log=None, kv_tokens=2048, digest=digest)
    return greedy(native, prompts, tokens), greedy(theirs, prompts, tokens)


@pytest.mark.torch
def test_both_engines_say_the_same(cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = write_tiny_model(tmp_path / "m.gguf", "Q8_0", seed=3)
    ours, theirs = both(path, [list(range(3, 30)), list(range(100, 200)), [7, 9, 11]], 25)
    assert ours == theirs


@pytest.mark.torch
@pytest.mark.model
@pytest.mark.nightly
def test_both_engines_say_the_same_with_the_builtin_model(builtin_model: Path) -> None:
    """The oracle: greedy tokens of transformers on the dequantized weights are those of the native engine."""
    pytest.importorskip("torch")
    with Gguf(builtin_model) as gguf:
        tokenizer = Tokenizer(gguf)
    texts = ["What is the capital of France?", "Explain how a bicycle stays upright.", "def fibonacci(n):"]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    ours, theirs = both(builtin_model, prompts, 50)
    assert ours == theirs


def test_config_carries_what_transformers_needs(cache: Path, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "F32", shape=TinyShape(rope_base=5000.0))
    config = json.loads((convert.convert(path) / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5000.0}
    assert config["tie_word_embeddings"] is True
    assert (config["num_key_value_heads"], config["head_dim"]) == (2, 16)
