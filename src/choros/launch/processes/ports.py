"""Ports of this host at which a process can listen."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

from choros.errors import LaunchError

__all__ = ["free_ports", "listening_error"]

#: Below those that kernels assign on request, and Kubernetes to services.
_PORTS = range(20000, 30000)


def free_ports(count: int) -> list[int]:
    """``count`` ports at which nothing listens on this host."""
    ports = list(_first_free(count))
    if len(ports) < count:
        raise LaunchError(f"of the ports {_PORTS[0]} … {_PORTS[-1]}, fewer than the {count} that are needed are free.")
    return ports


def _first_free(count: int) -> Iterator[int]:
    for port in random.sample(_PORTS, len(_PORTS)):
        if count == 0:
            return
        if listening_error("", port) is None:
            count -= 1
            yield port


def listening_error(host: str, port: int) -> OSError | None:
    """What prevents a process from listening there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports of connections that have ended are free
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error
    return None
