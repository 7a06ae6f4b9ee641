"""The journal: which tokens reach a client, and who is blamed for deaths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.engines.protocol import Emission, EngineRequest
from outlast.serve.journal import STRIKES, Journal, Verdict


def journal_of(*keys: int) -> Journal:
    journal = Journal()
    for key in keys:
        journal.accept(EngineRequest(key, (1,), 100), now=0.0)
    return journal


def test_only_the_next_token_is_new() -> None:
    journal = journal_of(1)
    assert journal.deliver(Emission(1, 0, 50, 0.0)) is Verdict.NEW
    assert journal.deliver(Emission(1, 0, 50, 0.0)) is Verdict.REPEATED
    assert journal.deliver(Emission(1, 0, 51, 0.0)) is Verdict.CONTRADICTION
    assert journal.deliver(Emission(1, 2, 50, 0.0)) is Verdict.GAP
    assert journal.deliver(Emission(9, 0, 50, 0.0)) is Verdict.UNKNOWN
    assert journal.entries()[0].delivered == (50,)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 1)), max_size=40))
def test_what_is_delivered_is_never_changed_whatever_is_reported(reports: list[tuple[int, int]]) -> None:
    journal = journal_of(1)
    shown: list[int] = []
    for index, token in reports:
        if journal.deliver(Emission(1, index, token, 0.0)) is Verdict.NEW:
            assert index == len(shown)
            shown.append(token)
        assert list(journal.entries()[0].delivered) == shown


def test_the_third_death_without_progress_ends_a_request() -> None:
    journal = journal_of(1, 2)
    for _ in range(STRIKES - 1):
        assert journal.strike([1]) == []
    assert [live.request.key for live in journal.strike([1])] == [1]


def test_a_token_or_a_part_of_a_prompt_clears_the_strikes() -> None:
    journal = journal_of(1, 2)
    for _ in range(10):
        assert journal.strike([1, 2]) == []
        journal.deliver(Emission(1, len(journal.entries()[0].delivered), 5, 0.0))
        journal.advanced([2])


def test_a_request_that_the_next_death_would_end_is_recovered_alone_until_it_gets_on() -> None:
    journal = journal_of(1, 2)
    journal.strike([1, 2])
    assert [entry.alone for entry in journal.entries()] == [False, False]
    journal.strike([1])
    assert [entry.alone for entry in journal.entries()] == [True, False]
    journal.advanced([1])
    assert [entry.alone for entry in journal.entries()] == [False, False]


def test_neighbours_of_a_request_that_kills_engines_are_never_ended() -> None:
    """As an engine does it: those on probation take steps of their own; key 1 kills every step it is in."""
    for order in ([1, 2, 3], [3, 2, 1], [2, 1, 3]):
        journal = journal_of(*order)
        ended: list[int] = []
        while not ended:
            alone = [entry.request.key for entry in journal.entries() if entry.alone]
            for step in [[key] for key in alone] or [order]:
                if 1 in step:
                    ended += [live.request.key for live in journal.strike(step)]
                    break
                journal.advanced(step)
        assert ended == [1]


def test_a_repeated_token_is_no_progress() -> None:
    journal = journal_of(1)
    journal.deliver(Emission(1, 0, 5, 0.0))
    for _ in range(STRIKES - 1):
        journal.strike([1])
    journal.deliver(Emission(1, 0, 5, 0.0))
    assert journal.entries()[0].alone


def test_ended_requests_are_forgotten_and_blame_of_them_is_ignored() -> None:
    journal = journal_of(1)
    journal.remove(1)
    journal.remove(1)
    assert journal.strike([1, 1, 1, 1]) == []
    assert len(journal) == 0
