"""How Ray places the actors of ranks: those of a job that is not elastic, in a placement group."""

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

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


def create_worker(worker: Mapping[str, float], *args: Any, **options: Any) -> Any:
    """Returns a new actor that holds the resources of a worker, with further options of Ray's."""
    groups = {CONTROL: 3}  # not max_concurrency, with which Ray does not keep the order of calls
    kind = ray.remote(
        num_cpus=worker["CPU"], num_gpus=worker["GPU"], concurrency_groups=groups, max_restarts=0, **options
    )
    return kind(RayWorker).remote(*args)
