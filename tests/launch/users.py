"""Other users of this machine: runs programs as one of them, and functions in processes of theirs. Root only."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["OTHER", "VICTIM", "as_user", "in_own_network", "process_of"]

#: Users without an account, a home or a group.
VICTIM, OTHER = 71001, 71002
#: Linux' numbers.
_PR_SET_DUMPABLE, _CLONE_NEWNET = 4, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


def as_user(user: int) -> list[str]:
    """Returns the arguments that run a command as ``user``, who may read Python and this checkout wherever they are."""
    return [sys.executable, "-I", __file__, str(user)]


@contextmanager
def process_of(user: int, function: Callable[[], None]) -> Iterator[int]:
    """Runs ``function`` in a process of ``user`` until the block ends; yields its process number.

    The process is a copy of this one, so it needs no files that only this user can read.
    """
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)  # else its own files in /proc belong to root
            function()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def in_own_network(function: Callable[[], None]) -> None:
    """Runs ``function`` in a process whose jobs have a loopback interface of their own: others' are not attacked."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if ctypes.CDLL(None).unshare(_CLONE_NEWNET):
                raise OSError("this kernel, or container, has no network namespaces")
            with socket.socket() as any_socket:
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
            function()
            code = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "see its traceback in the captured output"


def _main() -> None:
    """Becomes the user, in a mount namespace in which the directories above Python and this checkout can be entered."""
    user, command = int(sys.argv[1]), sys.argv[2:]
    needed = [Path(sys.base_prefix), Path(sys.prefix), Path(__file__).parents[2]]
    _enter_namespace([path for path in needed if _closed(path)])
    os.environ["HOME"] = "/nonexistent"
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.execvp(command[0], command)


def _enter_namespace(hidden: list[Path]) -> None:
    """Makes directories that others cannot reach reachable by their names, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(code: int) -> None:
        if code:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    check(libc.unshare(_CLONE_NEWNS))
    check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    opened = {path: os.open(path, os.O_PATH) for path in hidden}
    for directory in {_closed(path) for path in hidden}:
        check(libc.mount(b"tmpfs", bytes(directory), b"tmpfs", 0, b"mode=755"))
    for path, descriptor in opened.items():
        path.mkdir(parents=True, exist_ok=True)
        check(libc.mount(f"/proc/self/fd/{descriptor}".encode(), bytes(path), None, _MS_BIND | _MS_REC, None))


def _closed(path: Path) -> Path | None:
    """The topmost directory of ``path`` that others cannot enter."""
    return next((each for each in reversed([path, *path.parents]) if not each.stat().st_mode & 0o001), None)


if __name__ == "__main__":
    _main()
