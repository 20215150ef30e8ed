"""The names of this machine, by which a job's hosts are compared with it."""

from __future__ import annotations

import os

__all__ = ["own_names"]


def own_names() -> frozenset[str]:
    """Every name and address by which this machine may be called on it."""
    import socket  # these two take 15 ms, which a job without named hosts need not spend

    import psutil

    hostname = socket.gethostname()
    names = {"localhost", "127.0.0.1", "::1", hostname, hostname.split(".")[0], os.uname().nodename}
    for addresses in psutil.net_if_addrs().values():
        names |= {address.address for address in addresses}
    return frozenset(names)
