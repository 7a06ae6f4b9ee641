"""Operators of one's own: compiled, tried against their reference, published, called with arrays and tensors."""

from __future__ import annotations

import array
import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outlast.core.errors import NotPossibleHere, OperatorFailed, Refused, TimedOut, UsageError
from outlast.core.jit import Compiler, JitError
from outlast.executor import Executor
from outlast.executor.operator import Array, OperatorSpec, Scalar, Signature, Tensor

SCALE = """
OL_OPERATOR(scale, scale_args, a) {
    const ol_share w = ol_share_of(a->n, blockIdx, gridDim);
    for (int64_t i = w.begin; i < w.end; i += w.step) a->y[i] = a->factor * a->x[i];
    return OL_OK;
}
"""


def scale_reference(x: Any, y: Any, n: int, factor: float) -> None:
    np.multiply(x, np.float32(factor), out=y)


def scale_examples() -> list[tuple[Any, ...]]:
    return [(np.arange(n, dtype=np.float32), np.zeros(n, np.float32), n, 2.5) for n in (1, 5, 64)]


SIGNATURE = Signature(
    (
        Array("x", "float32", ("n",)),
        Array("y", "float32", ("n",), "out"),
        Scalar("n", "int64"),
        Scalar("factor", "float32"),
    )
)
SPEC = OperatorSpec("scale", SIGNATURE, SCALE, scale_reference, scale_examples, splittable=True)

# A strided tensor operator: out = x + y, any strides of x and y.
ADD = OperatorSpec(
    "add2",
    Signature(
        (
            Tensor("x", "float64", ("n", "m"), contiguous=False),
            Tensor("y", "float64", ("n", "m"), contiguous=False),
            Tensor("out", "float64", ("n", "m"), "out", contiguous=False),
        )
    ),
    """
    OL_OPERATOR(add2, add2_args, a) {
        for (int64_t i = 0; i < a->x.size[0]; ++i)
            for (int64_t j = 0; j < a->x.size[1]; ++j)
                ol_data<double>(a->out)[i * a->out.stride[0] + j * a->out.stride[1]] =
                    ol_data<double>(a->x)[i * a->x.stride[0] + j * a->x.stride[1]] +
                    ol_data<double>(a->y)[i * a->y.stride[0] + j * a->y.stride[1]];
        return OL_OK;
    }
    """,
    lambda x, y, out: np.add(x, y, out=out),
    lambda: [
        (np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(3, 2).T, np.zeros((2, 3))),
        (np.arange(12.0).reshape(2, 6)[:, ::-2], np.ones((2, 3)), np.zeros((4, 6))[::2, 1::2]),
    ],
)


