"""What a person typed in earlier chats: a private file, one JSON string per line, appended to at once."""

from __future__ import annotations

import json
import os
from pathlib import Path

from outlast.chat.conversation import replace_private
from outlast.core.paths import make_private, state_dir

KEPT = 1000  #: entries; twice as many may lie in the file until the next start
_MAX_ENTRY = 64 << 10  #: bytes; longer ones are not kept
_MAX_FILE = 8 << 20  #: bytes that are read


def default_file() -> Path:
    """Of this user."""
    return state_dir() / "chat-history"


class History:
    """Loads on creation. Lines that are no entries are skipped; several chats may append at once."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file can neither be read nor made."""
        make_private(path.parent)
        self._path = path
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "rb") as file:
            os.fchmod(fd, 0o600)  # it may have been copied or restored with less care
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_FILE))
            lines = file.read().splitlines()
        found = [entry for entry in map(_entry, lines) if entry is not None]
        self.entries = found[-KEPT:]
        if len(lines) > 2 * KEPT:
            replace_private(path, "".join(map(_line, self.entries)))

    def append(self, text: str) -> None:
        """Keep one more. Raises OSError."""
        self.entries.append(text)
        line = _line(text).encode()
        if len(line) > _MAX_ENTRY:
            return
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line)  # one call: what another chat appends stays apart
        finally:
            os.close(fd)


def _line(text: str) -> str:
    return json.dumps(text) + "\n"


def _entry(line: bytes) -> str | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
