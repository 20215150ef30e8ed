"""What the processes of a job with parameter servers must know of each other, and how each is told.

::

    chorosrun      chooses addresses and a secret    CHOROS_CLUSTER, CHOROS_SECRET, in mpirun's environment
       ▼
    mpirun ──►  wrapper of rank r                    knows its role from r, sees that its port is free
                   ▼
                COMMAND                              TF_CONFIG, CHOROS_SECRET, and nothing of MPI

Only the chief and the parameter servers listen at their addresses; a worker has one because ``TF_CONFIG`` wants it so.
"""

from __future__ import annotations

import json
import random
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from choros.config import SECRET
from choros.errors import ConfigError, LaunchError
from choros.launch.plan.environment import in_allocation, without_launchers
from choros.launch.plan.hosts import ranks_per_host
from choros.launch.plan.job import Job
from choros.launch.plan.roles import CHIEF, PS, WORKER, Role, Roles
from choros.launch.protocol.wrapper_options import CLUSTER
from choros.topology import TF_CONFIG, TFConfig, split_address

__all__ = ["addresses_by_role", "introduce", "role_in", "task_environment", "why_not_listening"]

_LOOPBACK = "127.0.0.1"
#: Below those that kernels give to whoever asks for any port, and Kubernetes to services.
_PORTS = range(20000, 30000)


def introduce(job: Job, environ: Mapping[str, str]) -> Job:
    """The job with what its processes must know of each other in its environment; a job without roles as it is.

    Args:
        job: what is to run.
        environ: the user's environment; a secret that it has is kept.

    Raises:
        ConfigError: it is not known on which hosts the processes will run.
        LaunchError: there are no free ports.
    """
    if not job.roles:
        return job
    if not job.hosts and in_allocation(environ):
        raise ConfigError(
            "--ps needs to know the hosts, which within a scheduler's allocation are mpirun's to choose: name them "
            "with -H host:slots,..."
        )
    hosts = _hosts_of_ranks(job)
    ports = _free_ports(job.size)
    cluster = addresses_by_role(job.roles, [_address(host, port) for host, port in zip(hosts, ports, strict=True)])
    told = {CLUSTER: json.dumps(cluster), SECRET.name: environ.get(SECRET.name) or secrets.token_hex(32)}
    return replace(job, environment={**told, **job.environment})


def addresses_by_role(roles: Roles, addresses: Sequence[str]) -> dict[str, list[str]]:
    """``TF_CONFIG``'s cluster, when rank ``i`` has ``addresses[i]``.

    Example:
        >>> addresses_by_role(Roles(servers=1, workers=2), ["a:1", "a:2", "b:3", "b:4"])
        {'chief': ['a:1'], 'ps': ['a:2'], 'worker': ['b:3', 'b:4']}
    """
    cluster: dict[str, list[str]] = {CHIEF: [], PS: [], WORKER: []}
    for rank, address in enumerate(addresses):
        role = roles.of(rank)
        if role is not None:
            cluster[role.name].append(address)
    return cluster


def role_in(environ: Mapping[str, str], rank: int) -> Role | None:
    """The role of ``rank`` in the job to whose wrappers ``environ`` was given; ``None`` if nobody has one."""
    if CLUSTER not in environ:
        return None
    cluster = json.loads(environ[CLUSTER])
    return Roles(len(cluster[PS]), len(cluster[WORKER])).of(rank)


def task_environment(environ: Mapping[str, str], rank: int) -> dict[str, str]:
    """The command's environment: ``environ``, or for a process with a role ``TF_CONFIG`` in place of the launcher's.

    Example:
        >>> cluster = '{"chief": ["a:1"], "ps": ["a:2"], "worker": ["b:3"]}'
        >>> told = {"CHOROS_CLUSTER": cluster, "OMPI_COMM_WORLD_RANK": "2", "PMIX_RANK": "2", "HOME": "/root"}
        >>> task = task_environment(told, rank=2)
        >>> sorted(task), task["TF_CONFIG"].partition('"task": ')[2]
        (['HOME', 'TF_CONFIG'], '{"type": "worker", "index": 0}}')
    """
    role = role_in(environ, rank)
    if role is None:
        return dict(environ)
    config = TFConfig.of(json.loads(environ[CLUSTER]), role.name, role.index)
    kept = {name: value for name, value in without_launchers(environ).items() if name != CLUSTER}
    return {**kept, TF_CONFIG: config.text()}


def why_not_listening(environ: Mapping[str, str], rank: int) -> str:
    """Why ``rank``, if it is to listen, cannot do so on this host; empty if it can."""
    role = role_in(environ, rank)
    if role is None or role.name == WORKER:
        return ""
    address = json.loads(environ[CLUSTER])[role.name][role.index]
    error = _try_port(*split_address(address))
    if error is None:
        return ""
    return (
        f"{role} cannot listen at {address}: {error.strerror or error}. If the port is taken, start the job again: it "
        "will choose others. If the address is not this host's, name hosts in -H as they reach each other."
    )


def _hosts_of_ranks(job: Job) -> list[str]:
    """The address of each rank's host: loopback if all are on one."""
    counts = ranks_per_host(job.hosts, job.size) or (job.size,)
    names = [host.name for host in job.hosts[: len(counts)]]
    remote = {host.name for host in job.remote}.intersection(names)
    if len(names) <= 1 or not remote:
        return [_LOOPBACK] * job.size
    resolved = {name: _resolve(name) for name in names if name in remote}
    here = _seen_from(next(iter(resolved.values())))
    return [resolved.get(name, here) for name, count in zip(names, counts, strict=True) for _ in range(count)]


def _resolve(name: str) -> str:
    """The address of a host, by which every other can reach it; its name, if only ssh knows what that means."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return name


def _seen_from(other: str) -> str:
    """The address of this host that ``other`` sees."""
    from choros.transport.address import address_towards, outward_address  # with NumPy, which few jobs need here

    try:
        return address_towards(other)
    except OSError:
        return outward_address()


def _free_ports(count: int) -> list[int]:
    """Ports that are free on this host; on others the wrappers see to it."""
    ports = list(_first_free(count))
    if len(ports) < count:
        raise LaunchError(f"of the ports {_PORTS[0]} … {_PORTS[-1]}, fewer than the {count} that are needed are free.")
    return ports


def _first_free(count: int) -> Iterator[int]:
    for port in random.sample(_PORTS, len(_PORTS)):
        if count == 0:
            return
        if _try_port("", port) is None:
            count -= 1
            yield port


def _try_port(host: str, port: int) -> OSError | None:
    """What stands in the way of listening there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports of connections that have ended are free
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error
    return None


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
