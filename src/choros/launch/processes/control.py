"""The control socket: through it ``choros stacks`` reaches a running chorosrun.

::

    choros stacks ── connects ──► choros-session-JOB/control.PID ──► chorosrun of that PID
          ▲                       a Unix socket in a directory           │ asks all wrappers
          └──────── a text ◄──────that only this user may enter ◄────────┘

Who connects gets the text, and can send nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from choros import durations
from choros.launch.processes.directories import SESSION, temporary

if TYPE_CHECKING:
    import socket

_PREFIX = "control."
#: The kernel's limit for the name of a Unix socket, on the system with the smallest one.
_LONGEST = 100


@contextmanager
def control_socket(session: Path) -> Iterator[socket.socket | None]:
    """A context in which this process listens; ``None`` if the directory ``session`` cannot have a socket."""
    import socket  # takes some milliseconds

    path = session / f"{_PREFIX}{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            with _short(path) as name:
                listener.bind(name)
            path.chmod(0o600)
            listener.listen()
            listener.setblocking(False)
        except OSError:
            yield None
        else:
            yield listener
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def send_text(client: socket.socket, text: str) -> None:
    """Sends ``text`` to a client and closes the connection."""
    client.settimeout(durations.CONTROL)
    with client, suppress(OSError):
        client.sendall(text.encode("utf-8", "surrogateescape"))


def running_jobs(roots: Iterable[Path] = ()) -> dict[int, Path]:
    """Returns control sockets of this user's jobs here, by chorosrun's PID; ``roots``: temporary files by default."""
    found = {}
    for root in roots or (temporary(),):
        for path in root.glob(f"{SESSION}*/{_PREFIX}*"):
            number = path.name.removeprefix(_PREFIX)
            with suppress(OSError):
                if number.isdecimal() and path.parent.lstat().st_uid == path.lstat().st_uid == os.geteuid():
                    os.kill(int(number), 0)
                    found[int(number)] = path
    return found


def text_of(path: Path, seconds: float) -> str:
    """Returns what the chorosrun that listens at ``path`` sends; raises an ``OSError`` if it takes ``seconds``."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, _short(path) as name:
        connection.settimeout(seconds)
        connection.connect(name)
        chunks = []
        while chunk := connection.recv(1 << 16):
            chunks.append(chunk)
    return b"".join(chunks).decode("utf-8", "replace")


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of ``path`` that is short enough for a socket."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
