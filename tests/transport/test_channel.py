"""Channels between two threads of this process, which behave as between two processes."""

from __future__ import annotations

import pickle
import socket
import struct
import threading

import numpy as np
import pytest

from choros.errors import ConfigError, EngineError
from choros.transport.channel import ChannelClosed, connect
from choros.transport.endpoint import connect_within
from choros.transport.listener import Listener
from choros.transport.loop import Loop
from choros.transport.remote_errors import Failure
from choros.transport.secret import job_key

KEY = b"0123456789abcdef"
RAN = []


class Harmful:
    def __reduce__(self):
        return RAN.append, ("unpickled",)


HARMFUL = pickle.dumps(Harmful())


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(params=["TCP", "Unix"])
def address(request, tmp_path):
    return free_port() if request.param == "TCP" else f"unix:{tmp_path / 'socket'}"


def echo(channel, first):
    try:
        channel.send(first)
        while True:
            channel.send(channel.receive())
    except ChannelClosed:
        pass


def test_received_arrays_are_writable(address):
    listener = Listener(address, KEY, echo)
    channel = connect(address, KEY, "the echo", 5)
    arrays = {
        "a": np.arange(12.0).reshape(3, 4),
        "empty": np.zeros((0, 2)),
        "number": np.float32(3),
        "text": "x" * 100_000,
    }
    for _ in range(2):
        channel.send(arrays)
        back = channel.receive()
        assert back["text"] == arrays["text"]
        for name in ("a", "empty", "number"):
            np.testing.assert_array_equal(back[name], arrays[name])
        back["a"][0] = 1
    channel.close()
    with pytest.raises(ChannelClosed, match="the echo"):
        channel.receive()
    listener.close()


def test_a_process_with_another_key_is_refused(address):
    listener = Listener(address, KEY, echo)
    with pytest.raises(EngineError, match="CHOROS_SECRET must be the same"):
        connect(address, b"another key 0000", "the echo", 5)
    connect(address, KEY, "the echo", 5).close()
    listener.close()


def test_connecting_without_a_listener_is_an_error_within_the_time_limit(address):
    with pytest.raises(EngineError, match=r"could not be reached at .* within 0.2 s"):
        connect(address, KEY, "parameter server 0", 0.2)


def test_keys(tmp_path):
    local, remote = ["127.0.0.1:1", "localhost:2"], ["127.0.0.1:1", "node1:2"]
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    key = job_key(environ, local)
    assert key == job_key(environ, local)
    assert len(key) == 32
    assert (tmp_path / "choros" / "secret").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="node1:2 can be reached from other hosts"):
        job_key(environ, remote)
    assert job_key({"CHOROS_SECRET": "ab" * 16}, remote) == b"\xab" * 16
    for wrong in ("xyz", "ab"):
        with pytest.raises(ConfigError, match="32 hexadecimal digits"):
            job_key({"CHOROS_SECRET": wrong}, local)


class OddError(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} {other}")


@pytest.mark.parametrize(("error", "kind"), [(ValueError("x"), ValueError), (OddError(1, 2), EngineError)])
def test_failures_are_sent_with_their_traceback(error, kind):
    try:
        raise error
    except (ValueError, OddError) as caught:
        failure = pickle.loads(pickle.dumps(Failure.of(caught)))
    assert isinstance(failure.error(), kind)
    assert "test_failures_are_sent" in failure.error().__notes__[0]


def test_a_channel_is_readable_when_a_message_has_arrived(address):
    listener = Listener(address, KEY, echo)
    channel, loop, received = connect(address, KEY, "the echo", 5), Loop(), []
    loop.on_readable(channel, lambda: received.append(channel.receive()))
    assert not loop.run(until=lambda: bool(received), seconds=0.05)
    channel.send("hello")
    assert loop.run(until=lambda: bool(received), seconds=5)
    assert received == ["hello"]
    listener.close()


def test_the_end_of_the_peer_is_detected(address):
    listener = Listener(address, KEY, lambda channel, _first: channel.close())
    channel = connect(address, KEY, "the other", 5)
    channel.send("first")
    with pytest.raises(ChannelClosed, match="the other is closed: it has ended"):
        channel.receive()
    listener.close()


def test_a_closed_listener_accepts_no_connection(address):
    listener = Listener(address, KEY, echo)
    channel = connect(address, KEY, "the echo", 5)
    channel.send("first")
    assert channel.receive() == "first"
    listener.close()
    with pytest.raises(EngineError, match="could not be reached"):
        connect(address, KEY, "the echo", 0.1)
    channel.send("still")
    assert channel.receive() == "still"


def test_nothing_is_unpickled_before_authentication(address):
    """A process without the key sends a message at once, which would run code."""
    opened = []
    listener = Listener(address, KEY, lambda _channel, first: opened.append(first))
    with connect_within(address, 5) as stranger:
        stranger.sendall(struct.pack("!i", len(HARMFUL)) + HARMFUL)
        stranger.settimeout(5)
        while stranger.recv(4096):
            pass  # a challenge, then the end
    assert opened == RAN == []
    listener.close()


def test_listening_at_a_used_address_is_an_error(address):
    listener = Listener(address, KEY, echo)
    with pytest.raises(EngineError, match="cannot listen at"):
        Listener(address, KEY, echo)
    listener.close()


def test_connect_waits_for_the_listener_to_start(address):
    later = threading.Timer(0.2, lambda: Listener(address, KEY, echo))
    later.start()
    connect(address, KEY, "the echo", 5).close()
    later.join()
