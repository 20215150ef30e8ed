"""``tf.distribute.coordinator``: functions of one's own, which the chief schedules on workers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from choros.errors import ConfigError, StrategyError
from choros.parameter_server.queue import PerWorkerDataset, PerWorkerValues, RemoteValue
from choros.parameter_server.strategy import ParameterServerStrategy

__all__ = ["ClusterCoordinator", "PerWorkerDataset", "PerWorkerValues", "RemoteValue"]

#: The maximum number of functions that wait or run; each holds its arguments in memory.
_LIMIT = 4096


@final
class ClusterCoordinator:
    """Schedules functions on workers asynchronously (``tf.distribute.coordinator.ClusterCoordinator``).

    ::

        coordinator = ClusterCoordinator(strategy)
        iterator = iter(coordinator.create_per_worker_dataset(make_dataset))
        for _ in range(steps):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()

    A function is run at least once: if its worker is lost, another worker runs it again, although parameter servers may
    have applied its gradients already. An error in a function cancels those that wait; the next ``schedule``, ``join``
    or ``done`` raises it; then others can be scheduled. After ``join`` the chief's models have the servers' variables.

    On workers, the first ``schedule``, ``join``, ``done`` or ``fetch`` serves the chief and does not return.

    Args:
        strategy: a ``ParameterServerStrategy``.

    Raises:
        ConfigError: ``strategy`` is no ``ParameterServerStrategy``.
        StrategyError: this process is the evaluator.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if not isinstance(strategy, ParameterServerStrategy):
            raise ConfigError(f"ClusterCoordinator takes a ParameterServerStrategy, not a {type(strategy).__name__}.")
        if strategy.role is None:
            raise StrategyError("the evaluator does not participate in training: create no ClusterCoordinator in it.")
        self._strategy = strategy
        self._role = strategy.role

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The given strategy."""
        return self._strategy

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Schedules ``fn`` on the next free worker.

        Args:
            fn: a plain function, a ``tf.function`` or one from ``jax.jit``. It is sent with cloudpickle; models,
                optimizers and metrics of the scope that it uses are replaced by the worker's own.
            args: its arguments. Each ``PerWorkerValues`` is replaced by the worker's own value.
            kwargs: its keyword arguments, treated like ``args``.

        Returns:
            A handle that will hold the result.

        Raises:
            ConfigError: ``fn`` is not callable, or it or an argument cannot be pickled.
            Exception: the error of an earlier function; ``fn`` is not scheduled then.
        """
        if not callable(fn):
            raise ConfigError(f"schedule() takes a function, not a {type(fn).__name__}.")
        chief = self._role.chief()
        return RemoteValue(chief.schedule(fn, args or (), kwargs or {}, _LIMIT), chief.result_of)

    def join(self) -> None:
        """Waits until all functions are done.

        Raises:
            Exception: the error of a function.
        """
        self._role.chief().join()

    def done(self) -> bool:
        """Returns whether all functions are done.

        Raises:
            Exception: the error of a function.
        """
        return self._role.chief().done()

    def fetch(self, val: Any) -> Any:
        """Returns ``val`` with each ``RemoteValue`` replaced by its result, as NumPy arrays; waits for the results."""
        import keras

        return keras.tree.map_structure(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val)

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Registers a data set that every worker creates for itself; each iterates over all of it, so shuffle it.

        Args:
            dataset_fn: called on the worker, returns an iterable; or a data set that the worker's script creates.

        Returns:
            A handle; ``iter`` of it returns an argument for ``schedule``.
        """
        function = getattr(dataset_fn, "python_function", dataset_fn)  # of a tf.function
        return PerWorkerDataset(self._role.objects.add("dataset", function))

    def __reduce__(self) -> Any:
        return ClusterCoordinator, (self._strategy,)