@pytest.fixture(autouse=True, scope="module")
def own_cache(compiler: Compiler, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTLAST_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def changed(source: str, **more: Any) -> OperatorSpec:
    return dataclasses.replace(SPEC, source=source, **more)


@pytest.mark.parametrize("canary", ["process", "here"])
def test_a_defined_operator_computes_what_its_reference_does(canary: Any) -> None:
    x, y = np.random.default_rng(1).random(1000, dtype=np.float32), np.zeros(1000, np.float32)
    with Executor(workers=1) as executor:
        scale = executor.define(SPEC, canary=canary)
        for parts in (1, 3):
            y[:] = 0
            executor.call(scale, x, y, 1000, 3.0, parts=parts)
            assert np.array_equal(y, x * np.float32(3))
        add = executor.define(ADD, canary=canary)
        left, right, out = np.arange(20.0).reshape(4, 5), np.arange(20.0).reshape(5, 4).T, np.zeros((8, 5))[::2]
        executor.call(add, left, right, out)
        assert np.array_equal(out, left + right)
        with pytest.raises(UsageError, match="exists"):
            executor.define(SPEC)
        with pytest.raises(UsageError, match="not splittable"):
            executor.call(add, left, right, out, parts=2)


def test_torch_tensors_and_plain_buffers_are_arguments() -> None:
    torch = pytest.importorskip("torch")
    with Executor() as executor:
        scale = executor.define(SPEC, canary="here")
        x, y = torch.arange(8.0), torch.zeros(8)
        executor.call(scale, x, y, 8, 2.0)
        assert torch.equal(y, 2 * x)
        buffer = array.array("f", [0.0] * 8)
        executor.call(scale, x, buffer, 8, 0.5)
        assert list(buffer) == [0.5 * i for i in range(8)]
        for bad, why in (
            (torch.zeros(8, dtype=torch.float64), "float64"),
            (torch.zeros(16)[::2], "not contiguous"),
            (torch.zeros(8, requires_grad=True), "requires grad"),
            (torch.zeros(8, device="meta"), "meta"),
        ):
            with pytest.raises(UsageError, match=why):
                executor.call(scale, x, bad, 8, 2.0)


FROZEN = np.zeros(4, np.float32)
FROZEN.flags.writeable = False


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((np.zeros(4, np.float32), np.zeros(4, np.float32), 4), "3 arguments.*x, y, n, factor"),
        ((np.zeros(4), np.zeros(4, np.float32), 4, 1.0), "'x' has elements of type float64.*takes float32"),
        ((np.zeros((2, 2), np.float32), np.zeros(4, np.float32), 4, 1.0), "'x' has rank 2.*rank 1"),
        ((np.zeros(4, np.float32), np.zeros(5, np.float32), 4, 1.0), "'y' has size 5.*n of argument 'x' says 4"),
        ((np.zeros(4, np.float32), np.zeros(8, np.float32)[::2], 4, 1.0), "'y' is not contiguous"),
        ((np.zeros(4, np.float32), FROZEN, 4, 1.0), "'y' is read-only"),
        ((np.zeros(4, np.float32), bytes(16), 4, 1.0), "'y'"),
        ((np.zeros(4, ">f4"), np.zeros(4, np.float32), 4, 1.0), "'x' has elements of type '>f4'"),
        ((np.zeros(4, np.complex64), np.zeros(4, np.float32), 4, 1.0), "'x' has elements of type '<c8'"),
        (([0.0] * 4, np.zeros(4, np.float32), 4, 1.0), "'x' is a list"),
        ((np.zeros(4, np.float32), np.zeros(4, np.float32), 4.5, 1.0), "'n': 4.5 is no int64"),
        ((np.zeros(4, np.float32), np.zeros(4, np.float32), 2**63, 1.0), "'n': 9223372036854775808 is no int64"),
        ((np.zeros(4, np.float32), np.zeros(4, np.float32), 4, "2"), "'factor': '2' is no float32"),
        ((np.ndarray(4, np.float32, bytearray(20), 1), np.zeros(4, np.float32), 4, 1.0), "'x' is not aligned"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(args: tuple[Any, ...], why: str) -> None:
    from outlast.executor.signature import Signature

    with pytest.raises(UsageError, match=why):
        Signature(SIGNATURE.arguments).pack(args)


def test_an_output_that_repeats_its_elements_is_refused() -> None:
    out = np.lib.stride_tricks.as_strided(np.zeros(3), (2, 3), (0, 8))
    with pytest.raises(UsageError, match="'out' repeats"):
        ADD.signature.pack((np.zeros((2, 3)), np.zeros((2, 3)), out))


def test_a_signature_that_makes_no_sense_is_refused() -> None:
    for arguments in (
        (Scalar("n", "int64"), Scalar("n", "int64")),
        (Scalar("not a name", "int64"),),
        (Scalar("n", "complex"),),
        (Array("x", "float8"),),
        (Tensor("x", "float32", 9),),
        (Tensor("x", "float32", None, "sideways"),),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError):
            Signature(arguments)
    with pytest.raises(UsageError, match="identifier"):
        dataclasses.replace(SPEC, name="not-c")


def test_struct_lies_as_the_compiler_puts_it() -> None:
    """Scalars of odd sizes between tensors: each member arrives."""
    arguments = (
        Scalar("a", "int32"),
        Tensor("x", "int64", None, "out"),
        Scalar("b", "float32"),
        Scalar("c", "uint32"),
        Scalar("d", "float64"),
        Scalar("e", "int32"),
        Array("z", "int16", ()),
        Scalar("f", "uint64"),
    )
    source = """
    OL_OPERATOR(lie, lie_args, a) {
        int64_t *x = ol_data<int64_t>(a->x);
        x[0] = a->a; x[1] = (int64_t)a->b; x[2] = a->c; x[3] = (int64_t)a->d; x[4] = a->e; x[5] = *a->z; x[6] = a->f;
        x[7] = a->x.dims * 100 + a->x.size[0] + a->x.stride[0] + 1000 * a->x.dtype;
        return OL_OK;
    }
    """

    def reference(a: int, x: Any, b: float, c: int, d: float, e: int, z: Any, f: int) -> None:
        x[:] = (a, int(b), c, int(d), e, int(z), f, 100 + 8 + 1 + 1000 * 5)

    example = (-7, np.zeros(8, np.int64), 3.0, 2**32 - 1, -9.0, 5, np.array(-3, np.int16), 2**62)
    with Executor() as executor:
        executor.define(OperatorSpec("lie", Signature(arguments), source, reference, [example]))


def test_compiler_errors_name_the_operators_own_lines() -> None:
    with Executor() as executor:
        broken = changed(SCALE.replace("a->factor", "a->fcator"))
        with pytest.raises(JitError) as failed:
            executor.define(broken)
        assert "scale:3:" in failed.value.why  # the line with the mistake, from 1
        assert "fcator" in failed.value.why
        assert "dialect.h" not in failed.value.why
        assert executor.operators == {}
        with pytest.raises(JitError, match="scale"):
            executor.define(changed(SCALE.rstrip().removesuffix("}")))  # ends too early


def test_no_compiler_is_said_with_the_extra_that_brings_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any) -> None:
        raise NotPossibleHere("cannot compile operators", do="pip install 'outlast[jit]'")

    monkeypatch.setattr("outlast.core.jit.Compiler.find", nothing)
    with Executor() as executor, pytest.raises(NotPossibleHere, match=r"outlast\[jit\]"):
        executor.define(SPEC)


WRONG = {
    "wrong value": (
        SCALE.replace("a->factor *", "(i == 3 ? 1 : a->factor) *"),
        r"example 2, .*'y' at \[3\]: 3.0 instead",
    ),
    "writes an input": (
        SCALE.replace("return OL_OK", "const_cast<float *>(a->x)[0] = 9; return OL_OK"),
        r"'x' at \[0\]: 9.0",
    ),
    "writes behind": (SCALE.replace("return OL_OK", "a->y[a->n] = 1; return OL_OK"), r"'y': it wrote outside .* \+"),
    "writes before": (SCALE.replace("return OL_OK", "a->y[-1] = 1; return OL_OK"), r"'y': it wrote outside .* -"),
    "ignores its part": (
        SCALE.replace("ol_share_of(a->n, blockIdx, gridDim)", "ol_share{0, a->n / gridDim.x}"),
        "3 parts",
    ),
    "fails": (SCALE.replace("return OL_OK", 'OL_FAIL("n is %d", (int)a->n)'), "status -1: n is 1"),
}


@pytest.mark.parametrize("canary", ["process", "here"])
@pytest.mark.parametrize("name", WRONG)
def test_code_that_differs_from_its_reference_is_not_published(name: str, canary: Any) -> None:
    source, why = WRONG[name]
    with Executor() as executor:
        with pytest.raises(Refused, match=why):
            executor.define(changed(source), canary=canary)
        assert executor.operators == {}
        scale = executor.define(SPEC, canary="here")
        with pytest.raises(Refused, match=why):
            executor.replace(scale, changed(source), canary=canary)
        x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
        executor.call(scale, x, y, 4, 5.0)
        assert (y.tolist(), executor.generation(scale), scale.spec) == ([5.0] * 4, 1, SPEC)


@pytest.mark.parametrize(
    ("body", "why", "limit"),
    [
        ("*(volatile int *)8 = 1;", "SIGSEGV", 10.0),
        ("raise(SIGFPE);", "SIGFPE", 10.0),
        ("for (volatile int i = 0;; ) i = i + 1;", "did not end within 0.5 s", 0.5),
        ("_exit(3);", "its process ended with 3", 10.0),
    ],
)
def test_code_that_traps_or_does_not_end_is_refused_and_this_process_goes_on(body: str, why: str, limit: float) -> None:
    source = "#include <csignal>\n#include <unistd.h>\n" + SCALE.replace("return OL_OK", body + " return OL_OK")
    with Executor(workers=1) as executor:
        scale = executor.define(SPEC)
        started = time.monotonic()
        with pytest.raises(Refused, match=why):
            executor.replace(scale, changed(source, canary_timeout_s=limit))
        assert time.monotonic() - started < 8
        x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
        executor.call(scale, x, y, 4, 5.0)
        assert y.tolist() == [5.0] * 4


def test_code_of_another_abi_or_without_its_symbol_is_refused() -> None:
    from outlast.executor import canary
    from outlast.executor.operator import compile_operator

    with Executor() as executor:
        other = changed("#undef OL_ABI_VERSION\n#define OL_ABI_VERSION 99u\n" + SCALE)
        for where in ("process", "here"):
            with pytest.raises(Refused, match="ABI version 99"):
                executor.define(other, canary=where)  # type: ignore[arg-type]
        with pytest.raises(Refused, match="undefined symbol: elacs"):
            canary.check(dataclasses.replace(SPEC, name="elacs"), compile_operator(SPEC), "process")
        with pytest.raises(UsageError, match="no canary"):
            executor.define(changed(SCALE, canary=[]))
        with pytest.raises(UsageError, match=r"example 1.*rank 2"):
            executor.define(changed(SCALE, canary=[(np.zeros((2, 2), np.float32), FROZEN, 4, 1.0)]))
        with pytest.raises(UsageError, match="canary="):
            executor.define(SPEC, canary="skip")  # type: ignore[arg-type]


def test_replace_publishes_and_rollback_returns_with_the_description() -> None:
    def doubled(x: Any, y: Any, n: int, factor: float) -> None:
        np.multiply(x, np.float32(2 * factor), out=y)

    second = changed(SCALE.replace("a->factor *", "2 * a->factor *"), reference=doubled)
    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    with Executor(workers=1) as executor:
        scale = executor.define(SPEC)
        executor.replace(scale, second)
        executor.call(scale, x, y, 4, 5.0)
        assert (y[0], scale.spec, executor.generation(scale)) == (10, second, 2)
        executor.rollback(scale)
        executor.call(scale, x, y, 4, 5.0)
        assert (y[0], scale.spec, executor.generation(scale)) == (5, SPEC, 3)
        with pytest.raises(UsageError, match="another signature"):
            executor.replace(scale, changed(SCALE, signature=Signature((*SIGNATURE.arguments, Scalar("k", "int32")))))


def test_a_call_that_times_out_keeps_what_its_task_points_at() -> None:
    """The arrays are dropped while the task runs; it still writes memory that is its own."""
    slow = changed(
        "#include <unistd.h>\n" + SCALE.replace("const ol_share", "usleep(a->n > 64 ? 300000 : 0);\n const ol_share"),
        splittable=False,
    )
    with Executor(workers=1) as executor:
        scale = executor.define(slow)
        x, y = np.ones(100_000, np.float32), np.zeros(100_000, np.float32)
        import weakref

        gone = weakref.ref(y)
        with pytest.raises(TimedOut):
            executor.call(scale, x, y, 100_000, 2.0, timeout=0.05, assist=False)
        del x, y
        assert gone() is not None
        executor.wait(executor.native.tail)
        executor.call(scale, np.ones(4, np.float32), np.zeros(4, np.float32), 4, 1.0)
        assert gone() is None


def test_objects_given_with_a_task_live_until_its_ticket_is_done() -> None:
    import weakref

    class Thing:
        pass

    with Executor() as executor:
        scale = executor.define(SPEC, canary="here")
        packed, _ = SIGNATURE.pack((np.ones(4, np.float32), y := np.zeros(4, np.float32), 4, 2.0))
        words = np.frombuffer(packed, dtype=np.uint64)
        thing = Thing()
        gone = weakref.ref(thing)
        ticket = executor.submit(scale, words.ctypes.data, keep=(words, thing))
        del thing
        assert gone() is not None
        executor.wait(ticket)
        assert gone() is None
        assert y.tolist() == [2.0] * 4


def test_an_operators_own_error_reaches_the_caller() -> None:
    picky = changed(
        SCALE.replace(
            "return OL_OK", 'if (a->factor < 0) OL_FAIL("factor %d is negative", (int)a->factor); return OL_OK'
        )
    )
    with Executor(workers=1) as executor:
        scale = executor.define(picky)
        with pytest.raises(OperatorFailed, match="factor -3 is negative"):
            executor.call(scale, np.ones(4, np.float32), np.zeros(4, np.float32), 4, -3.0)


def test_the_child_costs_little(tmp_path: Path) -> None:
    from outlast.executor import canary
    from outlast.executor.operator import compile_operator

    path = compile_operator(SPEC)
    took = []
    for _ in range(5):
        started = time.perf_counter()
        canary.check(SPEC, path, "process")
        took.append(time.perf_counter() - started)
    assert min(took) < 0.5


def test_definitions_from_several_threads_do_not_disturb_each_other() -> None:
    with Executor(workers=1) as executor:
        failed: list[BaseException] = []

        def work(number: int) -> None:
            try:
                name = f"scale{number}"
                spec = dataclasses.replace(SPEC, name=name, source=SCALE.replace("scale", name), native=False)
                operator = executor.define(spec)
                y = np.zeros(8, np.float32)
                executor.call(operator, np.ones(8, np.float32), y, 8, float(number))
                assert y.tolist() == [number] * 8
            except BaseException as error:  # noqa: BLE001 - shown below
                failed.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []


@pytest.mark.parametrize("parts", [0, -1, 65536])
def test_a_call_in_no_parts_is_an_error_and_not_a_call_that_does_nothing(compiler: Compiler, parts: int) -> None:
    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    with Executor() as executor:
        scale = executor.define(SPEC, canary="here")
        with pytest.raises(UsageError, match="parts"):
            executor.call(scale, x, y, 4, 3.0, parts=parts)


def test_a_signal_without_a_name_is_reported_by_its_number(compiler: Compiler) -> None:
    source = """
    #include <csignal>
    OL_OPERATOR(scale, scale_args, a) { std::raise(SIGRTMIN + 3); return OL_OK; }
    """
    with Executor() as executor, pytest.raises(Refused, match=r"ended with signal \d+"):
        executor.define(dataclasses.replace(SPEC, source=source))


def test_names_with_letters_that_c_does_not_have_are_refused() -> None:
    with pytest.raises(UsageError, match="C identifier"):
        dataclasses.replace(SPEC, name="größe")
    with pytest.raises(UsageError, match="C identifier"):
        Signature((Scalar("größe", "int64"),))


def test_an_example_that_is_no_list_of_arguments_is_named(compiler: Compiler) -> None:
    with Executor() as executor, pytest.raises(UsageError, match="example 1"):
        executor.define(dataclasses.replace(SPEC, canary=[5]), canary="here")


@pytest.mark.parametrize("n", [5, 400, 3, -1])
def test_a_number_named_like_a_dimension_is_that_dimension(n: int) -> None:
    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    with pytest.raises(UsageError, match=rf"argument 'n' is {n}.*says 4"):
        SIGNATURE.pack((x, y, n, 1.0))
    first = Signature((Scalar("n", "int64"), Array("y", "float32", ("n",), "out")))
    with pytest.raises(UsageError, match=rf"argument 'n' is {n}"):
        first.pack((n, y))
    first.pack((4, y))
