"""Operators defined by a specification on the CUDA backend, over the recording driver: tried, refused, published.

What runs in their place are Python functions: shown is what the host does with an outcome, not that device code is
right.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from outlast.core.errors import NotPossibleHere, OperatorFailed, Refused, UsageError
from outlast.core.jit import JitError
from outlast.executor.backends import nvrtc
from outlast.executor.backends.cuda import CudaExecutor
from outlast.executor.backends.driver import Driver
from outlast.executor.operator import Array, OperatorSpec, Scalar, Signature

SIGNATURE = Signature(
    (Array("x", "float32", ("n",)), Array("y", "float32", ("n",), "out"), Scalar("n", "int64"), Scalar("by", "float32"))
)
SOURCE = """
OL_OPERATOR(scale, scale_args, a) {
    const ol_share w = ol_share_of(a->n, blockIdx, gridDim);
    for (int64_t i = w.begin; i < w.end; i += w.step) a->y[i] = a->by * a->x[i];
    return OL_OK;
}"""


def spec(**changes: Any) -> OperatorSpec:
    described: dict[str, Any] = {
        "name": "scale",
        "signature": SIGNATURE,
        "source": SOURCE,
        "reference": lambda x, y, n, by: np.multiply(x, np.float32(by), out=y),
        "canary": [(np.arange(5, dtype=np.float32), np.zeros(5, np.float32), 5, 2.0)],
        "splittable": True,
    }
    return OperatorSpec(**{**described, **changes})


class Recorded:
    """An executor over a recording driver in which `scale` does what `behaviour` says."""

    def __init__(self, cubins: nvrtc.CubinCache) -> None:
        from recording_driver import RecordingDriver

        self.driver = RecordingDriver()
        self.driver.program = self._run
        self.behaviour = "right"
        self.executor = CudaExecutor(driver=Driver(self.driver), cache=cubins)

    def _run(self, module: Any, name: str, task: Any) -> tuple[int, str]:
        x, y, n, by = struct.unpack("<QQqf", ctypes.string_at(task.arg[0], 28))
        given, out = ((ctypes.c_float * n).from_address(at) for at in (x, y))
        if self.behaviour == "fails":
            return -5, "it does not like this"
        for i in range(n * task.part // task.parts, n * (task.part + 1) // task.parts):
            out[i] = (by + (self.behaviour == "wrong")) * given[i]
        if self.behaviour == "beyond":
            (ctypes.c_float * (n + 1)).from_address(y)[n] = 7.0
        return 0, ""

    def unloaded(self) -> bool:
        """Whether the module that was loaded last is given up, once the kernel is away again."""
        with self.executor._kernel.quiet():
            pass
        return self.driver.modules[-1].unloaded


@pytest.fixture
def recorded(cubins: nvrtc.CubinCache) -> Iterator[Recorded]:
    made = Recorded(cubins)
    yield made
    made.executor.close(timeout=5)


def test_a_defined_operator_is_tried_first_and_then_called(recorded: Recorded) -> None:
    scale = recorded.executor.define(spec())
    assert {name for _, _, name in recorded.driver.ran} == {"scale"}
    assert len(recorded.driver.ran) == 1 + 3  # the example in one part, and in three
    x, y = np.arange(10, dtype=np.float32), np.zeros(10, np.float32)
    recorded.executor.call(scale, x, y, 10, 3.0, parts=2)
    assert y.tolist() == (3 * x).tolist()
    assert [row.name for row in recorded.executor.stats().operators] == ["scale", "sequence"]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [("wrong", "instead of"), ("beyond", "outside the elements"), ("fails", "it does not like this")],
)
def test_an_operator_that_fails_its_canary_is_refused_and_unloaded(
    recorded: Recorded, behaviour: str, reason: str
) -> None:
    recorded.behaviour = behaviour
    with pytest.raises(Refused, match=reason):
        recorded.executor.define(spec())
    assert "scale" not in recorded.executor.operators
    assert recorded.unloaded()


def test_a_failing_replacement_leaves_the_old_code_active(recorded: Recorded) -> None:
    scale = recorded.executor.define(spec())
    recorded.behaviour = "wrong"
    with pytest.raises(Refused):
        recorded.executor.replace(scale, spec(defines={"OTHER": 1}))
    assert recorded.executor.generation(scale) == 1
    assert recorded.unloaded()
    recorded.behaviour = "right"
    recorded.executor.replace(scale, spec(defines={"OTHER": 2}))
    assert recorded.executor.generation(scale) == 2
    with pytest.raises(UsageError, match="another signature"):
        recorded.executor.replace(scale, spec(signature=Signature((Scalar("n", "int64"),))))


def test_an_error_of_a_call_has_the_operators_text_and_writes_nothing(recorded: Recorded) -> None:
    scale = recorded.executor.define(spec())
    recorded.behaviour = "fails"
    y = np.full(3, 9, np.float32)
    with pytest.raises(OperatorFailed, match="does not like"):
        recorded.executor.call(scale, np.ones(3, np.float32), y, 3, 1.0)
    assert y.tolist() == [9, 9, 9]


def test_lines_of_a_compiler_error_are_the_operators_own(recorded: Recorded) -> None:
    with pytest.raises(JitError, match=r"scale:4: error"):
        recorded.executor.define(spec(source=SOURCE.lstrip("\n").replace("return OL_OK", "retrn OL_OK") + "\n"))


def test_a_canary_in_another_process_is_refused_openly(recorded: Recorded) -> None:
    with pytest.raises(NotPossibleHere, match="here"):
        recorded.executor.define(spec(), canary="process")  # type: ignore[arg-type]
