"""Every interleaving of small executors keeps the protocol's promises, and each deliberate mistake breaks one."""

from __future__ import annotations

import protocol_model as model
import pytest
from protocol_model import Thread, Violation, explore


def ring(
    mutant: str = "", tasks: tuple[int, ...] = (2, 1), consumers: int = 2, first: int = 0, outcomes: int = 2
) -> int:
    """Producers of `tasks` tasks each and consumers, capacity 2; returns the number of states."""
    threads = [model.producer(2, n, mutant) for n in tasks]
    threads += [model.consumer(2, mutant) for _ in range(consumers)]
    return explore(model.ring_words(2, sum(tasks), first, outcomes), threads)


def ring_with_direct_calls(mutant: str = "", *, direct: tuple[bool, ...], others: tuple[Thread, ...] = ()) -> int:
    tasks = (2, 1)
    threads = [model.producer(2, n, mutant, direct=d) for n, d in zip(tasks, direct, strict=True)]
    return explore(model.ring_words(2, sum(tasks)), [*threads, model.consumer(2, mutant), *others])


def swaps(mutant: str = "", tasks: tuple[int, ...] = (2,), consumers: int = 2, times: int = 3) -> int:
    threads = [model.producer(2, n, mutant) for n in tasks]
    threads += [model.consumer(2, mutant) for _ in range(consumers)]
    return explore(model.ring_words(2, sum(tasks)), [*threads, model.swapper(times, mutant)])


def sleep(mutant: str = "") -> int:
    threads = [model.publisher(1, mutant), model.publisher(1, mutant), model.sleeper(mutant), model.sleeper(mutant)]
    return explore(model.sleep_words(2), threads)


def away(mutant: str = "") -> int:
    threads = [
        model.announcing_producer(2, mutant),
        model.announcing_producer(1, mutant),
        model.leaving_worker(mutant),
    ]
    return explore(model.away_words(3), threads)


def test_two_producers_and_two_consumers_run_every_ticket_once() -> None:
    """No slot is overwritten before it was copied, no outcome is lost, `completed` arrives, nobody gets stuck."""
    assert ring(tasks=(2, 2)) > 100_000


def test_tickets_may_start_anywhere() -> None:
    assert ring(first=(1 << 32) - 2) > 10_000


def test_the_sequence_word_alone_guards_a_slot() -> None:
    """With room for more outcomes than slots nothing but `seq` keeps a producer from a slot that is not copied yet."""
    assert ring(outcomes=4) > 10_000


@pytest.mark.parametrize(
    ("mutant", "broken", "outcomes"),
    [
        ("release before copy", "overwritten before it was copied", 4),
        ("claim without seq", "overwritten before it was copied", 4),
        ("claim without done", "the outcome of ticket", 2),
        ("plain claim", "stuck", 2),
        ("plain take", "runs twice", 2),
        ("plain completed", "completed goes back", 2),
        ("lap not seen", "stuck", 2),
    ],
)
def test_a_mistake_in_the_ring_is_found(mutant: str, broken: str, outcomes: int) -> None:
    with pytest.raises(Violation, match=broken):
        ring(mutant, outcomes=outcomes)


def test_a_producer_may_take_its_own_task_if_it_is_next() -> None:
    ring_with_direct_calls(direct=(True, False))
    ring_with_direct_calls(direct=(True, True))
    with pytest.raises(Violation):
        ring_with_direct_calls("direct overtakes", direct=(True, False))


def test_published_code_is_that_of_the_tasks_generation() -> None:
    """Three swaps, so that each side is overwritten: no task runs code that is gone, or another generation's."""
    assert swaps() > 10_000
    swaps(tasks=(2, 1), consumers=1, times=2)


@pytest.mark.parametrize(
    "mutant", ["word before claim", "reclaim without waiting", "reclaim at head", "tail before word"]
)
def test_a_mistake_in_publication_is_found(mutant: str) -> None:
    with pytest.raises(Violation, match="runs version"):
        swaps(mutant)


def test_nothing_runs_on_a_parked_executor_and_everything_after() -> None:
    ring_with_direct_calls(direct=(True, False), others=(model.parker(),))
    explore(model.ring_words(2, 3), [model.producer(2, 3), model.consumer(2), model.consumer(2), model.parker()])


@pytest.mark.parametrize(
    ("mutant", "broken"),
    [
        ("direct ignores park", "parked executor"),
        ("park beside the claim", "parked executor"),
        ("park without waiting", "parked executor"),
        ("resume forgets", "stuck"),
    ],
)
def test_a_mistake_in_park_is_found(mutant: str, broken: str) -> None:
    with pytest.raises(Violation, match=broken):
        ring_with_direct_calls(mutant, direct=(True, False), others=(model.parker(mutant),))


def test_no_wake_up_is_lost() -> None:
    assert sleep() > 1_000


@pytest.mark.parametrize(
    "mutant", ["look before publishing", "wake without signal", "no second look", "signal read late"]
)
def test_a_mistake_in_sleeping_loses_a_wake_up(mutant: str) -> None:
    with pytest.raises(Violation, match="stuck"):
        sleep(mutant)


def test_workers_that_leave_by_themselves_are_brought_back_for_every_task() -> None:
    assert away() > 100


@pytest.mark.parametrize("mutant", ["leave without a second look", "submit after the look"])
def test_a_mistake_in_leaving_strands_a_task(mutant: str) -> None:
    with pytest.raises(Violation, match="stuck"):
        away(mutant)
