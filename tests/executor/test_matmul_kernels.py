"""Matrix products: the order of summation, accuracy, strides, and which calls are left to PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from shipped_kernels import INSTRUCTION_SETS, run

from outlast.executor import lowering
from outlast.executor.lowering import Meta, Planner, Unsupported, Value
from outlast.executor.lowering.matmul import LIMITS
from outlast.executor.values import Buffer, contiguous_strides

pytestmark = pytest.mark.torch

NAMES = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}
#: largest error of a product, relative to the sum of the absolute products
ERRORS = {torch.float32: 1e-6, torch.float64: 1e-15, torch.float16: 6e-4, torch.bfloat16: 5e-3}
every_isa = pytest.mark.parametrize("isa", INSTRUCTION_SETS)
every_dtype = pytest.mark.parametrize("dtype", list(NAMES), ids=list(NAMES.values()))
both_forms = pytest.mark.parametrize("form", ["dot", "outer"])


def product(
    form: str, a: Any, b: Any, c: Any = None, *, isa: str, parts: int = 1, out: Any = None, **scales: Any
) -> Any:
    """The kernel's result for [m, k] times [k, n]."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype) if out is None else out
    members: dict[str, Any] = {"batch": 1, "m": a.shape[0], "n": b.shape[1], "k": a.shape[1], "alpha": 1.0, "beta": 1.0}
    operands = {"a": (a, "m", "k"), "b": (b, "k", "n"), "out": (out, "m", "n")}
    if c is not None:
        operands["c"] = (c.expand(out.shape), "m", "n")
    for name, (tensor, row, column) in operands.items():
        members |= {name: tensor.data_ptr(), f"{name}_{row}": tensor.stride(0), f"{name}_{column}": tensor.stride(1)}
    run(f"matmul_{form}_{NAMES[a.dtype]}", "ol_matmul_args", members | scales, isa=isa, parts=parts)
    return out


