"""The key of the gate before mpirun: from chorosrun to the wrappers, in a file that only this user can read.

::

    chorosrun  closes the gate, then writes ──► choros-session-JOB/gate ──► wrapper, which waits for it

An empty key says that the kernel does not allow a gate.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from choros.launch.processes.directories import SESSION, temporary
from choros.launch.protocol.wrapper_options import JOB

__all__ = ["wait_for_key", "write_key"]

_POLL_SECONDS = 0.005
_FILE = "gate"


def write_key(session: Path, key: bytes) -> None:
    """Writes the key, complete from the moment when the file exists."""
    path = session / f"{_FILE}.new"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key)
    path.rename(session / _FILE)


def wait_for_key(environ: Mapping[str, str]) -> bytes:
    """Returns the key of this job as soon as chorosrun has written it."""
    path = temporary() / (SESSION + environ[JOB]) / _FILE
    while True:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            time.sleep(_POLL_SECONDS)
