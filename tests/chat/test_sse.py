"""The event stream parser."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.chat.sse import BadStream, Comment, Data, EventParser


def parse(*pieces: bytes) -> list[Data | Comment]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_events_comments_and_fields_without_meaning() -> None:
    found = parse(b": hello\nevent: x\nid: 7\ndata: one\ndata:two\ndata:  three\n\n:\n\ndata\n\ndata:\n\n")
    assert found == [Comment("hello"), Data("one\ntwo\n three"), Comment(""), Data(""), Data("")]


def test_event_without_its_blank_line_does_not_count() -> None:
    assert parse(b"data: whole\n\ndata: torn\n") == [Data("whole")]


def test_byte_order_mark_at_the_start_is_no_text() -> None:
    assert parse("\ufeffdata: a\n\n".encode()) == [Data("a")]


STREAM = ": note\ndata: ä€😀\n\ndata: x\ndata: y\n\n: end\n\n"


@given(st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0, 60), max_size=12))
def test_any_line_end_and_any_cut_give_the_same_events(end: str, cuts: list[int]) -> None:
    data = STREAM.replace("\n", end).encode()
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    found = parse(*(data[a:b] for a, b in pairwise(places)))
    assert found == [Comment("note"), Data("ä€😀"), Data("x\ny"), Comment("end")]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_single_cut_and_single_bytes_give_the_same_events(end: str) -> None:
    data = STREAM.replace("\n", end).encode()
    whole = parse(data)
    assert parse(*(data[i : i + 1] for i in range(len(data)))) == whole
    assert all(parse(data[:i], data[i:]) == whole for i in range(len(data)))


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(data: bytes) -> None:
    parse(data)


@pytest.mark.parametrize("piece", [b"x" * 100, b"data: y\n" * 10])
def test_endless_event_is_refused(piece: bytes) -> None:
    parser = EventParser(limit=1000)

    def feed() -> None:
        for _ in range(1000):
            parser.feed(piece)

    with pytest.raises(BadStream):
        feed()
