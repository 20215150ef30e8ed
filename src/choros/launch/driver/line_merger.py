"""The merger of lines: equal lines that several ranks write on standard error within a moment become one. Pure.

::

    rank 0 writes  a    b    c                    held                               shown
    rank 1 writes    a    d    c       ──────►    a {0,1}  b {0}  d {1}  c {0,1}     [0-1] a
                                                  the first leaves when all ranks    [0] b
                                                  have written it, or after a moment …

A line joins an equal one only where its rank's lines keep their order. Standard output, partial lines and progress
bars are not merged; they are held only behind lines of their own rank.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import final

from choros import durations
from choros.launch.protocol.frames import Text

#: If a rank writes more than this at once, nothing of it is merged: to read each line would slow the rank down.
_MOST_LINES, _MOST_BYTES = 50, 1 << 13
#: If more is held than this, the first leave earlier, so that a search takes no time.
_MOST_HELD = 60
#: Time and thread at the beginning of a logger's line: ``2026-01-31 12:00:00.123456: I``, ``WARNING:2026-…``, or
#: Abseil's ``I0000 00:00:1769860800.123456   1234``. Group 1 precedes them.
_STAMP = re.compile(
    rb"\A(\W{0,3}[A-Z]{0,9}\W{0,3})"
    rb"(?:\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?|\d{4} \d\d:\d\d:\d+[:.\d]*(?: +\d+)?)"
)
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")


@dataclass(frozen=True)
class Lines:
    """Output to show: lines with their ends, or a partial line, and the ranks that wrote it, in increasing order."""

    ranks: tuple[int, ...]
    stream: str
    data: bytes


@dataclass
class _Held:
    """Output that is held; ``key`` is what equal lines have in common, ``None`` for output that is not merged."""

    ranks: list[int]
    stream: str
    data: bytes
    due: float
    key: bytes | None


@final
class LineMerger:
    """Merges equal lines, whatever their logger's time and thread; methods return the output to show at time ``now``.

    >>> merger = LineMerger(size=2)
    >>> merger.add(Text(0, "err", b"hello\\n"), now=0.0)
    []
    >>> merger.add(Text(1, "err", b"hello\\n"), now=0.01)
    [Lines(ranks=(0, 1), stream='err', data=b'hello\\n')]
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: list[_Held] = []
        #: The ranks that have written a partial line on standard error.
        self._unfinished: set[int] = set()

    def add(self, text: Text, now: float) -> list[Lines]:
        """Adds output of a rank."""
        for data, key in self._parts(text):
            if key is None or not self._join(text.rank, key):
                place = len(self._held)
                while key is None and place and text.rank not in self._held[place - 1].ranks:
                    place -= 1  # only behind lines of its own rank
                self._held.insert(place, _Held([text.rank], text.stream, data, now + durations.MERGE, key))
        return self.due(now)

    def due(self, now: float) -> list[Lines]:
        """Returns what need not be held any longer."""
        late = max((number for number, held in enumerate(self._held, 1) if held.due <= now), default=0)
        count = max(late, len(self._held) - _MOST_HELD)
        while count < len(self._held) and self._is_complete(self._held[count]):
            count += 1
        return self._leave(count)

    def flush(self) -> list[Lines]:
        """Returns all that is held."""
        return self._leave(len(self._held))

    def wait(self, now: float) -> float | None:
        """Returns the seconds until something is due; ``None`` if nothing is held."""
        return max(0.0, min(held.due for held in self._held) - now) if self._held else None

    def _parts(self, text: Text) -> Iterator[tuple[bytes, bytes | None]]:
        """Yields lines that may be merged, with their keys, and all other output, without one."""
        if text.stream != "err":
            yield text.data, None
            return
        data = text.data
        if text.rank in self._unfinished:
            end = data.find(b"\n") + 1 or len(data)
            yield data[:end], None
            if not data.endswith(b"\n", 0, end):
                return
            self._unfinished.discard(text.rank)
            data = data[end:]
        if data and not data.endswith(b"\n"):
            self._unfinished.add(text.rank)
        if len(data) > _MOST_BYTES or data.count(b"\n") > _MOST_LINES:
            yield data, None
        else:
            yield from ((line, _key(line)) for line in _LINE.findall(data))

    def _join(self, rank: int, key: bytes) -> bool:
        """Adds ``rank`` to an equal line that others have written, if there is one that it may join."""
        for place, held in enumerate(self._held):
            if held.key != key or rank in held.ranks:
                continue
            own = [later for later in self._held[place:] if rank in later.ranks]
            if all(later.ranks == [rank] for later in own):
                others = [later for later in self._held[place:] if rank not in later.ranks]
                self._held[place:] = [*own, *others]
                held.ranks.append(rank)
                return True
        return False

    def _is_complete(self, held: _Held) -> bool:
        return held.key is None or len(held.ranks) == self._size

    def _leave(self, count: int) -> list[Lines]:
        leaving, self._held = self._held[:count], self._held[count:]
        groups = groupby(leaving, key=lambda held: (tuple(sorted(held.ranks)), held.stream))
        return [Lines(ranks, stream, b"".join(held.data for held in group)) for (ranks, stream), group in groups]


def _key(line: bytes) -> bytes | None:
    """Returns what equal lines have in common; ``None`` for a partial line, and for a progress bar."""
    if not line.endswith(b"\n") or b"\r" in line.rstrip(b"\r\n"):
        return None
    return _STAMP.sub(rb"\1", line)
