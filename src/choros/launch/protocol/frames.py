"""What the wrappers report to chorosrun: one JSON object a line, through mpirun's standard output.

Open MPI forwards lines whole, so a line that starts with ``\\x1e`` is one frame of one rank; anything else on
that stream is mpirun's own. The time that it needs for a line grows with the square of its length from about 64 KiB
on (5 MB: 4 s): a frame may be longer only if there are few of them.

Text is decoded with ``surrogateescape``: whatever bytes a rank prints arrive.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import final

__all__ = ["MARK", "Events", "Exit", "Frame", "FrameReader", "Result", "Start", "Text", "decode", "encode"]

#: ASCII's record separator: the first byte of every frame.
MARK = b"\x1e"


@dataclass(frozen=True)
class Start:
    """The rank's command runs.

    Attributes:
        rank: which rank.
        host: where.
        pid: as which process.
        restarts: how often it has been started before.
        signal: the signal that ended it the last time.
    """

    rank: int
    host: str
    pid: int
    restarts: int = 0
    signal: int = 0


@dataclass(frozen=True)
class Text:
    """Something the rank wrote.

    Attributes:
        rank: who wrote it.
        stream: ``"out"`` or ``"err"``.
        text: lines, the last one without its end; or a piece of one.
        end: what ended the last: a newline, a carriage return (a progress bar), or nothing yet.
    """

    rank: int
    stream: str
    text: str
    end: str = "\n"


@dataclass(frozen=True)
class Result:
    """A piece, in base64, of what the rank's function returned."""

    rank: int
    data: str


@dataclass(frozen=True)
class Events:
    """Events of the rank: lines of JSON, as ``choros.observe`` writes them."""

    rank: int
    lines: str


@dataclass(frozen=True)
class Exit:
    """The rank's command has ended, and every process it had started.

    Attributes:
        rank: which rank.
        host: where it ran.
        code: its exit code; ``128 + n`` if signal ``n`` ended it.
        signal: the signal that ended it, 0 if it ended by itself.
        stopped: it ended because it was told to.
        traceback: the Python traceback it ended with, not shown so far; empty if there is none.
        shown: it printed a traceback shortly before, which has been shown already.
        tail: the last lines it wrote to standard error.
        problem: why the command could not be started at all.
        seconds: how long it ran.
        restarts: how often it had been started before.
    """

    rank: int
    host: str
    code: int
    signal: int = 0
    stopped: bool = False
    traceback: str = ""
    shown: bool = False
    tail: str = ""
    problem: str = ""
    seconds: float = 0.0
    restarts: int = 0


Frame = Start | Text | Result | Events | Exit

_KINDS: dict[str, type[Frame]] = {"start": Start, "text": Text, "result": Result, "events": Events, "exit": Exit}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def encode(frame: Frame) -> bytes:
    """The line that carries ``frame``.

    Example:
        >>> encode(Text(rank=0, stream="out", text="hello"))
        b'\\x1e{"kind":"text","rank":0,"stream":"out","text":"hello","end":"\\\\n"}\\n'
    """
    fields = {"kind": _NAMES[type(frame)], **asdict(frame)}
    return MARK + json.dumps(fields, separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes) -> Frame | None:
    """The frame in ``line``, ``None`` if it is no frame.

    Example:
        >>> decode(encode(Start(rank=1, host="a", pid=7)))
        Start(rank=1, host='a', pid=7, restarts=0, signal=0)
        >>> decode(b"mpirun has something to say") is None
        True
    """
    if not line.startswith(MARK):
        return None
    try:
        fields = json.loads(line[len(MARK) :])
        return _KINDS[fields.pop("kind")](**fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


@final
class FrameReader:
    """Takes apart what mpirun writes: frames, and lines of its own.

    Example:
        >>> list(FrameReader().feed(b"mpirun says" + encode(Start(rank=1, host="a", pid=7)) + b"unfinished"))
        ['mpirun says', Start(rank=1, host='a', pid=7, restarts=0, signal=0)]
    """

    def __init__(self) -> None:
        self._unfinished = b""

    def feed(self, data: bytes) -> Iterator[Frame | str]:
        """The frames and lines that ``data`` completes."""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        for line in lines:
            yield from self._parts(line)

    def end(self) -> Iterator[Frame | str]:
        """What is left when nothing more comes."""
        line, self._unfinished = self._unfinished, b""
        if line:
            yield from self._parts(line)

    @staticmethod
    def _parts(line: bytes) -> Iterator[Frame | str]:
        """mpirun does not always end its own lines: a frame may follow on the same one."""
        message, mark, rest = line.partition(MARK)
        if message or not mark:
            yield message.decode("utf-8", "replace")
        frame = decode(mark + rest)
        if frame is not None:
            yield frame
