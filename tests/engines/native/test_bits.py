"""A sequence's logits and KV rows have the same bits, whatever happens around it."""

from __future__ import annotations

import numpy as np
import pytest
from decoding import MakeRig, Rig, random_tokens
from fixtures.tiny_model import TinyShape
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outlast.engines.native import _native
from outlast.engines.native.decoder import Item
from outlast.engines.protocol import SamplingParams

# Levels of this size are really cut into parts; two attention segments with the longest prompts.
SHAPE = TinyShape(layers=2, hidden=256, heads=8, kv_heads=2, head_dim=32, ffn=512)
LENGTHS = (3, 17, 40, 64, 130, 290)
STEPS = 6
KINDS = [
    ("F32", "f32"), ("Q8_0", "f32"), ("Q4_1", "f32"), ("Q8_0", "int8x2"), ("Q4_1", "int8x2"), ("Q4_K", "int8x2"),
    ("Q6_K", "int8x2"), ("Q8_0", "int8"), ("Q4_1", "int8"),
]  # fmt: skip
PARAMS = SamplingParams(temperature=0.8, top_p=0.95, seed=11)


def _alone(rig: Rig, prompt: list[int], chunk: int = 1 << 20) -> tuple[list[int], bytes, bytes]:
    handle = rig.add(prompt, PARAMS)
    rig.advance(handle, STEPS, chunk)
    return rig.decoder.tokens(handle), rig.rows(handle).tobytes(), rig.logits()[0].tobytes()


@pytest.fixture
def prompts() -> list[list[int]]:
    return [random_tokens(n, 280, seed=n) for n in LENGTHS]


@pytest.mark.parametrize(("kind", "compute"), KINDS)
def test_bits_do_not_depend_on_parts_or_threads(
    make_rig: MakeRig, prompts: list[list[int]], kind: str, compute: str
) -> None:
    expected = [_alone(make_rig(kind, SHAPE, compute=compute), p) for p in prompts]
    for parts, threads in ((2, 1), (3, 2), (7, 2), (4, 4)):
        rig = make_rig(kind, SHAPE, compute=compute)
        rig.parts, rig.threads = parts, threads
        assert [_alone(rig, p) for p in prompts] == expected


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize(("kind", "compute"), KINDS)
def test_bits_do_not_depend_on_prefill_chunks(
    make_rig: MakeRig, prompts: list[list[int]], kind: str, compute: str, isa: str
) -> None:
    options = {"isa": isa, "compute": compute}
    some = prompts[1:4] if isa == "generic" else prompts  # slow
    expected = [_alone(make_rig(kind, SHAPE, **options), p) for p in some]
    for chunk in (1, 7, 32):
        assert [_alone(make_rig(kind, SHAPE, **options), p, chunk) for p in some] == expected


def test_bits_do_not_depend_on_blocks(make_rig: MakeRig, prompts: list[list[int]]) -> None:
    expected = [_alone(make_rig("Q4_1", SHAPE), p) for p in prompts]
    for block_tokens in (1, 5, 64, 512):
        rig = make_rig("Q4_1", SHAPE, block_tokens=block_tokens, blocks=1024, seed=3)
        assert [_alone(rig, p) for p in prompts] == expected


