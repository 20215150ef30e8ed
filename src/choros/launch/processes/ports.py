"""Free ports of this host."""

import random
import socket
from itertools import islice

from choros.errors import LaunchError

#: Below the ephemeral ports of kernels and the ports of Kubernetes' services.
_PORTS = range(20000, 30000)


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
