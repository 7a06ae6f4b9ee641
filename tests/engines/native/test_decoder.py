"""The decoder against the numpy reference, and the plan as the executor sees it."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import get_args

import numpy as np
import pytest
from decoding import GREEDY, MakeRig, Rig, StepWrite, Task, random_tokens
from fixtures.tiny_model import TinyShape

from outlast.core.errors import UsageError
from outlast.engines.native import _native
from outlast.engines.native.decoder import Compute, Decoder, Item, kv_geometry, operators
from outlast.engines.native.reference import ReferenceModel
from outlast.engines.protocol import SamplingParams

WIDE = TinyShape(layers=3, hidden=96, heads=6, kv_heads=2, head_dim=32, ffn=160, tied=False)
MQA = TinyShape(layers=1, hidden=64, heads=5, kv_heads=1, head_dim=64, ffn=64, rope_base=1e6)


#: largest difference of a logit or of an element of K and V, at logits with a standard deviation near 3
BOUNDS: dict[Compute, float] = {"f32": 1e-4, "int8x2": 6e-3, "int8": 1.0}


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("shape", [TinyShape(), WIDE, MQA], ids=["tiny", "untied", "multi-query"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_forward_agrees_with_the_reference(make_rig: MakeRig, kind: str, shape: TinyShape, isa: str) -> None:
    _check_forward(make_rig(kind, shape, isa=isa, compute="f32"), 600, BOUNDS["f32"])  # three attention segments


@pytest.mark.parametrize("compute", get_args(Compute))
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_each_mode_agrees_with_the_reference(make_rig: MakeRig, kind: str, compute: Compute) -> None:
    shape = TinyShape(hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512)
    _check_forward(make_rig(kind, shape, compute=compute), 40, BOUNDS[compute])


def _check_forward(rig: Rig, length: int, bound: float) -> None:
    tokens = random_tokens(length, rig.config.vocab)
    handle = rig.add(tokens)
    rig.step(Item(handle, length))
    expected = ReferenceModel(rig.gguf).forward(tokens)
    assert np.abs(rig.logits()[0] - expected.logits[-1]).max() < bound
    rows = rig.rows(handle).view(np.float32)
    for layer in range(rig.config.layers):
        assert np.abs(rows[:, 2 * layer] - expected.k[layer]).max() < bound
        assert np.abs(rows[:, 2 * layer + 1] - expected.v[layer]).max() < bound


def test_greedy_decoding_follows_the_reference(make_rig: MakeRig) -> None:
    rig = make_rig(compute="f32")
    tokens = random_tokens(9, rig.config.vocab)
    model = ReferenceModel(rig.gguf)
    for result in rig.advance(rig.add(tokens, SamplingParams(temperature=0, top_logprobs=5)), 20):
        logits = model.forward(tokens).logits[-1]
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        best = np.argsort(-logits)[:5]
        assert result.token == best[0]
        assert result.logprob == pytest.approx(logprobs[best[0]], abs=1e-4)
        assert [t for t, _ in result.top] == list(best)
        tokens.append(int(best[0]))


def test_rotary_angles_are_exact_to_float(make_rig: MakeRig) -> None:
    config = dataclasses.replace(make_rig().config, head_dim=64, rope_base=100_000.0).native()
    for position in (0, 1, 2, 1000, 8191, 100_000):
        native = np.array(_native.rope_angles(config, position)).reshape(-1, 2)
        angles = position * 100_000.0 ** (-np.arange(32) / 32)
        assert np.abs(native - np.stack([np.cos(angles), np.sin(angles)], 1)).max() < 1e-7


def test_each_level_waits_for_all_tasks_of_the_one_before(make_rig: MakeRig) -> None:
    rig = make_rig("F32", WIDE)
    rig.parts = 3
    slots = {name: 40 + i for i, name in enumerate(operators())}
    rig.decoder.bind(slots)
    handle = rig.add(random_tokens(64, rig.config.vocab))
    rig.plan([Item(handle, 64)])
    native = rig.decoder._native
    tasks = list((Task * native.tasks_count).from_address(native.tasks_address))
    names = {slot: name.removeprefix("engine.") for name, slot in slots.items()}
    levels: list[str] = []
    i = 0
    while i < len(tasks):
        parts = tasks[i].parts
        level = tasks[i : i + parts]
        assert [t.part for t in level] == list(range(parts))
        assert {(t.op, t.after, t.arg[1]) for t in level} == {(level[0].op, i, level[0].arg[1])}
        levels.append(names[level[0].op])
        i += parts
    layer = ["qkv", "attend", "output", "gate_up", "down"]
    assert levels == ["begin", *layer * 3, "head", "sample"]
    assert max(t.parts for t in tasks) == 3
    rig.decoder.abandon()


def _tasks(rig: Rig) -> list[tuple[int, int, int, int, int]]:
    native = rig.decoder._native
    found = (Task * native.tasks_count).from_address(native.tasks_address)
    return [(t.op, t.after, t.part, t.parts, t.arg[1]) for t in found]


def test_a_plan_is_built_once_for_each_way_of_cutting_its_levels(make_rig: MakeRig) -> None:
    shape = TinyShape(layers=2, hidden=256, heads=8, kv_heads=2, head_dim=32, ffn=512)
    rig = make_rig("Q4_1", shape, blocks=128)
    handles = [rig.add(random_tokens(n, 280, seed=n)) for n in (3, 40, 200, 9)]
    seen: dict[int, tuple[int, list[tuple[int, int, int, int, int]]]] = {}
    for step in range(60):
        rig.parts = 1 + step % 3
        batch = handles[: 1 + step % 4]
        items = [Item(h, min(16, rig.decoder.length(h) - rig.decoder.computed(h))) for h in batch]
        rig.plan(items)
        native = rig.decoder._native
        now = native.tasks_address, _tasks(rig)
        assert seen.setdefault(native.plan_number, now) == now
        levels = {(op, layer): parts for op, _, _, parts, layer in now[1]}
        assert sum(levels.values()) == len(now[1])
        rig.decoder.run(2)
        rig.decoder.commit()
    assert len(seen) == rig.decoder.plans_built < 20
    assert len({tuple(tasks) for _, tasks in seen.values()}) == len(seen)


def test_plans_that_stand_follow_new_slots(make_rig: MakeRig) -> None:
    rig = make_rig()
    handle = rig.add([5, 6, 7])
    for base in (40, 90):
        rig.decoder.bind({name: base + i for i, name in enumerate(operators())})
        rig.plan([Item(handle, 3)])
        assert {op // 10 for op, *_ in _tasks(rig)} == {base // 10}
        rig.decoder.abandon()


def test_small_work_is_not_cut_into_parts(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.parts = 8
    rig.plan([Item(rig.add([5, 6]), 2)])
    native = rig.decoder._native
    assert all(t.parts == 1 for t in (Task * native.tasks_count).from_address(native.tasks_address))


def test_writes_describe_the_step(make_rig: MakeRig) -> None:
    rig = make_rig()
    first = rig.add([5, 6, 7, 8], prompt=3, computed=0)
    second = rig.add(random_tokens(20, rig.config.vocab))
    rig.plan([Item(first, 4), Item(second, 12)])
    native = rig.decoder._native
    assert native.writes_count == 2
    writes = (StepWrite * 2).from_address(native.writes_address)
    lengths = [ctypes.c_uint32.from_address(w.state_length) for w in writes]
    assert [length.value for length in lengths] == [0, 0]
    rig.decoder.run()
    assert [(w.key, w.generation, w.first, w.count, w.state_offset) for w in writes] == [
        (1, 7, 0, 4, 1),
        (2, 7, 0, 12, 0),
    ]
    assert [length.value for length in lengths] == [16, 0]  # only the first one reached its last known position
    token = ctypes.c_uint32.from_address(writes[0].state).value
    results = rig.decoder.commit()
    assert results[0].token == token
    assert results[1].token is None
    assert rig.decoder.tokens(first) == [5, 6, 7, 8, token]
    assert [rig.decoder.computed(h) for h in (first, second)] == [4, 12]


def test_an_abandoned_step_leaves_the_sequence_as_it_was(make_rig: MakeRig) -> None:
    rig = make_rig()
    handle = rig.add([5, 6, 7])
    rig.plan([Item(handle, 3)])
    rig.decoder.run()
    rig.decoder.abandon()
    assert (rig.decoder.computed(handle), rig.decoder.length(handle)) == (0, 3)
    again = rig.advance(handle, 3)
    fresh = make_rig()
    assert [r.token for r in again] == [r.token for r in fresh.advance(fresh.add([5, 6, 7]), 3)]


def test_rewinding_computes_the_same_rows_again(make_rig: MakeRig) -> None:
    rig = make_rig()
    handle = rig.add(random_tokens(40, rig.config.vocab))
    rig.advance(handle, 5)
    before, tokens = rig.rows(handle), rig.decoder.tokens(handle)
    rig.decoder.rewind(handle, 0)
    rig.step(Item(handle, len(tokens) - 1))
    assert np.array_equal(rig.rows(handle), before)
    assert rig.decoder.tokens(handle) == tokens


def test_logits_that_are_not_finite_fail_their_sequence_alone(make_rig: MakeRig) -> None:
    rig = make_rig()
    good, bad = rig.add([5, 6, 7]), rig.add([8, 9, 10])
    rig.step(Item(good, 2), Item(bad, 2))
    rig.row(bad, 1, 0)[:4] = np.float32(np.nan).tobytes()
    results = rig.step(Item(good, 1), Item(bad, 1))
    assert results[0].finite
    assert results[0].token is not None
    assert not results[1].finite
    assert results[1].token is None
    assert rig.decoder.computed(bad) == 2


def _plan(rig: Rig, *items: Item) -> None:
    rig.decoder.plan(items, 1)


def test_impossible_requests_are_refused(make_rig: MakeRig) -> None:
    rig = make_rig()
    d = rig.decoder
    with pytest.raises(UsageError, match="not in the vocabulary"):
        rig.add([5, rig.config.vocab])
    with pytest.raises(UsageError, match="prompt"):
        d.add(1, 1, [], 0, 0, GREEDY)
    with pytest.raises(UsageError, match="already"):
        d.add(1, 1, [5, 6], 2, 2, GREEDY)
    with pytest.raises(UsageError, match="out of range"):
        rig.add([5], SamplingParams(top_logprobs=21))
    handle = rig.add([5, 6, 7])
    with pytest.raises(UsageError, match="block table"):
        _plan(rig, Item(handle, 3))
    d.set_table(handle, [0])
    for item in (Item(handle, 4), Item(handle, 0), Item(handle, 1, 1), Item(99, 1)):
        with pytest.raises(UsageError):
            _plan(rig, item)
    with pytest.raises(UsageError, match="twice"):
        _plan(rig, Item(handle, 1), Item(handle, 1))
    with pytest.raises(ValueError, match="not in the pool"):
        d.set_table(handle, [rig.geometry.blocks])


def test_a_pool_of_another_geometry_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig()
    other = make_rig("Q4_1", WIDE)
    with pytest.raises(UsageError, match="geometry"):
        Decoder(rig.weights, _native.address(rig.pool), kv_geometry(other.config, 16, 4))


def test_an_unknown_instruction_set_is_refused(make_rig: MakeRig) -> None:
    with pytest.raises(UsageError, match="sse9"):
        make_rig(isa="sse9")


def test_an_unknown_mode_is_refused(make_rig: MakeRig) -> None:
    with pytest.raises(UsageError, match="int4"):
        make_rig(compute="int4")
