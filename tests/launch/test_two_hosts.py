"""Jobs on several hosts: network namespaces, connected by a bridge, reached by a script instead of ssh."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from choros.errors import WorkerFailed
from choros.launch.processes.directories import remove_stale
from choros.launch.run import run as choros_run
from launch.launched import Running, rank_script, run
from launch.namespaces import ip, several_hosts

pytestmark = pytest.mark.slow

PYTHON = sys.executable


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with several_hosts(tmp_path_factory.mktemp("reach")) as network:
        yield network


def hosts_of(network, first=2, second=1):
    return f"{network.hosts[0]}:{first},{network.hosts[1]}:{second}"


def test_three_ranks_on_two_hosts(network, tmp_path):
    script = rank_script(
        tmp_path / "s.py",
        "import choros\n"
        "choros.init()\n"
        "from choros.parallel.objects import allgather_object\n"
        "print('rank', choros.rank(), choros.size(), choros.local_rank(), choros.local_size(), os.uname().nodename)\n"
        "print('others', allgather_object(choros.rank() * 10))\n"
        "print('secret', os.environ['SECRET'], os.environ['OMPI_COMM_WORLD_LOCAL_SIZE'])\n",
    )
    ended = run(
        *("--ssh-command", network.reach, "-H", hosts_of(network), "--output-dir", tmp_path / "logs", PYTHON, script),
        env={"SECRET": "hush-hush"},
    )
    assert ended.code == 0, ended.err
    assert sorted(re.findall(r"rank (.*)", ended.out)) == ["0 3 0 2 host-1", "1 3 1 2 host-1", "2 3 0 1 host-2"]
    assert ended.out.count("others [0, 10, 20]") == 3
    assert sorted(re.findall(r"secret (.*)", ended.out)) == ["hush-hush 1", "hush-hush 2", "hush-hush 2"]
    assert "rank 2" in (tmp_path / "logs" / "rank.2" / "stdout").read_text()
    assert "prted" in network.log.read_text()
    assert "hush-hush" not in network.log.read_text()


@pytest.mark.parametrize("elastic", [False, True])
def test_a_rank_on_the_other_host_that_is_stopped(network, tmp_path, elastic):
    """Its wrapper there takes the stack, and mpirun passes the request and the answer on."""
    script = rank_script(
        tmp_path / "s.py",
        "import choros\n"
        "choros.init()\n"
        "if rank == 2: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "choros.global_process_set.communicator.barrier(name='all')\n",
    )
    flags = ("--stall-shutdown", 8, *(("--min-np", 2) if elastic else ()))  # on a busy machine init() may take seconds
    ended = run("--ssh-command", network.reach, "-H", hosts_of(network), *flags, PYTHON, script)
    assert ended.code == (0 if elastic else 70), ended.err
    assert ("chorosrun: rank 2 was killed; 2 ranks go on." in ended.err) is elastic
    assert re.search(
        r"^chorosrun: ranks? [01, ]+ ha(s|ve) waited \d+ s for ranks? .*2 in barrier\(name='all'\)", ended.err
    )
    assert "  rank 2 on host-2, PID " in ended.err
    assert "os.kill(os.getpid(), signal.SIGSTOP)" in ended.err


def test_a_lost_rank_on_the_other_host_is_replaced_there(network, tmp_path):
    script = Path(__file__).parents[1] / "elastic" / "new_ranks_script.py"
    flags = ("--ssh-command", network.reach, "-H", hosts_of(network, 1, 2), "--min-np", 1)
    ended = run(*flags, PYTHON, script, "2", "join", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert sorted(re.findall("number .*", ended.out)) == [f"number {rank} is rank {rank} of 3: 3" for rank in range(3)]
    assert "chorosrun: a new rank 2 was started on host-2;" in ended.err


def test_parameter_servers_on_two_hosts(network, tmp_path):
    """The worker on the other host reaches chief and ps at the addresses in its TF_CONFIG."""
    script = tmp_path / "s.py"
    script.write_text(
        "import json, os, socket, time\n"
        "config = json.loads(os.environ['TF_CONFIG'])\n"
        "role, index = config['task'].values()\n"
        "def address(role, index=0):\n"
        "    host, port = config['cluster'][role][index].rsplit(':', 1)\n"
        "    return host, int(port)\n"
        "print('address', role, address(role, index)[0], os.uname().nodename)\n"
        "print('secret', os.environ['CHOROS_SECRET'])\n"
        "if role == 'worker':\n"
        "    for other in ('ps', 'chief'):\n"
        "        while True:\n"
        "            try:\n"
        "                socket.create_connection(address(other)).close(); break\n"
        "            except ConnectionRefusedError:\n"
        "                time.sleep(0.05)\n"
        "else:\n"
        "    server = socket.create_server(address(role))\n"
        "    server.accept()\n"
    )
    where = ("--ssh-command", network.reach, "-H", hosts_of(network))
    ended = run("--ps", "1", *where, PYTHON, script)
    assert (ended.code, ended.err) == (0, "")
    assert sorted(re.findall(r"\[(.*)\] address \S+ (.*)", ended.out)) == [
        ("chief", f"{network.hosts[0]} host-1"),
        ("ps 0", f"{network.hosts[0]} host-1"),
        ("worker 0", f"{network.hosts[1]} host-2"),
    ]
    (secret,) = set(re.findall(r"secret (\w+)", ended.out))
    assert secret not in network.log.read_text()


def test_a_rank_that_fails_on_the_other_host(network, tmp_path):
    script = rank_script(
        tmp_path / "s.py",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\nif rank == 2: sys.exit(7)\ntime.sleep(60)\n",
    )
    ended = run("--ssh-command", network.reach, "-H", hosts_of(network), PYTHON, script)
    assert ended.code == 7
    assert "chorosrun: rank 2 on host-2 failed with exit code 7; the other 2 ranks were stopped." in ended.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_on_other_hosts(network, tmp_path, number):
    script = rank_script(
        tmp_path / "s.py",
        "from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "ready()\ntime.sleep(60)\n",
    )
    with Running("--ssh-command", network.reach, "-H", hosts_of(network), PYTHON, script) as job:
        job.wait_for(3, "ready")
        daemons = job.daemons()
        assert len(daemons) == 2
        job.signal(number)
        assert job.end().code in (143, -signal.SIGKILL)
        job.assert_nothing_runs()
        if number == signal.SIGKILL:  # no rank ran on this host to clean up here: the next job does
            end = time.monotonic() + 30  # the lock goes with the last of a process that dies
            while job.directories() and time.monotonic() < end:
                remove_stale()
                time.sleep(0.1)
        job.assert_nothing_left(seconds=0)
    assert not [directory for directory in daemons if directory.exists()]


def test_a_host_that_goes_down(network, tmp_path):
    """Its daemon dies with its ranks; the job ends within a bounded time."""
    script = rank_script(tmp_path / "s.py", "ready()\ntime.sleep(60)\n")
    with Running("--ssh-command", network.reach, "-H", hosts_of(network), PYTHON, script) as job:
        job.wait_for(3, "ready")
        daemons = job.daemons()
        pids = subprocess.run(
            ["ip", "netns", "pids", network.namespaces[1]], capture_output=True, text=True, check=True
        )
        for pid in pids.stdout.split():
            with contextlib.suppress(ProcessLookupError):  # it died with its parent
                os.kill(int(pid), signal.SIGKILL)
        ended = job.end()
        job.assert_nothing_left()
    assert ended.code == 70
    assert ended.err == ("chorosrun: rank 2 on host-2 disappeared: the host went down or can no longer be reached.\n")
    assert not [directory for directory in daemons if directory.exists()]  # although the daemon was killed


def test_a_host_that_refuses_the_login(network):
    ended = run("--ssh-command", network.reach, "-H", f"{network.hosts[0]}:1,10.77.255.19:1", PYTHON, "-c", "pass")
    assert ended.code == 68
    assert "1 of 2 hosts cannot be reached (10.77.255.19: " in ended.err


def test_a_function_on_two_hosts(network, capsys):
    def function(factor):
        import os

        import choros

        choros.init()
        if factor == 0 and choros.rank() == 2:
            raise ValueError("on purpose")
        return choros.rank() * factor, os.uname().nodename

    where = {"num_proc": None, "hosts": hosts_of(network), "ssh_command": str(network.reach)}
    assert choros_run(function, (10,), **where) == [(0, "host-1"), (10, "host-1"), (20, "host-2")]
    data = os.urandom(1_000_000)  # of which mpirun repeats parts, when it forwards that much to another host
    assert choros_run(lambda given: given[-9:], (data,), **where) == 3 * [data[-9:]]
    with pytest.raises(WorkerFailed, match="rank 2 on host-2") as raised:
        choros_run(function, (0,), **where)
    assert raised.value.host == "host-2"


@pytest.mark.parametrize("elastic", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_link_that_is_down_for_less_than_the_silence_that_is_allowed(network, tmp_path, elastic):
    """TCP sends again after 0.2, 0.6, 1.4, 3.0 and 6.2 s: after the hosts count as silent, which are asked before."""
    script = rank_script(
        tmp_path / "s.py",
        "import choros\n"
        "from choros.parallel.objects import allgather_object\n"
        "choros.init()\n"
        "ready()\n"
        f"while not all(allgather_object(os.path.exists({str(tmp_path / 'end')!r}))): time.sleep(0.01)\n"
        "print('finished', choros.size(), os.environ.get('CHOROS_RESTARTS'))\n",
    )
    flags = ("--ssh-command", network.reach, "-H", hosts_of(network), *(("--min-np", 1) if elastic else ()))
    silence = ("--env", "CHOROS_UNREACHABLE_SECONDS=6")
    try:
        with Running(*flags, *silence, PYTHON, script) as job:
            job.wait_for(3, "ready")
            time.sleep(0.5)
            ip("-n", network.namespaces[1], "link", "set", "eth0", "down")
            time.sleep(3.2)
            ip("-n", network.namespaces[1], "link", "set", "eth0", "up")
            time.sleep(3.5)
            (tmp_path / "end").touch()
            ended = job.end()
    finally:
        ip("-n", network.namespaces[1], "link", "set", "eth0", "up")
    assert (ended.code, ended.out.count("finished 3 None")) == (0, 3), ended


def test_a_link_that_is_cut(network, tmp_path):
    """All ranks end, also those that mpirun does not reach any more, and say why."""
    script = rank_script(
        tmp_path / "s.py",
        "import choros\n"
        "choros.init()\n"
        "total = lambda: choros.global_process_set.communicator.allreduce([1.0] * 10000)\n"
        "total()\n"
        "(logs / f'pid.{rank}').write_text(str(os.getpid()))\n"
        "ready()\n"
        "while True: total()\n".replace("logs", f"__import__('pathlib').Path({str(tmp_path)!r})"),
    )
    try:
        with Running("--ssh-command", network.reach, "-H", hosts_of(network), PYTHON, script) as job:
            job.wait_for(3, "ready")
            ranks = [psutil.Process(int((tmp_path / f"pid.{rank}").read_text())) for rank in range(3)]
            ip("-n", network.namespaces[1], "link", "set", "eth0", "down")
            assert not psutil.wait_procs(ranks, timeout=60)[1]
            ip("-n", network.namespaces[1], "link", "set", "eth0", "up")  # mpirun may wait for it for a while
            ended = job.end()
    finally:
        ip("-n", network.namespaces[1], "link", "set", "eth0", "up")
    assert ended.code == 69
    assert f"PeerLostError: the host {network.hosts[1]} of rank 2 cannot be reached any more" in ended.err
