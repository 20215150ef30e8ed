"""``RayExecutor``, and Horovod's older class for elastic jobs."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

import ray

from choros import durations
from choros.errors import UnsupportedError
from choros.ray.elastic import ElasticAdapter
from choros.ray.job import RaySettings, raise_cause
from choros.ray.static import StaticAdapter

Callback = Callable[[Any], None]


@final
class RayExecutor:
    """Runs functions on the ranks of a job, each of which holds the resources of one actor of Ray's.

    Args:
        settings: those that ``create_settings`` returns.
        num_workers: the number of ranks; Ray packs their actors onto few nodes.
        num_hosts: in place of ``num_workers``: the number of nodes, with ``num_workers_per_host`` ranks on each.
        num_workers_per_host: see ``num_hosts``.
        cpus_per_worker: CPUs of a rank, which are its threads, too.
        use_gpu: whether ranks have GPUs.
        gpus_per_worker: how many, with ``use_gpu``. Default: 1.
        use_current_placement_group: use the placement group in which this is called, if there is one, as in a trial of
            Ray Tune.
        min_workers: makes the job elastic: it goes on when actors and nodes are lost, while so many ranks are left.
        max_workers: the most ranks of an elastic job. Default: what the cluster has room for when it starts.
        reset_limit: how many ranks an elastic job may take in after its start.
        cooldown_range: as ``--blacklist-cooldown-range`` of chorosrun.
        elastic_timeout: for how many seconds an elastic job waits for ``min_workers``.
        override_discovery: Ray says where an elastic job may run; with ``False``, ``settings.discovery`` does.
        env_vars: environment variables of the ranks.

    Example:
        >>> RayExecutor.create_settings(timeout_s=10).timeout_s
        10
        >>> executor = RayExecutor(RayExecutor.create_settings(), num_workers=2)  # doctest: +SKIP
        >>> executor.start()  # doctest: +SKIP
        >>> executor.run(train, args=[10])  # doctest: +SKIP
        >>> executor.shutdown()  # doctest: +SKIP
    """

    def __init__(
        self,
        settings: RaySettings,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int | None = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
        env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        if max_workers and not (min_workers or 0) > 0:
            raise ValueError("`max_workers` provided without any positive `min_workers`: an elastic job needs one.")
        if min_workers and num_workers:
            raise ValueError(
                "Both `min_workers` and `num_workers` provided. Only one of the above is allowed: a job with "
                "`min_workers` is elastic."
            )
        if min_workers is None and bool(num_workers) == bool(num_hosts):
            raise ValueError("Give either `num_workers` or `num_hosts`, or `min_workers` for an elastic job.")
        worker = resources_of(cpus_per_worker, gpus_per_worker, use_gpu=use_gpu)
        self.settings = settings
        self.settings.elastic = self._is_elastic = min_workers is not None
        env = {"OMP_NUM_THREADS": str(max(1, int(cpus_per_worker))), **_texts(env_vars)}
        kind: type = StaticAdapter
        own: dict[str, Any] = {
            "num_workers": num_workers,
            "num_hosts": num_hosts,
            "num_workers_per_host": num_workers_per_host,
            "use_current_placement_group": use_current_placement_group,
        }
        if min_workers is not None:
            kind = ElasticAdapter
            own = {
                "min_workers": min_workers,
                "max_workers": max_workers,
                "reset_limit": reset_limit,
                "cooldown_range": cooldown_range,
                "elastic_timeout": elastic_timeout,
                "override_discovery": override_discovery,
            }
        self._make = partial(_adapter, kind, settings, worker, env, **own)
        self.adapter: Any = None
        self._is_remote = False

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Any = None,
    ) -> RaySettings:
        """Returns settings: ``timeout_s`` for the start of the ranks, ``placement_group_timeout_s`` for Ray to have
        room for them. The others are Horovod's, and have no effect: there is no ssh.
        """
        return RaySettings(
            nics=nics,
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
        )

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts the actors and, if the job is not elastic, its ranks, each with an object of ``executable_cls``, which
        calls of ``execute`` get. ``TimeoutError``: Ray had no room for the actors in time.
        """
        self.shutdown()
        create = None
        if executable_cls is not None:
            create = partial(executable_cls, *(executable_args or ()), **(executable_kwargs or {}))
        self._is_remote = ray.util.client.ray.is_connected()
        self.adapter = self._make(remote=self._is_remote)
        try:
            self._call("start", create, _texts(extra_env_vars))
        except BaseException:
            self.shutdown()
            raise

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """Returns what ``fn`` returns on each rank, in order; it gets the rank's object of ``executable_cls``."""
        returned: list[Any] = self._call("execute", fn, tuple(callbacks or ()))
        return returned

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[Any]:
        """Returns what ``fn(*args, **kwargs)`` returns on each rank, in order; of an elastic job, on those that finish.

        ``callbacks`` are called with what ranks give ``choros.ray.log``. ``WorkerFailed``: it has raised an error on a
        rank, with that traceback, or an actor has ended: all ranks are ended, and ``start()`` starts others.
        """
        return self.execute(without_object(fn, args, kwargs), callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Returns at once, with a reference of Ray's to what each rank returns. Not in elastic jobs."""
        references: list[Any] = self._call("run_remote", without_object(fn, args, kwargs), instead="run")
        return references

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Returns what ``fn`` returns on rank 0, which alone calls it. Not in elastic jobs."""
        return self._call("execute_single", fn, instead="execute")

    def shutdown(self) -> None:
        """Ends ranks and actors, and gives their resources back to Ray."""
        if self.adapter is None:
            return
        adapter, self.adapter = self.adapter, None
        if not self._is_remote:
            adapter.shutdown()
            return
        ray.wait([adapter.shutdown.remote()], timeout=durations.RAY_END)  # it may wait for a call that does not end
        with suppress(Exception):  # what the adapter has made ends with it
            ray.kill(adapter)

    def _call(self, name: str, *args: Any, instead: str = "") -> Any:
        """Calls a method of the adapter; one with another ``instead`` of it is not for elastic jobs, as in Horovod."""
        if self.adapter is None:
            raise RuntimeError("call start() first.")
        if instead and self._is_elastic:
            raise UnsupportedError(f"{name}({args[0]!r}): an elastic job's actors come and go: use {instead}.")
        method = getattr(self.adapter, name)
        if not self._is_remote:
            return method(*args)
        try:
            return ray.get(method.remote(*args))
        except ray.exceptions.RayTaskError as error:
            raise_cause(error)


@final
class ElasticRayExecutor:
    """Runs elastic jobs; ``settings``: those that ``create_settings`` returns. See ``RayExecutor``."""

    def __init__(
        self,
        settings: RaySettings,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = None,
        env_vars: Mapping[str, Any] | None = None,
        override_discovery: bool = True,
    ) -> None:
        self.settings = settings
        self._executor = RayExecutor(
            settings,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            min_workers=settings.min_num_proc,
            max_workers=settings.max_num_proc,
            reset_limit=settings.reset_limit,
            elastic_timeout=settings.elastic_timeout,
            override_discovery=override_discovery,
            env_vars=env_vars,
        )

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Any = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> RaySettings:
        """Returns settings: the fewest and the most ranks, how many may be taken in after the start, for how many
        seconds the job waits for the fewest, and how long ranks may take to start. The others have no effect.
        """
        for old, new, value in (("min_np", "min_num_proc", min_np), ("max_np", "max_num_proc", max_np)):
            if value is not None:
                warnings.warn(f"{old} is deprecated, use {new} instead", DeprecationWarning, stacklevel=2)
        return RaySettings(
            nics=nics,
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
            options=kwargs,
        )

    def start(self) -> None:
        """Waits until there are actors for the fewest ranks."""
        self._executor.start()

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callable[[Any], None]] | None = None) -> list[Any]:
        """Returns what ``worker_fn()`` returns on the ranks that finish; see ``RayExecutor.run``."""
        return self._executor.run(worker_fn, callbacks=callbacks)

    def shutdown(self) -> None:
        """Ends the actors."""
        self._executor.shutdown()


def without_object(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    """Returns the call ``fn(*args, **kwargs)`` as a function of a rank's object, which it does not use."""
    return lambda _subject: fn(*(args or ()), **(kwargs or {}))  # pickled by value: ranks do not import this module


def resources_of(cpus: float, gpus: float | None, *, use_gpu: bool) -> dict[str, float]:
    """Returns the resources of a rank, by Ray's names; a ``ValueError`` if the arguments contradict each other."""
    if gpus and not use_gpu:
        raise ValueError(
            "gpus_per_worker is set, but use_gpu is False. use_gpu must be True if gpus_per_worker is set."
        )
    if cpus <= 0:
        raise ValueError(f"cpus_per_worker must be > 0: Got {cpus}.")
    if use_gpu and gpus is not None and gpus < 1:
        raise ValueError(f"gpus_per_worker must be >= 1: Got {gpus}.")
    return {"CPU": cpus, "GPU": (gpus or 1) if use_gpu else 0}


def _texts(variables: Mapping[str, Any] | None) -> dict[str, str]:
    return {name: str(value) for name, value in (variables or {}).items()}


def _adapter(kind: type, *args: Any, remote: bool, **kwargs: Any) -> Any:
    return ray.remote(kind).options(num_cpus=0).remote(*args, **kwargs) if remote else kind(*args, **kwargs)
