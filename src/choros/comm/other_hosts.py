"""The connections that MPI makes to other hosts: a rank ends when a host falls silent. Else MPI waits for a quarter
of an hour, in C, where nothing interrupts it: so no exception ends the rank, but this thread, with the exit code
and the text of a ``PeerLostError``. Linux only::

    rank 0 on a                              rank 2 on b
    addresses of a ──────── allgather ─────── addresses of b     of jobs on several hosts: in init(), with each new rank
    looks at MPI's connections to b    ╳     looks at those to a
    ends: rank 2 cannot be reached           ends: ranks 0 and 1 cannot be reached. No rank is left on a host
                                             that chorosrun does not reach
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping

import numpy as np
import psutil

from choros import durations
from choros.comm.communicator import Communicator
from choros.errors import PeerLostError
from choros.transport.address import is_loopback
from choros.transport.peers import remote_addresses
from choros.transport.silence import answers, ask_often, is_silent, unreachable_seconds
from choros.wording import ranks_text

_FAMILIES = (socket.AF_INET, socket.AF_INET6)

#: By its address, the ranks on another host, as the launcher numbers them.
_ranks_at: Mapping[str, list[int]] = {}
_started = False


def watch_other_hosts(communicator: Communicator) -> None:
    """Starts to look at this process's connections to the hosts of other ranks; all ranks call it."""
    global _ranks_at, _started
    interfaces = psutil.net_if_addrs().values()
    addresses = [each.address.partition("%")[0] for every in interfaces for each in every if each.family in _FAMILIES]
    own = [address for address in addresses if not is_loopback(address)]
    text = np.frombuffer(" ".join([*own, "\n"]).encode(), np.uint8)
    lines = communicator.allgather(text, name="addresses of hosts").tobytes().decode().splitlines()
    ranks_at: dict[str, list[int]] = {}
    for number, line in zip(communicator.launched, lines, strict=True):
        for address in set(line.split()) - set(own):
            ranks_at.setdefault(address, []).append(number)
    _ranks_at = ranks_at
    if not _started:
        _started = True
        threading.Thread(target=_look, name="choros: other hosts", daemon=True).start()


def _look() -> None:
    seconds = unreachable_seconds()
    last = 1000 * (seconds - durations.SILENCE_LOOK)
    limit = last - 1000 * durations.REACTION
    known: Mapping[int, str] = {}
    suspects: set[int] = set()
    due = 0.0
    while True:
        if time.monotonic() >= due:
            known, due = remote_addresses(), time.monotonic() + durations.NEW_CONNECTIONS
        for inode, end in _connections(known):
            if not is_silent(end, limit):
                suspects.discard(inode)
            elif inode not in suspects:
                suspects.add(inode)
            elif not answers(end) and is_silent(end, last):  # else it is asked once more
                _end(known[inode])
        time.sleep(durations.SILENCE_LOOK)


def _end(address: str) -> None:
    ranks = _ranks_at.get(address, [])
    error = PeerLostError(
        f"the host {address} of {ranks_text(ranks, None)} cannot be reached any "
        "more. The job cannot go on without: start it again, from its last checkpoint.",
        ranks=ranks,
    )
    with contextlib.suppress(SystemExit):
        sys.excepthook(PeerLostError, error, None)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(error.exit_code)


def _connections(known: Mapping[int, str]) -> Iterator[tuple[int, socket.socket]]:
    """The inodes and copies of this process's connections to other hosts of the job."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            inode = os.fstat(int(name)).st_ino
            if known.get(inode) in _ranks_at:
                # Not kept: MPI could not close its own.
                with socket.socket(fileno=os.dup(int(name))) as end:
                    ask_often(end)
                    yield inode, end
