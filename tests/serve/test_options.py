"""Options of engines and sizes of pools: what is refused, and with which words."""

from __future__ import annotations

import logging

import pytest

from outlast import cli
from outlast.core.errors import NotPossibleHere, UsageError
from outlast.core.machine import MemoryLimit
from outlast.engines.native import engine
from outlast.engines.native.loading import BLOCK_TOKENS
from outlast.serve import hf, native, parts
from outlast.serve.options import EngineOption, parse_options
from outlast.serve.parts import pool_tokens
from outlast.serve.settings import Settings

KNOWN = (
    EngineOption("on", True),
    EngineOption("number", 7, 0, 64),
    EngineOption("word", "one", choices=("one", "two")),
)


def test_options_are_of_their_kind_and_the_last_one_counts() -> None:
    given = [("on", "false"), ("number", "3"), ("word", "two"), ("number", "64")]
    assert parse_options("x", given, KNOWN) == {"on": False, "number": 64, "word": "two"}
    assert parse_options("x", [], KNOWN) == {}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("on", "1", "true or false"), ("on", "False", "true or false"), ("number", "65", "from 0 to 64"),
        ("number", "-1", "from 0 to 64"), ("number", "7.0", "whole number"), ("number", "", "whole number"),
        ("word", "three", "one or two"), ("nubmer", "7", r"number \(a whole number"),
    ],
)  # fmt: skip
def test_an_option_that_means_nothing_is_refused_with_what_it_may_be(name: str, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_options("x", [(name, text)], KNOWN)


@pytest.mark.parametrize(("kind", "known"), [("native", native.OPTIONS), ("transformers", hf.OPTIONS)])
def test_an_unknown_option_ends_the_command_with_2_and_names_those_there_are(
    kind: str, known: tuple[EngineOption, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "transformers":
        pytest.importorskip("transformers")
    assert cli.main(["serve", "--engine", kind, "--engine-option", "sharing=false", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "'sharing'" in said
    assert all(option.name in said for option in known)


def test_defaults_that_are_shown_are_those_of_the_engines() -> None:
    shown = {option.name: option.default for option in native.OPTIONS}
    assert (shown["speculate"], shown["prefill_chunk"]) == (engine.SPECULATE, engine.PREFILL_CHUNK)
    assert shown["block_tokens"] == BLOCK_TOKENS
    pytest.importorskip("torch")
    from outlast.engines.hf import engine as hf_engine

    assert {o.name: o.default for o in hf.OPTIONS}["prefill_chunk"] == hf_engine.PREFILL_CHUNK


def test_threads_that_no_step_could_use_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 256"):
        Settings(threads=257)


# --- the pool's size


@pytest.fixture
def gib24(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "memory_limit", lambda: MemoryLimit(24 << 30, "the cgroup's memory.max"))


def test_a_small_model_gets_room_for_some_contexts(gib24: None, caplog: pytest.LogCaptureFixture) -> None:
    assert pool_tokens(0, 8192, 46_080, 100 << 20) == 4 * 8192
    assert caplog.records == []


def test_a_large_context_gets_what_the_memory_has_and_the_log_says_so(
    gib24: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A model of 8B with a context of 131,072: 32 GiB of KV, 8 GiB of weights."""
    weights, token_bytes = 8 << 30, 262_144
    tokens = pool_tokens(0, 131_072, token_bytes, weights)
    assert 2 << 30 <= tokens * token_bytes <= 4 << 30
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for words in (str(tokens), "131072", "the cgroup's memory.max", "24,576 MiB", "--kv-tokens", "262144"):
        assert words in record.getMessage()


def test_a_model_that_leaves_no_room_is_refused(gib24: None) -> None:
    with pytest.raises(NotPossibleHere, match=r"the weights 24,\d+ MiB.*24,576 MiB \(the cgroup"):
        pool_tokens(0, 131_072, 262_144, (24 << 30) - (64 << 20))


@pytest.mark.parametrize("tokens", [1, 10, 255])
def test_a_pool_without_room_for_a_request_is_refused(gib24: None, tokens: int) -> None:
    with pytest.raises(UsageError, match=rf"--kv-tokens {tokens}.*at least 256.*or 0"):
        pool_tokens(tokens, 8192, 46_080)


def test_a_pool_that_is_asked_for_is_taken_if_it_fits_beside_the_weights(gib24: None) -> None:
    assert pool_tokens(65_536, 131_072, 262_144, 7 << 30) == 65_536
    with pytest.raises(NotPossibleHere, match=r"takes 16,384 MiB, the weights 9,216 MiB.*fewer --kv-tokens"):
        pool_tokens(65_536, 131_072, 262_144, 9 << 30)
