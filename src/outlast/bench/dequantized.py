"""The model of a GGUF file as `LlamaForCausalLM` of transformers, in fp32: baseline and oracle of the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.core.errors import UsageError
from outlast.engines.native.gguf import Gguf

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: GGUF -> transformers, within a layer.
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def dequantized_model(path: Path) -> Any:
    """`LlamaForCausalLM` with the weights of `path`, dequantized to fp32.

    Raises ImportError where torch, transformers or numpy is missing, `UsageError` if the file does not fit.
    """
    import torch
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    from outlast.engines.native.architecture import model_config

    with Gguf(path) as gguf:
        c = model_config(gguf)
        tied = "output.weight" not in gguf.tensors
        state = {name: torch.from_numpy(matrix) for name, matrix in _state(gguf, c.heads, c.kv_heads).items()}
    config = LlamaConfig(
        vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.ffn, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim,
        max_position_embeddings=c.context, rms_norm_eps=c.epsilon, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    # strict=False for the head of tied embeddings, which has no tensor of its own; nothing else may be missing.
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or [name for name in missing if not (tied and name == "lm_head.weight")]:
        raise UsageError(f"{path.name} does not fit LlamaForCausalLM", why=f"{missing or unexpected}")
    return model


def _state(gguf: Gguf, heads: int, kv_heads: int) -> dict[str, npt.NDArray[np.float32]]:
    """All tensors as float32, copied, under their names in `LlamaForCausalLM`."""
    from outlast.engines.native.reference import dequantize

    state = {}
    for name in gguf.tensors:
        matrix = dequantize(gguf, name)
        parts = name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                matrix = halves(matrix, heads if parts[2] == "attn_q" else kv_heads)
            target = f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
        else:
            target = _WHOLE[parts[0]] + ".weight"
        state[target] = matrix.copy()
    return state


def halves(matrix: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of a projection that is rotated: interleaved pairs (GGUF) to two halves per head (transformers)."""
    rows, columns = matrix.shape
    pairs = matrix.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
