"""Saving, loading and forgetting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outlast.chat.conversation import MAX_TURNS, Conversation, Turn
from outlast.chat.history import KEPT, History
from outlast.core.errors import OutlastError, UsageError


def test_messages_in_the_apis_form() -> None:
    talk = Conversation("be kind", [Turn("a", "b", whole=False)])
    roles = [(m["role"], m["content"]) for m in talk.messages("c")]
    assert roles == [("system", "be kind"), ("user", "a"), ("assistant", "b"), ("user", "c")]


def test_saved_conversation_comes_back_and_is_private(tmp_path: Path) -> None:
    talk = Conversation("sys\n", [Turn("ä\ud83d", "b\x1b"), Turn("c", "", whole=False)])
    file = tmp_path / "chat.json"
    talk.save(file, "m")
    assert Conversation.load(file) == talk
    assert file.stat().st_mode & 0o777 == 0o600
    Conversation().save(file, "m")  # one of its own it replaces
    assert Conversation.load(file) == Conversation()
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


def test_other_files_are_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "thesis.txt"
    file.write_text("years of work")
    with pytest.raises(OutlastError, match="not overwritten"):
        Conversation().save(file, "m")
    assert file.read_text() == "years of work"


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '{"format": "other"}', '{"format": "outlast chat 1", "system": 1, "turns": []}',
        '{"format": "outlast chat 1", "system": null, "turns": [{"said": "a"}]}',
        '{"format": "outlast chat 1", "system": null, "turns": [1]}', "[" * 100000,
        json.dumps({"format": "outlast chat 1", "turns": [{"said": "a", "answered": "b"}] * (MAX_TURNS + 1)}),
    ],
)  # fmt: skip
def test_file_that_is_no_conversation_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(text)
    with pytest.raises(UsageError):
        Conversation.load(file)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Conversation.load(tmp_path / "none")


def test_a_quarter_is_forgotten_at_once_oldest_first() -> None:
    talk = Conversation(None, [Turn(str(i), "x" * 99) for i in range(8)])
    assert talk.drop_oldest() == 2
    assert talk.turns[0].said == "2"
    one = Conversation(None, [Turn("long " * 100, "x"), Turn("a", "b")])
    assert (one.drop_oldest(), one.drop_oldest(), one.drop_oldest()) == (1, 1, 0)


def test_history_is_private_and_keeps_lines_together(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "history"
    history = History(file)
    history.append("one\ntwo ä")
    History(file).append("three")
    assert History(file).entries == ["one\ntwo ä", "three"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_history_that_others_may_read_is_closed_and_damage_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "history"
    file.write_bytes(b'"good"\n\xff\xfe\n{}\n"torn')
    file.chmod(0o644)
    assert History(file).entries == ["good"]
    assert file.stat().st_mode & 0o777 == 0o600


def test_history_does_not_grow_without_end(tmp_path: Path) -> None:
    file = tmp_path / "history"
    file.write_text("".join(f'"{i}"\n' for i in range(2 * KEPT + 1)))
    assert len(History(file).entries) == KEPT
    assert len(file.read_text().splitlines()) == KEPT
