"""The tables of durations, from ``choros.durations``."""

from __future__ import annotations

from collections.abc import Iterator

from choros.durations import table


def duration_tables(page: str) -> str:
    """Returns the tables of ``waiting.md``, one for each of those who wait; of other pages an empty text."""
    if page != "waiting.md":
        return ""
    tables: dict[str, list[str]] = {}
    for name, duration in table().items():
        row = f"| {length(duration.seconds)} | {duration.waits} | {duration.then} | `{name}` |"
        tables.setdefault(duration.who, []).append(row)
    return "".join(f"\n## {who}\n\n" + "\n".join([*_head(), *rows]) + "\n" for who, rows in tables.items())


def _head() -> Iterator[str]:
    yield "| | waits | then | name |"
    yield "|---|---|---|---|"


def length(seconds: float) -> str:
    """Writes seconds as people do.

    >>> length(0.002), length(60.0), length(86400.0)
    ('2 ms', '60 s', '24 h')
    """
    if seconds >= 3600:
        return f"{seconds / 3600:g} h"
    return f"{seconds:g} s" if seconds >= 0.1 else f"{seconds * 1000:g} ms"
