"""What the native operators compute, in numpy: slow, plain, and the other side of every differential test.

Needs numpy, which the engine itself does not import. `dtype` chooses float32 or float64 for the whole forward pass; the
native engine's float32 results lie within rounding of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outlast.engines.native.architecture import ModelConfig, model_config
from outlast.engines.native.gguf import BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q8_0, SUPPORTED_TYPES, Gguf
from outlast.engines.protocol import SamplingParams

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Unpacked:
    """A quantized matrix as weight = scale * q + least, blocks of columns last but one.

    `scale`, `least`: [rows, blocks, 1] float32; `q`: [rows, blocks, block columns], as stored less its offset.
    """

    scale: Array
    q: Array
    least: Array

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """The weights as float32 [rows, columns]."""
        return np.asarray((self.scale * self.q + self.least).reshape(len(self.q), -1), np.float32)


def _halves(raw: Array) -> Array:
    return raw.copy().view("<f2").astype(np.float32)


def _nibbles(raw: Array) -> Array:
    """Low nibbles of all bytes, then high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1).astype(np.float32)


def _unpack_k4(blocks: Array) -> tuple[Array, Array, Array]:
    """Q4_K: 256 columns in 8 blocks; w = d s q - e m with six-bit s and m."""
    d, least, s = _halves(blocks[:, 0:2]), _halves(blocks[:, 2:4]), blocks[:, 4:16]
    scale = np.concatenate([s[:, 0:4] & 63, (s[:, 8:12] & 15) | (s[:, 0:4] >> 6) << 4], axis=1)
    minus = np.concatenate([s[:, 4:8] & 63, (s[:, 8:12] >> 4) | (s[:, 4:8] >> 6) << 4], axis=1)
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (d * scale)[..., None], q, -(least * minus)[..., None]


