"""Imports modules, and starts ranks as copies of itself: ``server.py ADDRESS LOCK MODULE…``; see ``client.py``.

It ends with its standard input, and all ranks with it; until then it has the lock, with others.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from choros.launch.processes.process_tree import PTRACER, set_option
from ranks.job import HIDDEN
from warm.client import LENGTH

#: Above the numbers of the descriptors that a rank has.
_HIGH = 512
#: ``PR_SET_PTRACER_ANY``: MPI reads the memory of the other ranks, which are not this process's children.
_ANY = -1


def serve(listening: socket.socket) -> dict[str, Any] | None:
    """Starts ranks until standard input ends; returns the request in a process that is a rank, ``None`` in this one."""
    ranks: dict[int, tuple[socket.socket, int]] = {}  # each rank's client and number, by a descriptor of its process
    poll = select.poll()
    for waited_for in (sys.stdin, listening):
        poll.register(waited_for, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready == sys.stdin.fileno():
                for _, pid in ranks.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            if ready == listening.fileno():
                client, _ = listening.accept()
                request, descriptors = _received(client)
                if request is None:  # its client was killed
                    client.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    for each in (listening, client, *(client for client, _ in ranks.values())):
                        each.detach()
                    _take(descriptors, request["descriptors"])
                    return request
                for descriptor in descriptors:
                    os.close(descriptor)
                with contextlib.suppress(OSError):  # as above; that it has gone is read below
                    client.sendall(LENGTH.pack(pid))
                process = os.pidfd_open(pid)
                ranks[process] = client, pid
                poll.register(process, select.POLLIN)
                poll.register(client, select.POLLIN)
            elif ready in ranks:
                client, pid = ranks.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                with contextlib.suppress(KeyError):
                    poll.unregister(client)
                with client, contextlib.suppress(OSError):
                    client.sendall(LENGTH.pack(os.waitpid(pid, 0)[1]))
            else:  # a client was killed
                with contextlib.suppress(KeyError):
                    poll.unregister(ready)
                for client, pid in ranks.values():
                    if client.fileno() == ready:
                        os.kill(pid, signal.SIGKILL)


def _received(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    head, descriptors, _, _ = socket.recv_fds(client, LENGTH.size, 64)
    size = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else -1
    text = client.recv(size, socket.MSG_WAITALL) if size >= 0 else b""
    if len(text) == size:
        return json.loads(text), descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    return None, []


def _take(descriptors: list[int], numbers: list[int]) -> None:
    """Gives this process these descriptors, under these numbers, and no others."""
    moved = [os.dup2(each, _HIGH + place) for place, each in enumerate(descriptors)]
    os.closerange(0, _HIGH)
    for each, number in zip(moved, numbers, strict=True):
        os.dup2(each, number, inheritable=True)
        os.close(each)


def become(request: dict[str, Any]) -> tuple[CodeType, dict[str, Any]]:
    """Makes this process what a new one would be; returns its main module's code and variables."""
    set_option(PTRACER, _ANY)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["directory"])
    os.sched_setaffinity(0, request["processors"])
    for name, limits in request["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = open(number, mode, closefd=False) if number in request["descriptors"] else None  # noqa: SIM115
        if stream and name != "stdin":
            how = {"line_buffering": True, "errors": "backslashreplace"} if name == "stderr" else {}
            stream.reconfigure(write_through="PYTHONUNBUFFERED" in os.environ, **how)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.modules["numpy"].random.seed()  # as Python's own, but for this, would continue that of the server
    if "torch" in sys.modules and (threads := os.environ.get("OMP_NUM_THREADS")):  # read when it was imported
        sys.modules["torch"].set_num_threads(int(threads))
    for name in [name for name, module in sys.modules.items() if module is None]:
        if name not in os.environ.get(HIDDEN, "").split():
            del sys.modules[name]
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    code, file, directory = _program(request["arguments"])
    sys.path.insert(0, directory)
    main = ModuleType("__main__")
    if file:
        main.__file__ = file
    sys.modules["__main__"] = main
    return compile(code, file or "<string>", "exec"), vars(main)


def _program(arguments: list[str]) -> tuple[str, str, str]:
    """Sets ``sys.argv``, as Python does; returns the code, its file, and the directory of its modules."""
    first, *rest = arguments
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        return rest[0], "", ""
    path = Path(first)
    if first == "-m":
        spec = importlib.util.find_spec(rest[0])
        assert spec is not None
        assert spec.origin is not None
        path, rest = Path(spec.origin), rest[1:]
    sys.argv = [str(path), *rest]
    return path.read_text(), str(path), str(Path.cwd() if first == "-m" else path.absolute().parent)


def main() -> None:
    address, lock, *modules = sys.argv[1:]
    alive = open(lock)  # noqa: SIM115
    fcntl.flock(alive, fcntl.LOCK_SH)
    for module in os.environ[HIDDEN].split():
        sys.modules[module] = None  # type: ignore[assignment]
    for module in modules:
        importlib.import_module(module)
    ours = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [each for each in sys.path if each not in ours]
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    gc.freeze()  # so that a rank's collections of garbage do not copy what it shares with the others
    request = serve(listening)
    if request is None:
        return
    code, variables = become(request)
    try:
        exec(code, variables)
    except Exception as error:  # noqa: BLE001
        inner = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error.with_traceback(inner), inner)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
