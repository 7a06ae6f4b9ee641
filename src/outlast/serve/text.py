"""Between tokens and text: what the server needs of a tokenizer, and the search for stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text, piece by piece."""

    def push(self, token: int) -> str:
        """The text that is certain after `token`; an unfinished character is kept back."""

    def flush(self) -> str:
        """The rest, with U+FFFD for an unfinished character. Called once, at the end."""


class Tokenizer(Protocol):
    """A model's tokenizer. Called from the event loop and, for large prompts, from one other thread at a time."""

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 ... vocab_size - 1."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end an answer."""

    def encode(self, text: str) -> list[int]:
        """Plain text to ids; nothing is added, and names of special tokens in the text stay text."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Messages (`role`, `content`) through the chat template, up to where the assistant speaks next."""

    def detokenizer(self) -> Detokenizer:
        """A new one, for one sequence."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; for a special token the bytes of its name."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What clients see of the model."""

    id: str
    context: int  #: tokens, prompt and answer together
    tokenizer: Tokenizer
    fingerprint: str  #: names model and build; equal fingerprints give equal tokens
    created: int = 0  #: seconds since 1970


class StopStrings:
    """Finds the earliest of some strings in a growing text, and keeps back what may be the beginning of one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string is complete). After True nothing more may be pushed."""
        self._held += text
        found = [at for at in (self._held.find(s) for s in self._strings) if at >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max((self._overlap(s) for s in self._strings), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """What was kept back and turned out to be text."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, string: str) -> int:
        """Length of the longest end of the held text that is a beginning of `string`."""
        for length in range(min(len(string) - 1, len(self._held)), 0, -1):
            if self._held.endswith(string[:length]):
                return length
        return 0
