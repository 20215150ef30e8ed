"""Two hosts as users have them: with names, an sshd, and the daemons of SLURM. Nothing of the machine is changed.

A host is a network namespace, with its own processes, host name, shared memory and files in ``/etc``::

    n1: sshd  slurmd  munged  slurmctld  ◄─ bridge ─►  n2: sshd  slurmd

Its first process is killed when the test's process ends, however that ends; all others in the host die with it.
"""

import os
import shutil
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

NAMES = ("n1", "n2")
#: The first port of each sshd is the default one.
SSH_PORTS = (22, 2222)
CPUS = 2

#: ``wait`` also reaps the processes whose parents have died, as a host's init does.
INIT = """
set -e
hostname {name}
mount -t tmpfs none /dev/shm
mount -t tmpfs none /run
mkdir /run/sshd
mount --bind {directory}/hosts /etc/hosts
mount --bind {directory}/ssh /etc/ssh
/usr/sbin/sshd -E {directory}/sshd-{name}.log
echo ready
sleep infinity &
wait
"""
SSHD_CONFIG = """
{ports}
AuthorizedKeysFile /etc/ssh/authorized_keys
PermitRootLogin prohibit-password
UsePAM no
PrintMotd no
"""
#: The second key is not named: chorosrun must be given it.
SSH_CONFIG = """
Host n1 n2
    IdentityFile /etc/ssh/key
"""
SLURM_CONF = """
ClusterName=test
SlurmctldHost=n1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1
MpiDefault=none
ReturnToService=2
KillWait=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
NodeName=n[1-2] CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES State=UP
"""


@dataclass(frozen=True)
class RealHosts:
    """The hosts ``NAMES``, their addresses and their first processes; a user is logged in on the first of them."""

    directory: Path
    addresses: tuple[str, str]
    first_processes: tuple[int, int]

    @property
    def key(self) -> Path:
        """A key that is accepted, and that ssh does not try by itself."""
        return self.directory / "other_key"

    def start(self, cwd, host=0):
        """The argv that starts a command on a host, in the directory ``cwd``."""
        enter = ("nsenter", "--target", str(self.first_processes[host]))
        return (*enter, "--mount", "--uts", "--ipc", "--net", "--pid", "env", f"--chdir={cwd}")

    def run(self, *command, cwd, host=0, seconds=120, env=None):
        """Runs a command on a host to its end."""
        return subprocess.run(
            [*self.start(cwd, host), *map(str, command)],
            env={**os.environ, "SLURM_CONF": str(self.directory / "slurm.conf"), **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )


def need(*programs):
    """Skips the test where a program is missing."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    missing = [program for program in programs if shutil.which(program, path=path) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, of Debian's openssh-server, slurm-wlm, munge and util-linux")


@contextmanager
def real_hosts(network, directory):
    """A block in which the two hosts of ``network`` are these, with an sshd each."""
    need("sshd", "ssh", "ssh-keygen", "nsenter", "setpriv")
    with ExitStack() as processes:
        addresses = "".join(f"{address} {name}\n" for name, address in zip(NAMES, network.hosts, strict=True))
        (directory / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
        configure_ssh(directory)
        first = []
        for name, namespace in zip(NAMES, network.namespaces, strict=True):
            outer = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{namespace}"),
                    *("unshare", "--mount", "--uts", "--ipc", "--pid", "--mount-proc", "--fork", "--kill-child"),
                    *("sh", "-c", INIT.format(name=name, directory=directory)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.callback(kill, outer)
            assert outer.stdout.readline() == "ready\n"
            first.append(psutil.Process(outer.pid).children()[0].pid)
        yield RealHosts(directory, network.hosts, tuple(first))


def kill(process):
    with process:
        process.kill()


def configure_ssh(directory):
    """Writes what is ``/etc/ssh`` on each host: the same keys on both."""
    ssh = directory / "ssh"
    ssh.mkdir()
    accepted = []
    for key in (ssh / "ssh_host_ed25519_key", ssh / "key", directory / "other_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        accepted.append(key.with_suffix(".pub").read_text())
    known = [f"{name},[{name}]:{SSH_PORTS[1]} {accepted[0]}" for name in NAMES]
    (ssh / "ssh_known_hosts").write_text("".join(known))
    (ssh / "authorized_keys").write_text("".join(accepted[1:]))
    (ssh / "ssh_config").write_text(SSH_CONFIG)
    (ssh / "sshd_config").write_text(SSHD_CONFIG.format(ports="\n".join(f"Port {port}" for port in SSH_PORTS)))


def start_slurm(hosts):
    """Starts SLURM's daemons on the hosts, and waits until all its nodes are idle."""
    need("munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc", "sinfo")
    directory = hosts.directory
    (directory / "state").mkdir()
    (directory / "slurm.conf").write_text(SLURM_CONF.format(directory=directory, cpus=CPUS))
    (directory / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")  # which the hosts do not share, unlike /tmp
    key = directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    files = [f"--{kind}-file={directory}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
    # --force: the directory of the test is not one that munged would choose for its files.
    daemon(hosts, 0, "munged", "--force", f"--socket={directory}/munge.socket", *files)
    daemon(hosts, 0, "slurmctld", "-c")
    for host, name in enumerate(NAMES):
        daemon(hosts, host, "slurmd", "-N", name)
    end = time.monotonic() + 60
    while (answer := hosts.run("sinfo", "-h", "-o", "%D %t", cwd=directory)).stdout.strip() != "2 idle":
        assert time.monotonic() < end, answer
        time.sleep(0.2)


def daemon(hosts, host, program, *arguments):
    ended = hosts.run(f"/usr/sbin/{program}", *arguments, cwd=hosts.directory, host=host)
    assert ended.returncode == 0, ended
