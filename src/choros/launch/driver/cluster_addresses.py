"""Chooses the addresses and the secret of a job with parameter servers: see ``plan/cluster.py``."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Mapping
from dataclasses import replace

from choros.config import SECRET
from choros.errors import ConfigError
from choros.launch.plan.cluster import addresses_by_role
from choros.launch.plan.environment import in_allocation
from choros.launch.plan.hosts import ranks_per_host
from choros.launch.plan.job import Job
from choros.launch.processes.ports import free_ports
from choros.launch.protocol.wrapper_options import CLUSTER

__all__ = ["assign_addresses"]

_LOOPBACK = "127.0.0.1"


def assign_addresses(job: Job, environ: Mapping[str, str]) -> Job:
    """Returns the job with its cluster's addresses and secret in its environment; a job without roles unchanged.

    Args:
        job: the job to run.
        environ: the user's environment; a secret set there is kept.

    Raises:
        ConfigError: a scheduler chooses the hosts, so their addresses are not known.
        LaunchError: there are no free ports.
    """
    if not job.roles:
        return job
    if not job.hosts and in_allocation(environ):
        raise ConfigError(
            "--ps needs the names of the hosts, and in a scheduler's allocation mpirun chooses them: name them with "
            "-H host:slots,..."
        )
    hosts = _hosts_of_ranks(job)
    ports = free_ports(job.size)
    cluster = addresses_by_role(job.roles, [_address(host, port) for host, port in zip(hosts, ports, strict=True)])
    shared = {CLUSTER: json.dumps(cluster), SECRET.name: environ.get(SECRET.name) or secrets.token_hex(32)}
    return replace(job, environment={**shared, **job.environment})


def _hosts_of_ranks(job: Job) -> list[str]:
    """Returns the address of each rank's host: loopback if all ranks run on one host."""
    counts = ranks_per_host(job.hosts, job.size) or (job.size,)
    names = [host.name for host in job.hosts[: len(counts)]]
    remote = {host.name for host in job.remote}.intersection(names)
    if len(names) <= 1 or not remote:
        return [_LOOPBACK] * job.size
    resolved = {name: _resolve(name) for name in names if name in remote}
    here = _seen_from(next(iter(resolved.values())))
    return [resolved.get(name, here) for name, count in zip(names, counts, strict=True) for _ in range(count)]


def _resolve(name: str) -> str:
    """Returns the address at which other hosts reach ``name``; the name itself if only ssh can resolve it."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return name


def _seen_from(other: str) -> str:
    """Returns the address of this host on the route to ``other``."""
    from choros.transport.address import address_towards, outward_address  # imports NumPy, which few jobs need here

    try:
        return address_towards(other)
    except OSError:
        return outward_address()


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
