"""Jobs with parameter servers: roles, addresses and the environment of each process."""

import json
import socket

import pytest

from choros.errors import ConfigError
from choros.launch.driver.launcher import assign_addresses
from choros.launch.plan.command import Command, dry_run_text
from choros.launch.plan.hosts import Host, parse_hosts
from choros.launch.plan.job import Job
from choros.launch.plan.roles import Roles, task_environment, task_in
from choros.launch.wrapper.wrapper import listening_problem
from choros.topology import TFConfig, Topology, detect, read_tf_config, split_address

HOSTS = parse_hosts("a.invalid:2,b.invalid:3")


def job(hosts=(), remote=(), **rest):
    return Job(("python", "train.py"), 5, hosts=tuple(hosts), remote=tuple(remote), servers=1, **rest)


def environment_of(*given, environ=(), **how):
    return assign_addresses(job(*given, **how), dict(environ)).environment


def cluster_of(environment):
    return json.loads(environment["CHOROS_CLUSTER"])


def test_roles():
    roles = Roles(servers=2, workers=2)
    assert [roles.of(rank) for rank in range(5)] == [
        ("chief", 0),
        ("ps", 0),
        ("ps", 1),
        ("worker", 0),
        ("worker", 1),
    ]
    assert [roles.label(rank) for rank in range(5)] == ["chief", "ps 0", "ps 1", "worker 0", "worker 1"]
    assert not Roles()


def test_dry_run():
    lines = dry_run_text(job(HOSTS, HOSTS), Command(("mpirun",), {}), {})
    settings = "its wrapper divides the cores on that host"
    assert lines.splitlines() == [
        "mpirun",
        f"# the chief on a.invalid: {settings}",
        f"# ps 0 on a.invalid: {settings}",
        f"# worker 0 on b.invalid: {settings}",
        f"# worker 1 on b.invalid: {settings}",
        f"# worker 2 on b.invalid: {settings}",
    ]


def test_on_one_host_all_addresses_are_loopback():
    for environment in (
        environment_of(),
        environment_of([Host("localhost", 5)]),
        environment_of([Host("b.invalid", 5)], [Host("b.invalid", 5)]),
    ):
        cluster = cluster_of(environment)
        addresses = [split_address(address) for role in cluster.values() for address in role]
        assert [len(cluster[role]) for role in ("chief", "ps", "worker")] == [1, 1, 3]
        assert {host for host, _ in addresses} == {"127.0.0.1"}
        assert len({port for _, port in addresses}) == 5


def test_remote_hosts_have_their_own_addresses():
    here, there = Host("localhost", 2), Host("::2", 3)  # an address needs no resolver
    cluster = cluster_of(environment_of([there, here], [there]))
    assert all(address.startswith("[::2]:") for address in cluster["chief"] + cluster["ps"])
    assert [address.split(":")[0] for address in cluster["worker"][1:]] != ["localhost"] * 2
    named = cluster_of(environment_of(HOSTS, HOSTS))  # only ssh can resolve them: unchanged
    hosts = {role: [split_address(each)[0] for each in addresses] for role, addresses in named.items()}
    assert hosts == {"chief": ["a.invalid"], "ps": ["a.invalid"], "worker": ["b.invalid"] * 3}


def test_secrets_differ_from_job_to_job_unless_they_are_given():
    first, second = environment_of()["CHOROS_SECRET"], environment_of()["CHOROS_SECRET"]
    assert first != second
    assert len(bytes.fromhex(first)) == 32
    assert environment_of(environ={"CHOROS_SECRET": "ab"})["CHOROS_SECRET"] == "ab"
    assert environment_of(environment={"CHOROS_SECRET": "cd", "A": "b"})["CHOROS_SECRET"] == "cd"


def test_the_environment_of_a_job_without_roles_is_unchanged():
    environ = {"OMPI_COMM_WORLD_RANK": "1", "TF_CONFIG": "{}"}
    assert task_in(environ, 1) is None
    assert (task_environment(environ, None), listening_problem(None)) == (environ, "")


def test_hosts_that_a_scheduler_chooses_must_be_named():
    with pytest.raises(ConfigError, match="name them with -H host:slots"):
        assign_addresses(job(), {"SLURM_JOB_ID": "7"})


def test_environment_of_a_process():
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "5", "PMIX_RANK": "1", "PRTE_LAUNCHED": "1"}
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1"}
    environ = {**mpi, **slurm, "HOME": "/root", **environment_of()}
    task = task_environment(environ, task_in(environ, rank=1))
    cluster = {role: tuple(addresses) for role, addresses in cluster_of(environ).items()}
    assert read_tf_config(task) == TFConfig(cluster, "ps", 0)
    assert task.keys() == {*slurm, "HOME", "TF_CONFIG", "CHOROS_SECRET"}
    assert detect(task) == Topology(launcher="TF_CONFIG")


def test_ports_are_checked_on_the_host_that_listens():
    environ = environment_of()
    assert [listening_problem(task_in(environ, rank)) for rank in range(5)] == [""] * 5
    with socket.socket() as taken:
        taken.bind(split_address(cluster_of(environ)["ps"][0]))
        taken.listen()
        assert listening_problem(task_in(environ, 1)).startswith(
            f"ps 0 cannot listen at {cluster_of(environ)['ps'][0]}: Address"
        )
    elsewhere = {"CHOROS_CLUSTER": json.dumps({"chief": ["192.0.2.1:20000"], "ps": ["a:1"], "worker": ["192.0.2.1:1"]})}
    assert "give in -H the names by which the hosts reach each other" in listening_problem(task_in(elsewhere, 2))
    assert listening_problem(task_in(elsewhere, 0)) == ""  # the chief does not listen
