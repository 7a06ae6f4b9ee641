"""The shape of a model, read from a file's metadata: Llama, Mistral and Qwen2, and the tensors each of them has.

What a file says beyond what is computed here would give other tokens without any error. So each key that changes the
arithmetic is either used or refused by its name.
"""

from __future__ import annotations

import math
import struct
from dataclasses import asdict, dataclass

from outlast.engines.native import _native
from outlast.engines.native.gguf import Array, Gguf, UnsupportedModel

_ROPE_SCALINGS = ("none", "linear", "yarn")  #: in the order of RopeScaling::Kind in native/engine/model.h
_MAX_EXTENT = 1 << 24
_MAX_LAYERS = 1 << 10
_MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR = 0.25, 1e9  #: see kMaxRopeRate in native/engine/rope.h
_WIDTH, _HEAD_WIDTH = 32, 16  #: what the kernels' columns and head dimensions are multiples of


@dataclass(frozen=True, slots=True)
class Architecture:
    """What distinguishes the architectures; everything else is metadata."""

    rotary: str  #: which rows of q and k turn together: "pairs" 2 i and 2 i + 1 of a head, "halves" i and i + d / 2
    biased: bool  #: q, k and v always have a bias; otherwise they may


#: general.architecture -> what it means. Mistral's files are usually named llama, which is what they are.
ARCHITECTURES = {
    "llama": Architecture("pairs", biased=False),
    "mistral": Architecture("pairs", biased=False),
    "qwen2": Architecture("halves", biased=True),
}

#: Keys (behind the architecture's name) that change the arithmetic, and the values that do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
#: Keys that are refused whatever they say.
_REFUSED = ("rope.dimension_sections", "attention.sliding_window_pattern")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int  #: positions the model was trained for
    epsilon: float
    rope_base: float
    rotary: str = "pairs"  #: see `Architecture`; repacked weights have pairs always
    window: int = 0  #: positions that a position sees, itself included; 0: all before it
    rope_scaling: str = "none"  #: "none", "linear" or "yarn"; Llama 3's is in the tensor rope_freqs
    rope_factor: float = 1.0
    rope_original_context: float = 0.0  #: positions of the first training (yarn)
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0

    def native(self) -> _native.Config:
        """For the extension."""
        fields = asdict(self) | {"rope_scaling": _ROPE_SCALINGS.index(self.rope_scaling)}
        del fields["rotary"]
        return _native.Config(**fields)