@pytest.mark.skipif(not {"avx2", "avx512"} <= set(_native.isas()), reason="needs a CPU with AVX-512")
@pytest.mark.parametrize(("kind", "compute"), KINDS)
def test_avx2_and_avx512_give_the_same_bits(
    make_rig: MakeRig, prompts: list[list[int]], kind: str, compute: str
) -> None:
    fused = [isa for isa in _native.isas() if isa != "generic"]
    for prompt in prompts:
        first, *others = (_alone(make_rig(kind, SHAPE, isa=isa, compute=compute), prompt) for isa in fused)
        assert all(other == first for other in others)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bits_do_not_depend_on_the_batch(make_rig: MakeRig, data: st.DataObject) -> None:
    """Up to 16 sequences join and leave at random, with random chunks and parts; each ends as if alone."""
    kind, compute = data.draw(st.sampled_from(KINDS))
    lengths = data.draw(st.lists(st.sampled_from(LENGTHS), min_size=2, max_size=16))
    prompts = [random_tokens(n, 280, seed=i) for i, n in enumerate(lengths)]
    rig = make_rig(kind, SHAPE, blocks=512, compute=compute)
    order = data.draw(st.permutations(range(len(prompts))))
    handles = {rig.add(prompts[i], PARAMS): i for i in order}
    last: dict[int, bytes] = {}
    running = list(handles)
    while running:
        batch = data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True))
        rig.parts, rig.threads = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
        items = []
        for handle in batch:
            missing = rig.decoder.length(handle) - rig.decoder.computed(handle)
            items.append(Item(handle, missing if missing < 4 else data.draw(st.integers(missing // 3, missing))))
        results = rig.step(*items)
        rows = iter(rig.logits())
        for result in results:
            if result.token is None:
                continue
            last[result.handle] = next(rows).tobytes()
            if rig.decoder.length(result.handle) == len(prompts[handles[result.handle]]) + STEPS:
                running.remove(result.handle)
    for handle, i in handles.items():
        got = rig.decoder.tokens(handle), rig.rows(handle).tobytes(), last[handle]
        assert got == _alone(make_rig(kind, SHAPE, compute=compute), prompts[i])


# ---- checking restored rows ---------------------------------------------------------------------------------------


def _restored(rig: Rig, length: int, recheck: int) -> tuple[int, Item]:
    handle = rig.add(random_tokens(length, 280, seed=length))
    rig.step(Item(handle, length - 1))
    return handle, Item(handle, 1, recheck)


@pytest.mark.parametrize("recheck", [1, 2, 5])
def test_untouched_rows_pass_the_check(make_rig: MakeRig, recheck: int) -> None:
    rig = make_rig("Q4_1", SHAPE)
    handle, item = _restored(rig, 70, recheck)
    before = rig.rows(handle)
    rig.parts = 3
    (result,) = rig.step(item)
    assert result.verified
    assert result.token is not None
    assert np.array_equal(rig.rows(handle)[:69], before)
    plain = make_rig("Q4_1", SHAPE)
    _, item = _restored(plain, 70, 0)
    assert plain.step(item)[0].token == result.token


@pytest.mark.parametrize("piece", range(4))
@pytest.mark.parametrize("back", [1, 2])
def test_a_flipped_bit_in_a_checked_row_is_seen(make_rig: MakeRig, piece: int, back: int) -> None:
    rig = make_rig("Q4_1", SHAPE)
    handle, item = _restored(rig, 70, 2)
    row = rig.row(handle, 69 - back, piece)
    for byte, bit in ((0, 0), (len(row) // 2, 3), (len(row) - 1, 7)):
        row[byte] ^= 1 << bit
        damaged = rig.rows(handle)
        (result,) = rig.step(item)
        assert not result.verified
        assert result.token is None
        assert np.array_equal(rig.rows(handle), damaged), "the stored rows are put back"
        assert (rig.decoder.computed(handle), rig.decoder.length(handle)) == (69, 70)
        row[byte] ^= 1 << bit
    assert rig.step(item)[0].verified


@pytest.mark.parametrize("position", [0, 31, 67])
def test_damage_to_earlier_positions_shows_in_the_checked_rows(make_rig: MakeRig, position: int) -> None:
    """Through attention: rows of every layer but the last change what later layers compute for the checked position."""
    rig = make_rig("F32", SHAPE)
    handle, item = _restored(rig, 70, 1)
    for piece in (0, 1):  # K and V of the first layer
        row = np.frombuffer(rig.row(handle, position, piece), np.float32)
        kept = row.copy()
        row += 0.25
        assert not rig.step(item)[0].verified
        row[:] = kept


def test_a_failed_check_leaves_its_neighbours_alone(make_rig: MakeRig) -> None:
    rig = make_rig("Q4_1", SHAPE)
    damaged, first = _restored(rig, 40, 1)
    _, second = _restored(rig, 50, 1)
    rig.row(damaged, 38, 1)[5] ^= 4
    results = rig.step(first, second)
    assert [r.verified for r in results] == [False, True]
    assert results[1].token is not None
