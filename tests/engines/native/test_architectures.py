"""Random models of each architecture and rotary variant against transformers on the same float32 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoding import Rig, random_tokens

from outlast.engines.native.decoder import Item
from outlast.engines.native.gguf import UnsupportedModel
from outlast.engines.native.reference import ReferenceModel

pytestmark = pytest.mark.torch
pytest.importorskip("torch")
from fixtures.converted_model import random_model, write_converted  # noqa: E402

#: Largest difference of a logit, at a standard deviation of the logits of about 3: from transformers, which rounds the
#: rotary angles to float32 (measured: 2e-4), and from the reference in float64 (measured: 3e-5).
BOUND, REFERENCE_BOUND = 1e-3, 1e-4
PROMPT, ANSWER = 600, 30

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "llama, tied": ("llama", "llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama, biased": ("llama", "llama", {"attention_bias": True}),
    "llama, linear": ("llama", "llama", {"rope_parameters": LINEAR}),
    "llama, yarn": ("llama", "llama", {"rope_parameters": YARN}),
    "llama, llama3": ("llama", "llama", {"rope_parameters": LLAMA3, "head_dim": 64}),
    "qwen2": ("qwen2", "qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2, tied": ("qwen2", "qwen2", {"tie_word_embeddings": True, "hidden_size": 96, "num_attention_heads": 3,
                                       "num_key_value_heads": 1}),
    "qwen2, yarn": ("qwen2", "qwen2", {"rope_parameters": YARN}),
    "mistral as llama": ("mistral", "llama", {}),
    "mistral, window": ("mistral", "mistral", {"sliding_window": 300}),
    "mistral, narrow window": ("mistral", "llama", {"sliding_window": 5}),
}  # fmt: skip


def _without_bias_of_the_output(model: Any) -> None:
    """Llama's option adds a bias to all four projections; files of this family have it on q, k and v."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias = None


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    import torch

    kind, architecture, changes = CASES[case]
    model = random_model(kind, **changes)
    if changes.get("attention_bias"):
        _without_bias_of_the_output(model)
    rig = Rig(write_converted(tmp_path / "m.gguf", model, architecture), blocks=80, compute="f32")
    prompt = random_tokens(PROMPT, rig.config.vocab)
    handle = rig.add(prompt)
    ours = []
    for positions in [250, 350, *[1] * (ANSWER - 1)]:  # two chunks, then one by one
        rig.step(Item(handle, positions))
        ours += rig.logits()
    tokens = rig.decoder.tokens(handle)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens[:-1]])).logits[0, PROMPT - 1 :].numpy()
    assert np.abs(theirs - np.stack(ours)).max() < BOUND
    assert theirs.std() > 1
    assert list(theirs.argmax(-1)) == tokens[PROMPT:]
    reference = ReferenceModel(rig.gguf).forward(tokens[:-1])
    assert np.abs(reference.logits[PROMPT - 1 :] - np.stack(ours)).max() < REFERENCE_BOUND
    keys = rig.rows(handle).view(np.float32)[:, 0::2]
    assert np.abs(keys - reference.k.swapaxes(0, 1)).max() < REFERENCE_BOUND


def test_a_window_gives_the_same_bits_in_any_chunks_and_parts(tmp_path: Path) -> None:
    path = write_converted(tmp_path / "m.gguf", random_model("mistral", sliding_window=300), "llama")
    tokens = random_tokens(600, 270)
    seen = set()
    for chunk, parts, threads in ((600, 1, 1), (7, 4, 2), (100, 3, 2)):
        rig = Rig(path, blocks=80, seed=chunk, compute="f32")
        rig.parts, rig.threads = parts, threads
        handle = rig.add(tokens)
        rig.advance(handle, 12, chunk)
        seen.add((rig.rows(handle).tobytes(), rig.logits()[0].tobytes()))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"rope.scaling.type": "llama3"}, "llama3"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 1.5}, r"yarn_attn_factor = 1\.5"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": float("nan")}, "scaling factor is nan"),
        ({"rope.dimension_sections": [8, 8, 0, 0]}, "dimension_sections"),
        ({"rope.dimension_count": 16}, "dimension_count differs"),
        ({"rope.freq_base": float("inf")}, "rotary base is inf"),
        ({"attention.sliding_window": 100}, "sliding_window = 100"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
        ({"attention.head_count_kv": [2, 1]}, "another qwen2.attention.head_count_kv in each layer"),
        ({"attention.head_count_kv": 3}, "not a multiple of 3 KV heads"),
        ({"expert_count": 8}, "expert_count = 8"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attention.causal": False}, "causal = False"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    changed = {f"qwen2.{key}": value for key, value in changes.items()}
    path = write_converted(tmp_path / "m.gguf", random_model("qwen2"), "qwen2", **changed)
    with pytest.raises(UnsupportedModel, match=what):
        Rig(path)


def test_numbers_repeated_for_each_layer_are_taken(tmp_path: Path) -> None:
    repeated = {"qwen2.attention.head_count": [4, 4], "qwen2.feed_forward_length": [96, 96]}
    rig = Rig(write_converted(tmp_path / "m.gguf", random_model("qwen2"), "qwen2", **repeated))
    assert (rig.config.heads, rig.config.ffn) == (4, 96)
