"""The hub of a cluster's hosts, with agents that are only connections."""

import time
from contextlib import closing

import pytest

from choros.errors import HostUnreachable
from choros.launch.agents import HUB, AgentReady, HostSlots
from choros.launch.agents.hub import Hub, with_slots
from choros.launch.plan.arguments import Arguments
from choros.topology.clusters import ClusterHost
from choros.transport.channel import connect
from choros.transport.secret import Key

SECRET = "5e" * 32


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setenv("CHOROS_SECRET", SECRET)
    hubs = []

    def made(size=None, slots=1):
        hubs.append(Hub(ClusterHost("a cluster", 0, size, slots=slots, port=0)))
        return hubs[-1]

    yield made
    for hub in hubs:
        hub.close(0)


def agent(hub, first):
    channel = connect(f"127.0.0.1:{hub.port}", Key(bytes.fromhex(SECRET)), "agent", HUB, 20)
    channel.send(first)
    return channel


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_elastic_job_begins_with_fewer_hosts(make):
    """All others are at one address here, so that they are one host."""
    hub, arguments = make(size=4), Arguments(num_proc=4, min_num_proc=2)
    with closing(agent(hub, AgentReady(2, 2, "c"))):
        until(lambda: len(hub.hosts) == 2)
        named = hub.gather(arguments, 0.1)
    assert (named.num_proc, named.min_num_proc, named.max_num_proc) == (3, 2, 4)


def test_a_host_whose_agent_has_gone_is_waited_for(make):
    hub = make(size=2)
    agent(hub, AgentReady(1, 1, "b")).close()
    until(lambda: len(hub.hosts) == 2 and len(hub._present) == 1)
    with pytest.raises(HostUnreachable, match=r"1 of 2 hosts of a cluster did not come within"):
        hub.gather(Arguments(num_proc=2), 0.1)
    with closing(agent(hub, AgentReady(1, 1, "b"))):
        assert hub.gather(Arguments(num_proc=2), 20).hosts.endswith(":1,127.0.0.1:1")


def test_a_host_that_has_started_anew_is_one_host(make):
    hub = make()
    with closing(agent(hub, AgentReady(1, 2, "b"))), closing(agent(hub, AgentReady(5, 3, "f"))):
        until(lambda: [host.slots for host in hub.hosts] == [1, 3])
        told = agent(hub, HostSlots({0: 4, 5: 2}))
        assert told.receive() is None
        assert [host.slots for host in hub.hosts] == [4, 2]


def test_slots_of_a_job_with_parameter_servers():
    cluster = ClusterHost("a cluster", 0, 2, port=0)
    assert with_slots(cluster, Arguments(num_proc=8, ps=1), lambda: 0).slots == 5
    assert with_slots(cluster, Arguments(num_proc=8), lambda: 0).slots == 4
