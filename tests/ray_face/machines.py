"""Ray on several machines: network namespaces with names, processes and shared memory of their own."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from launch.namespaces import Network, several_hosts

#: ``wait`` reaps the processes whose parents have died, as a machine's init does.
_MACHINE = "mount -t tmpfs tmpfs /dev/shm; hostname machine-{number}; echo ready; sleep infinity & wait"
_PORT = 6379


@dataclass
class Machines:
    """Machines by their numbers; Ray begins on the first one."""

    network: Network
    directory: Path
    environ: dict[str, str]
    inits: dict[int, subprocess.Popen] = field(default_factory=dict)

    def boot(self, stack: ExitStack, number: int) -> None:
        outer = ["ip", "netns", "exec", self.network.namespaces[number], "unshare", "--uts", "--mount", "--pid"]
        shell = ["--fork", "--kill-child", "--mount-proc", "sh", "-c", _MACHINE.format(number=number)]
        process = subprocess.Popen([*outer, *shell], stdout=subprocess.PIPE, text=True, env=self.environ)
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        self.inits[number] = process

    def start(self, number: int, *command: str, **given: object) -> subprocess.Popen:
        (init,) = psutil.Process(self.inits[number].pid).children()
        enter = ["nsenter", "--target", str(init.pid), "--mount", "--uts", "--net", "--pid"]
        return subprocess.Popen([*enter, *command], env=self.environ, cwd=self.directory, **given)

    def start_ray(self, number: int) -> None:
        """Starts a node of Ray's with one CPU; the first one has the cluster's store."""
        address = self.network.hosts[number]
        first = f"{self.network.hosts[0]}:{_PORT}"
        head = ["--head", "--port", str(_PORT), "--include-dashboard=false", f"--temp-dir={self.directory}/ray"]
        where = head if number == 0 else ["--address", first]
        size = ["--num-cpus", "1", "--object-store-memory", "100000000"]
        started = self.start(number, "ray", "start", *where, "--node-ip-address", address, *size)
        assert started.wait(60) == 0

    def stop_ray(self, number: int) -> None:
        assert self.start(number, "ray", "stop", stdout=subprocess.DEVNULL).wait(60) == 0

    def power_off(self, number: int) -> None:
        process = self.inits.pop(number)
        process.kill()
        process.wait()

    def left(self, number: int) -> list[str]:
        """What runs on a machine beside its init."""
        (init,) = psutil.Process(self.inits[number].pid).children()
        return [" ".join(each.cmdline()) for each in init.children(recursive=True) if each.cmdline()[:1] != ["sleep"]]


@contextmanager
def machines(directory: Path, count: int):
    """A block in which there are ``count`` machines, all of which but the last one are nodes of a Ray cluster."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with several_hosts(directory, count) as network, ExitStack() as stack:
        found = Machines(network, directory, {**os.environ, **token, "PATH": path, "TMPDIR": str(directory)})
        for number in range(count):
            found.boot(stack, number)
        for number in range(count - 1):
            found.start_ray(number)
        yield found


def wait_until(condition: Callable[[], bool], seconds: float, what: Callable[[], object]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.1)
