"""Validation of jobs."""

import pytest

from choros.errors import ConfigError
from choros.launch.plan.hosts import parse_hosts
from choros.launch.plan.job import Job, Ssh


def test_more_ranks_than_slots():
    with pytest.raises(ConfigError, match=r"-np 5 requests more ranks than the hosts have slots: a:2,b:2 have 4"):
        Job(("x",), 5, hosts=parse_hosts("a:2,b:2"))


def test_more_processes_than_slots():
    message = r"--ps 1 -np 4 requests more processes, 6 with the chief, than the hosts have slots: a:2,b:3 have 5"
    with pytest.raises(ConfigError, match=message):
        Job(("x",), 6, hosts=parse_hosts("a:2,b:3"), servers=1)


def test_no_worker():
    with pytest.raises(ConfigError, match=r"--ps 2: a job needs a chief, 2 ps and at least one worker, .* 4 slots"):
        Job(("x",), 3, servers=2)


def test_more_ranks_than_cores_is_allowed_without_hosts():
    assert Job(("x",), 10_000).size == 10_000


def test_no_ranks():
    with pytest.raises(ConfigError, match="at least one rank"):
        Job(("x",), 0)


@pytest.mark.parametrize(
    ("ssh", "argv"),
    [
        (Ssh(), ["ssh", "-o", "BatchMode=yes"]),
        (Ssh(port=22, identity_file="key"), ["ssh", "-o", "BatchMode=yes", "-p", "22", "-i", "key"]),
        (Ssh(command=("/bin/reach", "-x")), ["/bin/reach", "-x"]),
    ],
)
def test_ssh(ssh, argv):
    assert ssh.argv() == argv
