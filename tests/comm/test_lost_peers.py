"""Ranks that MPI did not start: one is killed, ends or is cut off, and who waits for it gets an error that names it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from choros.errors import PeerLostError
from comm.starts import by_hand, together
from harness import free_port, needs
from launch.namespaces import Network, ip, several_hosts
from warm.servers import warm_python

pytestmark = needs("torch")

HOST = socket.gethostname()
#: Runs the command in the namespace given by the environment.
ON_ITS_HOST = ("sh", "-c", 'exec ip netns exec "$HOST" "$@"', "sh")

BEGIN = """
import atexit, os, signal, subprocess, sys, threading, time
import choros
flag = sys.argv[1]
def wait_for_flag():
    while not os.path.exists(flag): time.sleep(0.02)
choros.init()
rank = choros.rank()
total = lambda: choros.global_process_set.communicator.allreduce([1.0] * 1000)
total()
def total_or_flag():
    try: total()
    finally: open(flag, "w").close()
"""

#: Rank 0 waits for rank 1, which is late, and not for rank 2, which is killed while a child has its connections.
WAITS_FOR_ANOTHER = """
if rank == 2:
    if os.fork() == 0:
        wait_for_flag()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1: wait_for_flag()
total_or_flag()
"""


@pytest.mark.slow
def test_rank_that_is_killed_while_others_wait_for_another_one(tmp_path: Path) -> None:
    outcomes = together([*warm_python("torch"), "-c", BEGIN + WAITS_FOR_ANOTHER, str(tmp_path / "flag")], by_hand(3))
    assert [code for code, _ in outcomes] == [69, 69, -signal.SIGKILL], outcomes
    for _, output in outcomes[:2]:
        assert "choros.errors.PeerLostError: allreduce(" in output
        assert f"cannot be completed: rank 2 on {HOST} was killed, or has ended. Its own output" in output


#: The process of rank 1 ends only when the other one knows that it will; that of rank 0, which has the store, at once.
ENDS = {
    "raises": ("if rank == 1:\n    atexit.register(wait_for_flag)\n    raise ValueError\ntotal_or_flag()", [69, 1]),
    "rank 0": ("if rank == 0: os._exit(0)\ntotal_or_flag()", [0, 69]),
}
HOW = {"raises": f"rank 1 on {HOST} was ended by ValueError", "rank 0": f"rank 0 on {HOST} was killed, or has ended"}


@pytest.mark.slow
@pytest.mark.parametrize("way", ENDS)
def test_rank_that_ends(tmp_path: Path, way: str) -> None:
    script, codes = ENDS[way]
    outcomes = together([*warm_python("torch"), "-c", BEGIN + script, str(tmp_path / "flag")], by_hand(2))
    assert [code for code, _ in outcomes] == codes, outcomes
    assert HOW[way] in outcomes[codes.index(69)][1]


#: A rank that has agreed to a collective on devices is killed before it sends.
DIES_ON_DEVICES = """
import torch
from choros.comm.engines import torch_devices
devices = choros.global_process_set.communicator.devices
devices.allreduce(torch.ones(1000))
if rank == 1: torch_devices.as_tensor = lambda buffer: os.kill(os.getpid(), signal.SIGKILL)
devices.allreduce(torch.ones(1000))
"""


@pytest.mark.slow
def test_rank_that_is_killed_in_a_collective_on_devices() -> None:
    (code, output), (killed, _) = together([*warm_python("torch"), "-c", BEGIN + DIES_ON_DEVICES, ""], by_hand(2))
    assert (code, killed) == (69, -signal.SIGKILL), output
    assert f" cannot be completed: rank 1 on {HOST} was killed" in output


DIES_WHILE_CONNECTING = """
import os, choros
from choros.comm.store import RendezvousStore
def published(self, key, value, set=RendezvousStore.set):
    set(self, key, value)
    if "location" not in key: os._exit(7)  # the address at which Gloo listens
if os.environ["RANK"] == "1": RendezvousStore.set = published
choros.init()  # may return: the kernel of a process that listens accepts connections
choros.global_process_set.communicator.allreduce(1)
"""


@pytest.mark.slow
def test_rank_that_dies_while_the_others_connect_to_it() -> None:
    (code, output), (code_of_dead, other) = together([*warm_python("torch"), "-c", DIES_WHILE_CONNECTING], by_hand(2))
    assert (code, code_of_dead) == (69, 7), output + other
    assert f" cannot be completed: rank 1 on {HOST} was killed" in output


#: The link of rank 1 is cut in the middle of large messages.
CUT = """
cut = lambda: subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
if rank == 1: threading.Timer(0.3, cut).start()
large = [1.0] * (1 << 18)
while True: choros.global_process_set.communicator.allreduce(large)
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with several_hosts(tmp_path_factory.mktemp("reach")) as network:
        yield network


