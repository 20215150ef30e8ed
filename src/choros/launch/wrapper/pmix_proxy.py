"""The proxy between a rank and mpirun, which only who has the job's key can reach (``driver/mpirun_process.py``).

::

    rank ── PMIx ──► 127.0.0.1, this proxy ── signed ──► gate │ mpirun
                       ▲ a process of this user? as the kernel knows

Open MPI's library in the rank connects to the address in its environment, and cannot sign.
"""

import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import NoReturn

from choros import durations
from choros.launch.processes.directories import wait_for_key
from choros.transport.gate import connect_signed
from choros.transport.peers import users_connected_to

_BYTES = 1 << 16
_WAITING = 512
#: The variables with the address of mpirun, for clients of several versions of PMIx.
_VARIABLE = "PMIX_SERVER_URI"
_ADDRESS = re.compile(r"tcp[46]://\[?([\d.:a-f]+?)\]?:(\d+)")


def start_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """Connects a rank, and its children, to mpirun; returns variables of the rank's environment that lead here."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=_WAITING)
    listening.setblocking(False)
    here = "tcp4://{}:{}".format(*listening.getsockname())
    uris = {name: uri for name, uri in environ.items() if name.startswith(_VARIABLE)}
    addresses = [match for uri in uris.values() if (match := _ADDRESS.search(uri))]
    connect = partial(_connect, mpirun=(addresses[0][1], int(addresses[0][2])), environ=environ)
    threading.Thread(target=_serve, args=(listening, connect), name="choros: proxy", daemon=True).start()
    return {name: _ADDRESS.sub(here, uri) for name, uri in uris.items()}


def _serve(listening: socket.socket, connect: Callable[[socket.socket], None]) -> NoReturn:
    while True:
        select.select([listening], [], [])
        waiting: list[socket.socket] = []
        with suppress(OSError):  # there are no more
            while len(waiting) < _WAITING:
                waiting.append(listening.accept()[0])
        users = users_connected_to({listening.getsockname()[1]})
        for end in waiting:
            if users.get(os.fstat(end.fileno()).st_ino) == os.geteuid():
                threading.Thread(target=connect, args=(end,), name="choros: proxy", daemon=True).start()
            else:
                end.close()
        time.sleep(durations.PROXY_PAUSE)  # who connects again and again takes little of this core


def _connect(rank: socket.socket, mpirun: tuple[str, int], environ: Mapping[str, str]) -> None:
    rank.setblocking(True)
    with (
        rank,
        suppress(OSError),
        connect_signed(mpirun, wait_for_key(environ), durations.PROXY_CONNECT) as connection,
    ):
        answers = threading.Thread(target=_pass_on, args=(connection, rank), name="choros: proxy", daemon=True)
        answers.start()
        _pass_on(rank, connection)
        answers.join()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    """Sends what ``source`` receives, until one of both ends; then ends both."""
    with suppress(OSError):
        while data := source.recv(_BYTES):
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
