"""The wire protocol: what is written is read back equal, and nothing else is read."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.engines.protocol import Emission, EngineRequest, JournalEntry, RecoveryReport, SamplingParams
from outlast.serve import protocol as wire

u64 = st.integers(0, 2**64 - 1)
keys = st.integers(1, 2**64 - 1)
tokens = st.integers(0, 2**32 - 1)
token_tuples = st.lists(tokens, max_size=5).map(tuple)
floats = st.floats(allow_nan=False)
pairs = st.lists(st.tuples(tokens, floats), max_size=3).map(tuple)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
params = st.builds(
    SamplingParams, floats, floats, tokens, floats, u64, tokens, floats, floats, floats, pairs, st.integers(0, 20)
)
requests = st.builds(EngineRequest, keys, token_tuples, tokens, token_tuples, params)
finishes = st.sampled_from([None, "stop", "length"])
emissions = st.builds(Emission, keys, tokens, tokens, floats, pairs, finishes)
numbers = st.dictionaries(texts, floats, max_size=3)
reports = st.builds(RecoveryReport, u64, u64, u64, texts, numbers)
to_worker = st.one_of(
    st.builds(wire.Entry, st.builds(JournalEntry, requests, token_tuples, st.booleans())),
    st.builds(wire.Activate, u64, st.booleans(), u64),
    st.builds(wire.Submit, requests),
    st.builds(wire.Cancel, keys),
    st.builds(wire.Release, keys),
    st.just(wire.Stop()),
)
to_supervisor = st.one_of(
    st.builds(wire.Ready, st.integers(1, 2**32 - 1), floats),
    st.builds(wire.Active, u64, reports),
    st.builds(wire.Tokens, u64, st.lists(emissions, max_size=4).map(tuple), st.lists(keys, max_size=4).map(tuple)),
    st.builds(wire.Failed, keys, texts, st.booleans()),
    st.builds(wire.Stats, numbers),
    st.builds(wire.Fatal, texts),
)


@given(to_worker)
def test_messages_to_the_worker_come_back_equal(message: wire.ToWorker) -> None:
    line = wire.encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert wire.decode_for_worker(line[:-1]) == message


@given(to_supervisor)
def test_messages_to_the_supervisor_come_back_equal(message: wire.ToSupervisor) -> None:
    assert wire.decode_for_supervisor(wire.encode(message)[:-1]) == message


@given(to_supervisor)
def test_a_message_for_the_other_side_is_refused(message: wire.ToSupervisor) -> None:
    with pytest.raises(wire.ProtocolError):
        wire.decode_for_worker(wire.encode(message)[:-1])


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(wire.ProtocolError):
        wire.decode_for_supervisor(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=500)
@given(st.sampled_from(["tokens", "active", "ready", "failed", "stats", "fatal"]), st.lists(json_values, max_size=4))
def test_wrong_fields_are_refused_or_make_a_well_typed_message(kind: str, fields: list[object]) -> None:
    line = json.dumps([kind, *fields]).encode()
    try:
        message = wire.decode_for_supervisor(line)
    except wire.ProtocolError:
        return
    assert wire.decode_for_supervisor(wire.encode(message)[:-1]) == message


@given(to_supervisor, st.data())
def test_any_changed_byte_is_refused_or_read_as_a_well_typed_message(
    message: wire.ToSupervisor, data: st.DataObject
) -> None:
    line = bytearray(wire.encode(message)[:-1])
    line[data.draw(st.integers(0, len(line) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        read = wire.decode_for_supervisor(bytes(line))
    except wire.ProtocolError:
        return
    assert wire.decode_for_supervisor(wire.encode(read)[:-1]) == read


def test_a_log_probability_may_be_minus_infinity_but_never_nan() -> None:
    emission = Emission(1, 0, 5, -math.inf)
    line = wire.encode(wire.Tokens(1, (emission,)))
    assert wire.decode_for_supervisor(line) == wire.Tokens(1, (emission,))
    with pytest.raises(wire.ProtocolError):
        wire.decode_for_supervisor(line.replace(b"-Infinity", b"NaN"))


@given(st.lists(st.binary(max_size=20).filter(lambda b: b"\n" not in b), max_size=8), st.data())
def test_lines_do_not_depend_on_how_the_stream_is_cut(lines: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(line + b"\n" for line in lines) + b"torn"
    buffer, out = wire.LineBuffer(), []
    while whole:
        n = data.draw(st.integers(1, len(whole)))
        out += buffer.feed(whole[:n])
        whole = whole[n:]
    assert out == lines


def test_a_line_without_end_is_refused_before_it_fills_memory() -> None:
    buffer = wire.LineBuffer(limit=100)
    buffer.feed(b"x" * 100)
    with pytest.raises(wire.ProtocolError):
        buffer.feed(b"x")


def test_a_message_too_long_for_a_line_is_refused_by_the_sender() -> None:
    with pytest.raises(wire.ProtocolError):
        wire.encode(wire.Submit(EngineRequest(1, (4_000_000_000,) * 900_000, 1)))
