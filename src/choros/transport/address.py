"""Where processes listen: a rank's address, loopback if all ranks share a host, else one that other hosts can reach;
and free ports.
"""

import ipaddress
import os
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from choros.errors import LaunchError

LOOPBACK = "127.0.0.1"
#: Below the ephemeral ports of kernels and the ports of Kubernetes' services.
_PORTS = range(20000, 30000)
#: Two machines may have the same name, and network namespaces of one machine cannot use each other's loopback.
_HOST_IDS = (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net"))


@dataclass(frozen=True)
class Location:
    """The host of a rank, by its ``this_host``, that host's address from which the rank connected to the store, and its
    process, for people: the host's name and its number there.
    """

    host: str
    address: str
    name: str = ""
    pid: int = 0


def this_host() -> str:
    """Returns a unique name of this host, the same in all processes that share its loopback."""
    existing = [path for path in _HOST_IDS if path.exists()]
    ids = [os.readlink(path) if path.is_symlink() else path.read_text().strip() for path in existing]
    return " ".join([socket.gethostname(), *ids])


def is_loopback(address: str) -> bool:
    """Returns whether ``address`` is loopback, which other hosts cannot reach; ``False`` for host names.

    >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1"), is_loopback("a.example")
    (True, False, False)
    """
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def own_address(locations: Sequence[Location], rank: int) -> str:
    """The address at which ``rank`` listens and all others reach it: loopback on one host, else its location's. If that
    is loopback, as this host's name may be, it is the source of packets from here to another host.

    >>> own_address([Location("a", "10.0.0.1"), Location("a", "10.0.0.1")], rank=0)
    '127.0.0.1'
    >>> own_address([Location("a", "127.0.1.1"), Location("b", "10.0.0.2")], rank=1)
    '10.0.0.2'
    """
    own = locations[rank]
    if all(location.host == own.host for location in locations):
        return LOOPBACK
    if not is_loopback(own.address):
        return own.address
    others = (other.address for other in locations if not is_loopback(other.address))
    return next(map(address_towards, others), LOOPBACK)


def address_towards(other: str) -> str:
    """Returns the source address of packets from this host to ``other``; sends none.

    >>> address_towards("127.0.0.1")
    '127.0.0.1'
    """
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])


def outward_address() -> str:
    """Returns an address to publish: ``GLOO_SOCKET_IFNAME``'s, the host name's, or any non-loopback; else loopback."""
    import psutil  # no part of Python, which is all that a wrapper has

    interfaces = {
        name: [
            each.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for each in addresses
            if each.family == family and "%" not in each.address  # of one link only
        ]
        for name, addresses in psutil.net_if_addrs().items()
    }
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = LOOPBACK
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    candidates = [*interfaces.get(chosen, ()), named, *(address for known in interfaces.values() for address in known)]
    return next((address for address in candidates if not is_loopback(address)), LOOPBACK)


def free_ports(count: int) -> list[int]:
    """Returns ``count`` ports of this host at which no process listens."""
    free = (port for port in random.sample(_PORTS, len(_PORTS)) if listening_error("", port) is None)
    ports = list(islice(free, count))
    if len(ports) < count:
        raise LaunchError(
            f"the job needs {count} free ports from {_PORTS[0]} to {_PORTS[-1]}, and this host has only {len(ports)}. "
            "End processes that listen at these ports."
        )
    return ports


def listening_error(host: str, port: int) -> OSError | None:
    """Returns the error of listening at ``host``:``port``; ``None`` if it succeeds."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports in TIME_WAIT are free
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error
    return None
