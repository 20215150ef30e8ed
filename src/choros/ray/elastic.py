"""Elastic jobs: each ``run`` is one, on the actors that there are; lost ranks are replaced when Ray has new actors."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, final

import ray

from choros import durations
from choros.errors import EngineError, UnsupportedError
from choros.launch.run import pack
from choros.ray.discovery import rooms
from choros.ray.job import RayJob, in_order, number
from choros.ray.messages import RaySettings
from choros.ray.pool import ActorPool
from choros.ray.rank import run_tied
from choros.ray.registry import ActorRegistry
from choros.transport.address import this_host


@final
class ElasticAdapter:
    """What ``RayExecutor(min_workers=…)`` does, in its process or, for Ray's client, in an actor."""

    def __init__(
        self,
        settings: RaySettings,
        worker: Mapping[str, float],
        env: Mapping[str, str],
        *,
        min_workers: int,
        max_workers: int | None,
        reset_limit: int | None,
        cooldown_range: Sequence[int] | None,
        elastic_timeout: float,
        override_discovery: bool,
    ) -> None:
        self._worker, self._env = worker, env
        self._least, self._most, self._timeout = min_workers, max_workers, elastic_timeout
        self._discovery = None if override_discovery else settings.discovery
        self._given = {
            "min_num_proc": min_workers,
            "reset_limit": reset_limit,
            "cooldown_range": cooldown_range,
            "elastic_timeout": elastic_timeout,
            "start_timeout": settings.timeout_s,
        }
        self._create: Callable[[], Any] | None = None
        self._registry: ActorRegistry | None = None
        self._pool: ActorPool | None = None
        self._secret = ""

    def start(self, create: Callable[[], Any] | None, env: Mapping[str, str]) -> None:
        """Waits for the actors of ``min_workers``."""
        self._create = create
        self._env = {**self._env, **env}
        self._fill()

    def execute(self, function: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], None]]) -> list[Any]:
        """Runs a job whose ranks call ``function``; returns what it returns on those that finish."""
        registry, pool = self._fill()
        registry.callbacks = callbacks
        job = None
        try:
            machines = in_order(registry.actors, this_host())
            ordered = number(machines, use_gpu=self._worker["GPU"] > 0)[: self._most]
            most = max(len(ordered), pool.most)
            create = self._create
            packed = pack(lambda: function(None if create is None else create()))  # by value, without this module
            given = {**self._given, "num_proc": len(ordered), "max_num_proc": most, "env": self._env}
            call = partial(run_tied, registry.address, packed)
            job = RayJob(self._secret, machines, most, call, given, grows=registry.is_reachable)
            while not job.has_ended(durations.RAY_LOOK):
                with suppress(EngineError):  # it ends just now
                    job.follow(registry)
            return job.result()
        finally:
            if job is not None:
                job.kill()
            self.shutdown()

    def run_remote(self, function: Callable[[Any], Any]) -> NoReturn:
        """Not in elastic jobs, as in Horovod."""
        raise UnsupportedError(f"run_remote({function!r}): an elastic job's actors come and go: use run.")

    def execute_single(self, function: Callable[[Any], Any]) -> NoReturn:
        """Not in elastic jobs, as in Horovod."""
        raise UnsupportedError(f"execute_single({function!r}): an elastic job's actors come and go: use execute.")

    def shutdown(self) -> None:
        """Ends the actors."""
        pool, self._pool = self._pool, None
        registry, self._registry = self._registry, None
        if pool is not None:
            pool.close()
        if registry is not None:
            registry.close()

    def _fill(self) -> tuple[ActorRegistry, ActorPool]:
        if self._pool is None or self._registry is None:
            self._secret = secrets.token_hex(32)
            own, room = ray.util.get_node_ip_address(), rooms(ray.nodes(), self._worker)
            free = {"alive": True, "NodeManagerAddress": own, "Resources": ray.available_resources()}
            is_enough = set(room) == {own} and (self._most or 0) <= rooms([free], self._worker).get(own, 0)
            self._registry = ActorRegistry(self._secret, None if is_enough else own, self._timeout)
            self._pool = ActorPool(self._registry, self._secret, self._worker, self._most, self._discovery)
        self._pool.wait(self._least, self._timeout)
        return self._registry, self._pool
