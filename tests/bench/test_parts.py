"""The parts that reports are made of: prompts, intervals, phases, the baseline of the scan."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from outlast.bench.prompts import conversation
from outlast.bench.report import conditions, median_interval, spread
from outlast.bench.rounds import Kill, parent_of, phases
from outlast.bench.scan import CopyAndCompare
from outlast.core.memory import Memory


class Words:
    """One token per word."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [0 for message in messages for _ in message["content"].split()]


def test_prompt_has_the_length_asked_for_and_depends_on_the_seed_alone() -> None:
    texts = [conversation(seed, 1000, Words()) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    for text in texts:
        assert 1000 <= len(Words().encode_chat(text)) < 1040


def test_prompt_is_prose_and_not_one_sentence_again_and_again() -> None:
    text = conversation(3, 1000, Words())[0]["content"]
    sentences = text.split(". ")
    assert len(set(sentences)) > 0.95 * len(sentences)


def test_interval_of_the_median_covers_it_in_19_of_20_samples() -> None:
    rng = random.Random(4)
    hits = 0
    for _ in range(400):
        low, high = median_interval([rng.expovariate(1.0) for _ in range(80)])
        hits += low <= 0.6931 <= high
    assert 370 <= hits <= 396


def test_spread_names_quartiles() -> None:
    found = spread([float(i) for i in range(1, 101)])
    assert (found["n"], found["min"], found["median"], found["max"]) == (100, 1.0, 50.5, 100.0)
    assert spread([]) == {"n": 0}


def test_conditions_name_machine_versions_and_load() -> None:
    found = conditions("numpy", "no-such-package")
    assert "cores" in found["machine"]
    assert found["versions"]["no-such-package"] == "not installed"
    assert len(found["load"]) == 3


def test_phases_add_up_to_the_first_recovery() -> None:
    kill = Kill(at=10.0, wall=1000.0, pid=7, engine=1, stream=0, tokens={0: 5, 1: 6}, milliseconds={0: 90.0, 1: 80.0})
    times = {"fenced": 1.0, "recovered": 41.0, "first_token": 61.0, "engine_scan": 20.0, "engine_apply": 15.0,
             "engine_requests": 0.5}  # fmt: skip
    kill.server = {"victim": 7, "at": 1000.010, "milliseconds": times}
    found = phases(kill)
    assert sum(found.values()) == pytest.approx(80.0)
    assert found["detection"] == pytest.approx(10.0)
    assert found["delivery"] == pytest.approx(9.0)
    kill.server = {}
    assert phases(kill) == {}


def test_parent_of_a_child_is_this_process_and_of_no_process_nobody() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert parent_of(child.pid) == os.getpid()
        child.communicate(b"\n")
    assert parent_of(child.pid) == 0


def test_copy_and_compare_finds_exactly_the_changed_pages() -> None:
    size = 4096 * 101  # not a multiple of the piece it compares at once
    with Memory.anonymous(size) as memory:
        baseline = CopyAndCompare(memory.address, size)
        assert baseline.changed() == []
        for page in (0, 15, 16, 100):
            memory.buffer[page * 4096 + page] ^= 1
        assert baseline.changed() == [0, 15, 16, 100]
        assert baseline.changed() == []
        baseline.close()
