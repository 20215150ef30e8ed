"""``ElasticRayExecutor``: Horovod's older class for elastic jobs; ``RayExecutor(min_workers=…)`` does the same."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from choros.ray.executor import RayExecutor
from choros.ray.messages import RaySettings


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
