"""Free ports of this host."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

from choros.errors import LaunchError

__all__ = ["free_ports", "listening_error"]

#: Below the ephemeral ports of kernels and the ports of Kubernetes' services.
_PORTS = range(20000, 30000)


def free_ports(count: int) -> list[int]:
    """Returns ``count`` ports of this host at which no process listens."""
    ports = list(_first_free(count))
    if len(ports) < count:
        raise LaunchError(
            f"the job needs {count} free ports from {_PORTS[0]} to {_PORTS[-1]}, and this host has only {len(ports)}. "
            "End processes that listen at these ports."
        )
    return ports


def _first_free(count: int) -> Iterator[int]:
    for port in random.sample(_PORTS, len(_PORTS)):
        if count == 0:
            return
        if listening_error("", port) is None:
            count -= 1
            yield port


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
