"""Lowering of scaled dot-product attention.

Without gradients `F.scaled_dot_product_attention` on the CPU becomes the overload below, or, where that does not apply
(three dimensions, another size of values than of keys), plain products and a softmax.
"""

from __future__ import annotations

from typing import Any

from outlast.executor.kernels import FLOATS
from outlast.executor.lowering import Meta, Planner, Unsupported, Value, lowers

MASK_ADDED = 1  #: OL_MASK_ADDED
MAX_HEAD_DIM = 256  #: OL_HEAD_DIM_MAX

#: Multiply-adds above which PyTorch's kernel is at least as fast as ours. Measured (torch 2.13, two threads of a Zen 4
#: CPU, head dim 64): of float32, 8 heads with 16 queries over 256 keys took 109 us against 115 to 137.
LIMITS = {"f32": 1 << 22, "f64": 1 << 19, "f16": 1 << 24, "bf16": 1 << 20}

_SPEED = 20.0  #: multiply-adds per nanosecond, for the estimate of a step's work
#: a part is worth another worker from this much work on: on a busy core that worker starts tens of microseconds late
_PART_NS = 25000.0


@lowers("aten::_scaled_dot_product_flash_attention_for_cpu")
def flash_attention(
    p: Planner,
    out: tuple[Meta, Meta],
    query: Value,
    key: Value,
    value: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> tuple[Value, Value]:
    """Attention of [batch, heads, queries, dim] over [batch, heads or a divisor, keys, dim], and its logsumexp."""
    dtype = query.dtype
    if dtype not in FLOATS or key.dtype != dtype or value.dtype != dtype:
        raise Unsupported(f"attention of {dtype}, {key.dtype} and {value.dtype}")
    if dropout_p != 0.0:
        raise Unsupported("attention with dropout")
    batch, heads, queries, dim = query.shape
    shared, keys = key.shape[1], key.shape[2]
    if (key.shape, value.shape) != ((batch, shared, keys, dim),) * 2 or shared == 0 or heads % shared != 0:
        raise Unsupported(f"attention over keys {key.shape} and values {value.shape} for queries {query.shape}")
    if not 1 <= dim <= MAX_HEAD_DIM or keys == 0:
        raise Unsupported(f"attention over {keys} keys of {dim} elements (1 to {MAX_HEAD_DIM} are possible)")
    work = 2 * batch * heads * queries * keys * dim
    if work > LIMITS[dtype]:
        raise Unsupported(f"{work} multiply-adds of {dtype}: from {LIMITS[dtype]} on PyTorch's kernel is faster")
    scale = dim**-0.5 if scale is None else float(scale)
    if is_causal and not scale > 0:
        raise Unsupported(f"causal attention with scale {scale}: PyTorch hides a key by -infinity times the scale")
    result, logsumexp = p.like(out[0]), p.like(out[1])
    if result.numel == 0:
        return result, logsumexp
    if dim > 1 and any(one.stride[-1] != 1 for one in (query, key, value, result)):
        raise Unsupported("attention over tensors that are not contiguous along the head's dimension")
    own, sums = result, logsumexp
    mask = None
    if attn_mask is not None:
        mask = p.cast(attn_mask, logsumexp.dtype).expand((batch, heads, queries, keys))
    group = heads // shared
    if queries == 1 and group > 1 and not is_causal:
        # One query, and heads that share keys: taken as queries of one head, so that keys are read once.
        split = (batch, shared, group, dim)
        query, own, sums = _regroup(query, split), _regroup(own, split), _regroup(sums, split[:3])
        mask = None if mask is None else _regroup(mask, (batch, shared, group, keys))
        heads, queries, group = shared, group, 1
    time = work / _SPEED + 60.0 * batch * heads
    p.step(
        f"attention_{dtype}",
        writes=(own, sums),
        shares=max(1, min(batch * heads * -(-queries // 4), int(time / _PART_NS))),
        work=time,
        batch=batch,
        heads=heads,
        group=group,
        queries=queries,
        keys=keys,
        dim=dim,
        scale=scale,
        causal=int(is_causal),
        mask_kind=0 if mask is None else MASK_ADDED,
        **_members("q", query),
        **_members("k", key),
        **_members("v", value),
        **_members("out", own),
        **({} if mask is None else _members("mask", mask, column=True)),
        **_members("logsumexp", sums),
    )
    return result, logsumexp


def _regroup(value: Value, shape: tuple[int, ...]) -> Value:
    """[batch, heads, 1, ...] as [batch, shared, group, ...]: a view, since only one dimension is cut in two."""
    step = value.stride[1]
    strides = (value.stride[0], step * shape[2], step, *value.stride[3:])
    return Value(value.buffer, value.dtype, shape, strides, value.offset)


def _members(name: str, value: Value, *, column: bool = False) -> dict[str, Any]:
    batch, head, row = value.stride[:3]
    members = {name: value, f"{name}_batch": batch, f"{name}_head": head, f"{name}_row": row}
    return members | ({f"{name}_column": value.stride[3]} if column else {})
