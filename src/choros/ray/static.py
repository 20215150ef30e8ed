"""Jobs that are not elastic: ``start`` starts the ranks, which run one call after the other until ``shutdown``."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from choros import durations
from choros.errors import LaunchError, WorkerFailed
from choros.launch.bootstrap import pack
from choros.ray.job import RayJob, RaySettings, raise_cause
from choros.ray.rank import serve_calls
from choros.ray.registry import ActorRegistry, RankActor
from choros.ray.worker import CONTROL, create_placement_group, hire, no_room
from choros.transport.address import this_host


@final
class StaticAdapter:
    """What ``RayExecutor(num_workers=…)`` does, in its process or, for Ray's client, in an actor."""

    def __init__(
        self,
        settings: RaySettings,
        worker: Mapping[str, float],
        env: Mapping[str, str],
        *,
        num_workers: int | None,
        num_hosts: int | None,
        num_workers_per_host: int | None,
        use_current_placement_group: bool,
    ) -> None:
        self._settings, self._resources, self._env = settings, worker, env
        self._per_host = num_workers_per_host or 1
        self._hosts = None if num_workers else num_hosts
        self._size = num_workers or (num_hosts or 0) * self._per_host
        self._shares_group = use_current_placement_group
        self._own_group: PlacementGroup | None = None
        self.workers: list[Any] = []
        self._registry: ActorRegistry | None = None
        self._job: RayJob | None = None

    def start(self, create: Callable[[], Any] | None, env: Mapping[str, str]) -> None:
        """Starts actors and ranks; each makes an object by ``create``."""
        secret, seconds = secrets.token_hex(32), self._settings.placement_group_timeout_s + self._settings.timeout_s
        actors = self._hire(secret)
        self.workers = [each.handle for each in actors]
        try:
            places = ray.get([each.listening for each in actors], timeout=seconds)
        except ray.exceptions.GetTimeoutError as error:  # a placement group of the user's may have too few bundles
            raise no_room(f"{len(actors)} workers with {dict(self._resources)}", seconds) from error
        for each, place in zip(actors, places, strict=True):
            each.note_place(*place)
        is_here = all(each.machine == this_host() for each in actors)
        ip = None if is_here else ray.util.get_node_ip_address()
        self._registry = registry = ActorRegistry(secret, ip, self._settings.timeout_s)
        registry.add(*actors)
        given = {"start_timeout": self._settings.timeout_s, "env": {**self._env, **env}}
        call = partial(serve_calls, registry.address, pack(create or (lambda: None)))
        self._job = RayJob(registry, call, given)
        self.workers = [each.handle for each in self._job.actors]
        self._job.wait_for_ranks(self._settings.timeout_s)
        if create is not None:
            self._get(self.run_remote(lambda _: None))  # all have their objects then

    def _hire(self, secret: str) -> list[RankActor]:
        """Returns new actors, in the placement group in which this is called, or in one of their own."""
        group = get_current_placement_group() if self._shares_group else None
        per_bundle = self._per_host if self._hosts else 1
        if group is None:
            bundle = {name: value * per_bundle for name, value in self._resources.items()}
            spread, timeout = "STRICT_SPREAD" if self._hosts else "PACK", self._settings.placement_group_timeout_s
            self._own_group, _ = create_placement_group(bundle, self._hosts or self._size, timeout, spread)
        strategies = (
            PlacementGroupSchedulingStrategy(group or self._own_group, -1 if group else index // per_bundle)
            for index in range(self._size)
        )
        return [
            hire(self._resources, secret, index, self._size, scheduling_strategy=each)
            for index, each in enumerate(strategies)
        ]

    def run_remote(self, function: Callable[[Any], Any]) -> list[Any]:
        """Returns references to what the ranks return."""
        packed = pack(function)
        return [each.execute.remote(packed) for each in self._started()]

    def execute(self, function: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], None]]) -> list[Any]:
        """Returns what the ranks return."""
        if self._registry is not None:
            self._registry.callbacks = callbacks
        return self._get(self.run_remote(function))

    def execute_single(self, function: Callable[[Any], Any]) -> Any:
        """Returns what rank 0 returns."""
        packed = pack(function)
        return self._get([self._started()[0].execute.remote(packed)])[0]

    def shutdown(self) -> None:
        """Ends ranks and actors."""
        job, self._job = self._job, None
        with suppress(Exception):  # Ray may have been shut down
            for each in self.workers:
                each.end.options(concurrency_group=CONTROL).remote()
            if job is not None:
                ray.wait([job.ended], timeout=durations.RAY_END)
                job.kill()
            for each in self.workers:
                ray.kill(each)
        self.workers = []
        if self._registry is not None:
            self._registry.close()
            self._registry = None
        group, self._own_group = self._own_group, None
        if group is not None:
            with suppress(Exception):
                remove_placement_group(group)

    def _started(self) -> list[Any]:
        if self._job is None or self._job.has_ended():
            raise LaunchError("the ranks of this executor have ended, or were not started: call start().")
        return self.workers

    def _get(self, references: list[Any]) -> list[Any]:
        """The values, or the job's error, which says what happened first, or else theirs."""
        try:
            values: list[Any] = ray.get(references)
        except ray.exceptions.RayError as error:
            ray.wait(references, num_returns=len(references), timeout=durations.RAY_END)
            for each in references:
                with suppress(ray.exceptions.RayError):  # else Ray would show them
                    ray.get(each, timeout=0)
            lost = isinstance(error, ray.exceptions.RayActorError)
            failed = isinstance(getattr(error, "cause", None), WorkerFailed)
            if self._job is not None and (lost or failed):
                with suppress(ray.exceptions.GetTimeoutError):
                    self._job.result(durations.RAY_END)
            if isinstance(error, ray.exceptions.RayTaskError):
                raise_cause(error)
            raise
        return values
