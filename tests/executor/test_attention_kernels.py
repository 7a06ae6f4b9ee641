"""Attention kernels: accuracy, hidden keys, independence of what is computed beside, and what is left to PyTorch."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from shipped_kernels import INSTRUCTION_SETS, run

from outlast.executor import lowering
from outlast.executor.lowering import Meta, Planner, Unsupported, Value
from outlast.executor.values import Buffer, contiguous_strides

pytestmark = pytest.mark.torch

NAMES = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}
#: largest error of a result with values around 1, and of a logsumexp
ERRORS = {torch.float32: 4e-6, torch.float64: 1e-13, torch.float16: 3e-3, torch.bfloat16: 2e-2}
every_isa = pytest.mark.parametrize("isa", INSTRUCTION_SETS)
every_dtype = pytest.mark.parametrize("dtype", list(NAMES), ids=list(NAMES.values()))


def attend(
    q: Any, k: Any, v: Any, mask: Any = None, *, isa: str, parts: int = 1, causal: bool = False
) -> tuple[Any, Any]:
    """Result and logsumexp of the kernel."""
    batch, heads, queries, dim = q.shape
    keys = k.shape[2]
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, logsumexp = torch.full_like(q, 9.0), torch.full((batch, heads, queries), 9.0, dtype=sums)
    members: dict[str, Any] = {
        "batch": batch, "heads": heads, "group": heads // k.shape[1], "queries": queries, "keys": keys, "dim": dim,
        "scale": dim**-0.5, "causal": causal,
    }  # fmt: skip
    tensors = {"q": q, "k": k, "v": v, "out": out, "logsumexp": logsumexp}
    if mask is not None:
        tensors["mask"] = mask.expand(batch, heads, queries, keys)
        members |= {"mask_kind": 2 if mask.dtype == torch.bool else 1, "mask_column": tensors["mask"].stride(3)}
    for name, tensor in tensors.items():
        members |= {name: tensor.data_ptr()}
        members |= dict(zip((f"{name}_batch", f"{name}_head", f"{name}_row"), tensor.stride(), strict=False))
    run(f"attention_{NAMES[q.dtype]}", "ol_attention_args", members, isa=isa, parts=parts)
    return out, logsumexp


def heads(dtype: Any, queries: int, keys: int, dim: int, *, group: int = 1) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(queries * 1009 + keys * 31 + dim)
    q = torch.randn(2, 2 * group, queries, dim, generator=generator).to(dtype)
    k = torch.randn(2, keys, 2, dim, generator=generator).to(dtype).transpose(1, 2)  # as a KV cache holds them
    v = torch.randn(2, 2, keys, dim, generator=generator).to(dtype)
    return q, k, v


def reference(q: Any, k: Any, v: Any, mask: Any = None, *, causal: bool = False) -> tuple[Any, Any]:
    """The same in double precision."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    return (scores.softmax(3).nan_to_num(0.0) @ v), scores.logsumexp(3)


@every_isa
@every_dtype
@pytest.mark.parametrize(
    "size", [(1, 1, 64), (1, 17, 64), (5, 256, 64), (4, 257, 80), (9, 600, 17), (2, 40, 256), (1, 3, 1)]
)
def test_error_is_bounded(dtype: Any, isa: str, size: tuple[int, int, int]) -> None:
    for group in (1, 3):
        q, k, v = heads(dtype, *size, group=group)
        for causal in (False, True):
            out, logsumexp = attend(q, k, v, isa=isa, causal=causal)
            exact, sums = reference(q, k, v, causal=causal)
            torch.testing.assert_close(out.double(), exact, rtol=0, atol=ERRORS[dtype])
            torch.testing.assert_close(logsumexp.double(), sums, rtol=0, atol=1e-13 if dtype == torch.float64 else 4e-6)


@every_isa
@every_dtype
def test_masks_are_added_or_hide(dtype: Any, isa: str) -> None:
    q, k, v = heads(dtype, 5, 300, 64)
    kept = torch.rand(5, 300, generator=torch.Generator().manual_seed(1)) < 0.3
    added = torch.randn(2, 1, 5, 300, generator=torch.Generator().manual_seed(2)).masked_fill(~kept, -math.inf)
    added = added.double() if dtype == torch.float64 else added
    for mask in (kept, added, added.transpose(2, 3).contiguous().transpose(2, 3)):
        out, logsumexp = attend(q, k, v, mask, isa=isa)
        exact, sums = reference(q, k, v, mask)
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=ERRORS[dtype])
        torch.testing.assert_close(logsumexp.double(), sums, rtol=0, atol=4e-6)


