"""Which of a host's addresses its ranks use: loopback where that is enough, else one that the others reach."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["LOOPBACK", "Place", "address_towards", "choose_address", "is_loopback", "outward_address", "this_host"]

LOOPBACK = "127.0.0.1"
#: Two machines may have one name, and network namespaces of one machine cannot use each other's loopback.
_TELL_HOSTS_APART = (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net"))


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        host: as ``this_host`` names it.
        address: the address of that host from which the rank reached the place where ranks meet.
    """

    host: str
    address: str


def this_host() -> str:
    """A name for this host that no other has, the same in all processes that share its loopback."""
    there = [path for path in _TELL_HOSTS_APART if path.exists()]
    marks = [os.readlink(path) if path.is_symlink() else path.read_text().strip() for path in there]
    return " ".join([socket.gethostname(), *marks])


def is_loopback(address: str) -> bool:
    """Whether other hosts can certainly not reach ``address``; ``False`` for names.

    Example:
        >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1"), is_loopback("a.example")
        (True, False, False)
    """
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def choose_address(places: Sequence[Place], rank: int) -> str | None:
    """The address that ``rank`` should listen at, ``None`` if ``places`` do not tell.

    A host whose own name resolves to loopback, as on Debian, reached the meeting place through loopback: that
    is no use to the others, and only the host itself knows better (``address_towards`` one of them).

    Example:
        >>> choose_address([Place("a", "10.0.0.1"), Place("a", "10.0.0.1")], rank=0)
        '127.0.0.1'
        >>> choose_address([Place("a", "127.0.1.1"), Place("b", "10.0.0.2")], rank=1)
        '10.0.0.2'
        >>> choose_address([Place("a", "127.0.1.1"), Place("b", "10.0.0.2")], rank=0)
    """
    if all(place.host == places[rank].host for place in places):
        return LOOPBACK
    return None if is_loopback(places[rank].address) else places[rank].address


def address_towards(other: str) -> str:
    """The address of this host that packets to the address ``other`` carry; none is sent.

    Example:
        >>> address_towards("127.0.0.1")
        '127.0.0.1'
    """
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])


def outward_address() -> str:
    """An address of this host that others can be told: ``GLOO_SOCKET_IFNAME``'s, its name's, or any; else loopback."""
    interfaces = {
        name: [address.address for address in addresses if address.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = LOOPBACK
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    candidates = [*interfaces.get(chosen, ()), named, *(each for known in interfaces.values() for each in known)]
    return next((address for address in candidates if not is_loopback(address)), LOOPBACK)