def _unpack_k6(blocks: Array) -> tuple[Array, Array, Array]:
    """Q6_K: 256 columns in 16 blocks; w = d s (q - 32) with int8 s."""
    low = blocks[:, :128].reshape(-1, 2, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    upper = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    q = (_nibbles(low) + 16.0 * upper).reshape(-1, 16, 16) - 32
    scale = _halves(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8)
    return np.asarray(scale, np.float32)[..., None], np.asarray(q, np.float32), np.zeros((1, 1, 1), np.float32)


def unpack(gguf: Gguf, name: str) -> Unpacked:
    """Scales, integers and minima of a quantized tensor, in the order of its columns."""
    tensor = gguf.tensors[name]
    raw = np.frombuffer(gguf.data[tensor.offset : tensor.offset + tensor.nbytes], np.uint8)
    blocks = raw.reshape(-1, SUPPORTED_TYPES[tensor.type][1])
    least = np.zeros((1, 1, 1), np.float32)
    if tensor.type == Q8_0:
        scale, q = _halves(blocks[:, :2])[..., None], blocks[:, None, 2:].view(np.int8).astype(np.float32)
    elif tensor.type == Q4_0:
        scale, q = _halves(blocks[:, :2])[..., None], _nibbles(blocks[:, None, 2:]) - 8
    elif tensor.type == Q4_1:
        scale, q, least = _halves(blocks[:, :2])[..., None], _nibbles(blocks[:, None, 4:]), _halves(blocks[:, 2:4])
    elif tensor.type == Q4_K:
        scale, q, least = _unpack_k4(blocks)
    else:
        scale, q, least = _unpack_k6(blocks)
    rows = math.prod(tensor.shape[1:])
    width = q.shape[-1]
    q = q.reshape(rows, -1, width)
    return Unpacked(
        scale.reshape(rows, -1, 1), q, np.broadcast_to(least.reshape(-1, 1), (q.size // width, 1)).reshape(rows, -1, 1)
    )


def dequantize(gguf: Gguf, name: str) -> npt.NDArray[np.float32]:
    """A tensor as float32, rows first. The functions above describe the formats."""
    tensor = gguf.tensors[name]
    if tensor.type not in (F32, F16, BF16):
        return unpack(gguf, name).values.reshape(tensor.shape[::-1])
    raw = np.frombuffer(gguf.data[tensor.offset : tensor.offset + tensor.nbytes], np.uint8)
    if tensor.type == BF16:
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = raw.view("<f4" if tensor.type == F32 else "<f2").astype(np.float32)
    return np.asarray(values.reshape(tensor.shape[::-1]), np.float32)


def quantize_activations(x: Array, planes: int) -> tuple[Array, Array]:
    """(scale, q) of float32 x [..., columns], as native/engine/kernels.h says: x is near scale * q; [..., blocks, 32].

    `planes` 1: |q| <= 127; 2: |q| <= 32639, which is one int8 plane of 256 and one of 1.
    """
    most = np.float32(127 if planes == 1 else 32639)
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    some = largest >= np.float32(1e-30)
    inverse = np.where(some, most / np.where(some, largest, np.float32(1)), np.float32(0))
    q = np.rint(np.clip(blocks * inverse, -most, most))
    return np.where(some, largest / most, np.float32(0)), q.astype(np.int64)


def multiply_quantized(gguf: Gguf, name: str, x: Array, planes: int) -> Array:
    """x [tokens, columns] times a quantized matrix in the modes int8 and int8x2: float64 but for the quantization."""
    weights = unpack(gguf, name)
    scale, q = quantize_activations(x, planes)
    quantized = (scale.astype(np.float64) * q).reshape(len(x), -1)
    exact = weights.scale.astype(np.float64) * weights.q + weights.least
    return np.asarray(quantized @ exact.reshape(len(weights.q), -1).T)


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis."""
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(epsilon))
    return np.asarray(x * scale * weight.astype(x.dtype))


def rope_rates(c: ModelConfig, factors: Array | None) -> tuple[Array, float]:
    """(radians per position of each pair, length of a rotated pair), see rope.h. `factors`: the tensor rope_freqs."""
    d = c.head_dim
    rates = c.rope_base ** (-np.arange(d // 2) * 2.0 / d)
    if factors is not None:
        rates = rates / factors
    if c.rope_scaling == "linear":
        return rates / c.rope_factor, 1.0
    if c.rope_scaling == "none":
        return rates, 1.0

    def pair_of(turns: float) -> float:
        return float(d * np.log(c.rope_original_context / (turns * 2 * np.pi)) / (2 * np.log(c.rope_base)))

    low = max(0.0, np.floor(pair_of(c.rope_beta_fast)))
    high = min(d - 1.0, np.ceil(pair_of(c.rope_beta_slow)))
    slow = np.clip((np.arange(d // 2) - low) / max(high - low, 1e-3), 0, 1)
    return rates / c.rope_factor * slow + rates * (1 - slow), float(1 + 0.1 * np.log(c.rope_factor))


def rope(x: Array, positions: Array, rates: Array, length: float = 1.0, rotary: str = "pairs") -> Array:
    """Rotates the pairs of x [tokens, heads, head_dim] by position * rates[i]; "pairs" are interleaved."""
    half = x.shape[-1] // 2
    angles = positions[:, None].astype(np.float64) * rates
    cos, sin = (length * np.cos(angles))[:, None].astype(x.dtype), (length * np.sin(angles))[:, None].astype(x.dtype)
    first, second = (slice(0, None, 2), slice(1, None, 2)) if rotary == "pairs" else (slice(0, half), slice(half, None))
    out = np.empty_like(x)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def attention(q: Array, k: Array, v: Array, window: int = 0) -> Array:
    """Causal attention of q [n, heads, d] over k, v [n, kv_heads, d]; each KV head serves heads / kv_heads in a row.

    `window`: positions that a position sees, itself included; 0 = all before it.
    """
    n, heads, d = q.shape
    share = heads // k.shape[1]
    k, v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / q.dtype.type(np.sqrt(d))
    seen = np.tril(np.ones((n, n), bool)) & ~np.tril(np.ones((n, n), bool), -window if window else -n)
    scores = np.where(seen, scores, -np.inf)
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
    k: Array  #: [layers, tokens, kv_heads * head_dim], after the rotation, interleaved pairs side by side
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

        def project(h: Array, name: str, heads: int) -> Array:
            y = h @ weight(f"{name}.weight").T
            if f"{name}.bias" in self.tensors:
                y = y + weight(f"{name}.bias")
            return np.asarray(y.reshape(n, heads, c.head_dim))

        positions, n = np.arange(len(tokens)), len(tokens)
        rates, length = rope_rates(c, self.tensors.get("rope_freqs.weight"))
        x = weight("token_embd.weight")[tokens]
        keys, values = [], []
        for i in range(c.layers):
            p = f"blk.{i}."
            h = rms_norm(x, weight(p + "attn_norm.weight"), c.epsilon)
            q = rope(project(h, p + "attn_q", c.heads), positions, rates, length, c.rotary)
            k = rope(project(h, p + "attn_k", c.kv_heads), positions, rates, length, c.rotary)
            v = project(h, p + "attn_v", c.kv_heads)
            x = x + attention(q, k, v, c.window) @ weight(p + "attn_output.weight").T
            h = rms_norm(x, weight(p + "ffn_norm.weight"), c.epsilon)
            gated = silu(h @ weight(p + "ffn_gate.weight").T) * (h @ weight(p + "ffn_up.weight").T)
            x = x + gated @ weight(p + "ffn_down.weight").T
            if c.rotary == "halves":
                k = k.reshape(n, c.kv_heads, 2, -1).swapaxes(2, 3)
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
    logits: Array, params: SamplingParams, prompt: list[int], generated: list[int], stop_tokens: tuple[int, ...] = ()
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
    if len(generated) < params.min_tokens:
        scores[list(stop_tokens)] = -np.inf
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
    if params.typical_p < 1:
        shares = weights / weights.sum()
        surprise = -np.log(shares, where=shares > 0, out=np.full(len(shares), -np.inf))
        distance = np.abs(surprise - float(np.sum(shares[shares > 0] * surprise[shares > 0])))
        distance[shares == 0] = np.inf
        by_distance = np.lexsort((order, distance))
        before = np.cumsum(weights[by_distance]) - weights[by_distance]
        kept = by_distance[before < params.typical_p * weights.sum()]
        chosen = np.sort(kept if len(kept) else by_distance[:1])
        order, weights = order[chosen], weights[chosen]
    if params.top_p < 1:
        before = np.cumsum(weights) - weights
        keep = before < params.top_p * weights.sum()
        keep[0] = True
        order, weights = order[keep], weights[keep]
    by_id = np.argsort(order)
    return order[by_id], weights[by_id] / weights.sum()


def sample(
    logits: Array,
    params: SamplingParams,
    prompt: list[int],
    generated: list[int],
    position: int,
    stop_tokens: tuple[int, ...] = (),
) -> tuple[int, float]:
    """(token, distance of the random number from the nearest boundary between tokens)."""
    ids, probabilities = candidates(logits, params, prompt, generated, stop_tokens)
    ends = np.cumsum(probabilities)
    u = uniform(params.seed, params.stream, position)
    index = min(int(np.searchsorted(ends, u, side="right")), len(ids) - 1)
    return int(ids[index]), float(np.min(np.abs(ends[:-1] - u), initial=1.0))


def log_softmax(logits: Array) -> npt.NDArray[np.float64]:
    """Natural logarithm of the probabilities under unmodified logits."""
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
