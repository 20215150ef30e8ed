"""``ClusterCoordinator``: functions of the user's own, run on workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from choros.distribute.coordinator.remote_value import PerWorkerDataset, RemoteValue
from choros.distribute.coordinator.role import Role
from choros.distribute.parameter_server.strategy import ParameterServerStrategy
from choros.errors import ConfigError, StrategyError

__all__ = ["ClusterCoordinator"]

#: So many functions wait or run at most; each holds its arguments in memory.
_LIMIT = 4096


@final
class ClusterCoordinator:
    """Has workers run functions, without waiting for them (``tf.distribute.coordinator.ClusterCoordinator``).

    ::

        coordinator = ClusterCoordinator(strategy)
        iterator = iter(coordinator.create_per_worker_dataset(make_dataset))
        for _ in range(steps):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()

    A function is run at least once: if its worker is lost, another one runs it again, though parameter servers may have
    applied its gradients already. An error in a function cancels those that wait; the next ``schedule``, ``join`` or
    ``done`` raises it, and after that all goes on. The chief's models have the servers' variables after ``join``.

    On workers, the first ``schedule``, ``join``, ``done`` or ``fetch`` serves the chief and does not come back.

    Args:
        strategy: a ``ParameterServerStrategy``.

    Raises:
        ConfigError: another strategy.
        StrategyError: this process is the evaluator.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if not isinstance(strategy, ParameterServerStrategy):
            raise ConfigError(f"ClusterCoordinator takes a ParameterServerStrategy, not a {type(strategy).__name__}.")
        if strategy.role is None:
            raise StrategyError("the evaluator takes no part in the cluster, and has no ClusterCoordinator.")
        self._strategy = strategy
        self._role: Role = strategy.role

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy given."""
        return self._strategy

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Has a worker run ``fn``, as soon as one is free.

        Args:
            fn: any function: of ``tf.function``, of ``jax.jit``, or plain. It travels by cloudpickle; what it uses of
                models, optimizers and metrics of the scope is the worker's own.
            args: its arguments. A ``PerWorkerValues`` among them gives way to the worker's own value.
            kwargs: its keyword arguments, likewise.

        Returns:
            Where the result will be.

        Raises:
            ConfigError: something cannot travel, or ``fn`` is no function.
            Exception: of an earlier function; ``fn`` is not scheduled then.
        """
        if not callable(fn):
            raise ConfigError(f"schedule() takes a function, not a {type(fn).__name__}.")
        return self._role.schedule(fn, args or (), kwargs or {}, _LIMIT)

    def join(self) -> None:
        """Waits until all functions are done.

        Raises:
            Exception: of one of them.
        """
        self._role.join()

    def done(self) -> bool:
        """Whether all functions are done.

        Raises:
            Exception: of one of them.
        """
        return self._role.done()

    def fetch(self, val: Any) -> Any:
        """``val`` with results, as NumPy arrays, in the place of each ``RemoteValue``; waits for them."""
        import keras

        return keras.tree.map_structure(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val)

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """A data set that every worker makes for itself; each sees all of it, so shuffle it.

        Args:
            dataset_fn: makes an iterable, on the worker; or a data set that every worker makes when it runs the script.

        Returns:
            What ``iter`` makes an argument for ``schedule`` of.
        """
        return self._role.dataset(dataset_fn)

    def __reduce__(self) -> Any:
        return ClusterCoordinator, (self._strategy,)
