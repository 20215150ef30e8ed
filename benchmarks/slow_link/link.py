"""Two hosts on one machine with a slow link between them, and a command that runs as a rank on each.

    sudo python benchmarks/slow_link/link.py --rate 100 --delay 5 -- python train.py

The hosts are network namespaces. Where the kernel has netem, they are joined by a veth pair that it slows down.
Elsewhere this process is the link: each host has a tun device, and a packet that one host sends is written to the
other's device when a line of that rate and delay would deliver it::

    host 1 ── tun ──► queue of 1000 packets ──► one at a time, at the rate ──► delay ──► tun ── host 2

Exits with the command's exit code, or with 75 and the reason if the link cannot be created.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

CANNOT = 75
#: The length of the queue in full packets, beyond which the link drops packets: netem's default.
QUEUE = 1000
PACKET = 1 << 16
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
#: Used instead of ssh: runs a command in the namespace of a host's address, with its own host name and cores.
REACH = """#!/bin/sh
host=$1; shift
case $host in *.1) cores={cores[0]};; *) cores={cores[1]};; esac
exec taskset -c $cores ip netns exec {name}-${{host##*.}} unshare --uts sh -c "hostname host-${{host##*.}}; $*"
"""


class CannotLinkError(Exception):
    """The link cannot be created on this machine; the message is the reason."""


@dataclass(frozen=True)
class Line:
    """One direction of a link."""

    bits_per_s: float
    delay_s: float


@dataclass(frozen=True)
class Link:
    """Two hosts and the link between them."""

    name: str
    hosts: tuple[str, str]
    cores: tuple[str, str]
    reach: Path
    kind: str

    def run(self, command: Sequence[str]) -> int:
        """Runs ``command`` as a rank on each host; returns the exit code."""
        chorosrun = str(Path(sys.executable).with_name("chorosrun"))
        hosts = ",".join(f"{host}:1" for host in self.hosts)
        starter = [chorosrun, "--ssh-command", str(self.reach), "-H", hosts]
        on_first_host = ["taskset", "-c", self.cores[0], "ip", "netns", "exec", f"{self.name}-1"]
        return subprocess.run([*on_first_host, *starter, *command], check=False).returncode


@contextmanager
def slow_link(line: Line) -> Iterator[Link]:
    """Creates two hosts with a link between them, and removes them at the end.

    Raises:
        CannotLinkError: this process is not root, or the kernel lacks support, or a program is missing.
    """
    if os.geteuid() != 0:
        raise CannotLinkError("network namespaces need root: run this with sudo")
    if missing := [program for program in ("ip", "tc", "taskset", "unshare") if shutil.which(program) is None]:
        raise CannotLinkError(f"network namespaces need {' and '.join(missing)}")
    name = f"slow{os.getpid()}"
    namespaces = (f"{name}-1", f"{name}-2")
    with ExitStack() as stack:
        for namespace in namespaces:
            _ip("netns", "add", namespace)
            stack.callback(_ip, "netns", "del", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        kind = "netem" if _join_by_netem(namespaces, line) else stack.enter_context(_join_by_relay(namespaces, line))
        hosts = ("10.78.0.1", "10.78.0.2")
        for namespace, host in zip(namespaces, hosts, strict=True):
            _ip("-n", namespace, "addr", "add", f"{host}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
        reach = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "reach"
        cores = _halves(sorted(os.sched_getaffinity(0)))
        reach.write_text(REACH.format(name=name, cores=cores))
        reach.chmod(0o755)
        yield Link(name, hosts, cores, reach, kind)


def _halves(cores: Sequence[int]) -> tuple[str, str]:
    """Returns each host's half of the cores; the same core for both if there is only one."""
    middle = len(cores) // 2
    one, other = cores[:middle] or cores, cores[middle:]
    return ",".join(map(str, one)), ",".join(map(str, other))


def _ip(*arguments: str, program: str = "ip") -> None:
    done = subprocess.run([program, *arguments], check=False, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise CannotLinkError(f"{program} {' '.join(arguments)}: {done.stderr.strip()}")


def _join_by_netem(namespaces: tuple[str, str], line: Line) -> bool:
    """Joins the namespaces by a slowed veth pair; returns whether the kernel supports it."""
    one, other = namespaces
    _ip("link", "add", "eth0", "netns", one, "type", "veth", "peer", "name", "eth0", "netns", other)
    shape = ("netem", "rate", f"{line.bits_per_s:.0f}bit", "delay", f"{line.delay_s * 1e6:.0f}us")
    try:
        for namespace in namespaces:
            _ip("-n", namespace, "qdisc", "add", "dev", "eth0", "root", *shape, program="tc")
    except CannotLinkError:
        _ip("-n", one, "link", "del", "eth0")
        return False
    return True


@contextmanager
def _join_by_relay(namespaces: tuple[str, str], line: Line) -> Iterator[str]:
    """Joins the namespaces by tun devices of this process, which a thread serves."""
    if not Path("/dev/net/tun").exists():
        raise CannotLinkError("the kernel has neither netem nor tun")
    ends = []
    for number, namespace in enumerate(namespaces):
        device = f"slow{os.getpid() % 10000}t{number}"
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
        _ip("link", "set", device, "netns", namespace, "name", "eth0")
        ends.append(end)
    stop = threading.Event()
    thread = threading.Thread(target=_relay, args=(ends, line, stop))
    thread.start()
    try:
        yield "tun"
    finally:
        stop.set()
        thread.join()
        for end in ends:
            os.close(end)


def _relay(ends: Sequence[int], line: Line, stop: threading.Event) -> None:
    """Forwards packets in both directions until ``stop`` is set."""
    waiting: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    longest = QUEUE * 8 * 1500 / line.bits_per_s
    free = dict.fromkeys(ends, 0.0)  # when the line from this end is free again
    while not stop.is_set():
        due = min((packets[0][0] for packets in waiting.values() if packets), default=time.monotonic() + 0.1)
        ready, _, _ = select.select(ends, [], [], max(0.0, due - time.monotonic()))
        for end in ready:
            packet = os.read(end, PACKET)
            now = time.monotonic()
            if free[end] - now < longest:
                free[end] = max(now, free[end]) + 8 * len(packet) / line.bits_per_s
                waiting[end].append((free[end] + line.delay_s, packet))
        for end, other in (tuple(ends), tuple(reversed(ends))):
            packets = waiting[end]
            while packets and packets[0][0] <= time.monotonic():
                with suppress(OSError):  # a host that is not up yet loses the packet
                    os.write(other, packets.popleft()[1])


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=100, help="Mbit/s, each way")
    parser.add_argument("--delay", type=float, default=5, help="ms, each way")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    try:
        with slow_link(Line(arguments.rate * 1e6, arguments.delay / 1e3)) as link:
            return link.run(arguments.command)
    except CannotLinkError as error:
        print(error, file=sys.stderr)
        return CANNOT


if __name__ == "__main__":
    sys.exit(main())
