"""The sampler: published vectors for its generator, the numpy reference for its choices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.engines.native import _native, reference
from outlast.engines.protocol import SamplingParams

# Known-answer vectors of the Random123 distribution (philox4x32, 10 rounds): counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert tuple(_native.philox(list(counter), list(key))) == expected
    assert reference.philox4x32(counter, key) == expected


def test_random_numbers_differ_by_seed_stream_and_position() -> None:
    numbers = {(s, t, p): _native.uniform(s, t, p) for s in (0, 1, 1 << 40) for t in (0, 1) for p in range(50)}
    assert len(set(numbers.values())) == len(numbers)
    assert all(0 <= u < 1 for u in numbers.values())
    assert all(u == reference.uniform(*key) for key, u in numbers.items())


def _sample(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: list[int],
    generated: list[int],
    position: int,
    stop_tokens: tuple[int, ...] = (),
):
    counts = {token: generated.count(token) for token in {*prompt, *generated}}
    native = _native.SamplerParams(
        temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, min_p=params.min_p, seed=params.seed,
        stream=params.stream, presence_penalty=params.presence_penalty, frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty, logit_bias=list(params.logit_bias),
        top_logprobs=params.top_logprobs, typical_p=params.typical_p, min_tokens=params.min_tokens,
        stop_tokens=list(stop_tokens),
    )  # fmt: skip
    return _native.sample(logits.astype(np.float32).tobytes(), native, list(counts.items()), position, len(generated))


@given(
    seed=st.integers(0, (1 << 64) - 1),
    vocab=st.sampled_from([1, 2, 15, 300, 5000]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    top_k=st.sampled_from([0, 1, 3, 40, 400]),
    min_p=st.sampled_from([0.0, 0.05, 0.9]),
    penalties=st.tuples(*[st.sampled_from([-1.0, 0.0, 0.7])] * 2, st.sampled_from([0.8, 1.0, 1.3])),
    position=st.integers(0, 100_000),
    bias=st.booleans(),
)
def test_tokens_are_the_references(
    seed: int,
    vocab: int,
    spread: float,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    penalties: tuple[float, float, float],
    position: int,
    bias: bool,
) -> None:
    random = np.random.default_rng(seed)
    logits = (random.standard_normal(vocab) * spread).astype(np.float32)
    prompt, generated = ([int(t) for t in random.integers(0, vocab, 8)] for _ in range(2))
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stream=3,
        presence_penalty=penalties[0], frequency_penalty=penalties[1], repetition_penalty=penalties[2],
        logit_bias=((vocab // 2, 2.5), (0, -100.0)) if bias else (), top_logprobs=min(vocab, 20),
    )  # fmt: skip
    result = _sample(logits, params, prompt, generated, position)
    expected, margin = reference.sample(logits, params, prompt, generated, position)
    if spread > 0 and margin > 1e-5:  # the reference works in double precision: a draw on a boundary proves nothing
        ids, probabilities = reference.candidates(logits, params, prompt, generated)
        edge = temperature > 0 and (top_p < 1 or min_p > 0)
        if not edge or len(ids) == vocab:
            assert result.token == expected
        else:
            assert result.token in ids or probabilities.min() < 1e-5
    logprobs = reference.log_softmax(logits)
    assert result.logprob == pytest.approx(logprobs[result.token], abs=1e-5)
    order = np.lexsort((np.arange(vocab), -logits))[:20]
    assert [t for t, _ in result.top] == [int(t) for t in order]
    assert [p for _, p in result.top] == pytest.approx(list(logprobs[order]), abs=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.9, seed=5),
        SamplingParams(temperature=0.7, top_p=0.9, seed=6),
        SamplingParams(top_k=20, min_p=0.02, top_p=0.8, seed=7, stream=2),
        SamplingParams(temperature=1.5, min_p=0.1, seed=8),
        SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, seed=9),
        SamplingParams(top_k=300, seed=10),
    ],
    ids=lambda p: f"seed{p.seed}",
)
def test_a_thousand_draws_are_the_references(params: SamplingParams) -> None:
    logits = (np.random.default_rng(4).standard_normal(2000) * 2.5).astype(np.float32)
    different = 0
    for position in range(1000):
        token, margin = reference.sample(logits, params, [1, 2, 3], [4, 4, 5], position)
        if _sample(logits, params, [1, 2, 3], [4, 4, 5], position).token != token:
            assert margin < 1e-6
            different += 1
    assert different <= 1


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    params = SamplingParams(seed=123)
    counts = np.bincount([_sample(logits, params, [], [], p).token for p in range(8000)], minlength=4)
    assert np.abs(counts / 8000 - np.exp(logits)).max() < 0.02


def test_ties_go_to_the_lower_id() -> None:
    logits = np.zeros(100, np.float32)
    logits[[17, 40, 90]] = 3
    assert _sample(logits, SamplingParams(temperature=0), [], [], 0).token == 17
    kept = {_sample(logits, SamplingParams(top_k=2, seed=1), [], [], p).token for p in range(60)}
    assert kept == {17, 40}


def test_penalties_count_generated_tokens_and_repetition_the_prompt_too() -> None:
    logits = np.zeros(10, np.float32)
    logits[[3, 4]] = [2.0, 1.5]
    greedy = {"temperature": 0.0}
    assert _sample(logits, SamplingParams(presence_penalty=1.0, **greedy), [3], [], 0).token == 3
    assert _sample(logits, SamplingParams(presence_penalty=1.0, **greedy), [], [3], 0).token == 4
    assert _sample(logits, SamplingParams(frequency_penalty=0.3, **greedy), [], [3], 0).token == 3
    assert _sample(logits, SamplingParams(frequency_penalty=0.3, **greedy), [], [3, 3], 0).token == 4
    assert _sample(logits, SamplingParams(repetition_penalty=2.0, **greedy), [3], [], 0).token == 4
    result = _sample(logits, SamplingParams(logit_bias=((7, 50.0),), **greedy), [], [], 0)
    assert result.token == 7
    assert result.logprob < math.log(0.1), "log-probabilities are those of the unmodified logits"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_reported(bad: float) -> None:
    logits = np.zeros(100, np.float32)
    logits[60] = bad
    result = _sample(logits, SamplingParams(), [], [], 0)
    assert not result.finite
    assert result.token is None


# ---- typical sampling, min_tokens, ties, edges ---------------------------------------------------------------------


@given(
    seed=st.integers(0, 1 << 40),
    vocab=st.sampled_from([3, 40, 700]),
    spread=st.sampled_from([0.5, 2.0, 8.0]),
    typical_p=st.sampled_from([0.05, 0.3, 0.7, 0.95]),
    top_k=st.sampled_from([0, 20]),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
)
def test_typical_sampling_keeps_the_references_tokens(
    seed: int, vocab: int, spread: float, typical_p: float, top_k: int, temperature: float
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)
    params = SamplingParams(temperature=temperature, typical_p=typical_p, top_k=top_k, seed=seed)
    ids, _ = reference.candidates(logits, params, [], [])
    result = _sample(logits, params, [], [], seed % 1000)
    assert result.token in ids or typical_p == 0.95  # on an edge rounding may take one more
    expected, margin = reference.sample(logits, params, [], [], seed % 1000)
    if margin > 1e-3:
        assert result.token == expected or result.token not in ids


def test_typical_sampling_prefers_the_unsurprising_to_the_likely() -> None:
    """One token of probability 0.4 and 300 of 0.002: the entropy is near the small ones' surprise."""
    logits = np.log(np.array([0.4, *[0.002] * 300], np.float32))
    drawn = {_sample(logits, SamplingParams(typical_p=0.3, seed=s), [], [], 0).token for s in range(200)}
    assert 0 not in drawn
    assert len(drawn) > 50


