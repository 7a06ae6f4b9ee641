"""What the native operators compute, in numpy: slow, plain, and the other side of every differential test.

Needs numpy, which the engine itself does not import. `dtype` chooses float32 or float64 for the whole forward pass; the
native engine's float32 results lie within rounding of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outlast.engines.native.gguf import F32, Q8_0, Gguf
from outlast.engines.native.weights import ModelConfig, model_config
from outlast.engines.protocol import SamplingParams

Array = npt.NDArray[Any]


def dequantize(gguf: Gguf, name: str) -> npt.NDArray[np.float32]:
    """A tensor as float32, rows first. Q8_0: d q; Q4_1: d q + m, columns 0-15 in the low nibbles, 16-31 in the high."""
    tensor = gguf.tensors[name]
    raw = np.frombuffer(gguf.data[tensor.offset : tensor.offset + tensor.nbytes], np.uint8)
    shape = tensor.shape[::-1]
    if tensor.type == F32:
        return np.asarray(raw.view("<f4").reshape(shape), np.float32)
    if tensor.type == Q8_0:
        blocks = raw.reshape(-1, 34)
        scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
        return np.asarray((scale * blocks[:, 2:].view(np.int8)).reshape(shape), np.float32)
    blocks = raw.reshape(-1, 20)
    scale, least = blocks[:, :4].copy().view("<f2").astype(np.float32).T[..., None]
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    return np.asarray((scale * nibbles + least).reshape(shape), np.float32)


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis."""
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(epsilon))
    return np.asarray(x * scale * weight.astype(x.dtype))


def rope(x: Array, positions: Array, base: float) -> Array:
    """Rotates interleaved pairs of x [tokens, heads, head_dim] by position * base^(-2 i / head_dim)."""
    half = x.shape[-1] // 2
    angles = positions[:, None].astype(np.float64) * base ** (-np.arange(half) * 2.0 / x.shape[-1])
    cos, sin = np.cos(angles)[:, None].astype(x.dtype), np.sin(angles)[:, None].astype(x.dtype)
    out = np.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return out


def attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention of q [n, heads, d] over k, v [n, kv_heads, d]; each KV head serves heads / kv_heads in a row."""
    n, heads, d = q.shape
    share = heads // k.shape[1]
    k, v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / q.dtype.type(np.sqrt(d))
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.asarray(np.einsum("hqk,khd->qhd", weights, v).reshape(n, heads * d))


def silu(x: Array) -> Array:
    """x / (1 + exp(-x))."""
    return np.asarray(x / (1 + np.exp(-x)))


@dataclass(frozen=True)
class Forward:
    """Result of a forward pass over all positions."""

    logits: Array  #: [tokens, vocab]
    k: Array  #: [layers, tokens, kv_heads * head_dim], after the rotation
    v: Array  #: [layers, tokens, kv_heads * head_dim]


class ReferenceModel:
    """The whole model, dequantized."""

    def __init__(self, gguf: Gguf) -> None:
        self.config: ModelConfig = model_config(gguf)
        self.tensors = {name: dequantize(gguf, name) for name in gguf.tensors}

    def forward(self, tokens: list[int], dtype: type = np.float64) -> Forward:
        """Logits and KV rows of `tokens` from position 0."""
        c = self.config

        def weight(name: str) -> Array:
            return self.tensors[name].astype(dtype)

        positions, n = np.arange(len(tokens)), len(tokens)
        x = weight("token_embd.weight")[tokens]
        keys, values = [], []
        for i in range(c.layers):
            p = f"blk.{i}."
            h = rms_norm(x, weight(p + "attn_norm.weight"), c.epsilon)
            q = rope((h @ weight(p + "attn_q.weight").T).reshape(n, c.heads, c.head_dim), positions, c.rope_base)
            k = rope((h @ weight(p + "attn_k.weight").T).reshape(n, c.kv_heads, c.head_dim), positions, c.rope_base)
            v = (h @ weight(p + "attn_v.weight").T).reshape(n, c.kv_heads, c.head_dim)
            x = x + attention(q, k, v) @ weight(p + "attn_output.weight").T
            h = rms_norm(x, weight(p + "ffn_norm.weight"), c.epsilon)
            gated = silu(h @ weight(p + "ffn_gate.weight").T) * (h @ weight(p + "ffn_up.weight").T)
            x = x + gated @ weight(p + "ffn_down.weight").T
            keys.append(k.reshape(n, -1))
            values.append(v.reshape(n, -1))
        head = "output.weight" if "output.weight" in self.tensors else "token_embd.weight"
        logits = rms_norm(x, weight("output_norm.weight"), c.epsilon) @ weight(head).T
        return Forward(logits, np.stack(keys), np.stack(values))


# ---- sampling -----------------------------------------------------------------------------------------------------


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10 (Salmon et al., SC'11)."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & mask, (a >> 32) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def uniform(seed: int, stream: int, position: int) -> float:
    """The random number of one position: 53 bits of Philox with key = seed and counter = (position, 0, stream, 0)."""
    high, low, _, _ = philox4x32((position, 0, stream, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return float(((high << 32 | low) >> 11) * 2.0**-53)


def candidates(
    logits: Array, params: SamplingParams, prompt: list[int], generated: list[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """(ids, probabilities) left after penalties, bias, temperature and filters, in order of id. Temperature > 0."""
    scores = logits.astype(np.float64).copy()
    for token in {*prompt, *generated}:
        up = scores[token] > 0
        scores[token] = scores[token] / params.repetition_penalty if up else scores[token] * params.repetition_penalty
    for token in set(generated):
        scores[token] -= params.presence_penalty + params.frequency_penalty * generated.count(token)
    for token, bias in params.logit_bias:
        scores[token] += bias
    if params.temperature == 0:
        return np.array([int(np.argmax(scores))]), np.array([1.0])
    scaled = scores / params.temperature
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    if 0 < params.top_k < len(order):
        order = order[: params.top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    if params.min_p > 0:
        keep = weights >= params.min_p
        order, weights = order[keep], weights[keep]
    if params.top_p < 1:
        before = np.cumsum(weights) - weights
        keep = before < params.top_p * weights.sum()
        keep[0] = True
        order, weights = order[keep], weights[keep]
    by_id = np.argsort(order)
    return order[by_id], weights[by_id] / weights.sum()


def sample(
    logits: Array, params: SamplingParams, prompt: list[int], generated: list[int], position: int
) -> tuple[int, float]:
    """(token, distance of the random number from the nearest boundary between tokens)."""
    ids, probabilities = candidates(logits, params, prompt, generated)
    ends = np.cumsum(probabilities)
    u = uniform(params.seed, params.stream, position)
    index = min(int(np.searchsorted(ends, u, side="right")), len(ids) - 1)
    return int(ids[index]), float(np.min(np.abs(ends[:-1] - u), initial=1.0))


def log_softmax(logits: Array) -> npt.NDArray[np.float64]:
    """Natural logarithm of the probabilities under unmodified logits."""
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
