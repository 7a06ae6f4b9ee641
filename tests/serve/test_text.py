"""Stop strings in a growing text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.serve.text import StopStrings

pieces = st.lists(st.text("abc", max_size=4), max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


@given(pieces, stops)
def test_what_is_shown_ends_before_the_first_stop_string_however_the_text_is_cut(
    parts: list[str], strings: list[str]
) -> None:
    """The first is the one complete earliest; of those complete with the same piece, the one that begins first."""
    matcher = StopStrings(strings)
    shown, seen = "", ""
    for part in parts:
        seen += part
        text, matched = matcher.push(part)
        shown += text
        begins = [seen.find(s) for s in strings if s in seen]
        assert matched == bool(begins)
        if matched:
            assert shown == seen[: min(begins)]
            return
        assert seen.startswith(shown)
    assert shown + matcher.flush() == seen


@given(pieces, stops)
def test_no_character_is_kept_back_that_can_not_begin_a_stop_string(parts: list[str], strings: list[str]) -> None:
    matcher = StopStrings(strings)
    shown, seen = "", ""
    for part in parts:
        seen += part
        text, matched = matcher.push(part)
        shown += text
        if matched:
            return
        kept = seen[len(shown) :]
        assert not kept or any(s.startswith(kept) for s in strings)


def test_without_stop_strings_everything_is_shown_at_once() -> None:
    matcher = StopStrings([])
    assert matcher.push("abc") == ("abc", False)
    assert matcher.flush() == ""
