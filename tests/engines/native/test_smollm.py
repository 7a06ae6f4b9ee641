"""The built-in model against transformers on the same, dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from decoding import Rig

from outlast.engines.native.decoder import Compute, Item
from outlast.engines.native.gguf import Gguf
from outlast.engines.native.reference import dequantize, log_softmax
from outlast.engines.native.tokenizer import Tokenizer
from outlast.engines.protocol import SamplingParams

pytestmark = pytest.mark.model

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain how a bicycle stays upright.",
    "List three uses of copper.",
    "def fibonacci(n):",
    "Translate 'good morning' into Spanish, French and German.",
    "What is 17 times 23?",
    "Tell me a joke about computers.",
    "Why is the sky blue? Answer in one sentence.",
    "Summarise the plot of Romeo and Juliet.",
    "What does the command `git rebase` do?",
    "Name a mammal that lays eggs.",
    "How do I boil an egg?",
    "Describe a sunset to someone who has never seen one.",
    "SELECT name FROM users WHERE",
    "Give me a recipe for pancakes with exact amounts.",
    "Who wrote 'The Origin of Species', and when?",
    "Compare TCP with UDP in a short table.",
    "日本の首都はどこですか？",
    "Continue the sequence: 1, 1, 2, 3, 5, 8,",
]


@pytest.fixture(scope="module")
def rig(builtin_model: Path) -> Rig:
    return Rig(builtin_model, blocks=128)


@pytest.fixture(scope="module")
def tokenizer(builtin_model: Path) -> Tokenizer:
    with Gguf(builtin_model) as gguf:
        return Tokenizer(gguf)


def _rotary_halves(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows of interleaved pairs (GGUF) to first halves, then second halves (transformers)."""
    rows, columns = matrix.shape
    pairs = matrix.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _transformers_model(rig: Rig) -> Any:
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    c = rig.config
    config = llama.LlamaConfig(
        vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.ffn, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, max_position_embeddings=c.context,
        rms_norm_eps=c.epsilon, rope_theta=c.rope_base, tie_word_embeddings=True,
    )  # fmt: skip
    parts = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    state = {}
    for name in rig.gguf.tensors:
        values = dequantize(rig.gguf, name)
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            if part in ("attn_q", "attn_k"):
                values = _rotary_halves(values, c.heads if part == "attn_q" else c.kv_heads)
            name = f"model.layers.{layer}.{parts[part]}.weight"
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
        state[name] = torch.from_numpy(np.array(values))
    model = llama.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


#: mode -> (largest difference of a logit, share of equal first choices); docs/reference/numerics.md. The logits have a
#: standard deviation of 5.3.
Bounds = dict[Compute, tuple[float, float]]
BOUNDS: Bounds = {"f32": (1e-3, 1.0), "int8x2": (2e-2, 1.0), "int8": (4.0, 0.94)}
#: Of a sample 33 times as large, whose largest difference is larger.
FIFTY_PROMPTS_BOUNDS: Bounds = {"f32": (1e-3, 1.0), "int8x2": (4e-2, 1.0), "int8": (6.0, 0.94)}


def _compare(
    path: Path, tokenizer: Tokenizer, compute: Compute, prompts: list[str], tokens: int, bounds: Bounds
) -> None:
    """Greedy decoding, and transformers' logits for the same text; raw text and chats in turn."""
    torch = pytest.importorskip("torch")
    rig = Rig(path, blocks=128, compute=compute)
    model = _transformers_model(rig)
    worst, equal = 0.0, 0
    for i, text in enumerate(prompts):
        prompt = tokenizer.encode(text) if i % 2 else tokenizer.encode_chat([{"role": "user", "content": text}])
        handle = rig.add(prompt, SamplingParams(temperature=0))
        ours = []
        for _ in range(tokens):
            missing = rig.decoder.length(handle) - rig.decoder.computed(handle)
            rig.step(Item(handle, missing))
            ours.append(rig.logits()[0])
        text_tokens = rig.decoder.tokens(handle)
        with torch.inference_mode():
            theirs = model(torch.tensor([text_tokens[:-1]])).logits[0, len(prompt) - 1 :].numpy()
        equal += int((theirs.argmax(-1) == text_tokens[len(prompt) :]).sum())
        worst = max(worst, float(np.abs(theirs - np.stack(ours)).max()))
        rig.release(handle)
    share = equal / (len(prompts) * tokens)
    print(f"{compute}: largest difference of a logit {worst:.2e}, first choice equal {share:.3f}")
    assert worst < bounds[compute][0]
    assert share >= bounds[compute][1]


