"""Options of an engine as users give them (`--engine-option NAME=VALUE`): which there are, and what they may be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outlast.core.errors import UsageError

Value = int | bool | str
_WORDS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One option. `default` says of what kind it is; numbers lie in [`least`, `most`], text is one of `choices`."""

    name: str
    default: Value
    least: int = 0
    most: int = 0
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        """What it may be, for people."""
        if isinstance(self.default, bool):
            return "true or false"
        if isinstance(self.default, int):
            return f"a whole number from {self.least} to {self.most}"
        return f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"

    def parse(self, text: str) -> Value:
        """The value typed as `text`. Raises `UsageError`."""
        value: Value | None = None
        if isinstance(self.default, bool):
            value = _WORDS.get(text)
        elif isinstance(self.default, int):
            if text.isascii() and text.isdigit() and self.least <= int(text) <= self.most:
                value = int(text)
        elif text in self.choices:
            value = text
        if value is None:
            raise UsageError(f"engine option {self.name}={text}", why=f"it must be {self.allowed}")
        return value


def parse_options(engine: str, given: Iterable[tuple[str, str]], known: Sequence[EngineOption]) -> dict[str, Value]:
    """What was given of the options `known` of `engine`, by name; the last counts.

    Raises `UsageError` for a name that is not known and for a value that has no meaning.
    """
    by_name = {option.name: option for option in known}
    values = {}
    for name, text in given:
        if name not in by_name:
            raise UsageError(
                f"the {engine} engine has no option {name!r}",
                do=f"It has {', '.join(f'{o.name} ({o.allowed})' for o in known)}.",
            )
        values[name] = by_name[name].parse(text)
    return values
