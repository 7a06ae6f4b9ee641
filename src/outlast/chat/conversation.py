"""What was said, and the file it can be kept in."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outlast.core.errors import OutlastError, UsageError

#: The API takes 4,096 messages; a turn has two.
MAX_TURNS = 2000
MAX_FILE_BYTES = 16 << 20
_FORMAT = "outlast chat 1"
#: When the context is full, so much of the conversation goes at once. Less would be gone again after a turn or two,
#: and each time the beginning changes the engine has to read all of the rest anew.
_DROPPED_SHARE = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """What the person said and what the model answered; `whole` is false if the answer was stopped or cut off."""

    said: str
    answered: str
    whole: bool = True


@dataclass(slots=True)
class Conversation:
    """The turns that the model is still shown, after an optional system message."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self, text: str) -> list[dict[str, str]]:
        """As the API wants them, with what is said now as the last one."""
        out = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            out.append({"role": "user", "content": turn.said})
            out.append({"role": "assistant", "content": turn.answered})
        return [*out, {"role": "user", "content": text}]

    def add(self, turn: Turn) -> None:
        """Append a turn; past `MAX_TURNS` the oldest goes."""
        self.turns.append(turn)
        del self.turns[:-MAX_TURNS]

    def drop_oldest(self) -> int:
        """Forget the oldest turns, a quarter of the text but at least one turn; how many. 0 if there is none."""
        total = sum(len(turn.said) + len(turn.answered) for turn in self.turns)
        count = size = 0
        while count < len(self.turns) and (count == 0 or size * _DROPPED_SHARE < total):
            size += len(self.turns[count].said) + len(self.turns[count].answered)
            count += 1
        del self.turns[:count]
        return count

    def save(self, path: Path, model: str) -> None:
        """Write it whole, readable by its owner alone. Raises OutlastError; a file that is no conversation stays."""
        if path.exists() and not _is_conversation(path):
            raise OutlastError(
                f"{path} is not overwritten", why="it is not a saved conversation", do="Choose another name."
            )
        rows = [{"said": turn.said, "answered": turn.answered, "whole": turn.whole} for turn in self.turns]
        text = json.dumps({"format": _FORMAT, "model": model, "system": self.system, "turns": rows}, indent=1)
        try:
            replace_private(path, text + "\n")
        except OSError as error:
            raise OutlastError(f"cannot save to {path}", why=error.strerror or str(error)) from error

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """The inverse of `save`. Raises UsageError for a file that is missing or something else."""
        value = _parse(path)
        system, rows = value.get("system"), value.get("turns")
        if not isinstance(system, str | None) or not isinstance(rows, list):
            raise _not_one(path, "system or turns are missing")
        if len(rows) > MAX_TURNS:
            raise _not_one(path, f"it has {len(rows)} turns, and {MAX_TURNS} is the limit")
        turns = []
        for number, row in enumerate(rows, 1):
            fields = (row.get("said"), row.get("answered"), row.get("whole", True)) if isinstance(row, dict) else ()
            match fields:
                case (str(said), str(answered), bool(whole)):
                    turns.append(Turn(said, answered, whole))
                case _:
                    raise _not_one(path, f"turn {number} is damaged")
        return cls(system, turns)


def _not_one(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is no saved conversation", why=why)


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}", why=error.strerror or str(error)) from None
    if len(data) > MAX_FILE_BYTES:
        raise _not_one(path, f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise _not_one(path, "it is not JSON") from None
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        raise _not_one(path, f"its format is not {_FORMAT!r}")
    return value


def _is_conversation(path: Path) -> bool:
    try:
        _parse(path)
    except UsageError:
        return False
    return True


def replace_private(path: Path, text: str) -> None:
    """Write a file beside `path`, mode 0600, and rename it there: nobody sees half of it. Raises OSError."""
    path = path.resolve()  # a link stays one
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
