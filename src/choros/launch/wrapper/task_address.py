"""The address at which a worker or a parameter server listens."""

from __future__ import annotations

import json
from collections.abc import Mapping

from choros.launch.plan.cluster import role_in
from choros.launch.plan.roles import CHIEF
from choros.launch.protocol.wrapper_options import CLUSTER
from choros.topology import split_address

__all__ = ["listening_problem"]


def listening_problem(environ: Mapping[str, str], rank: int) -> str:
    """Returns why ``rank`` cannot listen at its address; empty if it can, or if it does not need to listen."""
    role = role_in(environ, rank)
    if role is None or role.name == CHIEF:
        return ""
    from choros.launch.processes.ports import listening_error  # imports sockets, which other jobs do not need

    address = json.loads(environ[CLUSTER])[role.name][role.index]
    error = listening_error(*split_address(address))
    if error is None:
        return ""
    return (
        f"{role} cannot listen at {address}: {error.strerror or error}. If the port is in use, start the job again: "
        "it chooses other ports. If the address is not this host's, give in -H the names by which the hosts reach "
        "each other."
    )
