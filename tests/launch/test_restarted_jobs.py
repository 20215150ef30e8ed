"""Elastic jobs that lose mpirun, a host or a link: what is left goes on from the last commit; nothing stays."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from harness import FRAMEWORKS, needs
from launch.launched import Running
from launch.namespaces import ip, several_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), needs("mpi4py")]

SCRIPT = Path(__file__).with_name("restarted_script.py")


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with several_hosts(tmp_path_factory.mktemp("reach"), 3) as network:
        yield network


def backend():
    """The framework that starts soonest, of those that are tested."""
    return next(name for name in ("torch", "jax", "tensorflow") if name in FRAMEWORKS)


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it died with its parent
            os.kill(pid, signal.SIGKILL)


def link(network, host, state):
    ip("-n", network.namespaces[host], "link", "set", "eth0", state)


def lose_host(network, host):
    """As if its power were cut."""
    done = subprocess.run(["ip", "netns", "pids", network.namespaces[host]], capture_output=True, text=True, check=True)
    link(network, host, "down")
    kill(map(int, done.stdout.split()))


def isolate(network, on):
    """Hosts reach the machine of chorosrun, but not each other."""
    for port in network.ports:
        subprocess.run(["bridge", "link", "set", "dev", port, "isolated", on], check=True)


def start(tmp_path, *arguments):
    arguments = ("--min-np", 2, "--commit-dir", tmp_path / "commits", *arguments)
    return Running(*arguments, sys.executable, SCRIPT, env={"CHOROS_LOG_LEVEL": "WARNING"})


def mpirun_of(job):
    """The only child of chorosrun, but for a discovery script while that runs."""
    for child in psutil.Process(job.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() in ("mpirun", "prterun"):
                return child
    raise AssertionError("chorosrun has no mpirun")


def ranks_of(job):
    return [psutil.Process(int(pid)) for pid in re.findall(r"pid=(\d+)", job.output)]


def test_mpirun_is_killed(tmp_path):
    with start(tmp_path, "-np", 2, "--output-dir", tmp_path / "logs") as job:
        job.wait_for(2, "ready")
        mpirun = mpirun_of(job)
        mpirun.kill()
        ended = job.end()
        job.assert_nothing_left()
    assert ended.code == 0, ended.err
    assert ended.err == (
        "chorosrun: mpirun was killed by SIGKILL (signal 9); it is started again, with 2 ranks, and goes on from its "
        "last commit (restart 1).\n"
    )
    assert sorted(re.findall(r"rank .*", ended.out)) == [f"rank {rank} restarts=1 steps={[2] * 10}" for rank in (0, 1)]
    written = (tmp_path / "logs" / "rank.1" / "stdout").read_text()
    assert re.findall(r"ready|restarts=1", written) == ["ready", "restarts=1"]  # of both launches


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--reset-limit", 0), "--reset-limit 0"),
        (("--elastic-timeout", 1), "after --elastic-timeout 1 s there are slots for 0 ranks, fewer than --min-np 2"),
    ],
)
def test_a_job_that_is_not_started_again_says_why(tmp_path, flags, why):
    hosts = tmp_path / "hosts"
    hosts.write_text(f"#!/bin/sh\ntest -e {tmp_path}/lost || echo localhost:2\n")
    hosts.chmod(0o755)
    with start(tmp_path, "-np", 2, "--host-discovery-script", hosts, *flags) as job:
        job.wait_for(2, "ready")
        mpirun = mpirun_of(job)
        (tmp_path / "lost").touch()
        mpirun.kill()
        ended = job.end()
        job.assert_nothing_left()
    assert ended.code == 69
    assert "mpirun was killed by SIGKILL (signal 9); the job ends: " in ended.err, ended.err
    assert why in ended.err


def test_fit_goes_on_in_the_middle_of_an_epoch_when_mpirun_was_killed(tmp_path):
    script = Path(__file__).with_name("restarted_fit_script.py")
    flags = ("-np", 2, "--min-np", 1, "--commit-dir", tmp_path / "commits", "--commit-steps", 3)
    with Running(*flags, sys.executable, script, env={"KERAS_BACKEND": backend()}, warm=True) as job:
        job.wait_for(2, "ready")
        mpirun = mpirun_of(job)
        mpirun.kill()
        ended = job.end()
        job.assert_nothing_left()
    assert ended.code == 0, ended.err
    assert re.findall("restarts=.*", ended.out) == ["restarts=1 wrong=[] epochs=2"] * 2
    assert "training goes on in epoch 1, from the commit in" in ended.err


@pytest.mark.parametrize("how", ["host", "link", pytest.param("links", marks=pytest.mark.nightly)])
def test_a_host_or_a_link_is_lost(network, tmp_path, how):
    """Rank 0's host is lost; or its link, which comes back; or all hosts lose each other, but not chorosrun."""
    hosts = ",".join(f"{host}:{slots}" for host, slots in zip(network.hosts, (1, 2, 1), strict=True))
    try:
        with start(tmp_path, "--ssh-command", network.reach, "-H", hosts) as job:
            job.wait_for(4, "ready")
            ranks, daemons = ranks_of(job), job.daemons()
            if how == "host":
                lose_host(network, 0)
            elif how == "link":
                link(network, 0, "down")
            else:
                isolate(network, "on")
            assert not psutil.wait_procs(ranks, timeout=20)[1]  # on both sides of the link
            job.wait_for(1, "restarts=")
            link(network, 0, "up")
            isolate(network, "off")
            ended = job.end()
            job.assert_nothing_left()
        assert len(daemons) == 3
        assert not [directory for directory in daemons if directory.exists()]
    finally:
        link(network, 0, "up")
        isolate(network, "off")
    assert ended.code == 0, ended.err
    size, left = (2, network.hosts[1]) if how == "links" else (3, f"{network.hosts[1]}:2,{network.hosts[2]}:1")
    assert sorted(re.findall(r"rank (\d) restarts=\d steps=(.*)", ended.out)) == [
        (str(rank), str([4] * 4 + [size] * 6)) for rank in range(size)
    ], ended
    assert f"it is started again, with {size} ranks on {left}" in ended.err


def test_a_script_adds_a_host_and_drops_another(network, tmp_path):
    """The ranks commit after the next step, and the job goes on there; the first host is let go."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"#!/bin/sh\necho {network.hosts[0]}:1\necho {network.hosts[1]}:1\n")
    hosts.chmod(0o755)
    found = ("--host-discovery-script", hosts, "--max-np", 3, "--ssh-command", network.reach)
    with start(tmp_path, "-np", 2, *found) as job:
        job.wait_for(2, "ready")
        new = tmp_path / "new"
        new.write_text(f"#!/bin/sh\necho {network.hosts[1]}:1\necho {network.hosts[2]}:2\n")
        new.chmod(0o755)
        new.replace(hosts)
        ended = job.end()
        job.assert_nothing_left()
    assert ended.code == 0, ended.err
    steps = re.findall(r"rank \d restarts=1 steps=(.*)", ended.out)
    assert steps == [str([2] * 4 + [3] * 6)] * 3
    assert f"the hosts are now {network.hosts[1]}:1,{network.hosts[2]}:2." in ended.err
