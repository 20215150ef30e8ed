"""Hosts on one machine, which a switch of a given rate and delay joins: each is a network namespace.

::

    host 1 ── tun ──► its line, one packet at a time ──► delay ──► the receiver's line ── tun ──► host 2

Linux has ``netem`` for that, but not every kernel does: here a process is the switch, which runs before all others, as
hardware would. Full-duplex lines of the same rate go to it and from it, and no packet is lost. Bare acknowledgements
overtake data, which hosts keep in short queues; here a queue is as long as what a socket may hold.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import multiprocessing
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import IPPROTO_TCP

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PR_SET_TIMERSLACK = 29
#: The kernel holds what ranks do not read at once because they wait for a core.
READ_BUFFER = "4096 8388608 33554432"
#: A socket holds what the line sends in this time, and in a round trip: with more, TCP takes a queue for a loss.
SOCKET_SECONDS = 0.02
#: A packet takes this time on a line, so that few of them need to be passed on.
PACKET_SECONDS = 1e-3
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
#: Used instead of ssh: runs a command in the namespace of a host's address, with its own host name.
REACH = """#!/bin/sh
host=$1; shift
exec ip netns exec {name}-${{host##*.}} unshare --uts sh -c "hostname host-${{host##*.}}; $*"
"""


@dataclass(frozen=True)
class Line:
    """A host's line to the switch, in each direction; the delay is from host to host."""

    bits_per_s: float
    delay_s: float

    @property
    def packet(self) -> int:
        """The bytes of a packet."""
        return int(min(max(self.bits_per_s / 8 * PACKET_SECONDS, 1500), 65000))

    @property
    def socket(self) -> int:
        """The bytes that a socket holds."""
        return max(int(self.bits_per_s / 8 * (SOCKET_SECONDS + 2 * self.delay_s)), 1 << 17)


@dataclass(frozen=True)
class Network:
    """Hosts by their addresses, and a command that starts programs on them as ssh does."""

    name: str
    hosts: tuple[str, ...]
    reach: Path

    def run(self, slots: int, command: Sequence[str], seconds: float) -> None:
        """Runs ``command`` on ``slots`` ranks of each host, to its end."""
        chorosrun = str(Path(sys.executable).with_name("chorosrun"))
        hosts = ",".join(f"{host}:{slots}" for host in self.hosts)
        first = ["ip", "netns", "exec", f"{self.name}-1"]
        starter = [chorosrun, "--ssh-command", str(self.reach), "-H", hosts, "-np", str(slots * len(self.hosts))]
        arguments = [*first, *starter, "--no-prefix-output", *command]
        subprocess.run(arguments, check=True, timeout=seconds)


@contextmanager
def switched(count: int, line: Line) -> Iterator[Network]:
    """A block in which there are ``count`` hosts; needs root."""
    name = f"fc{os.getpid()}"
    with ExitStack() as stack:
        # Ranks of one session would not yield cores to those of another.
        before = AUTOGROUP.read_text()
        stack.callback(AUTOGROUP.write_text, before)
        AUTOGROUP.write_text("0")
        ends = []
        for number in range(1, count + 1):
            namespace = f"{name}-{number}"
            run("ip", "netns", "add", namespace)
            stack.callback(run, "ip", "netns", "del", namespace)
            inside = ("ip", "netns", "exec", namespace)
            run(*inside, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=cubic", check=False)
            run(*inside, "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0")
            run(*inside, "sysctl", "-qw", f"net.ipv4.tcp_rmem={READ_BUFFER}")
            run(*inside, "sysctl", "-qw", f"net.ipv4.tcp_wmem=4096 {line.socket} {line.socket}")
            end, device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), f"{name[-9:]}t{number}"
            stack.callback(os.close, end)
            fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
            run("ip", "link", "set", device, "netns", namespace, "name", "eth0")
            of_namespace = ("ip", "-n", namespace)
            run(*of_namespace, "link", "set", "lo", "up")
            run(*of_namespace, "addr", "add", f"10.79.0.{number}/24", "dev", "eth0")
            run(*of_namespace, "link", "set", "eth0", "mtu", str(line.packet), "txqueuelen", "10000", "up")
            run(*of_namespace, "route", "change", "10.79.0.0/24", "dev", "eth0", "quickack", "1")
            ends.append(end)
        switch = multiprocessing.get_context("fork").Process(target=serve, args=(ends, line), daemon=True)
        switch.start()
        stack.callback(switch.join)
        stack.callback(switch.terminate)
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        reach = Path(directory) / "reach"
        reach.write_text(REACH.format(name=name))
        reach.chmod(0o755)
        yield Network(name, tuple(f"10.79.0.{number}" for number in range(1, count + 1)), reach)


def run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    if check and done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def serve(ends: Sequence[int], line: Line) -> None:
    """Passes packets on when the lines would deliver them, until it is ended."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    free_out, free_in = [0.0] * len(ends), [0.0] * len(ends)
    numbers = {end: number for number, end in enumerate(ends)}
    due: list[tuple[float, int, int, bytes]] = []
    count, seconds = 0, 8 / line.bits_per_s
    while True:
        timeout = max(0.0, due[0][0] - time.monotonic()) if due else 1.0
        ready, _, _ = select.select(ends, (), (), timeout)
        for end in ready:
            sender = numbers[end]
            with suppress(BlockingIOError):
                for _ in range(16):
                    packet = os.read(end, 1 << 16)
                    receiver = packet[19] - 1
                    if packet[0] >> 4 != 4 or not 0 <= receiver < len(ends):
                        continue
                    lasts = len(packet) * seconds
                    headers = 4 * ((packet[0] & 15) + (packet[32] >> 4)) if packet[9] == IPPROTO_TCP else 0
                    if len(packet) == headers:  # without data
                        arrives = time.monotonic() + line.delay_s
                    else:
                        begin = max(time.monotonic(), free_out[sender])
                        free_out[sender] = begin + lasts
                        arrives = max(begin + line.delay_s, free_in[receiver]) + lasts
                        free_in[receiver] = arrives
                    count += 1
                    heapq.heappush(due, (arrives, count, receiver, packet))
        now = time.monotonic()
        while due and due[0][0] <= now:
            _, _, receiver, packet = heapq.heappop(due)
            with suppress(OSError):
                os.write(ends[receiver], packet)
