"""The request of a rank: its call of a collective, in a digest that ranks compare before data moves::

rank 0                     rank 1
request ─ digest, value ──┐ ┌─ digest, value ── request     (1) one control message of 16 bytes a rank
                    ┌─────┴─┴─────┐
same digests?  ◄────┤  all ranks' ├────►  same digests?     (2) every rank compares the same table
                    │   digests   │
                    └─────────────┘
yes: the data moves.  no: the requests' texts are gathered, and every rank raises the same MismatchError
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType

from choros.comm.reduction import Reduction
from choros.observe import events
from choros.wording import ranks_text

_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
_calls = threading.local()
#: The first bits of the digest of a request that other ranks serve.
_SERVED = 0x5E12ED << 39
_OTHER_BITS = (1 << 39) - 1


@dataclass(frozen=True)
class CollectiveSpec:
    """What a rank must know to take part without a call (``joining.py``); no first dimension that may differ.
    An ``agreement`` moves no data; a ``sum`` is one of as many numbers as the values say: ``differ`` if they do.
    """

    collective: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()
    op: Reduction = Reduction.AVERAGE
    root: int | None = None
    differ: str = ""

    def encode(self) -> bytes:
        """Returns it as a message.

        >>> spec = CollectiveSpec("allreduce", (("float32", (3, 4)),), Reduction.SUM)
        >>> CollectiveSpec.decode(spec.encode()) == spec
        True
        """
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> CollectiveSpec:
        """Returns the spec of a message."""
        values = json.loads(message)
        arrays = tuple((dtype, tuple(shape)) for dtype, shape in values.pop("arrays"))
        return cls(arrays=arrays, op=Reduction(values.pop("op")), **values)


@dataclass(frozen=True)
class Request:
    """One rank's part in a collective: all that must be the same on every rank. Ranks that have joined take part by
    ``spec``, or learn what to do from the message that ``explain`` returns; with neither, they cannot. A ``served`` one
    may be made by some ranks only: ``Members.serve``.
    """

    collective: str
    arguments: str = ""
    name: str = ""
    spec: CollectiveSpec | None = field(default=None, compare=False)
    explain: Callable[[], bytes] | None = field(default=None, compare=False)
    served: bool = False

    @cached_property
    def digest(self) -> int:
        """63 bits that identify this request."""
        digest = digest_of("\0".join((self.collective, self.arguments, self.name)).encode())
        return (digest & _OTHER_BITS) | _SERVED if self.served else digest

    @cached_property
    def label(self) -> bytes:
        """It as text, for the page that the wrapper reads."""
        return str(self).encode()

    def __str__(self) -> str:
        name = [f"name={self.name!r}"] if self.name else []
        return f"{self.collective}({', '.join([*name, *([self.arguments] if self.arguments else [])])})"


def is_served(digest: int) -> bool:
    """Whether ``digest`` is that of a request that other ranks serve."""
    return digest & ~_OTHER_BITS == _SERVED


def digest_of(message: bytes) -> int:
    """63 bits that identify ``message``, to send as a signed integer."""
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest()) >> 1


def caller() -> str | None:
    """``file:line`` of the innermost frame outside choros, or of the call a thread works for (``called_at``)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return getattr(_calls, "location", None)


def is_users(file: str) -> bool:
    """Whether a file of Python code is the user's: not choros', a library's, or AutoGraph's copy of one."""
    libraries = ("site-packages", "/lib/python3", "__autograph_generated_file")
    return not file.startswith((_PACKAGE, "<")) and not any(each in file for each in libraries)


@contextmanager
def called_at(location: str | None) -> Iterator[None]:
    """A context in which this thread works for a call at ``location``."""
    outer = getattr(_calls, "location", None)
    _calls.location = location
    try:
        yield
    finally:
        _calls.location = outer


def mismatch_text(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """The message of a ``MismatchError``: each rank's request, equal requests together; ``ranks`` are global.

    >>> print(mismatch_text(["barrier()", "barrier()", "allreduce()"], [0, 1, 2]))
    Ranks made different calls, so no data was moved:
      ranks 0, 1: barrier()
      rank 2: allreduce()
    Ranks must call the same collectives with the same dtypes and shapes, and those without a name in order.
    """
    asked: dict[str, list[int]] = {}
    for text, rank in zip(texts, ranks, strict=True):
        asked.setdefault(text, []).append(rank)
    lines = [f"  {ranks_text(who, None)}: {text}" for text, who in asked.items()]
    advice = "Ranks must call the same collectives with the same dtypes and shapes, and those without a name in order."
    if 0 < sum(text.startswith("gradients") for text in asked) < len(asked):
        advice += (
            "\nIf some had fewer batches: in fit with a choros callback, they take part in the steps of the others if "
            "the model is compiled with a DistributedOptimizer (a tape's gradients are not known there); in loops, if "
            "they call join() after the last batch."
        )
    return "\n".join(["Ranks made different calls, so no data was moved:", *lines, advice])


#: The request of a rank that ends: it matches no other, so ranks that still call a collective are notified.
SHUTDOWN = Request(events.SHUTDOWN.removesuffix("()"))
#: The request of a rank that has joined: it matches every request that this rank can participate in.
JOINED = Request("join")
