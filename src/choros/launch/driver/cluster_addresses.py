"""Chooses the addresses and the secret of a job with parameter servers: see ``plan/roles.py``."""

import json
import secrets
import socket
from collections.abc import Mapping
from dataclasses import replace

from choros.errors import ConfigError
from choros.launch.plan.environment import in_allocation
from choros.launch.plan.hosts import hosts_of_ranks
from choros.launch.plan.job import Job
from choros.launch.plan.roles import CHIEF, PS, WORKER
from choros.launch.protocol.wrapper_options import CLUSTER
from choros.settings import VARIABLES
from choros.transport.address import LOOPBACK, address_towards, free_ports, outward_address


def assign_addresses(job: Job, environ: Mapping[str, str]) -> Job:
    """Returns the job with its addresses and secret (by default new) in its environment; fails under a scheduler."""
    if not job.hosts and in_allocation(environ):
        raise ConfigError(
            "--ps needs the names of the hosts, and in a scheduler's allocation mpirun chooses them: name them with "
            "-H host:slots,..."
        )
    hosts = _hosts_of_ranks(job)
    ports = free_ports(job.size)
    names = [f"[{host}]" if ":" in host else host for host in hosts]
    chief, *others = (f"{name}:{port}" for name, port in zip(names, ports, strict=True))
    cluster = {CHIEF: [chief], PS: others[: job.servers], WORKER: others[job.servers :]}
    secret = VARIABLES["secret"].name
    shared = {CLUSTER: json.dumps(cluster), secret: environ.get(secret) or secrets.token_hex(32)}
    return replace(job, environment={**shared, **job.environment})


def _hosts_of_ranks(job: Job) -> list[str]:
    """Returns the address of each rank's host: loopback if all ranks run on one host."""
    names = hosts_of_ranks(job.hosts, job.size)
    remote = {host.name for host in job.remote}
    resolved = {name: _resolve(name) for name in dict.fromkeys(names) if name in remote}
    if len(set(names)) <= 1 or not resolved:
        return [LOOPBACK] * job.size
    try:  # the address of this host on the route to another one
        here = address_towards(next(iter(resolved.values())))
    except OSError:
        here = outward_address()
    return [resolved.get(name, here) for name in names]


def _resolve(name: str) -> str:
    """Returns the address at which other hosts reach ``name``; the name itself if only ssh can resolve it."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return name
