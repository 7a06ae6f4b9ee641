"""Plain tables for people; programs use --json."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence


def columns(rows: Sequence[Sequence[str]], *, indent: str = "", width: int = 100) -> str:
    """Left-aligned columns, the last one wrapped so that lines stay below `width` characters."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        head = indent + "".join(f"{cell:<{size}}  " for cell, size in zip(row, widths, strict=False))
        body = textwrap.wrap(row[-1], max(30, width - len(head)), break_on_hyphens=False) or [""]
        lines += [f"{head if i == 0 else ' ' * len(head)}{line}".rstrip() for i, line in enumerate(body)]
    return "\n".join(lines)


def facts(values: Mapping[str, object]) -> str:
    """One line per value; a list of mappings, or a mapping of mappings, becomes a table below its name."""
    plain = [(name, _cell(value)) for name, value in values.items() if not _rows(value)]
    parts = [columns(plain)] if plain else []
    for name, value in values.items():
        rows = _rows(value)
        if rows:
            header = list(rows[0])
            parts.append(
                f"{name}\n" + columns([header, *([_cell(row.get(k)) for k in header] for row in rows)], indent="  ")
            )
    return "\n".join(parts)


def _rows(value: object) -> list[Mapping[str, object]]:
    if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
        return value
    if isinstance(value, Mapping) and value and all(isinstance(row, Mapping) for row in value.values()):
        return [{"": name, **row} for name, row in value.items()]
    return []


def _cell(value: object) -> str:
    if value is None or value in ("", [], {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_cell(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    return str(value)
