"""The control sockets: through them ``choros stacks`` and ``choros top`` reach a running chorosrun.

::

    choros stacks ── connects ──► choros-session-JOB/stacks.PID ──► chorosrun of that PID
          ▲                       a Unix socket in a directory          │ asks all wrappers
          └──────── a text ◄──────that only this user may enter ◄───────┘

    choros top ───── connects ──► choros-session-JOB/view.PID   ──► sends the job's record, as JSON, short
               ───── --json ────► choros-session-JOB/record.PID ──► and whole

Who connects gets the text, and can send nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from choros import durations
from choros.errors import LaunchError
from choros.launch.processes.directories import SESSION, temporary

if TYPE_CHECKING:
    import socket

STACKS_OF, RECORD_OF, VIEW_OF = WHAT = ("stacks", "record", "view")
_NO_JOB = "start it with chorosrun, and run this command on the host of chorosrun, with the same TMPDIR"
#: The kernel's limit for the name of a Unix socket, on the system with the smallest one.
_LONGEST = 100


@contextmanager
def control_socket(session: Path, what: str) -> Iterator[socket.socket | None]:
    """A context in which this process listens for who wants ``what``; ``None`` if ``session`` can have no socket."""
    import socket  # takes some milliseconds

    path = session / f"{what}.{os.getpid()}"
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


def answer(clients: socket.socket, send: Callable[[socket.socket], None]) -> None:
    """Calls ``send`` with the process that has connected to the socket ``clients``."""
    with suppress(OSError):  # it has gone
        send(clients.accept()[0])


def send_text(client: socket.socket, text: str) -> None:
    """Sends ``text`` to a client and closes the connection."""
    client.settimeout(durations.CONTROL)
    with client, suppress(OSError):
        client.sendall(text.encode("utf-8", "surrogateescape"))


def running_jobs(what: str) -> dict[int, Path]:
    """Returns the sockets of this user's jobs here that send ``what``, by chorosrun's PID."""
    found = {}
    for session in temporary().glob(f"{SESSION}*"):
        with suppress(OSError):  # its job has ended, perhaps just now
            for path in session.glob(f"{what}.*"):
                number = path.name.removeprefix(f"{what}.")
                if number.isdecimal() and session.lstat().st_uid == path.lstat().st_uid == os.geteuid():
                    os.kill(int(number), 0)
                    found[int(number)] = path
    return found


def chosen_job(what: str, job: int | None, command: str) -> tuple[int, Path]:
    """Returns the job that ``command`` means, ``job`` or the only one, and its socket; a ``LaunchError`` without it."""
    jobs = running_jobs(what)
    listed = ", ".join(map(str, sorted(jobs)))
    if job is None and len(jobs) != 1:
        which = f"give one of {listed}" if jobs else _NO_JOB
        raise LaunchError(f"{command}: {len(jobs)} jobs of yours run on this host: {which}.")
    if job is not None and job not in jobs:
        which = f"those that run: {listed}" if jobs else _NO_JOB
        raise LaunchError(f"{command} {job}: {job} is not the PID of a chorosrun of yours on this host; {which}.")
    return next(iter(jobs.items())) if job is None else (job, jobs[job])


def answer_of(what: str, job: int | None, command: str, seconds: float) -> str:
    """Returns what ``chosen_job`` sends; a ``LaunchError`` if there is no such job, or it does not answer in time."""
    number, path = chosen_job(what, job, command)
    try:
        return text_of(path, seconds)
    except OSError as error:  # it has just ended, or is stopped
        raise LaunchError(f"{command} {number}: chorosrun does not answer: {error}.") from error


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
