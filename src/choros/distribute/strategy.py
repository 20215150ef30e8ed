"""The base class of all strategies, with the interface of ``tf.distribute.Strategy``.

A strategy is composed of two parts:

    replicas   their number, their device, how they run a function together and reduce values    (replicas.py)
    training   ``fit``, ``evaluate``, ``predict`` and ``save`` of its models                      (training.py)
"""

from __future__ import annotations

import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, cached_property
from typing import Any, ClassVar, final

from choros.comm import is_initialized, topology
from choros.distribute import datasets
from choros.distribute.keras_hook import patch_keras
from choros.distribute.replicas import Axis, Replicas, leave_unconverted, values_of
from choros.distribute.saving import guard_saving
from choros.distribute.scope import current_replica, enter_scope, strategy_of
from choros.distribute.training import Training
from choros.distribute.types import InputContext, InputOptions, PerReplica, ReduceOp, ValueContext, per_replica
from choros.distribute.variables import follow_variables
from choros.errors import ConfigError, StrategyError
from choros.topology.environments import detect
from choros.training.thread import doing

_log = logging.getLogger("choros")


class Strategy(ABC):
    """How a model is trained on several replicas (``tf.distribute.Strategy``).

    Args:
        replicas: the participating replicas.
        training: the training of models that are created in the scope; ``None`` without Keras.
        cluster_resolver: the resolver that provided the workers' addresses, if any.

    Attributes:
        is_default: whether its scope counts as outside of all scopes.
    """

    is_default: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, replicas: Replicas, training: Training | None, cluster_resolver: Any = None) -> None:
        leave_unconverted()
        self.replicas = replicas
        self.training = training
        self._cluster_resolver = cluster_resolver

    @final
    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that compute a step together, on all processes.

        Example:
            >>> from choros import distribute
            >>> distribute.MirroredStrategy().num_replicas_in_sync
            1
        """
        return self.replicas.count

    @final
    @property
    def cluster_resolver(self) -> Any:
        """The resolver that provided the workers' addresses; ``None`` for strategies of one host."""
        return self._cluster_resolver

    @final
    @cached_property
    def extended(self) -> StrategyExtended:
        """The methods of ``tf.distribute.StrategyExtended``."""
        return StrategyExtended(self)

    @final
    def scope(self) -> AbstractContextManager[Strategy]:
        """Returns the block in which models, optimizers and metrics are created for this strategy.

        It may be entered several times, also within itself.

        ``compile``, ``fit``, ``evaluate``, ``predict`` and ``save`` of such a model use the strategy, even outside.

        Raises:
            StrategyError: the scope of another strategy is open.

        Example:
            >>> from choros import distribute
            >>> strategy = distribute.MirroredStrategy()
            >>> with strategy.scope():
            ...     distribute.get_strategy() is strategy
            True
        """
        return _Scope(self)

    @final
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Calls ``fn`` once on each replica, in replica context.

        There, ``apply`` and ``apply_gradients`` of optimizers made in the scope *sum* the replicas' gradients, as in
        ``tf.distribute``: divide the loss by the global batch (``choros.nn.compute_average_loss``).

        Args:
            fn: the step.
            args: its arguments, as a tuple or list; each ``PerReplica`` in them is replaced by the replica's value.
            kwargs: its keyword arguments, likewise.
            options: ``tf.distribute.RunOptions``; has no effect.

        Returns:
            The result of ``fn``: plain values where a process has one replica, else ``PerReplica``.

        Example:
            >>> from choros import distribute
            >>> strategy = distribute.MirroredStrategy()
            >>> strategy.run(lambda x: x * 2, args=(3,))
            6
        """
        if not isinstance(args, (tuple, list)):
            raise ConfigError(
                f"strategy.run(fn, args={args!r}): args must be a tuple or a list, such as args=(batch,)."
            )
        if current_replica() is not None:
            raise StrategyError(
                "strategy.run was called inside a replica: call it outside of the functions that it runs."
            )
        with enter_scope(self), patch_keras(self, in_run=True), self._following_variables():
            return self.replicas.run(self, fn, args, kwargs or {})

    @final
    def experimental_run_v2(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The older name of ``run``."""
        warnings.warn("experimental_run_v2 is deprecated: use run.", DeprecationWarning, stacklevel=2)
        return self.run(fn, args, kwargs)

    @final
    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Axis = None) -> Any:
        """Reduces the replicas' values; returns the result on every process.

        Args:
            reduce_op: ``SUM`` or ``MEAN``.
            value: a result of ``run``, or a structure of results.
            axis: ``None`` reduces the replicas' values element by element; a number, or a tuple of them, also reduces
                each value over these dimensions, so that ``MEAN`` is the mean over all examples, even of batches of
                unequal sizes. The mean of integers is of floating point.

        Raises:
            StrategyError: the program is in a replica, which sees only its own value.

        Example:
            >>> import numpy as np
            >>> from choros import distribute
            >>> strategy = distribute.MirroredStrategy()
            >>> float(strategy.reduce("MEAN", np.array([1.0, 2.0]), axis=0))
            1.5
        """
        self._check_not_in_replica("reduce", "get_replica_context().all_reduce(…)")
        with doing("using_own_copy"):  # of ``on_read`` variables
            return self.replicas.reduce(ReduceOp.of(reduce_op), values_of(value), axis)

    @final
    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the replicas' values along ``axis``; returns the result on every process.

        Args:
            value: a result of ``run``: arrays of at least one dimension, which may differ only in ``axis``; of numbers
                or strings.
            axis: the dimension.

        Raises:
            StrategyError: the program is in a replica.
        """
        self._check_not_in_replica("gather", "get_replica_context().all_gather(…)")
        with doing("using_own_copy"):
            return self.replicas.gather(values_of(value), axis)

    @final
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the values of this process's replicas as a tuple.

        Example:
            >>> from choros import distribute
            >>> distribute.MirroredStrategy().experimental_local_results(5)
            (5,)
        """
        return value.values if isinstance(value, PerReplica) else (value,)

    @final
    def experimental_distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> Any:
        """Distributes ``dataset``, whose batches are global, to the replicas.

        Args:
            dataset: a ``tf.data.Dataset``, a ``PyDataset``, a torch ``DataLoader``, a Grain data set, or an iterable of
                batches.
            options: ``tf.distribute.InputOptions``; has no effect.

        Returns:
            An iterable of this process's part of each batch; for a ``tf.data.Dataset``, another ``tf.data.Dataset``.
        """
        return datasets.distribute(dataset, self.replicas)

    @final
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Returns the data set that ``dataset_fn`` creates for this process.

        Args:
            dataset_fn: takes an ``InputContext``; returns a data set of this process's part of the data, in batches for
                *one replica*.
            options: ``tf.distribute.InputOptions``; has no effect.
        """
        return datasets.from_function(dataset_fn, self.replicas)

    @final
    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """The older name of ``distribute_datasets_from_function``."""
        text = "experimental_distribute_datasets_from_function is deprecated: use distribute_datasets_from_function."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return self.distribute_datasets_from_function(dataset_fn, options)

    @final
    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Returns the result of ``value_fn`` for each replica of this process.

        Example:
            >>> from choros import distribute
            >>> strategy = distribute.MirroredStrategy()
            >>> strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
            0
        """
        first, count = self.replicas.first, self.replicas.count
        return per_replica([value_fn(ValueContext(first + i, count)) for i in range(self.replicas.local_count)])

    @final
    def _following_variables(self) -> AbstractContextManager[None]:
        """The block in which TensorFlow's new variables are those of all replicas."""
        return follow_variables() if self.replicas.may_differ else nullcontext()

    @final
    def _check_not_in_replica(self, method: str, instead: str) -> None:
        if current_replica() is not None:
            raise StrategyError(
                f"strategy.{method} was called inside a replica, which sees only its own value: call it on the "
                f"result of strategy.run, or use {instead} here."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_replicas_in_sync} replicas)"


