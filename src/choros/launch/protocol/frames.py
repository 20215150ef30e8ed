"""Frames: the wrappers' messages to chorosrun, one per line, through mpirun or past it (``processes/pipes.py``).

::

    ‹1e› {"kind":"Written","rank":1,"stream":"out","newline":28} ‹1f› what the rank printed ‹0a›
    mark  fields, in JSON                                          data, with ‹1c› in place of each newline

Open MPI forwards whole lines; any without the mark is its own. Its time grows with the square of their length from
64 KiB on (5 MB: 4 s): only rare frames are longer. Data, maybe megabytes, is neither decoded nor put into JSON.
A byte that the data lack replaces newlines: one byte is replaced by one many times faster than by two.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import final, get_args

from choros.observe.progress import RankProgress

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
    """The rank's command has started; ``signal`` ended it before its last restart; ``added``: another rank did it."""

    rank: int
    host: str
    pid: int
    restarts: int = 0
    signal: int = 0
    added: bool = False


#: The streams of a rank: standard output and error, the pickled return value of its function, and its events.
OUT, ERR, RESULT, EVENTS = "out", "err", "result", "events"


@dataclass(frozen=True)
class Written:
    """What the rank has written to a stream: of ``OUT`` and ``ERR`` lines with their ends, or a partial line; of
    ``EVENTS`` lines of JSON, as ``choros.observe`` writes them; of ``RESULT`` a chunk.
    """

    rank: int
    stream: str
    data: bytes


@dataclass(frozen=True)
class Received:
    """Rank 0 has got the first ``count`` lines of the payload: see ``payload.py``."""

    count: int


@dataclass(frozen=True)
class Stacks:
    """The answer to ``STACKS``: what the kernel says it does, if known, and Python stacks, or why there are none."""

    rank: int
    state: str
    text: str


@dataclass(frozen=True)
class Exit:
    """The rank's command has ended, with all it started; ``code`` is ``128 + n`` if signal ``n`` ended it.
    ``stopped``: after a signal from chorosrun. ``traceback``: its final one, not shown so far; ``shown``: if it was.
    ``problem``: why it could not be started. ``tail``: its last lines on standard error.
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


Frame = Start | Written | Received | RankProgress | Stacks | Exit

_KINDS: dict[str, type[Frame]] = {kind.__name__: kind for kind in get_args(Frame)}


def encode(frame: Frame) -> bytes:
    """Returns the line that encodes ``frame``.

    >>> encode(Written(rank=0, stream="out", data=b"hello\\n"))
    b'\\x1e{"kind":"Written","rank":0,"stream":"out","newline":28}\\x1fhello\\x1c\\n'
    """
    fields = {"kind": type(frame).__name__, **asdict(frame)}
    data: bytes = fields.pop("data", b"")
    if b"\n" in data:
        stand_in = next((byte for byte in _STAND_INS if byte not in data), None)
        fields["newline"] = None if stand_in is None else ord(stand_in)
        for byte, replacement in _ESCAPES if stand_in is None else ((b"\n", stand_in),):
            data = data.replace(byte, replacement)
    return MARK + json.dumps(fields, separators=(",", ":")).encode("ascii") + _SEPARATOR + data + b"\n"


def decode(line: bytes) -> Frame | None:
    """Returns the frame in ``line``; ``None`` if the line is not a frame.

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
        if kind is Written:
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

    >>> list(FrameReader().feed(b"a message" + encode(Start(rank=1, host="a", pid=7)) + b"unfinished"))
    ['a message', Start(rank=1, host='a', pid=7, restarts=0, signal=0, added=False)]
    """

    def __init__(self) -> None:
        self._unfinished = b""

    def feed(self, data: bytes) -> Iterator[Frame | str]:
        """Yields the frames and lines that ``data`` completes; empty data are the end of the output."""
        *lines, self._unfinished = (self._unfinished + (data or b"\n")).split(b"\n")
        for line in lines if data else filter(None, lines):
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
