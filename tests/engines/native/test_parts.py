"""How many threads share a step follows what helps."""

from __future__ import annotations

import random

import pytest

from outlast.engines.native.parts import Parts


def _run(parts: Parts, steps: int, alone: float, shared: float, tokens: int = 1) -> tuple[float, list[int]]:
    """Mean time of a step and the choices, where one thread takes `alone` and all take `shared`, give or take 5 %."""
    noise, total, chosen = random.Random(1), 0.0, []
    for _ in range(steps):
        chosen.append(parts.choose(tokens))
        seconds = (alone if chosen[-1] == 1 else shared) * noise.uniform(0.95, 1.05)
        parts.ran(tokens, chosen[-1], seconds)
        total += seconds
    return total / steps, chosen


def test_threads_share_while_that_is_faster() -> None:
    mean, chosen = _run(Parts(2), 1000, alone=8.0, shared=5.0)
    assert chosen[0] == 2
    assert mean < 5.0 * 1.02


@pytest.mark.parametrize("shared", [9.0, 34.0, 80.0])
def test_one_thread_works_while_sharing_is_slower(shared: float) -> None:
    parts = Parts(2)
    _run(parts, 200, 8.0, 5.0)
    mean, _ = _run(parts, 2000, alone=8.0, shared=shared)
    assert mean < 8.0 / 0.9


def test_sharing_begins_again_once_it_helps() -> None:
    parts = Parts(2)
    _run(parts, 500, alone=8.0, shared=30.0)
    _, chosen = _run(parts, 600, alone=8.0, shared=5.0)
    assert chosen[-300:].count(2) > 290


def test_sizes_of_steps_are_judged_apart() -> None:
    parts = Parts(2)
    for _ in range(100):
        _run(parts, 1, alone=1.0, shared=3.0, tokens=1)
        _run(parts, 1, alone=64.0, shared=40.0, tokens=64)
    assert (parts.choose(1), parts.choose(64)) == (1, 2)


def test_growing_contexts_do_not_mislead() -> None:
    """Each step is slower than the ones before: an old estimate of the other choice must not win for long."""
    parts = Parts(2)
    shared = 0
    for step in range(2000):
        chosen = parts.choose(1)
        parts.ran(1, chosen, (5.0 if chosen == 2 else 8.0) * (1 + step / 500))
        shared += chosen == 2
    assert shared > 1900


def test_one_thread_has_no_choice() -> None:
    assert set(_run(Parts(1), 100, 8.0, 1.0)[1]) == {1}