@every_isa
def test_a_query_without_keys_gets_zeros(isa: str) -> None:
    q, k, v = heads(torch.float32, 5, 300, 64)
    mask = torch.ones(5, 300, dtype=torch.bool)
    mask[3] = False
    mask[4, :290] = False  # a first span without any key
    out, logsumexp = attend(q, k, v, mask, isa=isa)
    exact, sums = reference(q, k, v, mask)
    assert (out[:, :, 3] == 0).all()
    assert (logsumexp[:, :, 3] == 0).all()
    torch.testing.assert_close(out[:, :, 4].double(), exact[:, :, 4], rtol=0, atol=4e-6)
    torch.testing.assert_close(logsumexp[:, :, 4].double(), sums[:, :, 4], rtol=0, atol=4e-6)


@every_isa
@every_dtype
def test_a_query_does_not_depend_on_those_beside_it(dtype: Any, isa: str) -> None:
    q, k, v = heads(dtype, 9, 300, 80)
    whole, _ = attend(q, k, v, isa=isa)
    for i in range(9):
        assert torch.equal(attend(q[:, :, i : i + 1], k, v, isa=isa)[0], whole[:, :, i : i + 1])
    assert torch.equal(attend(q[:1, 1:], k[:1, 1:], v[:1, 1:], isa=isa)[0], whole[:1, 1:])
    causal, _ = attend(q, k, v, isa=isa, causal=True)
    assert torch.equal(attend(q, k[:, :, :9], v[:, :, :9], isa=isa, causal=True)[0], causal)
    assert torch.equal(attend(q, k, v, isa=isa, parts=3)[0], whole)


def steps(q: tuple[int, ...], k: tuple[int, ...], **kwargs: Any) -> list[Any]:
    planner = Planner()
    metas = Meta("f32", q, contiguous_strides(q)), Meta("f32", q[:3], contiguous_strides(q[:3]))
    values = [Value(Buffer("input"), "f32", shape, contiguous_strides(shape)) for shape in (q, k, k)]
    lowering.registered()["aten::_scaled_dot_product_flash_attention_for_cpu"](planner, metas, *values, **kwargs)
    return planner.steps


def test_a_decode_step_is_one_step() -> None:
    assert [step.kernel for step in steps((1, 8, 1, 64), (1, 8, 200, 64))] == ["attention_f32"]
    assert [step.kernel for step in steps((1, 8, 1, 64), (1, 2, 200, 64))] == ["attention_f32"]


def test_heads_that_share_keys_are_captured_as_queries_of_one_head() -> None:
    import outlast

    q, k, v = torch.randn(2, 6, 1, 64), torch.randn(2, 2, 40, 64), torch.randn(2, 2, 40, 64)
    mask = torch.randn(2, 6, 1, 40)

    def attention(*tensors: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True)

    with torch.no_grad():
        for given in ((q, k, v), (q, k, v, mask)):
            replay = outlast.capture(attention, *given)
            torch.testing.assert_close(replay(*given), attention(*given), rtol=1e-5, atol=1e-5)
            assert not replay.report().fallbacks


@pytest.mark.parametrize(
    ("shape", "keys", "kwargs", "reason"),
    [
        ((1, 8, 512, 64), (1, 8, 512, 64), {}, "PyTorch's kernel is faster"),
        ((1, 8, 1, 512), (1, 8, 16, 512), {}, "512 elements"),
        ((1, 8, 1, 64), (1, 3, 16, 64), {}, "attention over keys"),
        ((1, 8, 1, 64), (1, 8, 16, 64), {"dropout_p": 0.5}, "dropout"),
        ((1, 8, 2, 64), (1, 8, 16, 64), {"is_causal": True, "scale": -1.0}, "scale"),
    ],
)
def test_what_is_not_supported_is_left_to_pytorch(
    shape: tuple[int, ...], keys: tuple[int, ...], kwargs: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        steps(shape, keys, **kwargs)
