"""Several hosts on one machine: network namespaces, joined by a bridge. What containers restrict: mount namespaces."""

import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.launched import CHOROSRUN

#: Host 10.77.N.1x → namespace x, with its own host name; every command is logged. Whose link is down is not reached.
REACH = """#!/bin/sh
host=$1; shift
echo "$host $*" >> {log}
ip -n {name}-${{host##*.1}} link show eth0 up | grep -q eth0 || exit 255
exec ip netns exec {name}-${{host##*.1}} unshare --uts sh -c "hostname host-${{host##*.1}}; $*"
"""


@dataclass
class Network:
    """Hosts, and how to reach them.

    Attributes:
        hosts: their addresses.
        reach: a program to use instead of ssh.
        log: the file with the commands that were run so.
        namespaces: their namespaces.
        ports: their ports of the bridge.
    """

    hosts: tuple[str, ...]
    reach: Path
    log: Path
    namespaces: tuple[str, ...]
    ports: tuple[str, ...]


@contextmanager
def several_hosts(directory, count=2, only_ipv6=False):
    """A block in which ``count`` hosts exist; skips the test where they cannot be created."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need ip and unshare")
    number = free_number()
    name, bridge = f"ch{number}", f"chb{number}"
    namespaces = tuple(f"{name}-{host}" for host in range(1, count + 1))
    network, bits, options = (f"fd77:{number}::", "64", ["nodad"]) if only_ipv6 else (f"10.77.{number}.", "24", [])
    addresses = tuple(f"{network}1{host}" for host in range(1, count + 1))
    try:
        ip("addr", "add", f"{network}1/{bits}", "dev", bridge, *options)
        ip("link", "set", bridge, "up")
        for host, (namespace, address) in enumerate(zip(namespaces, addresses, strict=True), 1):
            ip("netns", "add", namespace)
            ip("link", "add", f"{name}v{host}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("link", "set", f"{name}v{host}", "master", bridge, "up")
            ip("-n", namespace, "addr", "add", f"{address}/{bits}", "dev", "eth0", *options)
            ip("-n", namespace, "link", "set", "eth0", "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        reach, log = directory / "reach", directory / "log"
        reach.write_text(REACH.format(name=name, log=log))
        reach.chmod(0o755)
        yield Network(addresses, reach, log, namespaces, tuple(f"{name}v{host}" for host in range(1, count + 1)))
    finally:
        # The links first: with a namespace they would go later, and the next hosts may have their names.
        for host, namespace in enumerate(namespaces, 1):
            ip("link", "del", f"{name}v{host}", check=False)
            ip("netns", "del", namespace, check=False)
        ip("link", "del", bridge, check=False)


def ip(*arguments, check=True):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if check and done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def free_number():
    """The third part of unused addresses; creates the bridge that is named after it."""
    for attempt in range(20):
        number = 20 + (os.getpid() + 7 * attempt) % 200
        try:
            ip("link", "add", f"chb{number}", "type", "bridge")
        except OSError as error:
            problem = str(error)
        else:
            return number
    pytest.skip(f"no bridge can be created: {problem}")


def contained(command, *mounts, shell="", program=CHOROSRUN):
    """Runs chorosrun, or another program, with temporary file systems: ``(options, directory)``."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mount namespaces need root and unshare")
    lines = ["set -e", *(f"mount -t tmpfs -o {options} tmpfs {directory}" for options, directory in mounts), shell]
    script = "\n".join([*lines, 'exec "$@"'])
    argv = ["unshare", "--mount", "sh", "-c", script, "sh", *program, *map(str, command)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)
    if "unshare: " in ended.stderr or "mount: " in ended.stderr:
        pytest.skip(f"this machine allows no mount namespaces: {ended.stderr}")
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended
