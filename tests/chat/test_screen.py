"""A model cannot control the terminal."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.chat.screen import Screen, harmless


def test_ordinary_text_of_any_script_stays_as_it_is() -> None:
    text = "tab\tand\nlines, ä€😀 漢字 עברית \u200e 👩‍👩‍👧 e\u0301 **bold**"
    assert harmless(text) == text


def test_sequences_become_visible() -> None:
    assert harmless("a\x1b[31mred\x1b]0;title\x07\x9b2J\x08\x7f\rb\r\n") == "a␛[31mred␛]0;title␇<9B>2J␈␡␍b\n"
    assert harmless("\u202egpj.exe\u2069 \ud83d") == "<202E>gpj.exe<2069> \ufffd"


@given(st.text(st.characters(), max_size=50))
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    left = harmless(text)
    assert not any((ord(c) < 0x20 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 for c in left)
    left.encode()


@pytest.mark.parametrize("no_color", ["", "1"])
def test_notes_are_dim_unless_colours_are_not_wanted(monkeypatch: pytest.MonkeyPatch, no_color: str) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    out = io.StringIO()
    screen = Screen(out)
    screen.write("word")
    screen.note("a \x1b note")
    assert out.getvalue() == ("word\na ␛ note\n" if no_color else "word\n\x1b[2ma ␛ note\x1b[0m\n")
