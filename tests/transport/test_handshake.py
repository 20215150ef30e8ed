"""Connections between processes of a job when others interfere: nobody without the key gets a word in."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from choros.errors import EngineError
from choros.transport.channel import ChannelClosed, Listener, connect, connect_within
from choros.transport.handshake import _GREETING, _MAGIC, Cut, accept_proof, offer_proof, seal_with
from choros.transport.secret import Key
from ranks.environment import python_path
from ranks.job import free_port
from transport.relay import Relay

SECRET = b"0123456789abcdef"
RAN: list[str] = []


def run_code() -> None:
    RAN.append("code of someone else")


class Harmful:
    def __reduce__(self):
        return run_code, ()


HARMFUL = pickle.dumps(Harmful())
#: A message as a channel writes it where nothing is sealed.
MESSAGE = struct.pack("!QI", len(HARMFUL), 0) + HARMFUL


@pytest.fixture(autouse=True)
def nothing_ran():
    assert isinstance(pickle.loads(MESSAGE[12:]), type(None))
    assert RAN, "the message must be harmful to those who read it"
    RAN.clear()
    yield
    assert not RAN


@pytest.fixture(params=["TCP", "Unix"])
def address(request, tmp_path):
    return f"127.0.0.1:{free_port()}" if request.param == "TCP" else f"unix:{tmp_path / 'socket'}"


@pytest.fixture
def served(address):
    """The first messages that a server at ``address`` has read; it answers with "hello"."""
    read = []

    def serve(channel, first):
        read.append(first)
        with contextlib.suppress(ChannelClosed):
            channel.send("hello")
            channel.receive()

    listener = Listener(address, Key(SECRET), "ps 0", serve)
    yield read
    listener.close()


def relayed(address, stack):
    relay = Relay(address)
    stack.callback(relay.close)
    return relay


def test_who_hands_on_the_handshake_of_two_processes_cannot_speak_for_either(address, served):
    """The port of a server that is not up yet is taken, and what a real server proves is handed on."""
    with contextlib.ExitStack() as stack:
        relay = relayed(address, stack)
        channel = connect(relay.address, Key(SECRET), "worker 0", "ps 0", 5)
        relay.to_connecting.sendall(MESSAGE)
        relay.to_connecting.sendall(bytes(1 << 12))
        with pytest.raises(ChannelClosed, match="a message was changed on the way"):
            channel.receive()


def test_on_one_host_nobody_can_stand_between(address):
    with contextlib.ExitStack() as stack:
        key = Key(SECRET, within_host=True)
        listener = Listener(address, key, "ps 0", lambda channel, first: None)
        stack.callback(listener.close)
        relay = relayed(address, stack)
        with pytest.raises(EngineError, match=r"ps 0 and this process .*: another process forwards this connection"):
            connect(relay.address, key, "worker 0", "ps 0", 5)
        connect(address, key, "worker 0", "ps 0", 5).close()


@pytest.mark.parametrize("repeat", [False, True])
def test_a_message_that_is_changed_or_repeated_on_the_way_is_not_read(address, served, repeat):
    with contextlib.ExitStack() as stack:
        relay = relayed(address, stack)
        channel = connect(relay.address, Key(SECRET), "worker 0", "ps 0", 5)
        relay.change = lambda data: 2 * data if repeat else data[:-1] + bytes([data[-1] ^ 1])
        channel.send("first")
        if repeat:
            assert channel.receive() == "hello"
        with pytest.raises(ChannelClosed, match="a message was changed on the way"):
            channel.receive()


def test_a_proof_is_valid_for_one_role(address, served):
    with pytest.raises(EngineError, match="this process expected ps 1 there and found ps 0"):
        connect(address, Key(SECRET), "worker 0", "ps 1", 5)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (Key(SECRET), "CHOROS_SECRET must be the same"),
        (Key(SECRET, within_host=True), "must run as the same user"),
    ],
    ids=["CHOROS_SECRET", "the user's file"],
)
def test_a_process_with_another_key_is_refused(address, key, message):
    listener = Listener(address, key, "ps 0", lambda channel, first: None)
    with pytest.raises(EngineError, match=message):
        connect(address, Key(b"another key 0000", within_host=key.within_host), "worker 0", "ps 0", 5)
    connect(address, key, "worker 0", "ps 0", 5).close()
    end = time.monotonic() + 10
    while not listener.refusal and time.monotonic() < end:
        time.sleep(0.01)
    assert "could not authenticate each other" in listener.refusal
    assert message in listener.refusal
    listener.close()


def test_a_process_that_ends_during_the_handshake_is_not_refused():
    """It may have failed: nothing is known about its key."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def connect_to_ours():
            with pytest.raises(Cut):
                offer_proof(theirs, Key(SECRET), "worker 0", "ps 0", 10)

        thread = threading.Thread(target=connect_to_ours)
        thread.start()
        greeting = ours.recv(4096)
        ours.shutdown(socket.SHUT_RDWR)
        thread.join()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(greeting)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(Cut, match="the connection was closed during the handshake"):
            accept_proof(ours, Key(SECRET), "ps 0", 10)


def test_nothing_is_read_before_the_proof(address, served):
    with connect_within(address, 5) as stranger:
        stranger.sendall(MESSAGE + bytes(1 << 12))
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    assert not served


def test_the_time_limit_is_one_for_the_whole_handshake():
    """A process that sends a byte now and then keeps nobody waiting."""
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def drip():
        with contextlib.suppress(OSError):
            while not ended.wait(0.01):
                theirs.send(b"c")

    thread = threading.Thread(target=drip)
    thread.start()
    with ours, theirs:
        with pytest.raises(EngineError, match="took too long"):
            accept_proof(ours, Key(SECRET), "ps 0", 0.2)
        ended.set()
        thread.join()


LISTENS = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from choros.transport.channel import Listener
from choros.transport.secret import Key
Listener(sys.argv[1], Key({SECRET!r}), "ps 0", lambda channel, first: channel.send(first))
print("listening", flush=True)
sys.stdin.read()
"""


def test_connections_that_prove_nothing_do_not_keep_the_others_out(address):
    """There are more of them than the process can have open files."""
    server = subprocess.Popen(
        [sys.executable, "-c", LISTENS, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": python_path()},
    )
    with server, contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        assert server.stdout.readline() == b"listening\n"
        for _ in range(300):
            stack.enter_context(connect_within(address, 30))
        channel = connect(address, Key(SECRET), "worker 0", "ps 0", 30)
        channel.send("still there?")
        assert channel.receive() == "still there?"


def test_seals_of_both_directions_and_of_each_section_differ():
    one, other = seal_with(b"1"), seal_with(b"2")
    tags = [next(each) for each in (one, one, other)]
    assert len({tag.digest() for tag in tags}) == 3


def test_greetings_that_are_no_text_are_refused_and_few_of_them_are_logged(address, served, caplog):
    kind, _, path = address.partition(":")
    for _ in range(30):
        with socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET) as end:
            end.connect(path if kind == "unix" else (kind, int(path)))
            end.sendall(_GREETING.pack(_MAGIC, bytes(32), bytes(32), 200, 200) + b"\xff" * 400)
            end.settimeout(60)
            with contextlib.suppress(ConnectionError):
                assert end.recv(1) == b""
    refusals = [record for record in caplog.records if "is none of this version of choros" in record.getMessage()]
    assert len(refusals) == 10
    assert refusals[-1].getMessage().endswith("Further ones are not logged.")
    with contextlib.closing(connect(address, Key(SECRET), "worker 0", "ps 0", 60)) as channel:
        channel.send("first")
        assert channel.receive() == "hello"
    assert served == ["first"]
