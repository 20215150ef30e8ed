"""Where the actors of a job that is not elastic are: in a placement group of Ray's."""

from collections.abc import Mapping
from typing import Any, final

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from choros.ray.worker import CONTROL, RayWorker


def create_placement_group(
    resources_per_bundle: Mapping[str, float], num_bundles: int, pg_timeout: float, pg_strategy: str
) -> tuple[PlacementGroup, list[dict[str, float]]]:
    """Returns a new placement group and its bundles; ``TimeoutError``: the cluster has no room for it in time."""
    bundles = [{name: value for name, value in resources_per_bundle.items() if value} for _ in range(num_bundles)]
    group = placement_group(bundles, strategy=pg_strategy)
    try:
        ready, _ = ray.wait([group.ready()], timeout=pg_timeout)
        if not ready:
            raise no_room(f"{bundles} ({pg_strategy})", pg_timeout)
    except BaseException:
        remove_placement_group(group)
        raise
    return group, bundles


def no_room(what: str, seconds: float) -> TimeoutError:
    """Returns the error that says that Ray has not had the resources for ``what``."""
    return TimeoutError(
        f"Ray had no room for {what} within {seconds:g} s; free are {ray.available_resources()}. Use fewer workers, "
        "wait until others have ended, or give create_settings a larger placement_group_timeout_s."
    )


@final
class StaticPlacement:
    """Places the actors of ``RayExecutor(num_workers=…)``, or of ``num_hosts`` with as many on each."""

    def __init__(
        self,
        timeout: float,
        worker: Mapping[str, float],
        *,
        num_workers: int | None,
        num_hosts: int | None,
        num_workers_per_host: int | None,
        use_current_placement_group: bool,
    ) -> None:
        self._timeout = timeout
        self._worker = worker
        self._per_host = num_workers_per_host or 1
        self.num_workers = num_workers or (num_hosts or 0) * self._per_host
        self._hosts = None if num_workers else num_hosts
        self.placement_group = get_current_placement_group() if use_current_placement_group else None
        self._created_placement_group = False

    def create_workers(self) -> list[Any]:
        """Returns the new actors."""
        per_bundle = 1
        if self.placement_group is None:
            per_bundle = self._per_host if self._hosts else 1
            bundle = {name: value * per_bundle for name, value in self._worker.items()}
            spread = "STRICT_SPREAD" if self._hosts else "PACK"
            count = self._hosts or self.num_workers
            self.placement_group, _ = create_placement_group(bundle, count, self._timeout, spread)
            self._created_placement_group = True
        return [self._create(number, number // per_bundle) for number in range(self.num_workers)]

    def _create(self, number: int, bundle: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            self.placement_group, bundle if self._created_placement_group else -1
        )
        return create_worker(self._worker, number, self.num_workers, scheduling_strategy=strategy)

    def shutdown(self) -> None:
        """Removes the placement group, if it was created here."""
        if self._created_placement_group and self.placement_group is not None:
            remove_placement_group(self.placement_group)
        self.placement_group = None


def create_worker(worker: Mapping[str, float], *args: Any, **options: Any) -> Any:
    """Returns a new actor that holds the resources of a worker, with further options of Ray's."""
    groups = {CONTROL: 3}  # not max_concurrency, with which Ray does not keep the order of calls
    kind = ray.remote(
        num_cpus=worker["CPU"], num_gpus=worker["GPU"], concurrency_groups=groups, max_restarts=0, **options
    )
    return kind(RayWorker).remote(*args)
