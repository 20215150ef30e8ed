"""A rank of a test that is a copy of a process which has its framework already: ``client.py DIRECTORY ARGUMENT…``.

::

    wrapper ── starts ──► client ── arguments, environment, files ──► server ── fork ──► the rank
                             │                                           ▲ │ exit code      ▲
                             └── each signal ────────────────────────────┼─┼────────────────┘
                                                                         │ └► client: ends as the rank has
                                        if the client is killed: its end ┘    the rank is killed, too

Importing PyTorch and Keras takes most of the time of a short test. This process, which imports nothing, is what
chorosrun sees; so tests of what it sees (signals, process trees, stacks, stopped ranks) do without.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys

FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
             signal.SIGWINCH, signal.SIGPROF, signal.SIGCONT}  # fmt: skip
#: The rank's environment variable with the number of this process, which has the parents that a rank has.
CLIENT = "CHOROS_TEST_CLIENT"
#: Of what both sides send: the number of bytes that follow.
LENGTH = struct.Struct("<I")


def main() -> None:
    server = socket.socket(socket.AF_UNIX)
    # Of two servers: sets have another order in each.
    rank = next(filter(None, map(os.environ.get, ("OMPI_COMM_WORLD_RANK", "RANK", "SLURM_PROCID"))), "0")
    server.connect(os.path.join(sys.argv[1], str(int(rank) % 2)))
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    descriptors = [number for number in descriptors if number != server.fileno() and _is_open(number)]
    request = {
        "arguments": sys.argv[2:],
        "environ": {**os.environ, CLIENT: str(os.getpid())},
        "directory": os.getcwd(),
        "descriptors": descriptors,
        "processors": sorted(os.sched_getaffinity(0)),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in ("RLIMIT_NOFILE", "RLIMIT_CORE")},
    }
    text = json.dumps(request).encode()
    socket.send_fds(server, [LENGTH.pack(len(text))], descriptors)
    server.sendall(text)
    for number in descriptors:
        os.close(number)
    (pid,) = LENGTH.unpack(server.recv(LENGTH.size, socket.MSG_WAITALL))
    for number in FORWARDED:
        signal.signal(number, lambda number, _frame: _send(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = server.recv(LENGTH.size, socket.MSG_WAITALL)
    code = os.waitstatus_to_exitcode(LENGTH.unpack(status)[0]) if status else -signal.SIGKILL
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_open(number: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(number)
        return os.get_inheritable(number)
    return False


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    main()
