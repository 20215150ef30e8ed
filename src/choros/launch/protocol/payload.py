"""The payload of ``choros.run``: a function call, packed as bytes for the ranks.

::

    choros.run ──stdin──► rank 0 ──broadcast──► the other ranks
        ▲                                             │
        └── Result frames ◄── a pipe to the wrapper ◄─┘ the function's return value

No process listens on a port, and neither disk nor a command line holds the data. Unpickling the results is safe
because they come from processes that this process has started.
"""

import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle


def pack(call: Callable[[], Any]) -> bytes:
    """Returns ``call`` as bytes, with this process's module path, after a line with the number of bytes.

    >>> from functools import partial
    >>> pack(partial(max, 1, 2)).partition(b"\\n")[0].isdigit()
    True
    """
    body = pickle.dumps((list(sys.path), cloudpickle.dumps(call)))
    return b"%d\n%s" % (len(body), body)


def unpack(body: bytes) -> Callable[[], Any]:
    """Returns the call in ``body`` and sets this process's module path to that of the process that packed it."""
    path, call = pickle.loads(body)  # noqa: S301  (from the process that started this one)
    sys.path[:] = path
    unpacked: Callable[[], Any] = pickle.loads(call)  # noqa: S301
    return unpacked


def read_framed(descriptor: int) -> bytes:
    """Reads the bytes of ``pack`` from ``descriptor`` by their count: mpirun does not forward the end of file."""
    header = b""
    while not header.endswith(b"\n"):
        header += _read(descriptor, 1)
    chunks, missing = [], int(header)
    while missing:
        chunk = _read(descriptor, min(missing, 1 << 20))
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)


def _read(descriptor: int, most: int) -> bytes:
    data = os.read(descriptor, most)
    if not data:
        raise EOFError("choros.run: rank 0 received only a part of the function call.")
    return data
