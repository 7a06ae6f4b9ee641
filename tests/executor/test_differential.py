"""Every supported overload against eager PyTorch, over random arguments; also its in-place and out= forms.

`samples_*.py` say how to draw arguments for an overload. `OUTLAST_DIFFERENTIAL_CASES` sets how many cases are drawn in
all (default 5,000; the nightly target asks for 100,000).
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import differential
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outlast.executor import lowering
from outlast.executor.runtime import Executor

pytestmark = pytest.mark.torch

CASES = int(
    os.environ.get(
        "OUTLAST_DIFFERENTIAL_CASES", "100000" if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else "5000"
    )
)


def _collect() -> tuple[dict[str, Callable[..., Any]], dict[str, tuple[float, float]]]:
    samples: dict[str, Callable[..., Any]] = {}
    tolerances: dict[str, tuple[float, float]] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name.startswith("samples_"):
            loaded = importlib.import_module(module.name)
            samples.update(loaded.SAMPLES)
            tolerances.update(getattr(loaded, "TOLERANCES", {}))
    return samples, tolerances


SAMPLES, TOLERANCES = _collect()


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(workers=0) as one:
        yield one


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_overload_gives_what_eager_gives(name: str, executor: Executor) -> None:
    draw_sample = st.composite(lambda draw: SAMPLES[name](draw))
    others = differential.forms(name)
    done = 0

    @settings(
        max_examples=max(5, CASES // len(SAMPLES)), deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )  # fmt: skip
    @given(sample=draw_sample())
    def run(sample: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        nonlocal done
        args, kwargs = sample
        done += differential.compare(name, args, kwargs, executor, TOLERANCES.get(name))
        for other, change in others.items():
            changed = change(args, kwargs)
            if changed is not None:
                differential.compare(other, *changed, executor, TOLERANCES.get(name))

    run()
    assert done > 0, f"no sample of {name} was run by the executor: {differential.unsupported}"


def test_every_lowering_has_samples() -> None:
    covered = set(SAMPLES).union(*(differential.forms(name) for name in SAMPLES))
    missing = sorted(set(lowering.registered()) - covered)
    assert not missing
