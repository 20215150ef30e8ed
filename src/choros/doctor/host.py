"""What runs on another host, in a login of the doctor's: it says the facts of the host, and whom it reaches.

::

    doctor                                     host
      ◄────────────────────────────── clock ────┤
      ◄──────────── facts, port, secret ────────┤  ⎫
      ├── the other hosts' ports and secrets ──►   ⎬ it listens
      ◄──────────── hosts that it misses ───────┤  ⎪
      ├── end of its input ────────────────────►   ⎭

Each host listens at a free port, the doctor's too, and all others connect to it: a listener with another secret, or
none, is not that host.
"""

import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, NamedTuple

from choros import durations
from choros.doctor.gather import gather
from choros.launch.driver.preflight import ask_all
from choros.transport.channel import listen

#: Begins each line for the doctor: a login shell may print others.
MARK = "choros doctor: "


class Target(NamedTuple):
    """A listener on a host: it can be reached if one of the ``addresses`` can."""

    host: str
    addresses: Sequence[str]
    port: int
    secret: str


@contextmanager
def listening() -> Iterator[tuple[int, str]]:
    """A block in which all who connect to a port get a secret: the port, and the secret."""
    secret = secrets.token_hex(8)
    with listen("") as server:
        with suppress(RuntimeError):  # too many threads: others do not reach this machine
            threading.Thread(target=_answer, args=(server, secret.encode()), daemon=True).start()
        yield server.getsockname()[1], secret


def _answer(server: socket.socket, secret: bytes) -> None:
    with suppress(OSError):  # the block has ended
        while True:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(secret)


def unreached(targets: Sequence[Target]) -> list[str]:
    """Returns the hosts of ``targets`` that this machine does not reach."""
    by_host = {target.host: target for target in targets}
    _, failures = ask_all([*by_host], lambda host: _connect(by_host[host]), durations.DOCTOR_REACH)
    return list(failures)


def _connect(target: Target) -> str:
    """Returns the address that leads to ``target``; an ``OSError`` if none does."""
    seconds = durations.DOCTOR_REACH / max(1, len(target.addresses))
    for address in target.addresses:
        with suppress(OSError), socket.create_connection((address, target.port), timeout=seconds) as connection:
            if connection.recv(64, socket.MSG_WAITALL) == target.secret.encode():
                return address
    raise OSError("not reached")


def main() -> None:
    """Answers the doctor; its arguments: the job's directory, and the path of its mpirun, empty for the default."""
    _say(time.time())
    directory, mpirun = sys.argv[1:]
    with listening() as (port, secret):
        _say({"facts": asdict(gather(directory, mpirun or None)), "port": port, "secret": secret})
        targets = json.loads(sys.stdin.readline() or "[]")
        _say(unreached([Target(*each) for each in targets]))
        sys.stdin.read()


def _say(answer: Any) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
