"""Comparing streams: whatever a client was sent that the reference has not there is found and counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outlast.bench.transcripts import Received, Transcript, compare, judge


def transcript(tokens: int = 10, finish: str | None = "length") -> Transcript:
    rows = [Received(100 + i, f"w{i} ", -0.5 * i, 1 + i // 4, float(i)) for i in range(tokens)]
    return Transcript(rows, finish, tokens)


def test_same_stream_from_other_engines_at_other_times_is_identical() -> None:
    observed = transcript()
    observed.tokens = [replace(r, engine=r.engine + 5, at=r.at + 100) for r in observed.tokens]
    found = compare(transcript(), observed)
    assert (found.identical, found.contradicted, found.first) == (True, 0, "")


@pytest.mark.parametrize(
    "change", [{"token": 7}, {"logprob": -0.7500001}, {"text": "other "}], ids=["token", "logprob", "text"]
)
def test_one_changed_token_is_one_contradiction(change: dict[str, object]) -> None:
    observed = transcript()
    observed.tokens[3] = replace(observed.tokens[3], **change)  # type: ignore[arg-type]
    found = compare(transcript(), observed)
    assert not found.identical
    assert found.contradicted == 1
    assert found.first.startswith("token 3: ")


def test_repeated_token_contradicts_everything_after_it() -> None:
    observed = transcript()
    observed.tokens.insert(4, observed.tokens[3])
    observed.counted = 11
    found = compare(transcript(), observed)
    assert not found.identical
    assert (found.contradicted, found.lost) == (7, 0)


def test_lost_tail_is_counted_though_nothing_sent_was_wrong() -> None:
    observed = transcript()
    del observed.tokens[8:]
    observed.counted = 8
    found = compare(transcript(), observed)
    assert not found.identical
    assert (found.contradicted, found.lost) == (2, 2)


def test_stream_without_an_end_is_hung() -> None:
    observed = transcript(finish=None)
    observed.error = "APIError: gone"
    found = compare(transcript(), observed)
    assert (found.identical, found.hung) == (False, True)
    assert "APIError: gone" in found.first


def test_usage_must_count_what_came() -> None:
    observed = transcript()
    observed.counted = 11
    assert "usage counts 11" in compare(transcript(), observed).first


def test_other_end_is_a_difference() -> None:
    assert not compare(transcript(), transcript(finish="stop")).identical


def test_verdict_adds_up_over_rounds_and_streams() -> None:
    references = [transcript(), transcript(5)]
    bad = transcript(5)
    bad.tokens[0] = replace(bad.tokens[0], token=1)
    bad.tokens[4] = replace(bad.tokens[4], token=1)
    verdict = judge(references, [[transcript(), transcript(5)], [transcript(), bad]])
    assert (verdict.identical, verdict.contradicted) == (False, 2)
    assert verdict.differences[0].startswith("round 2, stream 1: token 0")
    assert judge(references, [[transcript(), transcript(5)]]).identical


@pytest.mark.parametrize("references", [[], [Transcript()], [transcript(finish=None)]])
def test_nothing_compared_is_not_identical(references: list[Transcript]) -> None:
    assert not judge(references, [references] if references else []).identical
