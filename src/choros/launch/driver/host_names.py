"""The names of this machine, to tell which of a job's hosts are remote."""

from __future__ import annotations

import os

__all__ = ["own_names"]


def own_names() -> frozenset[str]:
    """Returns every name and address of this machine that a host list may contain."""
    import socket  # these two imports take 15 ms, and only jobs with named hosts need them

    import psutil

    hostname = socket.gethostname()
    names = {"localhost", "127.0.0.1", "::1", hostname, hostname.split(".")[0], os.uname().nodename}
    for addresses in psutil.net_if_addrs().values():
        names |= {address.address for address in addresses}
    return frozenset(names)