@pytest.fixture
def uncut(network: Network) -> Iterator[Network]:
    yield network
    ip("-n", network.namespaces[1], "link", "set", "eth0", "up")


@pytest.mark.slow
def test_hosts_that_cannot_reach_each_other_any_more(uncut: Network, tmp_path: Path) -> None:
    common = {"MASTER_ADDR": uncut.hosts[0], "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environs = [
        {**common, "RANK": str(rank), "HOST": namespace, "CHOROS_SECRET": "ab" * 16}
        for rank, namespace in enumerate(uncut.namespaces)
    ]
    outcomes = together([*ON_ITS_HOST, sys.executable, "-c", BEGIN + CUT, str(tmp_path / "flag")], environs)
    for rank, (code, output) in enumerate(outcomes):
        assert code == 69, output
        assert f"PeerLostError: allreduce(op=Average, dtype=float64, shape=({1 << 18},)" in output
        assert f"rank {1 - rank} on {HOST} cannot be reached any more" in output


#: As between a worker and a parameter server: one waits, the other one is sending when the link is cut.
ENDS_OF_A_CHANNEL = """
import os, subprocess, sys, threading
from choros.transport.channel import ChannelClosed, Listener, connect
from choros.transport.secret import Key

key, address, ended = Key(bytes(32)), sys.argv[1], threading.Event()
def until_closed(operation):
    try:
        while True: operation()
    except ChannelClosed as error:
        print(error, error.silent)
    ended.set()
if os.environ["LISTENS"]:
    Listener(address, key, "ps 0", lambda channel, _: until_closed(channel.receive))
    ended.wait()
else:
    channel = connect(address, key, "worker 0", "ps 0", 20)
    channel.send("hello")
    threading.Timer(0.3, subprocess.run, [["ip", "link", "set", "eth0", "down"]]).start()
    until_closed((lambda: channel.send(bytes(1 << 20))) if sys.argv[2] == "sends" else channel.receive)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sends", "waits"])
def test_channels_between_hosts_that_cannot_reach_each_other_any_more(uncut: Network, way: str) -> None:
    environs = [{"HOST": host, "LISTENS": listens} for host, listens in zip(uncut.namespaces, ("1", ""), strict=True)]
    command = [*ON_ITS_HOST, sys.executable, "-c", ENDS_OF_A_CHANNEL, f"{uncut.hosts[0]}:{free_port()}", way]
    for (code_of_end, output), peer in zip(together(command, environs), ("worker 0", "ps 0"), strict=True):
        assert code_of_end == 0, output
        assert output == f"the connection to {peer} is closed: it cannot be reached any more. True\n"


SENDS_TO_A_STOPPED_PROCESS = """
import os, signal, sys, threading, time
from choros.transport.channel import Listener, connect
from choros.transport.secret import Key

key, port = Key(bytes(32)), sys.argv[1]
child = os.fork()
if child == 0:
    ended = threading.Event()
    def serve(channel, first):
        channel.send(len(channel.receive()))
        ended.set()
    Listener(f"127.0.0.1:{port}", key, "listens", serve)
    ended.wait()
    os._exit(0)
channel = connect(f"127.0.0.1:{port}", key, "connects", "listens", 20)
channel.send("hello")
os.kill(child, signal.SIGSTOP)
threading.Timer(2.5, os.kill, (child, signal.SIGCONT)).start()
channel.send(bytes(100 << 20))  # more than the kernel keeps
print(channel.receive())
"""


def test_process_that_is_stopped_is_not_lost() -> None:
    command = [sys.executable, "-c", SENDS_TO_A_STOPPED_PROCESS, str(free_port())]
    done = subprocess.run(
        command, env={"CHOROS_UNREACHABLE_SECONDS": "2", "PATH": ""}, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == (f"{100 << 20}\n", "")


def test_losses_that_follow_from_the_first_one_are_not_named() -> None:
    from choros.comm.store import Loss, PeerWatch

    peers = PeerWatch()
    peers.note(Loss(2, "b", "was killed, or has ended"))
    peers.note(Loss(3, "b", "was killed, or has ended"))
    peers._losses[3] = (peers._losses[3][0], peers._losses[3][1] + 1.0)
    with pytest.raises(PeerLostError, match=r"barrier\(\) cannot be completed: rank 2 on b was killed[^3]*$") as raised:
        peers.check(range(4), lambda: "barrier()", grace=0)
    assert raised.value.ranks == (2,)
    peers.check([0, 1], lambda: "barrier()", grace=0)
