"""Frames: the wrappers' messages to chorosrun, one per line, through mpirun or past it (``processes/pipes.py``).

::

    ‹1e› {"kind":"text","rank":1,"stream":"out","newline":28} ‹1f› what the rank printed ‹0a›
    mark  fields, in JSON                                          data, with ‹1c› in place of each newline

Open MPI forwards whole lines, so a line that starts with the mark is one frame of one rank; any other line is
mpirun's own. mpirun's time for a line grows with the square of its length from about 64 KiB on (5 MB: 4 s), so only
rare frames may be longer. Data is neither decoded nor put into JSON: ranks may print megabytes of anything. A byte
that the data lack stands for newlines in them, because one byte is replaced by another many times faster than by two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import final

from choros.observe.stragglers import RankSteps

__all__ = [
    "MARK",
    "Events",
    "Exit",
    "Frame",
    "FrameReader",
    "RankProgress",
    "Result",
    "Stacks",
    "Start",
    "Text",
    "decode",
    "encode",
]

#: ASCII's record separator: the first byte of every frame.
MARK = b"\x1e"
#: Separates the fields from the data.
_SEPARATOR = b"\x1f"
#: The bytes that may stand for newlines: control characters first, of which text has none.
_STAND_INS = tuple(bytes([number]) for number in (28, 29, *range(256)) if number != ord("\n"))
#: Data that have all bytes are escaped.
_ESCAPES = ((b"\x1c", b"\x1cs"), (b"\n", b"\x1cn"))


@dataclass(frozen=True)
class Start:
    """The rank's command has started.

    Attributes:
        rank: the rank.
        host: its host.
        pid: its process ID.
        restarts: how many times it has been restarted.
        signal: the signal that ended it before the last restart.
        added: another rank of an elastic job has started it.
    """

    rank: int
    host: str
    pid: int
    restarts: int = 0
    signal: int = 0
    added: bool = False


@dataclass(frozen=True)
class Text:
    """Output of the rank.

    Attributes:
        rank: the rank.
        stream: ``"out"`` or ``"err"``.
        data: lines with their ends, or a partial line.
    """

    rank: int
    stream: str
    data: bytes


@dataclass(frozen=True)
class Result:
    """A chunk of the pickled return value of the rank's function."""

    rank: int
    data: bytes


@dataclass(frozen=True)
class Events:
    """Events of the rank: lines of JSON, as ``choros.observe`` writes them."""

    rank: int
    lines: str


@dataclass(frozen=True)
class Stacks:
    """The answer to the signal ``STACKS``.

    Attributes:
        rank: the rank.
        state: what its process does, as the kernel says; empty if that is not known.
        text: the Python stacks of its threads and child processes, or why there are none.
    """

    rank: int
    state: str
    text: str


@dataclass(frozen=True)
class RankProgress:
    """What the rank has done so far: sent once a minute, before ``Stacks`` and before ``Exit``.

    Attributes:
        rank: the rank.
        steps: the fields of ``choros.observe.progress.PageContents``, and so to ``last``.
        prompt_steps: see there.
        seconds: see there.
        waiting: see there.
        loading: see there.
        last: see there.
        ago: how many seconds ago that was.
    """

    rank: int
    steps: int = 0
    prompt_steps: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    loading: float = 0.0
    last: str = ""
    ago: float = 0.0

    @property
    def rank_steps(self) -> RankSteps:
        """The steps alone."""
        return RankSteps(self.rank, self.steps, self.prompt_steps, self.seconds, self.waiting, self.loading)


@dataclass(frozen=True)
class Exit:
    """The rank's command has ended, with every process it had started.

    Attributes:
        rank: the rank.
        host: its host.
        code: its exit code; ``128 + n`` if signal ``n`` ended it.
        signal: the signal that ended it, 0 if it ended by itself.
        stopped: it ended after a signal from chorosrun.
        traceback: its final Python traceback, not shown so far; empty if there is none.
        shown: its final traceback, if it was shown already.
        tail: its last lines on standard error.
        problem: why the command could not be started.
        seconds: how long it ran.
        restarts: how many times it was restarted.
    """

    rank: int
    host: str
    code: int
    signal: int = 0
    stopped: bool = False
    traceback: str = ""
    shown: str = ""
    tail: str = ""
    problem: str = ""
    seconds: float = 0.0
    restarts: int = 0


Frame = Start | Text | Result | Events | RankProgress | Stacks | Exit

_KINDS: dict[str, type[Frame]] = {
    "start": Start,
    "text": Text,
    "result": Result,
    "events": Events,
    "progress": RankProgress,
    "stacks": Stacks,
    "exit": Exit,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def encode(frame: Frame) -> bytes:
    """Returns the line that encodes ``frame``.

    Example:
        >>> encode(Text(rank=0, stream="out", data=b"hello\\n"))
        b'\\x1e{"kind":"text","rank":0,"stream":"out","newline":28}\\x1fhello\\x1c\\n'
    """
    fields = {"kind": _NAMES[type(frame)], **asdict(frame)}
    data: bytes = fields.pop("data", b"")
    if b"\n" in data:
        stand_in = next((byte for byte in _STAND_INS if byte not in data), None)
        fields["newline"] = None if stand_in is None else ord(stand_in)
        for byte, replacement in _ESCAPES if stand_in is None else ((b"\n", stand_in),):
            data = data.replace(byte, replacement)
    return MARK + json.dumps(fields, separators=(",", ":")).encode("ascii") + _SEPARATOR + data + b"\n"


def decode(line: bytes) -> Frame | None:
    """Returns the frame in ``line``; ``None`` if the line is not a frame.

    Example:
        >>> decode(encode(Start(rank=1, host="a", pid=7)))
        Start(rank=1, host='a', pid=7, restarts=0, signal=0, added=False)
        >>> decode(b"a message of mpirun") is None
        True
    """
    if not line.startswith(MARK):
        return None
    text, _, data = line[len(MARK) :].removesuffix(b"\n").partition(_SEPARATOR)
    try:
        fields = json.loads(text)
        kind = _KINDS[fields.pop("kind")]
        if kind in (Text, Result):
            newline = fields.pop("newline", ord("\n"))
            replaced = reversed(_ESCAPES) if newline is None else ((b"\n", bytes([newline])),)
            for byte, replacement in replaced:
                data = data.replace(replacement, byte)
            fields["data"] = data
        return kind(**fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


@final
class FrameReader:
    """Splits mpirun's output into frames and mpirun's own lines.

    Example:
        >>> list(FrameReader().feed(b"a message" + encode(Start(rank=1, host="a", pid=7)) + b"unfinished"))
        ['a message', Start(rank=1, host='a', pid=7, restarts=0, signal=0, added=False)]
    """

    def __init__(self) -> None:
        self._unfinished = b""

    def feed(self, data: bytes) -> Iterator[Frame | str]:
        """Yields the frames and lines that ``data`` completes."""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        for line in lines:
            yield from self._parts(line)

    def end(self) -> Iterator[Frame | str]:
        """Yields the unfinished line at the end of the output."""
        line, self._unfinished = self._unfinished, b""
        if line:
            yield from self._parts(line)

    @staticmethod
    def _parts(line: bytes) -> Iterator[Frame | str]:
        """Splits a line: mpirun does not always end its own lines, so a frame may follow on the same line."""
        message, mark, rest = line.partition(MARK)
        if message or not mark:
            yield message.decode("utf-8", "replace")
        frame = decode(mark + rest)
        if frame is not None:
            yield frame
