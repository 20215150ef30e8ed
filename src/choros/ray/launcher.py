"""The actors that are chorosrun's part: ``JobLauncher`` runs a job, ``HostAgent`` its ranks on another machine. They
hold no CPUs, and both need the main thread of their process, for signals.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, final

from choros import durations
from choros.launch.agents.agent import serve_host
from choros.launch.agents.hub import Hub
from choros.launch.plan.arguments import Arguments
from choros.launch.run import run_call
from choros.settings import VARIABLES
from choros.topology.clusters import ClusterHost

_CLUSTER = "the Ray cluster"
#: Ray sets it for an actor without CPUs, which this is; ranks have some.
_THREADS = "OMP_NUM_THREADS"


@final
class JobLauncher:
    """Runs one job, with the key ``secret``."""

    def __init__(self, secret: str) -> None:
        _set_up(secret)
        self._hub: Hub | None = None

    def listen(self, machines: int, slots: int) -> str:
        """Waits for agents of the other ``machines`` from now on, with ``slots`` here; returns at which address."""
        import ray

        self._hub = Hub(ClusterHost(_CLUSTER, 0, machines, port=0), slots, os.environ)
        return f"{ray.util.get_node_ip_address()}:{self._hub.port}"

    def run(self, call: Callable[[], Any], given: Mapping[str, Any]) -> list[Any]:
        """Runs ``call`` on the ranks of a job with these ``Arguments``; returns what they return."""
        arguments = Arguments(in_python=True, **given)
        if self._hub is None:
            return run_call(call, arguments)
        try:
            self._hub.wait(arguments.processes, arguments.min_num_proc, durations.AGENTS, print)
            return run_call(call, self._hub.named(arguments))
        finally:
            self._hub.close(0)


@final
class HostAgent:
    """Runs the ranks of one machine, for the launcher at ``address``."""

    def __init__(self, secret: str) -> None:
        _set_up(secret)

    def serve(self, index: int, slots: int, address: str) -> int:
        """Serves the job until it ends: this is machine ``index`` of it."""
        first, _, port = address.rpartition(":")
        cluster = ClusterHost(_CLUSTER, index, None, first, port=int(port))
        return serve_host(cluster, slots, durations.AGENTS, print)


def _set_up(secret: str) -> None:
    os.environ[VARIABLES["secret"].name] = secret
    os.environ.pop(_THREADS, None)
