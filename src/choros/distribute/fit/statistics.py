"""Statistics that layers keep of their inputs, such as batch normalisation's, in custom loops: averaged when read.

They are variables with ``SyncOnRead`` and ``MEAN`` in ``tf.distribute``::

    strategy.run(step)          replica 0                replica 1
      moving_mean.assign(…)     its own value            its own value            nothing is exchanged
    moving_mean.numpy()         ────────────── mean ──────────────                all processes must read it
    model.evaluate, save, …     ────────────── mean ──────────────

Weights that no replica has assigned are the same on all, and are read without communication. In ``fit`` a callback
averages the statistics instead, before validation and at the end of each epoch.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, final

from choros.arrays import adapter_of
from choros.comm import global_process_set
from choros.distribute.reduce_op import ReduceOp
from choros.distribute.replicas import Replicas
from choros.distribute.scope import in_fit, in_replica
from choros.distribute.writing import is_writing
from choros.training.distributed_optimizer import derive
from choros.training.keras_internals import local_value

__all__ = ["Statistics", "average_variables"]

_ATTRIBUTE = "_choros_statistics"


@final
class Statistics:
    """The statistics of one strategy's layers.

    Args:
        replicas: those of the strategy, one for each process.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        #: Those that a replica has assigned, by ``id``, because variables compare by value.
        self._assigned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        #: Those that a function assigns that was compiled meanwhile: each of its calls does.
        self._compiled: set[int] = set()

    def add(self, variable: Any) -> None:
        """Makes ``variable``, which is not trained, one whose value is averaged when it is read."""
        object.__setattr__(variable, _ATTRIBUTE, self)
        variable.__class__ = derive(type(variable), _StatisticMixin)

    def assigned(self, variable: Any, value: Any) -> None:
        """Notes that a replica assigns ``value`` to ``variable``."""
        self._assigned[id(variable)] = variable
        if adapter_of(value).is_symbolic([value]):
            self._compiled.add(id(variable))

    def read(self, variable: Any) -> Any:
        """Returns the mean of the replicas' values; ``None`` where the local value is to be read."""
        if id(variable) not in self._assigned or in_replica() or in_fit() or is_writing():
            return None
        value = local_value(variable)
        if adapter_of(value).is_symbolic([value]):
            return self.replicas.all_reduce(ReduceOp.MEAN, value)
        self._average([variable])
        return None

    def average(self, model: Any = None) -> None:
        """Assigns the mean to statistics that replicas have assigned; every process must call it.

        Args:
            model: the one whose statistics are meant; ``None`` for all.
        """
        if not self._assigned:
            return
        if model is None:
            gc.collect()  # processes may have released models at different times
            self._average(list(self._assigned.values()))
        else:
            self._average([each for each in model.non_trainable_variables if id(each) in self._assigned])

    def _average(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            if id(variable) not in self._compiled:
                del self._assigned[id(variable)]
        average_variables(variables)


class _StatisticMixin:
    """The methods of a variable that replicas assign without communication."""

    @property
    def value(self) -> Any:
        """The mean of the replicas' values; in a replica, its own."""
        mean = getattr(self, _ATTRIBUTE).read(self)
        return super().value if mean is None else mean  # type: ignore[misc]

    def assign(self, value: Any) -> Any:
        """Keras' own."""
        result = super().assign(value)  # type: ignore[misc]
        if in_replica():
            getattr(self, _ATTRIBUTE).assigned(self, result)
        return result

    def __repr__(self) -> str:
        """Keras' own, without the value, which all processes would have to read."""
        variable: Any = self
        return f"<Variable path={variable.path}, shape={variable.shape}, dtype={variable.dtype}>"


def average_variables(variables: Sequence[Any]) -> None:
    """Assigns the mean of the processes' values to ``variables``, on each process."""
    values = [local_value(variable) for variable in variables]
    own = [adapter_of(value).to_host(value) for value in values]
    if not own:
        return
    means = global_process_set.communicator.grouped_allreduce(own, name="statistics")
    for variable, mean in zip(variables, means, strict=True):
        variable.assign(mean)
