"""Reductions and row operators: one order of summation, accuracy, NaN and ties everywhere, long rows, bad targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from shipped_kernels import INSTRUCTION_SETS, run

from outlast.core.errors import OutlastError
from outlast.executor.lowering.dims import rows_of, walk

pytestmark = pytest.mark.torch

NAMES = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64"}
every_isa = pytest.mark.parametrize("isa", INSTRUCTION_SETS)


def reduce(kernel: str, x: Any, dims: Sequence[int], *, isa: str, parts: int = 1, **members: Any) -> tuple[Any, Any]:
    """Result and, where the kernel makes them, indices or means."""
    shape = [size for dim, size in enumerate(x.shape) if dim not in dims]
    out = torch.full(shape, 7, dtype=x.dtype)
    second = torch.full(shape, 7, dtype=torch.int64 if kernel.startswith("arg") else x.dtype)
    path = walk(x.shape, x.stride(), out.stride(), dims).members()
    padded = {
        name: value + [0] * (8 - len(value)) if isinstance(value, list) else value for name, value in path.items()
    }
    given = {"in": x.data_ptr(), "out": out.data_ptr(), **padded, **members}
    if kernel in ("argmax", "argmin", "var"):
        given["second"] = second.data_ptr()
    run(f"{kernel}_{NAMES[x.dtype]}", "ol_reduce_args", given, isa=isa, parts=parts)
    return out, second


def by_rows(kernel: str, x: Any, out: Any, *, isa: str, parts: int = 1, second: Any = None, **members: Any) -> None:
    """A kernel along the last dimension of matrices."""
    given = {
        "in": x.data_ptr(), "in_stride": (x.stride(0), x.stride(1), 0), "out": out.data_ptr(),
        "out_stride": (out.stride(0), out.stride(1), 0), "outer": x.shape[0], "n": x.shape[1], "inner": 1, **members,
    }  # fmt: skip
    if second is not None:
        given |= {"second": second.data_ptr(), "second_stride": (second.stride(0), second.stride(1), 0)}
    run(f"{kernel}_{NAMES[x.dtype]}", "ol_rows_args", given, isa=isa, parts=parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=["f32", "f64", "f16"])
@pytest.mark.parametrize("shape", [(37, 8), (37, 65), (5, 5000), (1100, 3), (700, 70)])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_sum_has_the_same_bits_however_it_is_shared_placed_and_built(shape: Any, dim: int, dtype: Any) -> None:
    generator = torch.Generator().manual_seed(shape[1])
    x = torch.randn(shape, generator=generator).to(dtype)
    expected, _ = reduce("sum", x, (dim,), isa=INSTRUCTION_SETS[0])
    assert torch.allclose(expected.double(), x.double().sum(dim), rtol=2e-3, atol=2e-2)
    for isa in INSTRUCTION_SETS:
        for shift in (0, 1, 5):
            moved = torch.empty(x.numel() + shift, dtype=dtype)[shift:].view(shape).copy_(x)
            for parts in (1, 2, 7):
                actual, _ = reduce("sum", moved, (dim,), isa=isa, parts=parts)
                assert torch.equal(actual, expected), f"{isa}, address + {shift} elements, {parts} parts"


@every_isa
def test_a_row_has_the_bits_that_it_has_alone(isa: str) -> None:
    x = torch.randn(9, 600, generator=torch.Generator().manual_seed(3))
    for kernel in ("softmax", "log_softmax", "cumsum", "logcumsumexp"):
        together, alone = torch.empty_like(x), torch.empty(1, 600)
        by_rows(kernel, x, together, isa=isa, parts=4)
        for i in range(9):
            by_rows(kernel, x[i : i + 1].clone(), alone, isa=isa)
            assert torch.equal(alone[0], together[i]), kernel


@every_isa
def test_long_sums_stay_accurate(isa: str) -> None:
    """A plain loop in float32 would be off by 1e-3 here."""
    x = torch.full((1 << 20,), 0.1)
    for source, dims in ((x, (0,)), (x.view(-1, 8), (0,)), (x.view(1 << 10, -1), (0, 1)), (x[::3], (0,))):
        total, _ = reduce("sum", source, dims, isa=isa)
        exact = source.double().sum(dims)
        assert float(((total.double() - exact) / exact).abs().max()) < 1e-6


@every_isa
def test_variance_survives_a_mean_far_from_0(isa: str) -> None:
    """Squares minus the square of the mean would leave nothing of it."""
    x = 3e4 + torch.randn(4, 2000, generator=torch.Generator().manual_seed(5))
    for source, dim in ((x, 1), (x.t().contiguous(), 0)):
        variance, mean = reduce("var", source, (dim,), isa=isa, number=1.0)
        assert torch.allclose(variance.double(), source.double().var(dim), rtol=1e-6)
        assert torch.allclose(mean.double(), source.double().mean(dim), rtol=1e-7)


@every_isa
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 33, 64, 70, 4097])
def test_the_first_nan_is_the_extremum_wherever_it_stands(n: int, isa: str) -> None:
    places = range(n) if n < 100 else (0, 1, 4094, 4095, 4096)
    for place in places:
        x = torch.randn(n, generator=torch.Generator().manual_seed(place))
        x[place] = float("nan")
        x[min(place + 5, n - 1)] = float("nan")
        for kernel in ("argmax", "argmin"):
            for source in (x, x.repeat_interleave(2)[::2]):
                value, index = reduce(kernel, source, (0,), isa=isa)
                assert value.isnan()
                assert int(index) == place
            value, _ = reduce(kernel.removeprefix("arg").replace("m", "am", 1), x, (0,), isa=isa)
            assert value.isnan()
        values, indices = reduce("argmax", x[:, None].expand(n, 5).contiguous(), (0,), isa=isa)
        assert values.isnan().all()
        assert (indices == place).all()


@every_isa
def test_the_first_of_equal_elements_is_taken(isa: str) -> None:
    x = torch.zeros(40, 70)
    x[torch.arange(40), torch.arange(40)] = 3.0
    x[:, 50:] = 3.0
    for dtype in (torch.float32, torch.float16, torch.int64):
        _, indices = reduce("argmax", x.to(dtype), (1,), isa=isa)
        assert indices.tolist() == list(range(40))
    _, indices = reduce("argmax", x, (0,), isa=isa)
    assert indices.tolist() == [*range(40), *[0] * 30]


@every_isa
def test_softmax_may_overwrite_its_input(isa: str) -> None:
    for n in (5, 64, 100, 5000):
        x = torch.randn(3, n, generator=torch.Generator().manual_seed(n))
        for kernel in ("softmax", "log_softmax"):
            apart, same = torch.empty_like(x), x.clone()
            by_rows(kernel, x, apart, isa=isa)
            by_rows(kernel, same, same, isa=isa)
            assert torch.equal(apart, same)


@every_isa
@pytest.mark.parametrize("n", [1, 7, 8, 9, 16, 63, 64, 65, 1000, 1023, 1024])
@pytest.mark.parametrize("descending", [False, True])
def test_rows_are_sorted_stably_whatever_their_order(n: int, descending: bool, isa: str) -> None:
    generator = torch.Generator().manual_seed(n)
    orders = [
        torch.arange(n),
        torch.arange(n).flip(0),
        torch.randperm(n, generator=generator),
        torch.randint(0, 3, (n,)),
    ]
    x = torch.stack([order.float() for order in orders])
    x[2, ::5] = float("nan")
    x[3, ::4] = -0.0
    values, indices = torch.empty_like(x), torch.empty(x.shape, dtype=torch.int64)
    by_rows("order", x, values, isa=isa, second=indices, k=n, descending=int(descending), parts=3)
    expected = torch.sort(x, dim=1, stable=True, descending=descending)
    assert torch.equal(indices, expected.indices)
    assert torch.equal(values.nan_to_num(1e9), expected.values.nan_to_num(1e9))


@every_isa
@pytest.mark.parametrize("k", [1, 2, 16, 17, 128, 129, 512])
def test_topk_of_long_rows_finds_all_even_when_each_element_is_better_than_the_last(k: int, isa: str) -> None:
    n = 3000
    rows = [torch.arange(n), torch.arange(n).flip(0), torch.randperm(n, generator=torch.Generator().manual_seed(k))]
    for dtype in (torch.float32, torch.float64):
        x = torch.stack(rows).to(dtype)
        for descending in (False, True):
            values, indices = torch.empty(3, k, dtype=dtype), torch.empty(3, k, dtype=torch.int64)
            by_rows("order", x, values, isa=isa, second=indices, k=k, descending=int(descending))
            expected = torch.topk(x, k, 1, descending)
            assert torch.equal(values, expected.values)
            assert torch.equal(indices, expected.indices)


@every_isa
@pytest.mark.parametrize("target", [-1, 5, 1 << 40])
def test_a_target_that_is_no_class_is_refused_by_number(target: int, isa: str) -> None:
    x, targets = torch.zeros(2, 5), torch.tensor([1, target])
    out, total = torch.zeros(()), torch.zeros(())
    members = {
        "in": x.data_ptr(), "target": targets.data_ptr(), "out": out.data_ptr(), "total": total.data_ptr(), "rows": 2,
        "classes": 5, "places": 1, "in_row": 5, "in_class": 1, "target_row": 1, "ignored": -100, "reduction": 1,
    }  # fmt: skip
    with pytest.raises(OutlastError, match=str(target)):
        run("nll_f32", "ol_nll_args", members, isa=isa)


def test_dimensions_that_lie_behind_each_other_are_walked_as_one() -> None:
    whole = walk((4, 5, 6), (30, 6, 1), (), (0, 1, 2))
    assert whole.reduced == ((120, 1),)
    assert whole.kept == ((1, 0, 0),)
    assert not whole.columns
    columns = walk((4, 5, 6), (30, 6, 1), (1,), (0, 1))
    assert columns.reduced == ((20, 6),)
    assert columns.kept == ((6, 1, 1),)
    assert columns.columns
    rows = walk((4, 5, 6), (30, 6, 1), (5, 1), (2,))
    assert rows.kept == ((20, 6, 1),)
    assert rows.reduced == ((6, 1),)
    assert not rows.columns
    apart = walk((4, 5, 6), (30, 6, 1), (1,), (0, 2))
    assert apart.kept == ((5, 6, 1),)
    assert apart.reduced == ((6, 1), (4, 30))
    expanded = walk((4, 5), (0, 1), (1,), (0,))
    assert expanded.columns
    assert expanded.reduced == ((4, 0),)


def test_rows_are_seen_without_a_copy_only_where_the_strides_allow_it() -> None:
    assert rows_of((2, 3, 4, 5), (60, 20, 5, 1), 1) == (60, 20, 1)
    assert rows_of((2, 3, 4, 5), (60, 20, 5, 1), 3) == (5, 1, 0)
    assert rows_of((2, 3, 4), (12, 1, 3), 2) is None
