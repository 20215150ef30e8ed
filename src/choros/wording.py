"""Numbers as people read them, in messages, tables and pictures: everywhere with the same digits and units."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: From which value on a unit is used, how large it is, and its name.
_BYTES = tuple(
    (1 << shift, 1 << shift, f"{prefix}iB") for shift, prefix in ((40, "T"), (30, "G"), (20, "M"), (10, "K"))
)
#: Colours, and other sequences for a terminal, with their 8-bit forms.
_CONTROLS = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SECONDS = ((7200, 3600, "h"), (120, 60, "min"), (1, 1, "s"), (1e-3, 1e-3, "ms"))


def without_controls(text: str) -> str:
    """A text with which a terminal does nothing but show it: of control characters, it has newlines and tabs only.

    >>> without_controls("\\x1b[31mdone\\x1b[0m\\x1b]0;title\\x07")
    'done]0;title'
    """
    return _CONTROLS.sub("", text)


def bytes_text(number: float) -> str:
    """A number of bytes.

    >>> bytes_text(0), bytes_text(4096), bytes_text(1536 << 20), bytes_text(470852)
    ('0 B', '4 KiB', '1.5 GiB', '460 KiB')
    """
    return _with_unit(number, (*_BYTES, (0, 1, "B")))


def seconds_text(seconds: float) -> str:
    """A time.

    >>> seconds_text(8.14e-6), seconds_text(0.0425), seconds_text(12), seconds_text(150), seconds_text(7200)
    ('8.14 µs', '42.5 ms', '12 s', '2.5 min', '2 h')
    """
    return _with_unit(seconds, (*_SECONDS, (0, 1e-6, "µs"))) if seconds else "0 s"


def _with_unit(value: float, units: Sequence[tuple[float, float, str]]) -> str:
    size, unit = next(((size, unit) for least, size, unit in units if value >= least), units[-1][1:])
    return f"{number_text(value / size)} {unit}"


def number_text(value: float) -> str:
    """A number with three digits or more.

    >>> number_text(1234.5), number_text(0.0425), number_text(12)
    ('1,234', '0.0425', '12')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent_text(share: float) -> str:
    """A share of 1 in percent.

    >>> percent_text(0.456)
    '46 %'
    """
    return f"{share:.0%}".replace("%", " %")


def count_text(number: int, noun: str) -> str:
    """How many there are.

    >>> count_text(1, "rank"), count_text(2, "rank"), count_text(0, "slot")
    ('1 rank', '2 ranks', '0 slots')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def ranks_text(ranks: Sequence[int], most: int | None = 8) -> str:
    """The names of ranks, of the first ``most``; ``None``: of all.

    >>> ranks_text([1]), ranks_text([0, 2]), ranks_text(range(9))
    ('rank 1', 'ranks 0, 2', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more')
    """
    left = "" if most is None or len(ranks) <= most else f" and {len(ranks) - most} more"
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks[:most]))}{left}"
