"""A function call on its way to the ranks, as bytes.

::

    choros.run ──stdin──► rank 0 ──broadcast──► the other ranks
        ▲                                             │
        └── Result frames ◄── a pipe to the wrapper ◄─┘ what the function returned

Nothing listens on a port, nothing is written to disk and nothing stands on a command line; what comes back is
unpickled only because it comes from processes that we have started ourselves.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

__all__ = ["Call", "pack", "read_framed", "unpack"]


@dataclass(frozen=True)
class Call:
    """A function and its arguments."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def __call__(self) -> Any:
        """Calls the function."""
        return self.function(*self.args, **self.kwargs)


def pack(call: Call) -> bytes:
    """The bytes of ``call``, with where its modules are found, behind a line that says how many there are.

    Example:
        >>> pack(Call(max, (1, 2), {})).partition(b"\\n")[0].isdigit()
        True
    """
    body = pickle.dumps((list(sys.path), cloudpickle.dumps((call.function, tuple(call.args), dict(call.kwargs)))))
    return b"%d\n%s" % (len(body), body)


def unpack(body: bytes) -> Call:
    """The call in ``body``; this process looks for modules where the one that packed it did."""
    path, call = pickle.loads(body)  # noqa: S301  (from the process that started us)
    sys.path[:] = path
    return Call(*pickle.loads(call))  # noqa: S301


def read_framed(descriptor: int) -> bytes:
    """Reads what ``pack`` made from ``descriptor``, whose end is never seen: mpirun does not pass it on."""
    header = b""
    while not header.endswith(b"\n"):
        header += _read(descriptor, 1)
    pieces, missing = [], int(header)
    while missing:
        piece = _read(descriptor, min(missing, 1 << 20))
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _read(descriptor: int, most: int) -> bytes:
    data = os.read(descriptor, most)
    if not data:
        raise EOFError("choros.run: the call was cut off on its way to rank 0.")
    return data