def model_config(gguf: Gguf) -> ModelConfig:
    """Reads the configuration. Raises `UnsupportedModel` by name for an architecture or a variant that is not run."""
    name = gguf.text("general.architecture")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise UnsupportedModel(
            f"{gguf.path} is a model of architecture {name!r}", why=f"this engine runs {', '.join(ARCHITECTURES)}"
        )
    _refuse_variants(gguf, name)
    hidden, heads = gguf.integer(f"{name}.embedding_length"), _per_layer(gguf, f"{name}.attention.head_count")
    if hidden <= 0 or heads <= 0:
        raise UnsupportedModel(f"{gguf.path} has {heads} heads and hidden size {hidden}")
    head_dim = gguf.integer(f"{name}.attention.key_length", hidden // heads)
    for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        if gguf.integer(key, head_dim) != head_dim:
            raise UnsupportedModel(f"{gguf.path}: {key} differs from the head dimension {head_dim}")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UnsupportedModel(f"{gguf.path} has no tensor token_embd.weight")
    context = gguf.integer(f"{name}.context_length")
    scaling, factor = _rope_scaling(gguf, name)
    config = ModelConfig(
        layers=gguf.integer(f"{name}.block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=_per_layer(gguf, f"{name}.attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=_per_layer(gguf, f"{name}.feed_forward_length"),
        vocab=embedding.shape[1],
        context=context,
        epsilon=gguf.number(f"{name}.attention.layer_norm_rms_epsilon"),
        rope_base=gguf.number(f"{name}.rope.freq_base", 10000.0),
        rotary=architecture.rotary,
        window=_window(gguf, name, context),
        rope_scaling=scaling,
        rope_factor=factor,
        rope_original_context=gguf.number(f"{name}.rope.scaling.original_context_length", float(context)),
        rope_beta_fast=gguf.number(f"{name}.rope.scaling.yarn_beta_fast", 32.0),
        rope_beta_slow=gguf.number(f"{name}.rope.scaling.yarn_beta_slow", 1.0),
    )
    _check(gguf, config)
    return config


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Name -> (rows, columns) of every tensor that a model of this shape may have; rows 0 = vector."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {
        "token_embd.weight": (config.vocab, config.hidden),
        "output_norm.weight": (0, config.hidden),
        "output.weight": (config.vocab, config.hidden),
        "rope_freqs.weight": (0, config.head_dim // 2),
    }
    for layer in range(config.layers):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (0, config.hidden),
            f"blk.{layer}.attn_q.weight": (q, config.hidden),
            f"blk.{layer}.attn_k.weight": (kv, config.hidden),
            f"blk.{layer}.attn_v.weight": (kv, config.hidden),
            f"blk.{layer}.attn_q.bias": (0, q),
            f"blk.{layer}.attn_k.bias": (0, kv),
            f"blk.{layer}.attn_v.bias": (0, kv),
            f"blk.{layer}.attn_output.weight": (config.hidden, q),
            f"blk.{layer}.ffn_norm.weight": (0, config.hidden),
            f"blk.{layer}.ffn_gate.weight": (config.ffn, config.hidden),
            f"blk.{layer}.ffn_up.weight": (config.ffn, config.hidden),
            f"blk.{layer}.ffn_down.weight": (config.hidden, config.ffn),
        }
    return shapes


def may_lack(gguf: Gguf, tensor: str) -> bool:
    """Whether a model runs without the tensor: a tied head, no Llama 3 scaling, no biases."""
    if tensor.endswith(".bias"):
        return not ARCHITECTURES[gguf.text("general.architecture")].biased
    return tensor in ("output.weight", "rope_freqs.weight")


def check_rope_freqs(gguf: Gguf) -> None:
    """Raises `UnsupportedModel` if Llama 3's divisors of the rotary frequencies, where present, are out of range."""
    tensor = gguf.tensors.get("rope_freqs.weight")
    if tensor is None:
        return
    factors = struct.unpack_from(f"<{tensor.nbytes // 4}f", gguf.data, tensor.offset)
    if not all(_MIN_ROPE_FACTOR <= factor <= _MAX_ROPE_FACTOR for factor in factors):
        raise UnsupportedModel(
            f"{gguf.path}: a number in rope_freqs.weight is out of range",
            why=f"between {_MIN_ROPE_FACTOR} and {_MAX_ROPE_FACTOR:g} is possible",
        )


def turning_heads(tensor: str, config: ModelConfig) -> int:
    """Heads of a q or k tensor whose rows have to be brought from halves into pairs; 0: the rows stay as they are."""
    part = tensor.split(".")[2] if tensor.startswith("blk.") else ""
    if config.rotary == "pairs" or part not in ("attn_q", "attn_k"):
        return 0
    return config.heads if part == "attn_q" else config.kv_heads


def pairs_from_halves(rows: memoryview, heads: int, head_dim: int) -> bytes:
    """Rows of q or k (or elements of a bias), as bytes: i and i + d / 2 of each head come to stand at 2 i and 2 i + 1.

    Scores are sums over the rows of a head of q and k, so an order that both share changes their rounding at most.
    """
    size = rows.nbytes // (heads * head_dim)
    parts: list[memoryview] = []
    for head in range(0, rows.nbytes, head_dim * size):
        for first in range(head, head + head_dim // 2 * size, size):
            second = first + head_dim // 2 * size
            parts += (rows[first : first + size], rows[second : second + size])
    return b"".join(parts)


def _per_layer(gguf: Gguf, key: str, default: int | None = None) -> int:
    """An integer that some writers repeat for each layer."""
    if not isinstance(gguf.metadata.get(key), Array):
        return gguf.integer(key, default)
    values = set(gguf.integers(key))
    if len(values) != 1:
        raise UnsupportedModel(f"{gguf.path} has another {key} in each layer", why="this engine needs one for all")
    return values.pop()


def _refuse_variants(gguf: Gguf, name: str) -> None:
    for key in _REFUSED:
        if f"{name}.{key}" in gguf.metadata:
            raise UnsupportedModel(f"{gguf.path} has {name}.{key}", why="that is not implemented")
    for key, neutral in _NEUTRAL.items():
        value = gguf.metadata.get(f"{name}.{key}", neutral[0])
        if isinstance(value, Array) or value not in neutral:
            shown = "a list" if isinstance(value, Array) else value
            raise UnsupportedModel(f"{gguf.path} has {name}.{key} = {shown}", why="that is not implemented")


def _rope_scaling(gguf: Gguf, name: str) -> tuple[str, float]:
    """(kind, factor). Without a type a factor means linear; a factor of 0 means none."""
    factor = gguf.number(f"{name}.rope.scaling.factor", gguf.number(f"{name}.rope.scale_linear", 1.0)) or 1.0
    kind = gguf.text(f"{name}.rope.scaling.type", "none" if factor == 1 else "linear")
    if kind not in _ROPE_SCALINGS:
        raise UnsupportedModel(
            f"{gguf.path} has {name}.rope.scaling.type = {kind}",
            why=f"this engine runs {', '.join(_ROPE_SCALINGS)}, and Llama 3's scaling by the tensor rope_freqs.weight",
        )
    return (kind, factor) if kind != "none" else (kind, 1.0)


def _window(gguf: Gguf, name: str, context: int) -> int:
    key = f"{name}.attention.sliding_window"
    window = gguf.integer(key, 0)
    if not window >= 0:
        raise UnsupportedModel(f"{gguf.path} has {key} = {window}")
    if window == 0 or window >= context:
        return 0
    if name == "qwen2":  # it has a window in some of the layers, and the file does not say in which
        raise UnsupportedModel(
            f"{gguf.path} has {key} = {window}, less than its context", why="that is not implemented"
        )
    return window


def _check(gguf: Gguf, config: ModelConfig) -> None:
    """The limits of native/engine/decoder.cpp, told before anything is started."""
    for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context"):
        if not 1 <= getattr(config, field) <= (_MAX_LAYERS if field == "layers" else _MAX_EXTENT):
            raise UnsupportedModel(f"{gguf.path}: {field} is {getattr(config, field)}")
    if config.layers > len(gguf.tensors):
        raise UnsupportedModel(f"{gguf.path}: {config.layers} layers, but only {len(gguf.tensors)} tensors")
    if config.heads % config.kv_heads:
        raise UnsupportedModel(f"{gguf.path}: {config.heads} heads are not a multiple of {config.kv_heads} KV heads")
    if config.head_dim % _HEAD_WIDTH:
        raise UnsupportedModel(f"{gguf.path}: head dimension {config.head_dim} is not a multiple of {_HEAD_WIDTH}")
    for what, extent in (
        ("hidden size", config.hidden),
        ("feed-forward length", config.ffn),
        ("heads * head dimension", config.heads * config.head_dim),
    ):
        if extent % _WIDTH:
            raise UnsupportedModel(f"{gguf.path}: {what} {extent} is not a multiple of {_WIDTH}")
    for what, value, low, high in (
        ("norm epsilon", config.epsilon, 1e-30, 1.0),
        ("rotary base", config.rope_base, 1.001, 1e12),
        ("rotary scaling factor", config.rope_factor, 1.0, 1e6),
        ("original context", config.rope_original_context, 1.0, float(_MAX_EXTENT)),
        ("yarn's beta_fast", config.rope_beta_fast, 1e-3, 1e6),
        ("yarn's beta_slow", config.rope_beta_slow, 1e-3, 1e6),
    ):
        if not (math.isfinite(value) and low <= value <= high):
            raise UnsupportedModel(f"{gguf.path}: {what} is {value}", why=f"between {low:g} and {high:g} is possible")
