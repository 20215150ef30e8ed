"""Gates before the sockets of this process and of a child."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from choros.transport.gate import Gate, connect_signed, new_listeners

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no other system has gates")
LISTENS = (
    "import socket, sys; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"
)


@pytest.fixture(params=["127.0.0.1", "::"])
def server(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    dual = family == socket.AF_INET6
    with socket.create_server((request.param, 0), family=family, dualstack_ipv6=dual) as listening:
        yield listening


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.3).close()
    except TimeoutError:
        return False
    return True


def test_only_who_has_the_key_connects(server: socket.socket) -> None:
    port, gate = server.getsockname()[1], Gate(os.getpid(), [os.fstat(server.fileno()).st_ino])
    assert can_connect(port)
    assert gate.close()
    assert not can_connect(port)
    with pytest.raises(TimeoutError):
        connect_signed(("127.0.0.1", port), Gate(os.getpid()).key, seconds=0.3)
    with connect_signed(("127.0.0.1", port), gate.key, seconds=10) as connection:
        accepted, _ = server.accept()
        connection.sendall(b"signed")
        assert accepted.recv(16) == b"signed"
        assert not gate.expel()  # it belongs to this user
        accepted.sendall(b"and back")
        assert connection.recv(16) == b"and back"
        accepted.close()
    gate.open()
    assert can_connect(port)


def test_connections_that_were_not_accepted_yet_end(server: socket.socket) -> None:
    with socket.create_connection(("127.0.0.1", server.getsockname()[1])) as early:
        assert Gate(os.getpid(), sockets=[os.fstat(server.fileno()).st_ino]).close()
        early.settimeout(10)
        assert early.recv(1) == b""


def test_the_sockets_of_a_child() -> None:
    with subprocess.Popen([sys.executable, "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        assert can_connect(port)
        assert Gate(child.pid).close()
        assert not can_connect(port)
        child.kill()


def test_a_process_without_sockets_has_no_gate() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        gate = Gate(child.pid)
        assert (gate.close(), gate.sockets()) == (False, {})
        child.kill()


def test_new_listeners_are_those_of_the_block(server: socket.socket) -> None:
    with new_listeners() as found, socket.create_server(("127.0.0.1", 0)) as inside:
        number = os.fstat(inside.fileno()).st_ino
        assert not found
        with new_listeners() as none:
            pass
        assert not none
    assert not found  # it listens no more
    with new_listeners() as found:
        inside = socket.create_server(("127.0.0.1", 0))
    with inside:
        assert found == {os.fstat(inside.fileno()).st_ino} != {number}
