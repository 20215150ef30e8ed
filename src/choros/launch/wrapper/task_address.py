"""The address at which a chief or a parameter server listens."""

from __future__ import annotations

import json
from collections.abc import Mapping

from choros.launch.plan.cluster import role_in
from choros.launch.plan.roles import WORKER
from choros.launch.protocol.wrapper_options import CLUSTER
from choros.topology import split_address

__all__ = ["why_not_listening"]


def why_not_listening(environ: Mapping[str, str], rank: int) -> str:
    """Why ``rank``, if it is to listen, cannot do so on this host; empty if it can."""
    role = role_in(environ, rank)
    if role is None or role.name == WORKER:
        return ""
    from choros.launch.processes.ports import listening_error  # with sockets, which other jobs need not load

    address = json.loads(environ[CLUSTER])[role.name][role.index]
    error = listening_error(*split_address(address))
    if error is None:
        return ""
    return (
        f"{role} cannot listen at {address}: {error.strerror or error}. If the port is taken, start the job again: it "
        "chooses others. If the address is not this host's, name hosts in -H as they reach each other."
    )
