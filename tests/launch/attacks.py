"""What another user of the machine may try against a job; each function runs in a process of that user."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["connect_to_all", "plant_links", "read_everything"]

_LISTENS = "0A"
#: How many connections one process keeps.
_ENDS = 500
#: Where jobs have their directories.
_ROOTS = (Path("/tmp"), Path("/dev/shm"))


def plant_links(precious: Path) -> None:
    """Makes directories that look like those of jobs, with links to ``precious``, as soon as a job shows its name."""
    while True:
        names = {path.name.rpartition("-")[2] for root in _ROOTS for path in root.glob("choros-*-*")}
        for root in _ROOTS:
            for name in names | {"feedbeef"}:
                directory = root / f"choros-job-{name}"
                with suppress(OSError):
                    directory.mkdir()
                with suppress(OSError):
                    (directory / "prted.1").symlink_to(precious)
                with suppress(OSError):
                    (directory / "daemon.prted.1").touch()
                with suppress(OSError):
                    (root / "prted.1").symlink_to(precious)
        time.sleep(0.001)


def connect_to_all(user: int, log: int) -> None:
    """Keeps many connections to everything at which processes of ``user`` listen, and says nothing.

    Writes a byte to ``log`` for each connection.
    """
    ends = []
    while True:
        for port in _ports(user):
            end = socket.socket()
            end.settimeout(0.01)
            with suppress(OSError):
                end.connect(("127.0.0.1", port))
                os.write(log, b".")
                ends.append(end)
        del ends[:-_ENDS]


def read_everything(user: int, pids: Sequence[int], roots: Sequence[Path], result: Path) -> None:
    """Writes to ``result`` what this user can read of the processes, and of the files of ``user`` in ``roots``.

    The last line is "all".
    """
    paths = [Path(f"/proc/{pid}/{name}") for pid in pids for name in ("environ", "mem", "maps", "fd", "io")]
    for root in roots:
        for path in root.iterdir():
            with suppress(OSError):
                if path.lstat().st_uid == user:
                    paths += [path, *path.rglob("*")]
    readable = []
    for path in paths:
        with suppress(OSError):
            if path.is_dir():
                os.listdir(path)
            else:
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            readable.append(str(path))
    complete = result.with_suffix(".part")
    complete.write_text("\n".join([*readable, "all"]))
    complete.rename(result)


def _ports(user: int) -> set[int]:
    """The ports at which processes of ``user`` listen."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[7]) == user:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found
