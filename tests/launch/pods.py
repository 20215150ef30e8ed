"""Pods of an Indexed Job, on one machine: network namespaces with host names, and names that a hosts file resolves; no
ssh. A pod that is killed takes all of its processes with it.
"""

import os
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager

from launch.launched import CHOROSRUN
from launch.namespaces import several_hosts
from ranks.environment import ONE_THREAD, QUICK

SECRET = "00ff" * 8
#: In its own namespaces: the names of the other pods, its own, its own memory and temporary files, then the command.
_POD = 'mount --bind {hosts} /etc/hosts; mount -t tmpfs tmpfs /dev/shm; hostname {name}; exec "$@"'


class Pods:
    """The pods; ``environ``: what the cluster says to pod ``index``, besides the key."""

    def __init__(self, network, directory, temporary, environ):
        self._network = network
        self._directory = directory
        self._temporary = temporary
        self.environ = environ
        self.addresses = network.hosts
        self._hosts = directory / "hosts"
        lines = [f"{address} train-{index}.train.ns train-{index}" for index, address in enumerate(network.hosts)]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self.processes = {}

    def start(self, index, *command, secret=SECRET):
        """Starts a pod that runs chorosrun with ``command``, or starts it again."""
        unshare = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        pod = _POD.format(hosts=self._hosts, name=f"train-{index}")
        argv = ["ip", "netns", "exec", self._network.namespaces[index], *unshare, "sh", "-c", pod, "sh"]
        temporary = tempfile.mkdtemp(prefix="pod-", dir=self._temporary)
        env = {**os.environ, **QUICK, **ONE_THREAD, **self.environ(index), "TMPDIR": temporary, "CHOROS_SECRET": secret}
        with (self._directory / f"pod-{index}").open("ab") as log:
            self.processes[index] = subprocess.Popen(
                [*argv, *CHOROSRUN, *map(str, command)], env=env, stdout=log, stderr=log, cwd=self._directory
            )

    def start_all(self, *command, **given):
        """Starts all pods."""
        for index in range(len(self._network.namespaces)):
            self.start(index, *command, **given)

    def kill(self, index):
        """Kills a pod."""
        self.processes[index].kill()
        self.processes[index].wait()

    def end(self, index):
        """Has chorosrun in a pod get SIGTERM, as when a pod is deleted."""
        (init,) = _children(self.processes[index].pid)
        os.kill(init, signal.SIGTERM)

    def until(self, condition, seconds=60):
        """Waits until something is true."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {self.logs()}"
            time.sleep(0.05)

    def codes(self, timeout=120):
        """The exit codes of the pods, once they have ended."""
        return [self.processes[index].wait(timeout) for index in sorted(self.processes)]

    def logs(self):
        """What all pods have printed."""
        return "the pods have printed:\n" + "\n".join(map(self.log, self.processes))

    def log(self, index):
        """What a pod has printed."""
        return (self._directory / f"pod-{index}").read_text()


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as listed:
        return [int(each) for each in listed.read().split()]


def indexed_job(index):
    """What Kubernetes says to a pod of an Indexed Job."""
    return {"JOB_COMPLETION_INDEX": str(index)}


@contextmanager
def several_pods(directory, count, environ=indexed_job, **network):
    """A block with so many pods, none of which is started; skips the test where there can be none."""
    with several_hosts(directory, count, **network) as hosts, tempfile.TemporaryDirectory(prefix="pods-") as temporary:
        pods = Pods(hosts, directory, temporary, environ)
        try:
            yield pods
        finally:
            for process in pods.processes.values():
                process.kill()
                process.wait()