def operands(form: str, dtype: Any, m: int, n: int, depth: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(m * 10007 + n * 101 + depth)
    a = torch.randn(m, depth, generator=generator).to(dtype)
    b = torch.randn(n, depth, generator=generator).to(dtype)
    return a, (b.T if form == "dot" else b.T.contiguous())


@every_isa
@every_dtype
@both_forms
def test_a_result_does_not_depend_on_rows_and_columns_beside_it(form: str, dtype: Any, isa: str) -> None:
    a, b = operands(form, dtype, 9, 77, 130)
    whole = product(form, a, b, isa=isa)
    for m in range(1, 9):
        assert torch.equal(product(form, a[:m], b, isa=isa), whole[:m])
        assert torch.equal(product(form, a[m:], b, isa=isa), whole[m:])
    for n in (1, 2, 7, 15, 16, 17, 31, 33, 64, 76):
        assert torch.equal(product(form, a, b[:, :n], isa=isa), whole[:, :n])
        assert torch.equal(product(form, a, b[:, n:], isa=isa), whole[:, n:])
    for i in (0, 8):
        assert torch.equal(product(form, a[i : i + 1], b[:, 5:6], isa=isa), whole[i : i + 1, 5:6])


@every_isa
@both_forms
def test_a_result_does_not_depend_on_how_work_is_shared(form: str, isa: str) -> None:
    a, b = operands(form, torch.float32, 11, 150, 70)
    whole = product(form, a, b, isa=isa)
    for parts in (2, 3, 16):
        assert torch.equal(product(form, a, b, isa=isa, parts=parts), whole)


@pytest.mark.skipif("avx512" not in INSTRUCTION_SETS, reason="needs a CPU with AVX-512")
@every_dtype
@both_forms
@pytest.mark.parametrize("depth", [1, 5, 16, 17, 100, 257])
def test_avx2_and_avx512_give_the_same_bits(form: str, dtype: Any, depth: int) -> None:
    a, b = operands(form, dtype, 9, 77, depth)
    assert torch.equal(product(form, a, b, isa="avx2"), product(form, a, b, isa="avx512"))


@every_isa
@every_dtype
@both_forms
@pytest.mark.parametrize("size", [(1, 1, 1), (1, 64, 64), (8, 64, 64), (3, 5, 17), (4, 10, 300), (6, 33, 8)])
def test_error_is_bounded(form: str, dtype: Any, isa: str, size: tuple[int, int, int]) -> None:
    a, b = operands(form, dtype, *size)
    c = torch.randn(size[1]).to(dtype)
    exact = 0.5 * (a.double() @ b.double()) - 2.0 * c.double()
    got = product(form, a, b, c, isa=isa, alpha=0.5, beta=-2.0)
    most = 0.5 * (a.double().abs() @ b.double().abs()) + 2.0 * c.double().abs()
    assert ((got.double() - exact).abs() <= ERRORS[dtype] * most).all()


@every_isa
@both_forms
def test_only_the_result_is_written(form: str, isa: str) -> None:
    a, b = operands(form, torch.float32, 5, 21, 33)
    room = torch.full((7, 2, 23), 7.0)
    out = room[1:6, 0, 1:22]
    product(form, a, b, isa=isa, out=out)
    assert torch.equal(out, product(form, a, b, isa=isa))
    out.fill_(7.0)
    assert (room == 7.0).all()
    scattered = torch.full((21, 5), 7.0).T  # columns are not contiguous
    assert torch.equal(product(form, a, b, isa=isa, out=scattered), product(form, a, b, isa=isa))


@every_isa
@both_forms
def test_relu_keeps_nan(form: str, isa: str) -> None:
    a, b = operands(form, torch.float32, 5, 21, 33)
    a[2, 3] = float("nan")
    got = product(form, a, b, isa=isa, activation=1)
    expected = product(form, a, b, isa=isa).relu()
    assert torch.equal(got.nan_to_num(9.0), expected.nan_to_num(9.0))
    assert got[2].isnan().all()


def value(shape: tuple[int, ...], stride: tuple[int, ...] | None = None, dtype: str = "f32") -> Value:
    return Value(Buffer("input"), dtype, shape, contiguous_strides(shape) if stride is None else stride)


def steps(name: str, shape: tuple[int, ...], *args: Any, dtype: str = "f32", **kwargs: Any) -> list[Any]:
    """The steps that a call becomes."""
    planner = Planner()
    lower: Callable[..., Any] = lowering.registered()[name]
    lower(planner, Meta(dtype, shape, contiguous_strides(shape)), *args, **kwargs)
    return planner.steps


def test_a_linear_layer_is_one_step_that_copies_nothing() -> None:
    weight = value((64, 32), (1, 64))  # as x W^T has it
    for rows in (1, 8):
        made = steps("aten::addmm", (rows, 32), value((32,)), value((rows, 64)), weight)
        assert [step.kernel for step in made] == ["matmul_dot_f32"]
    assert [step.kernel for step in steps("aten::mm", (3, 32), value((3, 64)), value((64, 32)))] == ["matmul_outer_f32"]
    assert [step.kernel for step in steps("aten::mv", (64,), value((64, 32)), value((32,)))] == ["matmul_dot_f32"]


def test_strides_that_no_kernel_takes_are_copied() -> None:
    made = steps("aten::mm", (3, 32), value((3, 64)), value((64, 32), (64, 2)))
    assert len(made) == 2
    assert made[-1].kernel == "matmul_outer_f32"


def test_what_is_larger_than_measured_to_pay_is_left_to_pytorch() -> None:
    many = LIMITS["f32"][1]
    side = round((many) ** (1 / 3)) + 1
    with pytest.raises(Unsupported, match="PyTorch's kernel is faster"):
        steps("aten::mm", (side, side), value((side, side)), value((side, side)))


def test_beta_of_zero_does_not_read_what_is_added() -> None:
    added = value((3, 32))
    made = steps("aten::addmm", (3, 32), added, value((3, 64)), value((64, 32)), beta=0)
    assert all(added.buffer is not one.buffer for step in made for one in step.reads)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 1), (1, 5)])
def test_addbmm_and_addmv_broadcast_what_they_add_to(shape: tuple[int, ...]) -> None:
    import outlast

    batch1, batch2, added = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(shape)
    replay = outlast.capture(torch.addbmm, added, batch1, batch2)
    torch.testing.assert_close(replay(added, batch1, batch2), torch.addbmm(added, batch1, batch2))
    if len(shape) < 2:
        matrix, vector = torch.randn(5, 7), torch.randn(7)
        replay = outlast.capture(torch.addmv, added, matrix, vector)
        torch.testing.assert_close(replay(added, matrix, vector), torch.addmv(added, matrix, vector))