def test_no_stop_token_is_chosen_before_min_tokens() -> None:
    logits = np.zeros(50, np.float32)
    logits[[7, 9]] = 20.0, 19.0
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, min_tokens=3, seed=4)
        for generated in range(6):
            result = _sample(logits, params, [], [1] * generated, generated, (7, 9))
            assert (result.token in (7, 9)) == (generated >= 3)
            assert result.logprob == pytest.approx(reference.log_softmax(logits)[result.token], abs=1e-5)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = np.full(300, -1.0, np.float32)
    logits[[250, 31, 170]] = 2.5
    assert _sample(logits, SamplingParams(temperature=0.0), [], [], 0).token == 31
    assert _sample(np.zeros(300, np.float32), SamplingParams(temperature=0.0), [], [], 0).token == 0
    assert _sample(logits, SamplingParams(temperature=1.0, top_k=1, seed=3), [], [], 0).token == 31


def test_logits_of_which_none_can_be_chosen_are_told_apart() -> None:
    never = np.full(40, -np.inf, np.float32)
    assert not _sample(never, SamplingParams(temperature=0.0), [], [], 0).finite
    assert not _sample(never, SamplingParams(seed=1), [], [], 0).finite
    only = never.copy()
    only[5] = 1.0
    assert _sample(only, SamplingParams(seed=1, typical_p=0.5, top_p=0.5), [], [], 0).token == 5
    assert not _sample(only, SamplingParams(temperature=0.0, min_tokens=1), [], [], 0, (5,)).finite
    for bad in (np.nan, np.inf):
        broken = np.zeros(40, np.float32)
        broken[3] = bad
        assert not _sample(broken, SamplingParams(temperature=0.0), [], [], 0).finite


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6, 1e30])
def test_extreme_temperatures_are_greedy_or_uniform(temperature: float) -> None:
    logits = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    drawn = [_sample(logits, SamplingParams(temperature=temperature, seed=s), [], [], 0).token for s in range(400)]
    if temperature < 1:
        assert set(drawn) == {int(np.argmax(logits))}
    else:
        assert len(set(drawn)) > 55


@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
def test_log_probabilities_are_exact_to_the_float_they_are_kept_in(spread: float) -> None:
    """Differences, sums over chunks and the logarithm are of double precision."""
    logits = (np.random.default_rng(2).standard_normal(49_152) * spread).astype(np.float32)
    exact = reference.log_softmax(logits)
    for seed in range(20):
        result = _sample(logits, SamplingParams(seed=seed, temperature=2.0, top_logprobs=20), [], [], 0)
        for token, logprob in [(result.token, result.logprob), *result.top]:
            assert abs(logprob - exact[token]) < 2**-23 * max(4.0, abs(exact[token]))