@pytest.mark.torch
@pytest.mark.parametrize("compute", get_args(Compute))
def test_logits_match_transformers(builtin_model: Path, tokenizer: Tokenizer, compute: Compute) -> None:
    _compare(builtin_model, tokenizer, compute, PROMPTS[:3], 50, BOUNDS)


@pytest.mark.torch
@pytest.mark.nightly
@pytest.mark.parametrize("compute", get_args(Compute))
def test_logits_match_transformers_over_fifty_prompts(
    builtin_model: Path, tokenizer: Tokenizer, compute: Compute
) -> None:
    more = [f"{text} Then say why {i}." for i, text in enumerate(PROMPTS + PROMPTS[:10])]
    _compare(builtin_model, tokenizer, compute, PROMPTS + more, 100, FIFTY_PROMPTS_BOUNDS)


def _perplexity(path: Path, tokens: list[int], compute: Compute) -> float:
    rig = Rig(path, blocks=64, compute=compute)
    whole = rig.add(tokens)
    for first in range(0, len(tokens), 64):
        rig.step(Item(whole, min(64, len(tokens) - first)))
    loss = 0.0
    for first in range(1, len(tokens), 16):
        # One sequence per position, all with the rows of the whole text before it: the step gives each one's logits.
        ends = range(first, min(first + 16, len(tokens)))
        handles = [rig.add(tokens[:end], computed=end - 1) for end in ends]
        for handle in handles:
            rig.tables[handle] = rig.tables[whole]
        rig.step(*(Item(handle, 1) for handle in handles))
        for end, logits in zip(ends, rig.logits(), strict=True):
            loss -= log_softmax(logits)[tokens[end]]
        for handle in handles:
            rig.decoder.remove(handle)
    return float(np.exp(loss / (len(tokens) - 1)))


def _perplexity_ratios(path: Path, tokenizer: Tokenizer, pages: list[str], length: int) -> dict[Compute, float]:
    """Perplexity of each mode over that of f32, less 1, on the beginnings of pages of the documentation."""
    loss: dict[Compute, float] = dict.fromkeys(get_args(Compute), 0.0)
    for page in pages:
        text = (Path(__file__).parents[3] / "docs" / "explanation" / f"{page}.md").read_text()
        for mode in loss:
            loss[mode] += np.log(_perplexity(path, tokenizer.encode(text)[:length], mode)) / len(pages)
    ratios = {mode: float(np.exp(value - loss["f32"])) - 1 for mode, value in loss.items()}
    print(", ".join(f"{mode} {ratio:+.4%}" for mode, ratio in ratios.items()))
    return ratios


def test_perplexity_hardly_depends_on_the_mode(builtin_model: Path, tokenizer: Tokenizer) -> None:
    """A short text: the bound of one plane is wider here than over a long one, since its errors average out."""
    ratios = _perplexity_ratios(builtin_model, tokenizer, ["recovery"], 250)
    assert abs(ratios["int8x2"]) < 1e-3
    assert abs(ratios["int8"]) < 2e-2


@pytest.mark.nightly
def test_perplexity_of_each_mode_over_long_texts(builtin_model: Path, tokenizer: Tokenizer) -> None:
    ratios = _perplexity_ratios(
        builtin_model, tokenizer, ["architecture", "executor", "cuda-backend", "recovery"], 1000
    )
    assert abs(ratios["int8x2"]) < 1e-3
    assert abs(ratios["int8"]) < 5e-3


def test_text_splits_into_known_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Hello world 1234") == [19556, 905, 216, 33, 34, 35, 36]
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert chat[-10:] == [1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198]
    assert tokenizer.stop_tokens == (0, 2)


def test_it_answers(rig: Rig, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    handle = rig.add(prompt, SamplingParams(temperature=0))
    rig.advance(handle, 8)
    assert "Paris" in tokenizer.decode(rig.decoder.tokens(handle)[len(prompt) :])
    rig.release(handle)
