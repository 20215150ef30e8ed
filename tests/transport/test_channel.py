"""Channels between two threads of this process, which behave as between two processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress

import numpy as np
import pytest

from choros.errors import EngineError
from choros.transport.channel import ChannelClosed, Failure, Listener, connect
from choros.transport.loop import Loop
from choros.transport.secret import Key
from ranks.job import free_port
from transport.relay import Relay

KEY = Key(b"0123456789abcdef")
NAMES = ("worker 0", "the echo")


@pytest.fixture(params=["TCP", "Unix"])
def address(request, tmp_path):
    return f"127.0.0.1:{free_port()}" if request.param == "TCP" else f"unix:{tmp_path / 'socket'}"


@pytest.fixture(params=["direct", "sealed"])
def listening(address, request):
    """An address at which the echo listens; someone forwards the connection if its messages are to be sealed."""
    with ExitStack() as stack:
        listener = Listener(address, KEY, NAMES[1], echo)
        stack.callback(listener.close)
        if request.param == "direct":
            yield address
        else:
            relay = Relay(address)
            stack.callback(relay.close)
            yield relay.address


def echo(channel, first):
    try:
        channel.send(first)
        while True:
            channel.send(channel.receive())
    except ChannelClosed:
        pass


AT_EXIT = """
import atexit
from choros.transport.channel import connect
from choros.transport.secret import Key
atexit.register(lambda: channel.send("at the exit"))
channel = connect({address!r}, Key({key!r}), "worker 0", "the echo", 5)
channel.send("before")
"""


def test_a_channel_is_open_until_its_process_has_ended(address):
    received = []

    def collect(channel, first):
        received.append(first)
        with suppress(ChannelClosed):
            while True:
                received.append(channel.receive())
        ended.set()

    ended = threading.Event()
    listener = Listener(address, KEY, NAMES[1], collect)
    try:
        subprocess.run([sys.executable, "-c", AT_EXIT.format(address=address, key=KEY.secret)], check=True, timeout=60)
        assert ended.wait(10)
    finally:
        listener.close()
    assert received == ["before", "at the exit"]


def test_received_arrays_are_writable(listening):
    channel = connect(listening, KEY, *NAMES, 5)
    arrays = {
        "a": np.arange(12.0).reshape(3, 4),
        "large": np.arange(2_000_003, dtype="u1"),
        "empty": np.zeros((0, 2)),
        "number": np.float32(3),
        "text": "x" * 100_000,
    }
    for _ in range(2):
        channel.send(arrays)
        back = channel.receive()
        assert back["text"] == arrays["text"]
        for name in ("a", "large", "empty", "number"):
            np.testing.assert_array_equal(back[name], arrays[name])
        back["a"][0] = 1
    channel.close()
    with pytest.raises(ChannelClosed, match="the echo"):
        channel.receive()


def test_one_thread_sends_while_another_one_receives(listening):
    channel = connect(listening, KEY, *NAMES, 5)
    sent = [np.full(100_000, number) for number in range(50)]
    sender = threading.Thread(target=lambda: [channel.send(array) for array in sent])
    sender.start()
    for array in sent:
        np.testing.assert_array_equal(channel.receive(), array)
    sender.join()


def test_connecting_without_a_listener_is_an_error_within_the_time_limit(address):
    with pytest.raises(EngineError, match=r"could not be reached at .* within 0.2 s"):
        connect(address, KEY, "worker 0", "parameter server 0", 0.2)


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


def test_a_failure_of_a_class_that_is_not_installed_here_has_its_text():
    failure = Failure.of(ValueError("no rows"))
    text = str(Failure(b"what cannot be unpickled", failure.text).error())
    assert text.startswith("ValueError: no rows\nRaised on ")


def test_a_channel_is_readable_when_a_message_has_arrived(listening):
    channel, loop, received = connect(listening, KEY, *NAMES, 5), Loop(), []
    loop.on_readable(channel, lambda: received.append(channel.receive()))
    assert not loop.run(until=lambda: bool(received), seconds=0.05)
    channel.send("hello")
    assert loop.run(until=lambda: bool(received), seconds=5)
    assert received == ["hello"]


def test_the_end_of_the_peer_is_detected(address):
    listener = Listener(address, KEY, NAMES[1], lambda channel, _first: channel.close())
    channel = connect(address, KEY, *NAMES, 5)
    channel.send("first")
    with pytest.raises(ChannelClosed, match="the echo is closed: it has ended"):
        channel.receive()
    listener.close()


def test_a_closed_listener_accepts_no_connection(address):
    listener = Listener(address, KEY, NAMES[1], echo)
    channel = connect(address, KEY, *NAMES, 5)
    channel.send("first")
    assert channel.receive() == "first"
    listener.close()
    with pytest.raises(EngineError, match="could not be reached"):
        connect(address, KEY, *NAMES, 0.1)
    channel.send("still")
    assert channel.receive() == "still"


def test_listening_at_a_used_address_is_an_error(address):
    listener = Listener(address, KEY, NAMES[1], echo)
    with pytest.raises(EngineError, match="cannot listen at"):
        Listener(address, KEY, NAMES[1], echo)
    listener.close()


def test_a_listener_goes_on_when_a_thread_could_not_be_started(address, monkeypatch):
    """As when other processes of a container, or of the user, have all that are allowed."""
    listener = Listener(address, KEY, NAMES[1], echo)
    start = threading.Thread.start
    failures = iter(range(2))

    def fail(thread):
        if next(failures, None) is None:
            start(thread)
        else:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    channel = connect(address, KEY, *NAMES, 20)
    channel.send("message")
    assert channel.receive() == "message"
    channel.close()
    listener.close()


def test_connect_waits_for_the_listener_to_start(address):
    later = threading.Timer(0.2, lambda: Listener(address, KEY, NAMES[1], echo))
    later.start()
    connect(address, KEY, *NAMES, 5).close()
    later.join()