@final
class _Scope(AbstractContextManager[Strategy]):
    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Strategy:
        strategy, replicas = self._strategy, self._strategy.replicas
        guard_saving()
        if strategy.is_default:
            _warn_of_several_ranks()
        with ExitStack() as stack:
            following = strategy._following_variables()
            for block in (enter_scope(strategy), replicas.on_device(), patch_keras(strategy), following):
                stack.enter_context(block)
            self._entered.append(stack.pop_all())
        return strategy

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.pop().__exit__(*exception)


@cache
def _warn_of_several_ranks() -> None:
    """Says once that ranks which use the default strategy do not train together."""
    job = topology() if is_initialized() else detect(os.environ)
    if job.size > 1 and job.rank == 0:
        _log.warning(
            "the scope of the default strategy was entered, and this job has %d ranks: it distributes nothing, so that "
            "each rank trains its own model, on all rows. Create models in the scope of a MirroredStrategy(), or of a "
            "MultiWorkerMirroredStrategy() for several hosts.",
            job.size,
        )


@final
class StrategyExtended:
    """``tf.distribute.StrategyExtended``, for processes that each hold one copy of every variable."""

    #: Makes ``tf.function`` trace a function anew in a strategy, where TensorFlow's names have other answers.
    _retrace_functions_for_each_device = True

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def _use_merge_call(self) -> bool:
        """Tells TensorFlow that variables are updated in replica context."""
        return False

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints: the first one; files of models are written once in any case."""
        return self._strategy.replicas.first == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: the first one."""
        return self._strategy.replicas.first == 0

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether data must have static shapes: no."""
        return False

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices of this process's replicas and variables, by the framework's names; not for use in ``run``."""
        import keras

        values = self._strategy.run(lambda: keras.ops.zeros(1))
        return tuple(str(each.device) for each in self._strategy.experimental_local_results(values))

    parameter_devices = worker_devices

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether the Keras variable ``v`` was created in this strategy's scope."""
        return strategy_of(v) is self._strategy

    def reduce_to(self, reduce_op: ReduceOp | str, value: Any, destinations: Any = None, options: Any = None) -> Any:
        """``strategy.reduce``: every process receives the result; ``destinations`` has no effect."""
        return self._strategy.reduce(reduce_op, value, axis=None)

    def batch_reduce_to(
        self, reduce_op: ReduceOp | str, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any = None
    ) -> list[Any]:
        """``reduce_to`` for each pair of a value and a destination."""
        return [self.reduce_to(reduce_op, value, to, options) for value, to in value_destination_pairs]

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls ``fn(var, *args)`` once: this process has one copy of ``var``."""
        result = fn(var, *args, **(kwargs or {}))
        return result if group else (result,)

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """``strategy.run``."""
        return self._strategy.run(fn, args, kwargs)

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """Does nothing: all variables of a process are on one device."""
        return nullcontext()

    def value_container(self, value: Any) -> Any:
        """Returns ``value`` itself: no variable consists of others."""
        return value
