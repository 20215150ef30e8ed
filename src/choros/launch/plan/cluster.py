"""The cluster of a job with parameter servers: how each process receives its role, the addresses and the secret.

::

    chorosrun      chooses addresses and a secret    CHOROS_CLUSTER, CHOROS_SECRET, in mpirun's environment
       ▼
    mpirun ──►  wrapper of rank r                    derives its role from r, checks that its port is free
                   ▼
                COMMAND                              TF_CONFIG, CHOROS_SECRET, and no variables of MPI

Only workers and parameter servers listen at their addresses; the chief has one because ``TF_CONFIG`` requires it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from choros.launch.plan.environment import without_launchers
from choros.launch.plan.roles import CHIEF, PS, WORKER, Role, Roles
from choros.launch.protocol.wrapper_options import CLUSTER
from choros.topology import TF_CONFIG, TFConfig

__all__ = ["addresses_by_role", "role_in", "task_environment"]


def addresses_by_role(roles: Roles, addresses: Sequence[str]) -> dict[str, list[str]]:
    """Returns ``TF_CONFIG``'s cluster, in which rank ``i`` has ``addresses[i]``.

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
    """Returns the role of ``rank`` according to a wrapper's ``environ``; ``None`` in a job without roles."""
    if CLUSTER not in environ:
        return None
    cluster = json.loads(environ[CLUSTER])
    return Roles(len(cluster[PS]), len(cluster[WORKER])).of(rank)


def task_environment(environ: Mapping[str, str], rank: int) -> dict[str, str]:
    """Returns the command's environment: ``environ``; with a role, ``TF_CONFIG`` replaces the launcher's variables.

    Example:
        >>> cluster = '{"chief": ["a:1"], "ps": ["a:2"], "worker": ["b:3"]}'
        >>> environ = {"CHOROS_CLUSTER": cluster, "OMPI_COMM_WORLD_RANK": "2", "PMIX_RANK": "2", "HOME": "/root"}
        >>> task = task_environment(environ, rank=2)
        >>> sorted(task), task["TF_CONFIG"].partition('"task": ')[2]
        (['HOME', 'TF_CONFIG'], '{"type": "worker", "index": 0}}')
    """
    role = role_in(environ, rank)
    if role is None:
        return dict(environ)
    config = TFConfig.of(json.loads(environ[CLUSTER]), role.name, role.index)
    kept = {name: value for name, value in without_launchers(environ).items() if name != CLUSTER}
    return {**kept, TF_CONFIG: config.text()}
