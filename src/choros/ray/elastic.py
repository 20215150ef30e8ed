"""Elastic jobs: each ``run`` is one, on the actors that there are: as many as it may have and Ray has room for. A
thread looks after them; lost ranks are replaced when Ray has new ones.

::

    Ray has room ──► an actor ── listens ──► the registry: a rank may be tied to it
    it has ended ──► out of the registry; its rank has ended with it; a new one is asked for
    its node drains, or is not wanted any more ──► its rank leaves in order ──► the actor is ended
"""

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

import ray

from choros import durations
from choros.errors import EngineError, LaunchError
from choros.launch.bootstrap import pack
from choros.ray import discovery as hosts_of_ray
from choros.ray.discovery import rooms, wanted
from choros.ray.job import RayJob, RaySettings
from choros.ray.rank import run_tied
from choros.ray.registry import ActorRegistry, RankActor
from choros.ray.worker import CONTROL, hire, no_room

_log = logging.getLogger("choros")
#: The host of actors that Ray places.
ANYWHERE = ""


@final
class ActorPool:
    """Keeps actors in its ``registry``, ``most`` at a time (``None``: as many as the cluster has room for now), whose
    ranks wait for ``seconds``; ``discovery``, as Horovod's, says where; ``None``: where Ray places them.
    """

    def __init__(self, worker: Mapping[str, float], most: int | None, discovery: Any, seconds: float) -> None:
        own, room = ray.util.get_node_ip_address(), rooms(ray.nodes(), worker)
        free = {"alive": True, "NodeManagerAddress": own, "Resources": ray.available_resources()}
        is_enough = set(room) == {own} and (most or 0) <= rooms([free], worker).get(own, 0)
        self.registry = ActorRegistry(secrets.token_hex(32), None if is_enough else own, seconds)
        self._worker, self._most, self._discovery = worker, most, discovery
        self._anywhere = most or sum(room.values())
        self._hired: list[RankActor] = []
        self._failure, self._has_begun = "", False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look_after, name="choros: actors", daemon=True)
        self._thread.start()

    def wait(self, least: int, seconds: float) -> None:
        """Waits for ``least`` actors, and once a moment longer, for more. ``TimeoutError``: there are not so many."""
        there = self.registry.wait(lambda actors: len(actors) >= least, seconds)
        if not there:
            if self._failure:
                raise LaunchError(f"{least} workers of Ray's did not start within {seconds:g} s: {self._failure}")
            raise no_room(f"{least} workers with {dict(self._worker)}", seconds)
        if self.most != least and not self._has_begun:
            self.registry.wait(lambda actors: len(actors) >= self.most, durations.RAY_MORE)
        self._has_begun = True

    @property
    def most(self) -> int:
        """How many actors there may be: never fewer than there are."""
        return max(sum(bool(each.address) for each in self._hired), self._anywhere)

    def close(self) -> None:
        """Ends the actors, and the ranks that are still there."""
        self._ends.set()
        self._thread.join(durations.RAY_END)
        for each in self._hired:
            with suppress(Exception):  # Ray may have been shut down
                ray.kill(each.handle)
        self.registry.close()

    def _look_after(self) -> None:
        while not self._ends.is_set():
            began = time.monotonic()
            try:
                self._look()
            except Exception as error:  # noqa: BLE001  (whatever Ray or the user's discovery raises: look again)
                if not ray.is_initialized():
                    return
                _log.warning("choros.ray: the actors of this job cannot be looked after now: %s", error)
            self._ends.wait(max(0.0, hosts_of_ray.DISCOVER_HOSTS_FREQUENCY_SECS - (time.monotonic() - began)))

    def _look(self) -> None:
        self._note_ready()
        self._note_ended()
        draining = set(_draining())
        hosts = {ANYWHERE: self._anywhere}
        if self._discovery is not None:
            hosts = dict(self._discovery.find_available_hosts_and_slots())
        staying = [each for each in self._hired if not each.leaves]
        counts = wanted(hosts, Counter(each.host for each in staying), self._most)
        for each in staying:
            is_wanted = counts.get(each.host, 0) > 0
            if is_wanted and each.node not in draining:
                counts[each.host] -= 1
            elif each.number < 0:
                self._dismiss(each)
        for host, count in counts.items():
            for _ in range(count):
                self._hired.append(self._hire(host))

    def _hire(self, host: str) -> RankActor:
        where: dict[str, Any] = {"resources": {f"node:{host}": 0.01}}
        options = {"scheduling_strategy": "DEFAULT"} if host == ANYWHERE else where
        return hire(self._worker, self.registry.secret, host=host, **options)

    def _note_ready(self) -> None:
        waiting = {each.listening: each for each in self._hired if not each.address}
        done = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)[0] if waiting else []
        for reference in done:
            try:
                waiting[reference].note_place(*ray.get(reference))
            except ray.exceptions.RayError as error:  # it has ended
                self._failure = str(error)
            else:
                self.registry.add(waiting[reference])

    def _note_ended(self) -> None:
        ends = {each.ended: each for each in self._hired}
        for end in ray.wait(list(ends), num_returns=len(ends), timeout=0)[0] if ends else []:
            self._forget(ends[end])
        for each in [each for each in self._hired if each.leaves and each.rank is None]:
            ray.kill(each.handle)
            self._forget(each)

    def _forget(self, actor: RankActor) -> None:
        self._hired.remove(actor)
        self.registry.drop(actor)

    def _dismiss(self, actor: RankActor) -> None:
        actor.leaves = True
        self.registry.remove(actor)
        if actor.rank is not None:
            actor.handle.leave.options(concurrency_group=CONTROL).remote()


def _draining() -> Mapping[str, Any]:
    """Ray's numbers of the nodes that are about to go."""
    from ray._private.state import state  # Ray has no public name for it

    get: Callable[[], Mapping[str, Any]] | None = getattr(state, "get_draining_nodes", None)
    return {} if get is None else get()


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
        self._pool: ActorPool | None = None

    def start(self, create: Callable[[], Any] | None, env: Mapping[str, str]) -> None:
        """Waits for the actors of ``min_workers``."""
        self._create = create
        self._env = {**self._env, **env}
        self._fill()

    def execute(self, function: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], None]]) -> list[Any]:
        """Runs a job whose ranks call ``function``; returns what it returns on those that finish."""
        pool = self._fill()
        pool.registry.callbacks = callbacks
        job = None
        try:
            create = self._create
            packed = pack(lambda: function(None if create is None else create()))  # by value, without this module
            call = partial(run_tied, pool.registry.address, packed)
            job = RayJob(pool.registry, call, {**self._given, "env": self._env}, pool.most)
            while not job.has_ended(durations.RAY_LOOK):
                with suppress(EngineError):  # it ends just now
                    job.follow()
            return job.result()
        finally:
            if job is not None:
                job.kill()
            self.shutdown()

    def shutdown(self) -> None:
        """Ends the actors."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _fill(self) -> ActorPool:
        if self._pool is None:
            self._pool = ActorPool(self._worker, self._most, self._discovery, self._timeout)
        self._pool.wait(self._least, self._timeout)
        return self._pool
