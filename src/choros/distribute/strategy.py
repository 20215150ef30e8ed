"""What all strategies have in common: the face of ``tf.distribute.Strategy``.

A strategy is put together from two parts and adds nothing to them but where variables are placed:

    replicas   how many there are, how they run a function together and combine values   (replicas.py)
    training   what ``fit``, ``evaluate``, ``predict`` and ``save`` of a model do under it   (fit/training.py)
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, final

from choros.distribute import datasets
from choros.distribute.extended import StrategyExtended
from choros.distribute.fit.training import Training
from choros.distribute.input_context import InputContext, InputOptions, ValueContext
from choros.distribute.keras_hook import patch_keras
from choros.distribute.reduce_op import ReduceOp
from choros.distribute.replicas import Replicas
from choros.distribute.scope import current_replica, enter_scope
from choros.distribute.values import PerReplica, per_replica
from choros.errors import ConfigError, StrategyError

__all__ = ["Strategy"]


class Strategy(ABC):
    """How a model is trained on several replicas (``tf.distribute.Strategy``).

    Args:
        replicas: those that take part.
        cluster_resolver: what told the workers' addresses, if anything did.

    Attributes:
        is_default: whether its scope counts as none.
    """

    is_default: ClassVar[bool] = False

    def __init__(self, replicas: Replicas, cluster_resolver: Any = None) -> None:
        self.replicas = replicas
        self._cluster_resolver = cluster_resolver
        self._extended = StrategyExtended(self)

    @property
    @abstractmethod
    def training(self) -> Training | None:
        """What models that are made in the scope do when they are trained; ``None`` where there is no Keras."""

    def placement(self) -> AbstractContextManager[Any]:
        """The block in which variables are made where this strategy wants them."""
        return nullcontext()

    @final
    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas compute a step together, on all workers.

        Example:
            >>> from choros import distribute
            >>> distribute.MirroredStrategy().num_replicas_in_sync
            1
        """
        return self.replicas.count

    @final
    @property
    def cluster_resolver(self) -> Any:
        """What told the workers' addresses; ``None`` for strategies of one host."""
        return self._cluster_resolver

    @final
    @property
    def extended(self) -> StrategyExtended:
        """The rarer methods (``tf.distribute.StrategyExtended``)."""
        return self._extended

    @final
    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """The block in which models, optimizers and metrics are made that are to train with this strategy.

        ``compile``, ``fit``, ``evaluate``, ``predict`` and ``save`` of such a model come back here by themselves.

        Raises:
            StrategyError: the scope of another strategy is open.

        Example:
            >>> from choros import distribute
            >>> strategy = distribute.MirroredStrategy()
            >>> with strategy.scope():
            ...     distribute.get_strategy() is strategy
            True
        """
        with enter_scope(self), self.placement(), patch_keras(self):
            yield self

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
            args: its arguments, as a tuple or list; each ``PerReplica`` in them gives way to the replica's own value.
            kwargs: its keyword arguments, likewise.
            options: ``tf.distribute.RunOptions``; has no effect.

        Returns:
            What ``fn`` returned: as it is where a process has one replica, else as ``PerReplica``.

        Example:
            >>> from choros import distribute
            >>> strategy = distribute.MirroredStrategy()
            >>> strategy.run(lambda x: x * 2, args=(3,))
            6
        """
        del options
        if not isinstance(args, (tuple, list)):
            raise ConfigError(
                f"strategy.run(fn, args={args!r}): args must be a tuple or a list, such as args=(batch,)."
            )
        if current_replica() is not None:
            raise StrategyError(
                "strategy.run was called inside a replica: call it outside of the functions that it runs."
            )
        # Not in scope(): this may be inside of a function that a framework compiles.
        with enter_scope(self):
            return self.replicas.run(self, fn, args, kwargs or {})

    @final
    def experimental_run_v2(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The older name of ``run``."""
        warnings.warn("experimental_run_v2 is deprecated: use run.", DeprecationWarning, stacklevel=2)
        return self.run(fn, args, kwargs)

    @final
    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """The replicas' values as one; every process gets it.

        Args:
            reduce_op: ``SUM`` or ``MEAN``.
            value: what ``run`` returned, or a structure of such.
            axis: ``None`` combines the values of the replicas element by element; a number also reduces each value over
                that dimension, so that ``MEAN`` is the mean over all examples, also of batches of unequal sizes.

        Raises:
            StrategyError: the program is in a replica, which sees only its own value.

        Example:
            >>> import numpy as np
            >>> from choros import distribute
            >>> strategy = distribute.MirroredStrategy()
            >>> float(strategy.reduce("MEAN", np.array([1.0, 2.0]), axis=0))
            1.5
        """
        self._not_in_replica("reduce", "get_replica_context().all_reduce(…)")
        return self.replicas.reduce(ReduceOp.of(reduce_op), value, axis)

    @final
    def gather(self, value: Any, axis: int) -> Any:
        """The replicas' values one after the other along ``axis``; every process gets them.

        Args:
            value: what ``run`` returned: arrays of at least one dimension, which differ in the dimension ``axis`` at
                most.
            axis: the dimension.

        Raises:
            StrategyError: the program is in a replica.
        """
        self._not_in_replica("gather", "get_replica_context().all_gather(…)")
        return self.replicas.gather(value, axis)

    @final
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this process's replicas, as a tuple.

        Example:
            >>> from choros import distribute
            >>> distribute.MirroredStrategy().experimental_local_results(5)
            (5,)
        """
        return value.values if isinstance(value, PerReplica) else (value,)

    @final
    def experimental_distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> Any:
        """``dataset``, whose batches are those of all replicas together, dealt out to them.

        Args:
            dataset: a ``tf.data.Dataset``, a ``PyDataset``, a torch ``DataLoader``, a Grain data set, or an iterable of
                batches.
            options: ``tf.distribute.InputOptions``; has no effect.

        Returns:
            An iterable of this process's part of each batch; of ``tf.data``, a ``tf.data.Dataset``.
        """
        del options
        return datasets.distribute(dataset, self.replicas)

    @final
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """The data set that ``dataset_fn`` makes for this process.

        Args:
            dataset_fn: gets an ``InputContext``; returns a data set of batches for *one replica*, of this process's
                part of the data.
            options: ``tf.distribute.InputOptions``; has no effect.
        """
        del options
        return datasets.from_function(dataset_fn, self.replicas)

    @final
    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """What ``value_fn`` gives for each replica of this process.

        Example:
            >>> from choros import distribute
            >>> strategy = distribute.MirroredStrategy()
            >>> strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
            0
        """
        first, count = self.replicas.first, self.replicas.count
        return per_replica([value_fn(ValueContext(first + i, count)) for i in range(self.replicas.local_count)])

    @final
    def _not_in_replica(self, method: str, instead: str) -> None:
        if current_replica() is not None:
            raise StrategyError(
                f"strategy.{method} was called inside a replica, which sees only its own value: call it on what "
                f"strategy.run returned, or use {instead} here."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_replicas_in_sync} replicas)"
