"""The actors that are chorosrun's part, one on each machine. They hold no CPUs, and need the main thread of their
process, for signals.
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
    """Runs one job, with the key ``secret``, or its ranks on another machine than the first."""

    def __init__(self, secret: str) -> None:
        os.environ[VARIABLES["secret"].name] = secret
        os.environ.pop(_THREADS, None)
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

    def serve(self, index: int, slots: int, address: str) -> int:
        """Runs the ranks of machine ``index`` of a job, for its launcher at ``address``, until it ends."""
        first, _, port = address.rpartition(":")
        cluster = ClusterHost(_CLUSTER, index, None, first, port=int(port))
        return serve_host(cluster, slots, durations.AGENTS, print)
