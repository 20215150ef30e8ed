"""The user at the other end of a connection within the host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from choros.errors import EngineError
from choros.transport.peers import connections_of_this_user

CONNECTS = """
import os, socket, sys
port, user = map(int, sys.argv[1:])
os.setuid(user)  # from here on, it may not be able to read Python's own files
end = socket.socket()
end.connect(("127.0.0.1", port))
sys.stdin.read()
"""


def connect_as(user: int) -> None:
    """A process of ``user`` connects to this one in the context."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
        command = [sys.executable, "-c", CONNECTS, str(listening.getsockname()[1]), str(user)]
        stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
        listening.settimeout(60)
        with connections_of_this_user():
            end, _ = listening.accept()
            stack.enter_context(end)


def test_a_process_of_the_same_user_is_accepted() -> None:
    connect_as(os.geteuid())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no other system says who has connected")
def test_a_process_of_another_user_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"a process of another user \(uid 12345\) has connected"):
        connect_as(12345)
